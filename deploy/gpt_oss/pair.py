"""`python -m deploy.gpt_oss.pair`: what `outrider bench --synthetic` measures, of several loads on one pair.

A load is IN:OUT:STREAMS:REQUESTS:K,K,...: tokens of each prompt, new tokens, requests at once, requests of each K. The
file is written anew after every K.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from outrider.cli import client, load, report, synthetic
from outrider.cli.processes import PairOptions, Synthetic
from outrider.synthetic_models import synthetic_model

# A service that is told to end does so soon, and a draft is not late while its kernels are compiled.
_SOON = ["--grace", "2"]
_PATIENT = ["--draft-timeout", "60"]


def parse_load(text: str, vocabulary: int, seed: int = 0) -> synthetic.Load:
    """The load that is spelled so, of random tokens below `vocabulary`. Raises ValueError."""
    fields = text.split(":")
    if len(fields) != 5:
        raise ValueError(f"--load: expected IN:OUT:STREAMS:REQUESTS:K,K,..., found {text!r}")
    prompt, new, streams, requests = map(int, fields[:4])
    templates = load.random_prompts(requests, prompt, vocabulary, seed)
    for index, template in enumerate(templates):
        template.max_new_tokens = new
        template.sampling.temperature = 0.0
        template.sampling.seed = seed + index  # streams of one seed would have their chains accepted in step
        template.ignore_eos = True
    return synthetic.Load(templates, streams, [int(chain) for chain in fields[4].split(",")], min(64, new))


def main() -> None:
    """Measures all loads, and prints one table of them."""
    parser = argparse.ArgumentParser(prog="deploy.gpt_oss.pair", description=__doc__)
    parser.add_argument("--synthetic", required=True, help="which model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--draft-device", default="", help="absent: the target's")
    parser.add_argument("--acceptance", type=float, default=2.5, help="mean acceptance length")
    parser.add_argument("--load", nargs="+", required=True)
    parser.add_argument("--target-flags", type=shlex.split, default=[], help="further flags of the target")
    parser.add_argument("--draft-flags", type=shlex.split, default=[], help="further flags of the draft")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    vocabulary = synthetic_model(options.synthetic).target["vocab_size"]
    loads = [parse_load(text, vocabulary) for text in options.load]

    def write(found: synthetic.SyntheticBench) -> None:
        options.json.write_text(json.dumps(report.machine() | found.as_json(), indent=1))

    model = Synthetic(options.synthetic)
    pair = PairOptions(
        model,
        model,
        target_flags=["--device", options.device, *_SOON, *options.target_flags],
        draft_flags=["--device", options.draft_device or options.device, *_SOON, *options.draft_flags],
        gateway_flags=[*_PATIENT, *_SOON],
    )
    print(report.synthetic_table(client.run(synthetic.run(pair, options.acceptance, loads, write))))


if __name__ == "__main__":
    main()
