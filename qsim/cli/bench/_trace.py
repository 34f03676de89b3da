"""The call path of an operation: the number of calls from one file of qsim into another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import qsim
import qsim_kernels

#: The parts of the kernels that do the work; calls inside them are not counted.
_OWN, _KERNELS = (str(Path(package.__file__ or "").parent) for package in (qsim, qsim_kernels))
_BENCH = str(Path(__file__).parent)


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
