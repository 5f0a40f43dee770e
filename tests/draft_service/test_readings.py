"""`outrider check --run`: which reading of a draft's files text of the target speaks for."""

import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from draft_service.faults import Faults
from draft_service.inspection import fit, inspect_draft
from draft_service.readings import Reading, all_boundaries, readings, table, try_readings, verdict
from draft_service.sharing import TargetFacts
from tests.drafts import write_tiny_draft
from tests.end_to_end.services import start_target
from tests.models import write_tiny_llama
from tests.trained import passages_of, write_trained_draft

FACTS = TargetFacts("target", vocab_size=320, hidden_size=64, num_layers=6)
CAPTURED = [1, 2, 3, 4, 5, 6]
TRUE = Reading((2, 4, 5), norm_before_residual=False, norm_output=False)
SETTINGS = "--aux-boundaries 2,4,5 --norm-output false --norm-before-residual false"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a draft that is read as it was trained, and the same with a config that says the opposite."""
    folder = tmp_path_factory.mktemp("readings")
    target = write_tiny_llama(folder / "target", num_hidden_layers=6)
    with start_target(target) as service:
        passages = asyncio.run(passages_of(service.address, CAPTURED, 64))
    torch.save(passages, folder / "passages.pt")
    chosen = [passage.at_boundaries(TRUE.boundaries, CAPTURED) for passage in passages]
    right = write_trained_draft(folder / "right", target, chosen, TRUE.boundaries)
    wrong = shutil.copytree(right, folder / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    config |= {"norm_before_residual": True, "norm_output": True}
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(TRUE.boundaries)  # to be read as 3, 5, 6
    (wrong / "config.json").write_text(json.dumps(config))
    return folder


def tried(folder, draft):
    """The pair, and the results of all readings, in this process."""
    faults = Faults(str(draft))
    fitted = fit(inspect_draft(draft, faults), FACTS, None, faults)
    faults.raise_if_any()
    passages = torch.load(folder / "passages.pt", weights_only=False)
    captured = all_boundaries(fitted)
    passages = [passage.at_boundaries(captured, CAPTURED) for passage in passages]
    shared = {"embed_tokens.weight": load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]}
    return fitted, try_readings(fitted, shared, passages, torch.device("cpu"))


def test_the_reading_that_it_was_trained_with_wins_clearly(folder):
    fitted, results = tried(folder, folder / "right")
    served = Reading.served(fitted)
    assert served == results[0].reading == TRUE and len(results) == 8
    best, second = (result.agreement.mean_length for result in results[:2])
    assert best > 3.8 and second < best - 0.2, table(results, served)
    assert verdict(results, served) == (True, "the reading that is served wins clearly")


def test_another_reading_that_wins_is_named_with_what_to_set(folder):
    """As users run it: both models as processes."""
    arguments = ["check", folder / "wrong", "--target", folder / "target", "--run"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *map(str, arguments), "--target-flags", "--kv-cache 16MiB"],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    resolved, trial = done.stdout.split("\nfits\n\n")
    assert "boundaries              3, 5, 6 (ids [2, 4, 5] are layer outputs: one more each)" in resolved
    about, header, *rows, line = trial.splitlines()
    assert about.startswith("agreement on ") and header.split()[-1] == "length" and len(rows) == 8
    assert rows[0].startswith("2, 4, 5     g               o ") and "served" not in rows[0]
    assert sum(row.endswith("served") and row.startswith("3, 5, 6     hidden_norm(g)  norm(o)") for row in rows) == 1
    assert line == f"another reading wins clearly: serve the draft with {SETTINGS}"


def test_a_draft_of_another_target_fits_by_no_reading(folder):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    draft = write_tiny_draft(folder / "other", draft_vocab_size=320, eagle_config=ids)
    fitted, results = tried(folder, draft)
    fits, line = verdict(results, Reading.served(fitted))
    assert not fits and line.startswith("does not fit: no reading is clearly better than chance")


def test_readings_that_are_as_good_are_no_reason_to_change(folder):
    _, results = tried(folder, folder / "right")
    twin = dataclasses.replace(results[0], reading=dataclasses.replace(TRUE, norm_output=True))
    assert verdict([twin, *results], TRUE) == (
        True,
        "no reading is clearly better than the one that is served; 2 are as good",
    )


@pytest.mark.parametrize(
    ("ids", "boundaries"),
    [
        ([1, 3, 4], {(1, 3, 4), (2, 4, 5)}),
        ([2, 4, 6], {(2, 4, 6)}),  # 7 is no boundary of 6 layers
        (None, {(2, 3, 3)}),
    ],
)
def test_only_readings_that_can_be_are_tried(folder, ids, boundaries):
    faults = Faults("")
    nested = {"eagle_aux_hidden_state_layer_ids": ids}
    draft = inspect_draft(write_tiny_draft(folder / f"tried {ids}", eagle_config=nested), faults)
    found = readings(fit(draft, FACTS, None, faults))
    assert {reading.boundaries for reading in found} == boundaries and len(found) == 4 * len(boundaries)
    assert found[0] == Reading(found[0].boundaries, norm_before_residual=False, norm_output=False)
