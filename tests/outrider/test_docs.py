"""What the documents say exists."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import typer

import draft_service.__main__
import gateway.__main__
import target_service.__main__
from draft_service.check import check
from outrider.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", [*DOCUMENTS, *(ROOT / "deploy").rglob("*.md")], ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_files_that_are_named_exist(document: Path) -> None:
    folders = "outrider|kernels|target_service|draft_service|gateway|proto|tests|deploy|tools|docs"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", document.read_text())
    assert not [path for path in paths if not (ROOT / path).exists()]


def flags_of(parameter: click.Parameter) -> list[str]:
    """Also those that switch it off."""
    return [*parameter.opts, *parameter.secondary_opts]


def test_flags_that_are_named_exist() -> None:
    services = typer.Typer()
    for command in (target_service.__main__.main, draft_service.__main__.draft, gateway.__main__.gateway, check):
        services.command()(command)
    commands = [*typer.main.get_command(app).commands.values(), *typer.main.get_command(services).commands.values()]
    known = {flag for command in commands for parameter in command.params for flag in flags_of(parameter)}
    scripts = [
        ROOT / name
        for name in ("kernels/bench/__main__.py", *(f"deploy/gpt_oss/{tool}.py" for tool in ("measure", "exactness")))
    ]
    of_bench = [flag for script in scripts for flag in re.findall(r'"(--[a-z-]+)"', script.read_text())]
    of_docker = {"--build-arg", "--read-only", "--shm-size", "--tmpfs", "--user"}
    of_hugging_face = {"--exclude", "--local-dir"}
    # As far as their first underscore.
    of_lm_eval = {"--tasks", "--num", "--apply", "--fewshot", "--log", "--output"}
    of_other_tools = {"--help", "--extra-index-url", *of_bench, *of_docker, *of_hugging_face, *of_lm_eval}
    for document in DOCUMENTS:
        unknown = set(re.findall(r"--[a-z][a-z-]+", document.read_text())) - known - of_other_tools
        assert not unknown, document


def test_series_that_are_named_exist() -> None:
    """Families in the sources."""
    sources = "".join(
        path.read_text()
        for folder in ("gateway", "target_service", "draft_service", "outrider")
        for path in (ROOT / folder).glob("*.py")
    )
    table = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2].partition("## Errors")[0]
    names = re.findall(r"`([a-z][a-z_]+)(?:_total)?(?:\{[^}]*\})?`", table)
    families = [name.removesuffix("_total") for name in names if "_" in name and not name.endswith("_")]
    assert len(families) > 12
    assert not [name for name in families if f'"{name}"' not in sources and name not in ("model_name", "draft_model")]
