"""Counts of what calls do: launches on a GPU, memory at the peak, calls between files, and compilations."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import qsim
import qsim_kernels
from qsim.cli.bench._timing import Call

MIB = 2**20
#: The parts of the kernels that do the work; calls inside them are not counted.
_OWN, _KERNELS = (str(Path(package.__file__ or "").parent) for package in (qsim, qsim_kernels))
_BENCH = str(Path(__file__).parent)


def launches(call: Call) -> int | None:
    """Count the launches on the GPU for a call. Launches may be slower afterwards, because the profiler remains active: time first.

    Args:
        call: The call; it is executed twice, and counted the second time.

    Returns:
        The number of kernels, copies and fills; `None` if the profiler reports none, as it does without the required permissions.
    """
    call()
    torch.cuda.synchronize()
    # Otherwise torch warns that it forgets the events of earlier cycles.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return _work_on_device(profiler.events() or ()) or None


def _work_on_device(events: Iterable[FunctionEvent]) -> int:
    """The events of the device, without the annotations that span several of them."""
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in events)


def allocated(device: torch.device) -> int:
    """The bytes that torch has allocated on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(step: Call, own: int, device: torch.device) -> float | None:
    """The memory of a step at its peak in MiB, with the bytes that its model occupies; None where torch does not count it."""
    return (own + peak_growth(step)) / MIB if device.type == "cuda" else None


def peak_growth(step: Call) -> int:
    """The bytes that a step allocates at its peak beyond those allocated before it."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def calls_between_files(call: Callable[[], Any]) -> int:
    """Count the calls from one file into another, and those by qsim's callers, in a warm call.

    Args:
        call: The call; it is executed three times, and counted the third time.
    """
    found = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        to = frame.f_code.co_filename
        if event == "call" and _is_ours(to):
            caller = frame.f_back
            while caller is not None and not _is_ours(caller.f_code.co_filename):
                caller = caller.f_back
            # Loops that kernels have compiled have no source file.
            came_from = _KERNELS if caller is None and to.startswith(_KERNELS) else "" if caller is None else caller.f_code.co_filename
            found += came_from != to and not came_from.startswith(_KERNELS)

    call()
    call()
    before = sys.getprofile()
    # On a GPU, the backward pass has its own thread.
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return found


def _is_ours(file: str) -> bool:
    return (file.startswith(_OWN) and not file.startswith(_BENCH)) or file.startswith(_KERNELS)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of the kernels that triton compiles in this context, or reads from its cache on disk, once each time.

    Without a CUDA device, nothing is compiled, and triton is not imported.
    """
    names: list[str] = []
    if not torch.cuda.is_available():
        yield names
        return
    import triton

    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def note(*args: Any, **kwargs: Any) -> Any:
        names.append(kwargs["fn"].name)
        return before(*args, **kwargs) if before is not None else None

    runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before
