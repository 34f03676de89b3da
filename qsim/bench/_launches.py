"""How many pieces of work a call gives to a GPU, as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from qsim.bench._timing import Call


def launches(call: Call) -> int | None:
    """Count what a call has a GPU do. Launches may be slower from here on, because the profiler stays in the way: time first.

    Args:
        call: It is called twice, and counted the second time.

    Returns:
        The number of kernels, copies and fills; `None` if the profiler has seen none, which is how it fails where it may not look.
    """
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return _work_on_device(profiler.events() or ()) or None


def _work_on_device(events: Iterable[FunctionEvent]) -> int:
    """Of all events those of the device, without the spans over several of them that annotations make."""
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in events)
