"""The socket of a pair, and a thread that reads from one."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from outrider.engine_thread import EngineThread
from outrider.errors import FailedPrecondition
from outrider.pair_socket import PairListener, PairSocket, sweep_stale_sockets
from outrider.v1 import draft_pb2

FOLDER = Path("/dev/shm")


def connected() -> tuple[PairSocket, PairSocket]:
    listener = PairListener()
    there = PairSocket.connect(listener.name)
    here = listener.accept()
    assert here is not None
    return here, there


def test_packets_stay_whole_and_in_order_and_the_end_is_seen() -> None:
    here, there = connected()
    messages = [draft_pb2.ProposeRequest(commands=[{"sequence_id": n}] * n) for n in range(1, 40)]
    assert all(here.send(message) for message in messages)
    assert [draft_pb2.ProposeRequest.FromString(packet) for packet in there.receive()] == messages
    assert there.receive() == [] and not there.ended
    here.shut_down()
    assert there.receive() == [] and there.ended
    assert not there.send(messages[0])
    here.close()
    there.close()


def test_a_packet_holds_the_sequences_of_any_step() -> None:
    here, there = connected()
    rows = {"first_position": 1 << 20, "tensor": {"shape": [4, 8640], "slice": {"buffer_id": "b" * 34}}}
    extend = {"hidden_states": rows, "token_ids": [1 << 17] * 4, "num_draft_tokens": 3}
    message = draft_pb2.ProposeRequest(commands=[{"sequence_id": 2**64 - 1, "extend": extend}] * 2700)
    assert message.ByteSize() > 212_992 and here.send(message), "more than the kernel lets through by default"
    assert there.receive() == [message.SerializeToString()]
    here.close()
    there.close()


def test_a_peer_that_never_reads_is_as_good_as_gone() -> None:
    here, there = connected()
    message = draft_pb2.ProposeRequest(commands=[{"sequence_id": 1}] * 1000)
    for _ in range(1000):
        if not here.send(message):
            break
    else:
        raise AssertionError("the kernel took everything")
    there.close()
    here.close()


def test_the_name_is_private_and_gone_once_somebody_has_come() -> None:
    listener = PairListener()
    path = FOLDER / listener.name
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert listener.accept() is None and not path.exists()
    with pytest.raises(FailedPrecondition, match="cannot be connected to"):
        PairSocket.connect(listener.name)


@pytest.mark.parametrize("name", ["", "outrider-1.socket", "../outrider-" + "0" * 32 + ".socket", "x" * 200])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(FailedPrecondition, match="pair socket: expected outrider-"):
        PairSocket.connect(name)


def test_only_names_that_nobody_has_open_are_swept() -> None:
    alive = PairListener()
    stale, bound = (FOLDER / f"outrider-{os.urandom(16).hex()}.socket" for _ in range(2))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(stale))
    no_socket = FOLDER / f"outrider-{os.urandom(16).hex()}.socket"
    no_socket.touch()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as about_to_listen:
            about_to_listen.bind(str(bound))
            swept = sweep_stale_sockets()
        assert stale.name in swept and not {alive.name, bound.name, no_socket.name} & set(swept)
        assert not stale.exists() and (FOLDER / alive.name).exists() and no_socket.exists()
        there = PairSocket.connect(alive.name)
        here = alive.accept()
        assert here is not None and here.receive() == [] and not here.ended, "who looked did not take the place"
        there.close()
        here.close()
    finally:
        no_socket.unlink()
        bound.unlink(missing_ok=True)
        alive.close()


def test_who_cannot_be_taken_in_does_not_wait_for_it() -> None:
    listener = PairListener()
    in_line: list[PairSocket] = []
    with pytest.raises(FailedPrecondition, match="cannot be connected to"):
        while len(in_line) < 10:
            in_line.append(PairSocket.connect(listener.name))
    listener.close()
    for end in in_line:
        end.close()


class Echo:
    """An engine that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def apply(self, commands: list[object]) -> None:
        self.told += commands

    def idle_seconds(self) -> None:
        return None

    def step(self) -> None:
        pass


class Packets(PairSocket):
    """A socket whose packets are the commands."""

    def read(self) -> list[object]:
        return [*self.receive(), *["ended"] * self.ended]


@pytest.mark.parametrize("watch_seconds", [0.0, 1e-3, 100.0])
async def test_a_thread_takes_commands_from_a_source_before_its_inbox_and_drops_it_at_its_end(
    watch_seconds: float,
) -> None:
    here, there = connected()
    engine = Echo()
    thread: EngineThread[object] = EngineThread(engine, "toy", watch_seconds=watch_seconds)
    source = Packets(here._end)
    thread.watch(source)
    message = draft_pb2.ProposeRequest(commands=[{"sequence_id": 3}])
    there.send(message)
    thread.submit("from the loop")
    thread.start(asyncio.get_running_loop())

    async def told(count: int) -> None:
        async with asyncio.timeout(60):
            while len(engine.told) < count:
                await asyncio.sleep(0.005)

    await told(2)
    assert engine.told == [message.SerializeToString(), "from the loop"]
    there.close()
    await told(3)
    thread.submit("after it")
    await told(4)
    assert engine.told[2:] == ["ended", "after it"] and source.fileno() == -1
    thread.stop()
