"""`make demo`: a small model and its draft served on this machine, and one question answered with and without it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from acceptance import question_request
from smollm2 import checkpoint

from outrider.cli import client, statistics
from outrider.cli.client import Generation
from outrider.cli.processes import Pair, PairOptions, ServiceFailed
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

DRAFT = Path(__file__).parent / "draft"
QUESTION = "How do plants make their own food?"


@dataclass(frozen=True)
class Answers:
    """The same question answered without and with speculation."""

    plain: Generation
    speculative: Generation

    @property
    def equal(self) -> bool:
        """Whether both are the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids


async def answer(stub: gateway_pb2_grpc.GatewayServiceStub, request: gateway_pb2.GenerateRequest) -> Generation:
    """One answer, printed as it arrives."""
    result = await client.generate(stub, request, lambda piece: print(piece.text, end="", flush=True))
    print("\n")
    return result


async def compare(address: str, question: str, draft_tokens: int, max_new_tokens: int) -> Answers:
    """Asks the gateway twice, after a question that warms everything up."""
    async with client.connect(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        await client.generate(stub, question_request("Hello!", draft_tokens, 16))
        print(f"\nQuestion: {question}\n\nWithout speculation:\n")
        plain = await answer(stub, question_request(question, 0, max_new_tokens))
        print(f"With speculation, up to {draft_tokens} draft tokens a round:\n")
        return Answers(plain, await answer(stub, question_request(question, draft_tokens, max_new_tokens)))


def describe(answers: Answers) -> list[str]:
    """Speeds and acceptance, and whether the answers are the same, as lines."""
    slow, fast = (statistics.decode_speed([each]) for each in (answers.plain, answers.speculative))
    acceptance = statistics.Acceptance.of([answers.speculative])
    count = len(answers.plain.token_ids)
    return [
        f"same tokens: {f'yes, all {count}' if answers.equal else 'NO'}",
        f"speed: {slow:.1f} tok/s without speculation, {fast:.1f} with it ({fast / slow if slow else 0:.2f} times)",
        f"acceptance length {acceptance.length:.2f} over {acceptance.rounds} rounds",
        f"accepted by position: {statistics.positions(acceptance)}",
    ]


async def serve_and_compare(options: PairOptions, question: str, draft_tokens: int, max_new_tokens: int) -> Answers:
    """Starts all three services on the pair, asks, and stops them."""
    async with Pair(options) as pair:
        return await compare(pair.address, question, draft_tokens, max_new_tokens)


def main(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Longest chain drafted.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 160,
    target: Annotated[Path | None, typer.Option(help="Another target's checkpoint directory.", exists=True)] = None,
    draft: Annotated[Path, typer.Option(help="The draft's checkpoint directory.", exists=True)] = DRAFT,
    device: Annotated[str, typer.Option(help="Where both models run: cpu, cuda or auto.")] = "cpu",
) -> None:
    """Serve the demo pair and answer QUESTION with and without speculation; fails if the answers differ."""
    try:
        on_device = ("--device", device)
        options = PairOptions(target or checkpoint(), draft, target_flags=on_device, draft_flags=on_device)
        answers = client.run(serve_and_compare(options, question, draft_tokens, max_new_tokens))
    except ServiceFailed as failed:
        print(f"demo: {failed}", file=sys.stderr)
        raise typer.Exit(failed.exit_code) from None
    print(*describe(answers), sep="\n")
    if not answers.equal or not answers.plain.token_ids:
        print("demo: expected the same tokens with and without speculation", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
