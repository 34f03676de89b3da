"""Texts in PTX inside of Triton's interpreter: where a kernel calls one, the elements of its tensors are placed on the lanes of warps.

A text gets elements where it expects them, see `qsim_kernels.triton.placement`, and all else in an order without any order: so a kernel whose
results are right here depends on nothing that its texts do not say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from qsim_kernels.triton.device import conversions, undecided
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.placement import Placement, placement_of
from qsim_kernels.triton.scaled import whole
from support.ptx import LANES, Words, execute


class _Results:
    """What the interpreter takes for an operation with several results."""

    def __init__(self, results: list[Any]) -> None:
        self.get_result = results.__getitem__


def places(count: int, pack: int, expected: Placement) -> Words:
    """The elements of `count` that each call of a text gets: `[warps, lanes, pack]`."""
    unit = min(count, max(expected.thread, expected.lanes))
    units = np.random.default_rng(count).permutation(count // unit)
    order = (unit * units[:, None] + np.arange(unit)).reshape(-1, pack)
    order = np.repeat(order, expected.copies, 0)
    # As in a tensor with fewer elements than a warp has places, the last lanes have elements of others.
    return np.resize(order, (-(-len(order) // LANES) * LANES, pack)).reshape(-1, LANES, pack)


def _registers(data: Words, at: Words) -> list[Words]:
    """The registers with a tensor's elements: narrow ones share one."""
    bits = 8 * data.dtype.itemsize
    words = data.reshape(-1).view(f"uint{bits}")[at]
    if bits < 32:
        words = np.ascontiguousarray(words).view(np.uint32)
    return [words[..., i] for i in range(words.shape[-1])]


def _of_lanes(data: Words, shape: tuple[int, ...], at: Words) -> list[Words]:
    """The registers of an operand, which may differ between copies."""
    if data.ndim > len(shape):
        copies = [_registers(np.broadcast_to(copy, shape), at) for copy in data]
        lane = np.arange(LANES) % len(copies)
        return [np.choose(lane, each) if each[0].dtype != np.uint64 else np.where(lane == 0, *each) for each in zip(*copies, strict=True)]
    return _registers(np.broadcast_to(data, shape), at)


def _tensor(words: list[Words], at: Words, kind: Any, shape: tuple[int, ...], copies: int) -> Any:
    """A result as the interpreter's tensor; if lanes with copies differ, one of each, in a dimension more."""
    dtype = np.dtype(interpreter._get_np_dtype(kind))
    elements = np.ascontiguousarray(np.stack(words, -1)).view(f"uint{8 * dtype.itemsize}").reshape(-1, at.shape[-1])
    found = []
    for copy in range(copies):
        data = np.empty(int(np.prod(shape)), dtype)
        data.view(elements.dtype)[at.reshape(elements.shape)[copy::copies]] = elements[copy::copies]
        found.append(data.reshape(shape))
    differs = any(each.tobytes() != found[0].tobytes() for each in found)
    return interpreter.TensorHandle(np.stack(found) if differs else found[0], kind.scalar)


def create_inline_asm(self: Any, text: str, constraints: str, values: list[Any], kinds: list[Any], is_pure: bool, pack: int) -> _Results:
    """What Triton's builder does with a text: execute it."""
    shape = tuple(kinds[0].shape) if kinds[0].is_block() else ()
    expected = placement_of(text) or Placement()
    at = places(int(np.prod(shape)), pack, expected)
    operands: list[Words] = []
    for value in values:
        # A small number of 64 bits is narrower in the interpreter.
        is_long = constraints.split(",")[len(operands) + constraints.count("=")] == "l"
        operands += _of_lanes(value.data.astype(np.int64) if is_long else value.data, shape, at)
    words = execute(text, constraints, operands)
    results, each = [], len(words) // len(kinds)
    for i, kind in enumerate(kinds):
        results.append(_tensor(words[i * each : (i + 1) * each], at, kind, shape, expected.copies))
    return _Results(results)


@contextmanager
def texts_interpreted() -> Iterator[None]:
    """Let kernels in the interpreter take the ways that they take on an H100, and execute their texts."""
    caches = [arguments.rounding, *_prepared()]
    with (
        patch.object(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm),
        patch.object(arguments, "INTERPRETED", False),
        patch.object(arguments, "supports_packed_16_bit", lambda: True),
        patch.object(conversions, "supports_packed_16_bit", lambda: True),
        patch.object(undecided, "SCALED_BY", undecided.SCALED_BY.value),  # its difference from a tensor would be a constant, too
        patch.object(tl.tuple, "__radd__", lambda self, first: tl.tuple([*first, *self]), create=True),  # behind Python's own tuples
        patch.object(whole, "supports_packed_16_bit", lambda: True),
    ):
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def _prepared() -> list[Any]:
    """The caches of what hosts decide for launches."""
    import sys

    modules = [module for name, module in sys.modules.items() if name.startswith("qsim_kernels.triton")]
    return [value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")]
