"""Loops over large tensors in as many threads as torch uses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

#: Fewer elements are not worth a second thread; parts begin at the start of a block of random bits.
_SHARE = 1 << 16
_local = threading.local()


def in_parts(loop: Callable[[int, int], None], count: int, row: int = 1) -> None:
    """Run a loop over `count` elements, or over rows of that many; it gets the start and the length of its part."""
    parts = min(torch.get_num_threads(), count * row // _SHARE, count)
    # A part never waits for parts of its own: all threads could end up waiting.
    if parts < 2 or getattr(_local, "is_part", False):
        loop(0, count)
        return

    def part(at: int, size: int) -> None:
        _local.is_part = True
        try:
            loop(at, size)
        finally:
            _local.is_part = False

    size = -(-count // parts // 8) * 8 if row == 1 else -(-count // parts)
    begun = [_threads(os.getpid(), parts).submit(part, at, min(size, count - at)) for at in range(size, count, size)]
    part(0, size)
    for other in begun:
        other.result()


@lru_cache(maxsize=1)
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """The thread pool of a process; a forked child does not inherit its threads."""
    return ThreadPoolExecutor(count, "qsim")
