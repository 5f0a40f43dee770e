"""`outrider check --run`: starts the target, has it write, and tries every reading of the draft on what it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.inspection import FittedDraft
from draft_service.passages import Passage, write_passages
from draft_service.prompts import encode_prompts
from draft_service.readings import Reading, all_boundaries, table, try_readings, verdict
from draft_service.shared_tensors import SharedTensors
from outrider.channels import connect
from outrider.cli.processes import ServiceProcess
from outrider.errors import Unavailable
from outrider.tokenizer_files import fetch_tokenizer
from outrider.v1 import target_pb2, target_pb2_grpc

NUM_TOKENS = 64  # of each of the prompts
SECONDS = 600.0
_FREE_PORTS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")


def run_trial(fitted: FittedDraft, target: Path, target_flags: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the draft is worth serving as it is read, and the lines that say why.

    Raises ServiceFailed where the target does not start, AioRpcError or OutriderError where it does not write.
    """
    passages, shared = asyncio.run(_ask_target(fitted, target, target_flags))
    if not passages:
        raise Unavailable(f"the target wrote nothing within {SECONDS:g} s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results, served = try_readings(fitted, shared, passages, device), Reading.served(fitted)
    about = f"agreement on {results[0].agreement.rows} rows of {len(passages)} answers that the target wrote"
    fits, line = verdict(results, served)
    return fits, [f"{about}, fed with the true tokens:", *table(results, served), line]


async def _ask_target(
    fitted: FittedDraft, target: Path, flags: Sequence[str]
) -> tuple[list[Passage], dict[str, torch.Tensor]]:
    """What the target writes, with all states that some reading asks for, and the tensors that the draft lacks."""
    service = await ServiceProcess.start("target", ["--model", str(target), *_FREE_PORTS, *flags])
    try:
        async with connect(service.address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            info = await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())
            files = await fetch_tokenizer(stub) if info.tokenizer_sha256 else {}
            prompts = encode_prompts(files, info.vocab_size)
            passages = await write_passages(stub, prompts, all_boundaries(fitted), NUM_TOKENS, SECONDS)
            tensors = SharedTensors(info.weights_fingerprint)
            names = fitted.sharing.from_target
            return passages, {name: await tensors.fetch(stub, name, info.hidden_size) for name in names}
    finally:
        await service.stop()
