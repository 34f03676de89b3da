"""From the operators' arguments to a launch: which kernel, with which numbers, on how many blocks."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from qsim_kernels.carrier import counts_wide
from qsim_kernels.grid import Coding, Grid, Rule
from qsim_kernels.triton import arguments
from qsim_kernels.triton.kernels import decode_kernel, encode_kernel, quantize_and_encode_kernel, quantize_kernel

_INTERPRETED = bool(triton.knobs.runtime.interpret)


class Launcher:
    """A kernel and all of its arguments that do not change from call to call.

    Triton finds the compiled form of a kernel by looking at every argument, which takes longer than to launch it. Here the form hangs on
    little: the device, whether the pointers are aligned, and which optional arguments there are.

    Args:
        kernel: The kernel.
        numbers: Its arguments that are never specialized, the last ones before the constants.
        constants: What it is compiled for, the elements of a block last.
        share: How many elements a program works on.
        options: What the compiler is told: `num_warps`, `maxnreg`.
    """

    def __init__(self, kernel: Any, numbers: tuple[int, ...], constants: tuple[Any, ...], share: int, **options: int) -> None:
        self._kernel = kernel
        self._tail = (*numbers, *constants)
        self._share = share
        self._options = {} if _INTERPRETED else options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, x: Tensor, out: Tensor, count: int, *others: Any, absent: Hashable = None) -> None:
        """Launches as many programs as share `count` elements; the other arguments are those of `launch`."""
        self.launch(-(-count // self._share), x, out, count, *others, absent=absent)

    def launch(self, programs: int, x: Tensor, out: Tensor, *others: Any, absent: Hashable = None) -> None:
        """Launches the kernel on the current stream of `x`'s device.

        Args:
            programs: How many.
            x: What is read, contiguous.
            out: What is written, contiguous.
            *others: The arguments between these and the numbers.
            absent: Which of the kernel's optional arguments are not there.
        """
        device = x.device.index
        if not _INTERPRETED and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(programs, x, out, *others, absent=absent)
            return
        source, target = x.data_ptr(), out.data_ptr()
        form = (device, source % 16, target % 16, absent)
        compiled = self._compiled.get(form)
        if compiled is not None:
            compiled[programs, 1, 1](source, target, *others, *self._tail)
            return
        compiled = self._kernel[programs, 1, 1](x, out, *others, *self._tail, **self._options)
        if not _INTERPRETED:
            self._compiled[form] = compiled


def quantize_into(
    out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, stream: int, offset: int, block: int | None = None
) -> None:
    """Rounds `x` onto a grid, into `out`; see `reference.quantize_into`.

    Args:
        out: Of `x`'s shape, in a dtype that holds the grid.
        x: Values.
        seed: A 0-d int64 tensor, needed for stochastic rounding alone.
        grid: The values to choose from.
        rule: How to choose.
        stream: Which of a seed's streams of random bits.
        offset: Logical index of `x`'s first element.
        block: Elements of a block, if not the number that is fastest.
    """
    count = x.numel()
    if count:
        source, target = flat(x), _target(out)
        pointer, number = seed_of(seed, x)
        launcher = _quantizer(grid, rule, x.dtype, out.dtype, offset % 8 == 0, block)
        launcher(source, target, count, pointer, number, stream, offset, absent=pointer is None)
        _finish(out, target)


def encode_into(
    out: Tensor,
    x: Tensor,
    seed: Tensor | None,
    grid: Grid,
    rule: Rule,
    coding: Coding,
    stream: int,
    offset: int,
    check: bool = True,
    block: int | None = None,
) -> Tensor | bool:
    """Rounds `x` onto a grid and writes the codes into `out`; see `reference.encode_into`.

    Returns:
        Whether a NaN was met that has no code, on the device of `x`.
    """
    count = x.numel()
    if not count:
        return False
    source, target = flat(x), _target(out)
    pointer, number = seed_of(seed, x)
    check = check and coding.nan < 0
    lost = torch.zeros((), dtype=torch.int32, device=x.device) if check else None
    launcher = _encoder(grid, rule, coding, x.dtype, out.dtype, offset % 8 == 0, block)
    launcher(source, target, count, lost, pointer, number, stream, offset, absent=(lost is None, pointer is None))
    _finish(out, target)
    return False if lost is None else lost


def decode_into(out: Tensor, codes: Tensor, grid: Grid, coding: Coding, block: int | None = None) -> None:
    """Writes the values of `codes` into `out`; see `reference.decode_into`."""
    count = codes.numel()
    if count:
        source, target = flat(codes), _target(out)
        _decoder(grid, coding, out.dtype, block)(source, target, count)
        _finish(out, target)


def quantize_and_encode_into(
    out: Tensor,
    codes: Tensor,
    x: Tensor,
    seed: Tensor | None,
    grid: Grid,
    rule: Rule,
    stream: int,
    code_grid: Grid,
    code_rule: Rule,
    coding: Coding,
    code_stream: int,
) -> None:
    """Rounds `x` onto two grids, into values and into codes; see `reference.quantize_and_encode_into`."""
    count = x.numel()
    if count:
        source, target, written = flat(x), _target(out), _target(codes)
        pointer, number = seed_of(seed, x)
        launcher = _both(grid, rule, code_grid, code_rule, coding, x.dtype, out.dtype, codes.dtype)
        launcher(source, target, count, written, pointer, number, stream, code_stream, absent=(pointer is None, written.data_ptr() % 16))
        _finish(out, target)
        _finish(codes, written)


@lru_cache(maxsize=4096)
def _quantizer(grid: Grid, rule: Rule, source: torch.dtype, target: torch.dtype, aligned: bool, block: int | None) -> Launcher:
    variant, numbers = arguments.rounding(grid, rule, torch.float64 in (source, target))
    run = run_of(source, target)
    block = block or (1024 if run == 4 else 2048)
    # Where there is little to move, as many threads as fit must share the work.
    scarce = {"maxnreg": 32} if source.itemsize == target.itemsize == 2 and aligned and not variant.wide else {}
    return Launcher(quantize_kernel, numbers, (variant, run, aligned, block), block, **scarce)


@lru_cache(maxsize=4096)
def _encoder(
    grid: Grid, rule: Rule, coding: Coding, source: torch.dtype, target: torch.dtype, aligned: bool, block: int | None
) -> Launcher:
    variant, numbers = arguments.rounding(grid, rule, source == torch.float64 or counts_wide(grid, coding))
    code_variant, code_numbers = arguments.writing(grid, coding, variant.wide)
    block = block or 2048
    constants = (variant, code_variant, run_of(source, target), aligned, block)
    return Launcher(encode_kernel, (*numbers, *code_numbers), constants, 2 * block)


@lru_cache(maxsize=4096)
def _both(
    grid: Grid,
    rule: Rule,
    code_grid: Grid,
    code_rule: Rule,
    coding: Coding,
    source: torch.dtype,
    target: torch.dtype,
    codes: torch.dtype,
) -> Launcher:
    variant, numbers = arguments.rounding(grid, rule, torch.float64 in (source, target))
    wide = source == torch.float64 or counts_wide(code_grid, coding)
    second_variant, second_numbers = arguments.rounding(code_grid, code_rule, wide)
    code_variant, code_numbers = arguments.writing(code_grid, coding, second_variant.wide)
    one_grid = grid == code_grid and variant.fast and second_variant.fast and code_variant.nan
    constants = (variant, second_variant, code_variant, one_grid, run_of(source, target), 2048)
    # Two grids need more registers than would leave room for as many threads.
    scarce = {"maxnreg": 40} if one_grid and source.itemsize == target.itemsize == 2 else {}
    return Launcher(quantize_and_encode_kernel, (*numbers, *second_numbers, *code_numbers), constants, 2048, **scarce)


@lru_cache(maxsize=4096)
def _decoder(grid: Grid, coding: Coding, target: torch.dtype, block: int | None) -> Launcher:
    variant, numbers = arguments.reading(grid, coding, target == torch.float64 or counts_wide(grid, coding))
    block = block or 1024
    return Launcher(decode_kernel, numbers, (variant, block), block, num_warps=2 if target.itemsize == 2 else 4)


def run_of(source: torch.dtype, target: torch.dtype) -> int:
    """How many neighbours a thread holds, so that it reads or writes 16 bytes of the narrower type at once."""
    return max(4, 16 // min(source.itemsize, target.itemsize))


def flat(x: Tensor) -> Tensor:
    """The elements in logical order."""
    return x if x.is_contiguous() else x.contiguous()


def _target(out: Tensor) -> Tensor:
    """Where to write the elements in logical order."""
    return out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _finish(out: Tensor, target: Tensor) -> None:
    """Puts what was written elsewhere into its place."""
    if target is not out:
        out.copy_(target)


def seed_of(seed: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """The seed by pointer where it lies on the device, which nothing waits for; else by value."""
    if seed is None:
        return None, 0
    return (seed, 0) if seed.device == x.device else (None, int(seed))
