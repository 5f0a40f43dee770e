"""Acceptance of the served pair on a file of questions, through the gateway.

python deploy/demo/acceptance.py --address HOST:PORT --draft-tokens 4
"""

from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from outrider.cli import client, statistics
from outrider.cli.client import DEFAULT_ADDRESS, Generation
from outrider.cli.options import speculation
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

QUESTIONS = Path(__file__).parent / "questions.txt"


def question_request(question: str, draft_tokens: int, max_new_tokens: int) -> gateway_pb2.GenerateRequest:
    """A greedy request for the answer to one question."""
    message = gateway_pb2.Conversation.Message(role="user", content=question)
    return gateway_pb2.GenerateRequest(
        conversation=gateway_pb2.Conversation(messages=[message]),
        sampling=common_pb2.SamplingParams(temperature=0),
        max_new_tokens=max_new_tokens,
        speculation=speculation(draft_tokens),
    )


async def ask(address: str, questions: list[str], draft_tokens: int, max_new_tokens: int) -> list[Generation]:
    """The answers, one after the other."""
    async with client.connect(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        requests = [question_request(question, draft_tokens, max_new_tokens) for question in questions]
        return [await client.generate(stub, request) for request in tqdm(requests, unit="question", disable=None)]


def report(answers: list[Generation]) -> list[str]:
    """Mean acceptance length, acceptance by position and speed over all answers, as lines."""
    acceptance = statistics.Acceptance.of(answers)
    tokens, speed = sum(len(answer.token_ids) for answer in answers), statistics.decode_speed(answers)
    return [
        f"{len(answers)} questions, {tokens} tokens, {speed:.1f} tok/s after the first",
        f"mean acceptance length {acceptance.length:.3f} over {acceptance.rounds} rounds",
        f"accepted by position: {statistics.positions(acceptance)}",
        f"rounds by accepted tokens: {acceptance.histogram}; drafted by position: {acceptance.drafted_per_position}",
    ]


def main(
    address: Annotated[str, typer.Option(help="HOST:PORT of the gateway.")] = DEFAULT_ADDRESS,
    draft_tokens: Annotated[int, typer.Option(min=0, help="Longest chain drafted.")] = 4,
    questions: Annotated[Path, typer.Option(help="A file of questions, one a line.", exists=True)] = QUESTIONS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 160,
) -> None:
    """Measure a served pair's acceptance, greedily."""
    lines = [line for line in questions.read_text().splitlines() if line.strip()]
    print(*report(client.run(ask(address, lines, draft_tokens, max_new_tokens))), sep="\n")


if __name__ == "__main__":
    typer.run(main)
