"""The number of launches on a GPU for a call, from torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from qsim.cli.bench._timing import Call


def launches(call: Call) -> int | None:
    """Count the launches on the GPU for a call. Launches may be slower afterwards, because the profiler remains active: time first.

    Args:
        call: The call; it is executed twice, and counted the second time.

    Returns:
        The number of kernels, copies and fills; `None` if the profiler reports none, as it does without the required permissions.
    """
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return _work_on_device(profiler.events() or ()) or None


def _work_on_device(events: Iterable[FunctionEvent]) -> int:
    """The events of the device, without the annotations that span several of them."""
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in events)
