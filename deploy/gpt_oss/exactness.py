"""`python -m deploy.gpt_oss.exactness`: whether greedy texts are the same at K = 0 and with chains.

The scripted draft of the tests proposes the text of K = 0, with a wrong token at one place or none, so that every
accepted length occurs. The target has random weights, whose best logits are often nearly tied: a single row that is
rounded otherwise shows soon. Steps have 64 rows at most, those of prompts, too, since more rows have the bits of the
library's products, which depend on their number (docs/exactness.md).

Of texts that differ the file says where first, by how much the log-probability of the token at K = 0 led there, and
whether they differ, too, when nothing runs beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outrider.synthetic_models import synthetic_model
from tests.end_to_end.services import Recorded
from tests.gateway.client import Answer, Client
from tests.processes import Service
from tests.scripted.cluster import ANY, eventually, scripted_draft, start_gateway

_TIMEOUT = 600.0


@dataclass
class Run:
    """A gateway before the target and the scripted draft, and how it is asked."""

    client: Client
    rows: int
    """Of a step, of all streams together."""
    new_tokens: int
    prompts: Sequence[Sequence[int]]

    async def ask(self, index: int, chain: int, **fields: Any) -> Answer:
        """The greedy answer to a prompt with chains of so many tokens. Its seed says where the draft is wrong."""
        sampling = {"temperature": 0.0, "seed": index}
        fields = {"max_new_tokens": self.new_tokens, "ignore_eos": True, "sampling": sampling, **fields}
        return await self.client.generate(self.prompts[index], k=chain, timeout=_TIMEOUT, **fields)

    async def ask_all(self, indices: Sequence[int], chain: int) -> list[Answer]:
        """The answers to these prompts, as many at a time as a step has rows for."""
        free = asyncio.Semaphore(self.rows // (chain + 1))

        async def ask(index: int) -> Answer:
            async with free:
                return await self.ask(index, chain)

        return list(await asyncio.gather(*map(ask, indices)))

    async def look_at(self, index: int, plain: Answer, drafted: Answer, chain: int) -> dict[str, Any]:
        """Where two answers to one prompt part, and how close it was there."""
        place = first_difference(plain.token_ids, drafted.token_ids)
        assert place is not None
        alone, with_chains = await self.ask(index, 0, logprobs=2), await self.ask(index, chain)
        found: dict[str, Any] = {
            "prompt": index,
            "place": place,
            "tokens": [plain.token_ids[place], drafted.token_ids[place]],
            "equal_alone": alone.token_ids == with_chains.token_ids,
            "same_as_alone": [alone.token_ids == plain.token_ids, with_chains.token_ids == drafted.token_ids],
        }
        if alone.token_ids[:place] == plain.token_ids[:place]:
            top = alone.logprobs[place].top
            found["margin"] = top[0].logprob - top[1].logprob
            found["were_best"] = {top[0].token_id, top[1].token_id} == set(found["tokens"])
        return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two texts differ, or one ends; None where they are the same."""
    pairs = enumerate(zip_longest(one, other))
    return next((place for place, (a, b) in pairs if a != b), None)


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


@dataclass
class Tally:
    """The texts of one K so far. accepted: how many rounds accepted 0, 1, ... tokens of their chain."""

    chain: int
    texts: int = 0
    equal: int = 0
    accepted: list[int] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, plain: Sequence[Answer], drafted: Sequence[Answer], seconds: float) -> list[int]:
        """Takes in answers to the same prompts, and returns the places of those that differ."""
        differ = [place for place, pair in enumerate(zip(plain, drafted, strict=True)) if _differ(*pair)]
        self.texts += len(plain)
        self.equal += len(plain) - len(differ)
        histograms = (answer.usage.acceptance_histogram for answer in drafted)
        self.accepted = [sum(counts) for counts in zip_longest(self.accepted, *histograms, fillvalue=0)]
        self.seconds += seconds
        return differ


async def compare(options: argparse.Namespace, gateway: Service, recorded: Recorded) -> None:
    """Asks for all texts at each K, some prompts after the other, and writes the file after each K of these."""
    vocabulary = synthetic_model(options.synthetic).target["vocab_size"]
    prompts = random_prompts(options.prompts, options.tokens, vocabulary, options.seed)
    found = {name: getattr(options, name) for name in ("synthetic", "prompts", "first", "tokens", "new_tokens", "rows")}
    tallies = [Tally(chain) for chain in map(int, options.chains.split(","))]

    def write() -> None:
        options.json.write_text(json.dumps({**found, "chains": [asdict(tally) for tally in tallies]}, indent=1))

    async with Client(gateway.address) as client:
        run = Run(client, options.rows, options.new_tokens, prompts)
        for begin in range(options.first, len(prompts), options.batch):
            indices = range(begin, min(begin + options.batch, len(prompts)))
            began = time.perf_counter()
            plain = await run.ask_all(indices, 0)
            print(f"K = 0: {len(plain)} texts in {time.perf_counter() - began:.1f} s", flush=True)
            recorded.add(plain)
            for tally in tallies:
                began = time.perf_counter()
                drafted = await run.ask_all(indices, tally.chain)
                differ = tally.add(plain, drafted, time.perf_counter() - began)
                write()
                print(asdict(tally) | {"differences": len(tally.differences)}, flush=True)
                for place in differ[: max(options.look - len(tally.differences), 0)]:
                    look = await run.look_at(indices[place], plain[place], drafted[place], tally.chain)
                    tally.differences.append(look)
                    write()
                    print(look, flush=True)


def _differ(one: Answer, other: Answer) -> bool:
    return one.token_ids != other.token_ids


def main() -> None:
    """Starts the services, and compares."""
    parser = argparse.ArgumentParser(prog="deploy.gpt_oss.exactness", description=__doc__)
    parser.add_argument("--synthetic", required=True, help="which model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache", default="8GiB")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the prompt to begin with, where a run has ended early")
    parser.add_argument("--tokens", type=int, default=256, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--chains", default="1,3,7")
    parser.add_argument("--rows", type=int, default=64, help="of a step: a request has one, and those of its chain")
    parser.add_argument("--batch", type=int, default=64, help="prompts that go through every K before the next ones")
    parser.add_argument("--look", type=int, default=4, help="differing texts of each K that are looked at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-flags", type=shlex.split, default=[], help="further flags of the target")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    flags = ["--synthetic", options.synthetic, "--device", options.device, "--kv-cache", options.kv_cache]
    flags += ["--step-tokens", str(options.rows), *options.target_flags]
    began = time.perf_counter()
    with ExitStack() as stack:
        recorded = Recorded(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "oracle.json")
        target = stack.enter_context(Service("target_service", *ANY, *flags, timeout=_TIMEOUT))
        draft = stack.enter_context(
            scripted_draft(target.address, "--attach", "--oracle", str(recorded.path), "--pattern", "places")
        )
        pair = f"{target.address}={draft.address}"
        gateway = stack.enter_context(start_gateway([pair], "--allow-synthetic", "--draft-timeout", "60"))
        eventually(lambda: gateway.metric("outrider_peer_available") == 2, 60.0, dump=[gateway])
        print(
            *re.findall(r".*loaded in .*", target.text), f"ready after {time.perf_counter() - began:.1f} s", flush=True
        )
        asyncio.run(compare(options, gateway, recorded))


if __name__ == "__main__":
    main()
