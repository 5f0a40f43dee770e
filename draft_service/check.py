"""`outrider check DRAFT --target DIR`: does this draft fit this target? From headers alone, unless it may run them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from draft_service.faults import Faults
from draft_service.inspection import FittedDraft, fit, inspect_draft
from draft_service.settings import parse_boundaries
from draft_service.sharing import TargetFacts
from draft_service.tokenizers import FILE as TOKENIZER
from draft_service.tokenizers import check_tokenizer
from draft_service.trial import run_trial
from outrider.checkpoint import Checkpoint, CheckpointError
from outrider.cli.processes import ServiceFailed
from outrider.errors import OutriderError
from outrider.settings import run_command, split_flags


def check(
    draft: Annotated[Path, typer.Argument(metavar="DRAFT", help="Directory of the EAGLE-3 checkpoint.")],
    target: Annotated[Path, typer.Option(help="Directory of the target's checkpoint.")],
    aux_boundaries: Annotated[str, typer.Option(help="Boundaries such as 2,15,27, whatever the config says.")] = "",
    run: Annotated[
        bool, typer.Option("--run", help="Have the target write, and try every reading that the files leave open.")
    ] = False,
    target_flags: Annotated[str, typer.Option(help="Further flags for the target of --run, as one string.")] = "",
) -> None:
    """Says whether a draft fits a target: everything resolved, or every fault."""
    flags = split_flags("--target-flags", target_flags)
    try:
        fitted, lines = _resolve(draft, target, aux_boundaries)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    print("fits")
    if run:
        _run(fitted, target, flags)


def _run(fitted: FittedDraft, target: Path, flags: Sequence[str]) -> None:
    """Prints what a trial shows. Exit code 1 where another reading is better, or none is any good."""
    print(flush=True)
    try:
        fits, lines = run_trial(fitted, target, flags)
    except (ServiceFailed, OutriderError, grpc.aio.AioRpcError) as error:
        print(f"outrider check: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(*lines, sep="\n")
    if not fits:
        raise typer.Exit(1)


def resolve(draft: Path, target: Path, aux_boundaries: str = "") -> dict[str, str]:
    """Everything resolved, as names and values. Raises ValueError that lists every fault of both directories."""
    return _resolve(draft, target, aux_boundaries)[1]


def _resolve(draft: Path, target: Path, aux_boundaries: str) -> tuple[FittedDraft, dict[str, str]]:
    """The draft beside its target, too."""
    faults = Faults(f"{draft} beside {target}")
    override = parse_boundaries(aux_boundaries)
    facts = target_facts(target, faults)
    inspected = inspect_draft(draft, faults)
    fitted, compared = None, ""
    if inspected and facts:
        fitted = fit(inspected, facts, override, faults)
        path = target / TOKENIZER
        compared = check_tokenizer(inspected, facts, path.read_bytes() if path.is_file() else b"", faults)
    faults.raise_if_any()
    assert fitted is not None
    return fitted, {**fitted.summary(), "tokenizer": compared}


def target_facts(directory: Path, faults: Faults) -> TargetFacts | None:
    """The target's sizes, from its config. Its embedding, and head unless tied, must be what the config says."""
    try:
        checkpoint = Checkpoint(directory)
    except CheckpointError as error:
        faults.add(f"the target: {error}")
        return None
    sizes: dict[str, Any] = {
        key: checkpoint.config.get(key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")
    }
    for key, value in sizes.items():
        if not isinstance(value, int):
            faults.add(f"the target's {key}: expected an integer in {directory / 'config.json'}, found {value!r}")
            return None
    expected = (sizes["vocab_size"], sizes["hidden_size"])
    tied = checkpoint.config.get("tie_word_embeddings", False)
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        info = checkpoint.tensors.get(name)
        if info is None or info.shape != expected:
            found = "none" if info is None else str(list(info.shape))
            faults.add(f"the target's {name}: expected {list(expected)}, found {found}")
    return TargetFacts(directory.resolve().name, *expected, sizes["num_hidden_layers"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 where the draft fits, 1 with every fault where it does not."""
    run_command(check, "check", arguments)


if __name__ == "__main__":
    main()
