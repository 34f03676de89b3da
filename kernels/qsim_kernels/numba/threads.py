"""Loops over large tensors in as many threads as torch uses.

They are torch's own threads, those of OpenMP, where these can be had: after each operator they wait for the next in a busy loop, and would
take the processors from any other threads for milliseconds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from qsim_kernels import private
from qsim_kernels.numba.jobs import LoneLoop, SharedLoop, changeable, job_address, layout_of
from qsim_kernels.numba.native import Native
from qsim_kernels.ops.backend import PROCESS

#: Up to this many elements are not worth a second thread; torch's own operators share as many.
GRAIN = 1 << 15
#: Elements of a part, of which each thread takes one after the other.
_PART = 1 << 14


class Loop(Native):
    """A compiled loop, which takes the address of a job, the index of the first element (or row, or tile) and their number."""

    def __init__(self, module: str, name: str) -> None:
        super().__init__(module, name, 3)

    @cached_property
    def _found(self) -> int:
        """Its address, once it was asked for."""
        return self.address

    def share(self, job: bytes, count: int, row: int = 1, part: int | None = None) -> None:
        """Run the loop over a number of elements, or of rows of `row` elements; threads take parts of them."""
        if count * row <= GRAIN or (threads := torch.get_num_threads()) == 1:
            _run_alone()(_pack_lone(self._found, count) + job)
            return
        work = changeable(SharedLoop(0, part or max(_PART // row, 1), count, self.address, job_address(job)))
        _team(os.getpid())(_SHARE.address, ctypes.addressof(work), threads)


_ALONE, _SHARE = (Native("shares", name, 1) for name in ("alone", "share"))
_pack_lone = layout_of(LoneLoop).pack


@lru_cache(maxsize=1)
def _run_alone() -> Callable[[bytes], None]:
    """A function that runs a loop in this thread, without the GIL; if it knew the types, ctypes would take longer than small loops."""
    return ctypes.CFUNCTYPE(None)(_ALONE.address)


@lru_cache(maxsize=1)
def _team(process: int) -> Callable[[int, int, int], None]:
    """A function that calls the function at an address, with one argument, in a number of threads at once."""
    parallel: Any = None
    if process == PROCESS and private.library_file is not None:
        with suppress(OSError, AttributeError):
            parallel = ctypes.CDLL(private.library_file).GOMP_parallel
    if parallel is None:
        return partial(_in_threads_of_python, ThreadPoolExecutor(thread_name_prefix="qsim"))
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return lambda function, argument, threads: parallel(function, argument, threads, 0)


def _in_threads_of_python(pool: ThreadPoolExecutor, function: int, argument: int, threads: int) -> None:
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64)(function)
    begun = [pool.submit(run, argument) for _ in range(threads - 1)]
    try:
        run(argument)
    finally:  # an interrupt must not free the memory that they work on
        wait(begun)
