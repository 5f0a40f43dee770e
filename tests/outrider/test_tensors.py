import pytest
import torch

from outrider import tensors
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (1,), ()])
def test_round_trip_keeps_every_bit(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype) if dtype is torch.bool else (torch.randn(shape) * 9).to(dtype)
    message = common_pb2.Tensor.FromString(tensors.encode(tensor).SerializeToString())
    back = tensors.decode(message, "rows")
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_a_view_that_is_not_contiguous_is_sent_row_major():
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    assert torch.equal(tensors.decode(tensors.encode(tensor), "rows"), tensor)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.Tensor(shape=[1], data=b"1234"), "rows.dtype"),
        (common_pb2.Tensor(dtype=99, shape=[1], data=b"1234"), "rows.dtype"),
        (common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[-1], data=b"1234"), "rows.shape"),
        (common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[0, 2**62, 2**62]), "rows.shape"),
        (common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[1] * 65, data=b"1234"), "rows.shape"),
        (common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[2], data=b"1234"), "rows.data"),
        (common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[1]), "rows.data"),
        (
            common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_FLOAT32, shape=[1], slice=common_pb2.BufferSlice()),
            "rows.slice",
        ),
    ],
)
def test_a_malformed_tensor_names_its_field(message, field):
    with pytest.raises(InvalidArgument) as caught:
        tensors.decode(message, "rows")
    assert caught.value.field == field


def test_a_slice_is_read_where_it_lies():
    memory = torch.arange(6, dtype=torch.float32).view(torch.uint8)
    slice_ = common_pb2.BufferSlice(buffer_id="a", offset=8, generation=1)
    message = tensors.reference(torch.float32, (2, 2), slice_)
    rows = tensors.decode(message, "rows", lambda s, size: memory[s.offset : s.offset + size])
    assert rows.tolist() == [[2.0, 3.0], [4.0, 5.0]]
