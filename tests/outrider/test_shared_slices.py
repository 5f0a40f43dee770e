import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidArgument
from outrider.shared_slices import SliceReader, SliceWriter, checked_slice, tensor_at
from outrider.tensors import decode, reference
from outrider.v1.common_pb2 import BufferSlice


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ring(size: int = 640) -> tuple[SliceWriter, Clock]:
    clock = Clock()
    return SliceWriter(torch.zeros(size, dtype=torch.uint8), clock), clock


ACTIONS = st.lists(
    st.tuples(st.just("take"), st.integers(0, 300), st.integers(0, 3))
    | st.tuples(st.just("release"), st.integers(0, 20), st.integers(0, 20))
    | st.tuples(st.just("retire"), st.integers(0, 3), st.just(0))
    | st.tuples(st.just("wait"), st.sampled_from([0.1, 0.8, 1.5]), st.just(0)),
    max_size=60,
)


@given(st.integers(64, 1000), ACTIONS)
def test_no_two_live_slices_overlap_and_an_empty_ring_takes_all(size, actions):
    writer, clock = ring(size)
    live: dict[int, tuple[int, int, int]] = {}  # generation: start, end, owner
    dying: dict[int, float] = {}
    handed_out = 0
    for action, first, second in actions:
        if action == "take":
            for generation in [g for g, due in dying.items() if due <= clock.now]:
                live.pop(generation, None)
                del dying[generation]
            granted = writer.allocate(first, owner=second)
            if granted is None:
                assert live or -(-max(first, 1) // 64) * 64 > size
                continue
            handed_out += 1
            assert granted.generation == handed_out
            assert granted.offset % 64 == 0 and granted.offset + first <= size
            span = (granted.offset, granted.offset + max(first, 1), second)
            assert all(span[1] <= start or end <= span[0] for start, end, _ in live.values())
            live[granted.generation] = span
        elif action == "release":
            known = [g for g in {first, second} if 1 <= g <= handed_out]
            writer.release(known)
            for generation in known:
                live.pop(generation, None)
        elif action == "retire":
            writer.retire(first)
            dying |= {g: clock.now + 1.5 for g, (_, _, owner) in live.items() if owner == first and g not in dying}
        else:
            clock.now += first
        assert writer.num_unreleased >= len([g for g in live if g not in dying])
    writer.release(range(1, handed_out + 1))
    assert writer.num_unreleased == 0
    assert writer.allocate(size // 64 * 64, owner=0).offset == 0


def test_a_full_ring_gives_none_and_goes_on_after_a_release():
    writer, _ = ring(640)
    granted = [writer.allocate(128, owner=1) for _ in range(5)]
    assert [slice_.offset for slice_ in granted] == [0, 128, 256, 384, 512]
    assert writer.allocate(1, owner=1) is None
    writer.release([granted[1].generation])
    assert writer.allocate(1, owner=1) is None  # space comes back in the order in which it went
    assert writer.num_unreleased == 4
    writer.release([granted[0].generation])
    assert writer.allocate(256, owner=1) == (0, 6)
    assert writer.allocate(1, owner=1) is None


def test_a_slice_does_not_wrap():
    writer, _ = ring(640)
    first, _second = writer.allocate(256, owner=1), writer.allocate(256, owner=1)
    writer.release([first.generation])
    assert writer.allocate(192, owner=1).offset == 0
    assert writer.allocate(128, owner=1) is None


def test_retired_slices_come_back_after_a_second_and_a_half():
    writer, clock = ring(640)
    writer.allocate(320, owner="a")
    writer.allocate(320, owner="b")
    writer.retire("a")
    writer.retire("a")
    clock.now += 1.49
    assert writer.allocate(64, owner="c") is None
    assert writer.num_unreleased == 2
    clock.now += 0.01
    assert writer.allocate(64, owner="c") == (0, 3)
    writer.release([1])  # read after all, too late to matter
    writer.retire("nobody")
    clock.now += 10
    assert writer.allocate(640, owner="c") is None  # b and c were not retired
    assert writer.num_unreleased == 2


def test_what_an_owner_takes_after_it_was_retired_stays():
    writer, clock = ring(640)
    writer.allocate(64, owner="a")
    writer.retire("a")
    writer.allocate(64, owner="a")
    clock.now += 2
    writer.allocate(64, owner="b")
    assert writer.num_unreleased == 2


@pytest.mark.parametrize("generation", [0, -1, 2, 2**63])
def test_generations_that_were_never_handed_out_are_refused(generation):
    writer, _ = ring()
    writer.allocate(64, owner=1)
    with pytest.raises(InvalidArgument, match=r"released\.generations: expected 1 to 1"):
        writer.release([generation])
    writer.release([1, 1])
    assert writer.num_unreleased == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_a_tensor_comes_out_as_it_went_in(dtype):
    memory = torch.zeros(1000, dtype=torch.uint8)
    writer = SliceWriter(memory)
    reader = SliceReader({"t/0": memory})
    for shape in [(3, 5), (0, 4), (2, 1, 7)]:
        tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 2, shape)).to(dtype)
        granted = writer.write(tensor.mT.contiguous().mT, owner=1)  # not row-major in memory
        message = reference(dtype, shape, BufferSlice(buffer_id="t/0", **granted._asdict()))
        assert torch.equal(decode(message, "hidden", reader.resolve), tensor)
        writer.release([granted.generation])


def test_the_reader_checks_before_it_looks():
    memory = torch.zeros(1000, dtype=torch.uint8)
    reader = SliceReader({"t/0": memory})
    assert len(reader.resolve(BufferSlice(buffer_id="t/0", offset=992), 8)) == 8
    for offset, num_bytes, field in [(992, 9, "offset"), (2**63, 1, "offset"), (4, 4, "offset"), (8, -1, "offset")]:
        with pytest.raises(InvalidArgument, match=field):
            reader.resolve(BufferSlice(buffer_id="t/0", offset=offset), num_bytes)
    with pytest.raises(InvalidArgument, match=r"slice\.buffer_id"):
        reader.resolve(BufferSlice(buffer_id="t/1"), 8)
    with pytest.raises(InvalidArgument, match="expected 8 bytes inside a buffer of 1000"):
        checked_slice(memory, -8, 8)
    with pytest.raises(InvalidArgument, match="no negative dimension"):
        tensor_at(memory, 0, torch.float32, (-1, -1))
