"""Texts in PTX inside of Triton's interpreter: where a kernel calls one, the elements of its tensors are placed on the lanes of warps.

A text gets elements where it expects them, see `qsim_kernels.triton.placement`, and all else shuffled: so a kernel whose results are right
here depends on nothing that its texts do not say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from qsim_kernels.triton.device import undecided
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.placement import Placement, placement_of
from support.forced_words import ForcedWords
from support.ptx import LANES, UndefinedError, Words, execute


class _Results:
    """An operation with several results, as the interpreter takes it."""

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
    return [words[..., i].copy() for i in range(words.shape[-1])]


def _of_lanes(data: Words, shape: tuple[int, ...], at: Words) -> list[Words]:
    """The registers of an operand, which may differ between copies."""
    if data.ndim > len(shape):
        copies = [_registers(np.broadcast_to(copy, shape), at) for copy in data]
        lane = np.arange(LANES) % len(copies)
        return [np.choose(lane, each) if each[0].dtype != np.uint64 else np.where(lane == 0, *each) for each in zip(*copies, strict=True)]
    return _registers(np.broadcast_to(data, shape), at)


def _tensor(words: list[Words], at: Words, kind: Any, shape: tuple[int, ...], copies: int, must_agree: bool) -> Any:
    """A result as the interpreter's tensor; where lanes with copies may differ and do, one of each, in a dimension more."""
    dtype = np.dtype(interpreter._get_np_dtype(kind))
    elements = np.ascontiguousarray(np.stack(words, -1)).view(f"uint{8 * dtype.itemsize}").reshape(-1, at.shape[-1])
    found = []
    for copy in range(copies):
        data = np.empty(int(np.prod(shape)), dtype)
        data.view(elements.dtype)[at.reshape(elements.shape)[copy::copies]] = elements[copy::copies]
        found.append(data.reshape(shape))
    differs = any(each.tobytes() != found[0].tobytes() for each in found)
    if differs and must_agree:
        raise UndefinedError("lanes that the compiler takes for copies differ")
    return interpreter.TensorHandle(np.stack(found) if differs else found[0], kind.scalar)


def called(text: str, constraints: str, values: list[Any], kinds: list[Any], pack: int, forced: ForcedWords | None) -> _Results:
    """The results of a text for tensors of the interpreter.

    Args:
        text: The text.
        constraints: Its constraints.
        values: Its operands.
        kinds: The types of its results.
        pack: Elements that it gets at once.
        forced: The random words that it draws, if not those of its blocks.
    """
    shape = tuple(kinds[0].shape) if kinds[0].is_block() else ()
    expected = placement_of(text) or Placement()
    at = places(int(np.prod(shape)), pack, expected)
    operands: list[Words] = []
    for value in values:
        # A small number of 64 bits is narrower in the interpreter.
        is_long = constraints.split(",")[len(operands) + constraints.count("=")] == "l"
        operands += _of_lanes(value.data.astype(np.int64) if is_long else value.data, shape, at)
    long = [operand for operand in operands if operand.dtype == np.uint64]
    if forced is not None and long:
        # A block, a seed and a stream for each of a text's elements, or two blocks.
        blocks = 2 if len(long) == 4 else len(long) // 3
        forced.replace(long[:blocks], long[blocks + max(1, len(long) // 3) :])
    words = execute(text, constraints, operands)
    each = len(words) // len(kinds)
    # Of two texts with copies, the first makes a difference and the second ends it.
    ends = any(value.data.ndim > len(shape) for value in values)
    return _Results([_tensor(words[i * each : (i + 1) * each], at, kind, shape, expected.copies, ends) for i, kind in enumerate(kinds)])


@contextmanager
def texts_interpreted(forced: ForcedWords | None = None, change: Callable[[str], str] = str) -> Iterator[list[str]]:
    """Let kernels in the interpreter take the ways that they take on an H100, and execute their texts.

    Args:
        forced: The random words that texts draw, in place of those of their blocks.
        change: What becomes of texts before they are executed.

    Yields:
        The texts that were executed, a list that grows.
    """
    texts: list[str] = []

    def create_inline_asm(_: Any, text: str, constraints: str, values: list[Any], kinds: list[Any], is_pure: bool, pack: int) -> _Results:
        texts.append(text)
        return called(change(text), constraints, values, kinds, pack, forced)

    modules = [module for name, module in sys.modules.items() if name.startswith("qsim_kernels.triton")]
    caches = [value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")]
    with ExitStack() as stack:
        stack.callback(lambda: [cache.cache_clear() for cache in caches])
        for module in modules:
            if hasattr(module, "supports_packed_16_bit"):
                stack.enter_context(patch.object(module, "supports_packed_16_bit", lambda: True))
        stack.enter_context(patch.object(arguments, "INTERPRETED", False))
        stack.enter_context(patch.object(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm))
        # What compiled code accepts and the interpreter does not: a constant less a number, and Python's tuples before Triton's.
        stack.enter_context(patch.object(undecided, "SCALED_BY", undecided.SCALED_BY.value))
        stack.enter_context(patch.object(tl.tuple, "__radd__", lambda self, first: tl.tuple([*first, *self]), create=True))
        for cache in caches:
            cache.cache_clear()
        yield texts
