"""Jobs in memory: 64 bits for each number of a record, and of the records in it, in a row; `loops.bits.record_at` reads them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, get_type_hints


def packed(job: tuple[Any, ...]) -> bytes:
    """A job in memory, as `Loop.run` takes it."""
    return _packing(type(job))(job)


@cache
def _packing(kind: type) -> Callable[[tuple[Any, ...]], bytes]:
    """A function that packs a record."""
    layout, numbers = layout_of(kind), attrgetter(*(path for path, _ in _numbers(kind)))
    return lambda job: layout.pack(*numbers(job))


def layout_of(kind: type) -> struct.Struct:
    """The numbers of a record in memory: floats where they are annotated as such, and integers."""
    return struct.Struct("".join(letter for _, letter in _numbers(kind)))


def _numbers(kind: Any) -> Iterator[tuple[str, str]]:
    """The numbers of a record, and of the records in it, as attributes of attributes, and the letters of their types."""
    for name, hint in get_type_hints(kind).items():
        if hasattr(hint, "_fields"):
            yield from ((f"{name}.{path}", letter) for path, letter in _numbers(hint))
        else:
            yield name, "d" if hint is float else "q"


def job_address(job: bytes) -> int:
    """The address of a job that a loop passes to another, valid as long as the job is kept."""
    return ctypes.cast(ctypes.c_char_p(job), ctypes.c_void_p).value or 0


def kept_address(job: tuple[Any, ...]) -> int:
    """The address of a job in memory that is never freed, because other jobs refer to it."""
    return job_address(_kept.setdefault(numbers := packed(job), numbers))


# No cache of a function: where two threads ask first, that frees the memory which one of them got.
_kept: dict[bytes, bytes] = {}


def changeable(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Numbers in memory that compiled code may change; `ctypes.addressof` gives their address, as long as they are kept."""
    return (ctypes.c_int64 * len(numbers))(*numbers)
