"""`outrider bench`: load a gateway, or start a pair alone on this machine and take its rounds apart."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import client, load, report, speed
from outrider.cli import synthetic as synthetic_bench
from outrider.cli.connection import Connection
from outrider.cli.processes import PairOptions, ServiceFailed, Synthetic
from outrider.settings import split_flags, usage_error, with_options
from outrider.synthetic_models import SYNTHETIC_MODELS, synthetic_model
from outrider.v1 import gateway_pb2, gateway_pb2_grpc


@with_options(connection=Connection)
def bench(
    *,
    connection: Connection,
    target: Annotated[
        Path | None, typer.Option(help="Start this target here, instead of --address, and take its rounds apart.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="The draft to start beside --target.")] = None,
    synthetic: Annotated[
        str, typer.Option(help=f"A pair of random weights here: {', '.join(SYNTHETIC_MODELS)}.", show_default=False)
    ] = "",
    synthetic_acceptance: Annotated[
        float, typer.Option(min=1, help="With --synthetic: mean acceptance length, of a script.")
    ] = 2.5,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="With --target: run transformers' generate beside it.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at once.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Requests for each K.")] = 8,
    prompts: Annotated[
        Path | None, typer.Option(help="File of questions, one a line; absent: built-in ones.", exists=True)
    ] = None,
    random_tokens: Annotated[
        int, typer.Option(min=0, help="Prompts of this many random tokens instead; with --synthetic 0 is 1024.")
    ] = 0,
    random_vocabulary: Annotated[int, typer.Option(min=1, help="Random tokens are below this id.")] = 1000,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a request.")] = 128,
    draft_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="K, once for each to measure; absent: 0 and the gateway's default, where a pair is started 0 to 7.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of random prompts and of sampling.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there too.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="With --synthetic: draw the roofline there, as SVG.", show_default=False)
    ] = None,
    target_flags: Annotated[str, typer.Option(help="Further flags for the target that is started here.")] = "",
    draft_flags: Annotated[str, typer.Option(help="Further flags for the draft that is started here.")] = "",
    gateway_flags: Annotated[str, typer.Option(help="Further flags for the gateway that is started here.")] = "",
) -> None:
    """Measure time to first token, inter-token latency, tokens per second and acceptance, against K = 0.

    With --target, one run on this machine gives transformers, K = 0 and each K beside each other, and what a round
    takes outside the two models. With --synthetic, a pair of random weights in the shapes of gpt-oss stands beside the
    floor that memory sets.
    """
    if target is None and (draft or transformers):
        raise usage_error("--draft and --transformers need --target")
    if target is None and not synthetic and (target_flags or draft_flags or gateway_flags):
        raise usage_error("--target-flags, --draft-flags and --gateway-flags need --target or --synthetic")
    if target is not None and concurrency != 1:
        raise usage_error(f"--concurrency: with --target one stream is measured, found {concurrency}")
    if synthetic and (target or prompts):
        raise usage_error("--synthetic: expected neither --target nor --prompts beside it")
    if picture and not synthetic:
        raise usage_error("--picture needs --synthetic")
    if synthetic:
        random_tokens, random_vocabulary = random_tokens or 1024, _vocabulary(synthetic)
    templates = (
        load.random_prompts(requests, random_tokens, random_vocabulary, seed)
        if random_tokens
        else list(islice(cycle(_questions(prompts)), requests))
    )
    _claim(json_file, "--json")
    _claim(picture, "--picture")
    for index, template in enumerate(templates):
        template.max_new_tokens = max_new_tokens
        template.sampling.temperature = temperature
        # Streams of one seed would have their chains accepted in step.
        template.sampling.seed = seed + index if synthetic else seed
        template.ignore_eos = bool(synthetic)
    if target is None and not synthetic:
        client.run(_load_gateway(connection, templates, concurrency, draft_tokens or [0, None], json_file))
        return
    options = PairOptions(
        target or Synthetic(synthetic),
        draft or (Synthetic(synthetic) if synthetic else None),
        target_flags=split_flags("--target-flags", target_flags),
        draft_flags=split_flags("--draft-flags", draft_flags),
        gateway_flags=split_flags("--gateway-flags", gateway_flags),
    )
    chains = draft_tokens or (list(range(8)) if options.draft else [0])
    try:
        if synthetic:
            client.run(_synthetic(options, synthetic_acceptance, templates, concurrency, chains, json_file, picture))
        else:
            client.run(_take_apart(options, templates, chains, transformers, json_file))
    except ServiceFailed as failed:
        client.fail(str(failed))


async def _load_gateway(
    connection: Connection,
    requests: list[gateway_pb2.GenerateRequest],
    concurrency: int,
    chains: list[int] | list[int | None],
    json_file: Path | None,
) -> None:
    async with connection.connect() as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        measurements = [await load.measure(stub, requests, concurrency, chain) for chain in chains]
    print(report.load_table(measurements))
    figures = {"concurrency": concurrency, "loads": [measurement.as_json() for measurement in measurements]}
    _write(json_file, report.machine() | figures)


async def _take_apart(
    options: PairOptions,
    requests: list[gateway_pb2.GenerateRequest],
    chains: list[int],
    transformers: bool,
    json_file: Path | None,
) -> None:
    result = await speed.take_apart(options, requests, chains, transformers)
    print(report.speed_table(result))
    _write(json_file, report.machine() | result.as_json())


async def _synthetic(
    options: PairOptions,
    acceptance: float,
    requests: list[gateway_pb2.GenerateRequest],
    streams: int,
    chains: list[int],
    json_file: Path | None,
    picture: Path | None,
) -> None:
    def write(found: synthetic_bench.SyntheticBench) -> None:
        _write(json_file, report.machine() | found.as_json())

    load = synthetic_bench.Load(requests, streams, chains)
    result = await synthetic_bench.run(options, acceptance, [load], write)
    print(report.synthetic_table(result))
    if picture is not None:
        picture.write_text(synthetic_bench.picture(result))


def _questions(prompts: Path | None) -> list[gateway_pb2.GenerateRequest]:
    """Those of the file, or the built-in ones. Raises a usage error."""
    try:
        return load.questions(prompts)
    except (OSError, ValueError) as error:
        raise usage_error(f"--prompts: {error}") from error


def _vocabulary(synthetic: str) -> int:
    """Its size. Raises a usage error for an unknown model."""
    try:
        return int(synthetic_model(synthetic).target["vocab_size"])
    except ValueError as error:
        raise usage_error(str(error)) from None


def _claim(path: Path | None, flag: str) -> None:
    """Makes the file now: what cannot be written later on is known before anything is measured."""
    if path is not None:
        try:
            path.touch()
        except OSError as error:
            raise usage_error(f"{flag}: {error}") from error


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
