"""Small tensors on their way to a device and back, without the host waiting for them: through pinned memory.

PyTorch keeps a pinned block until its copy is done, so that nothing here has to be kept alive. On a CPU tensors stay
what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; work that is queued there from now on finds it."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in main memory, to be read after the next `wait`."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Main memory for results of `device` that are brought there again and again, by `land`."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def land(tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor`, at the front of `room`, to be read after the next `wait`."""
    return room[: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits until the device has done all that is queued on this thread's stream by now."""
    if device.type != "cuda":
        return lambda: None
    # Not a blocking one: that would sleep, and the device's interrupt wakes a thread tens of microseconds late.
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return done.synchronize


def wait(device: torch.device) -> None:
    """Waits until the device has done all that was queued on this thread's stream."""
    mark(device)()
