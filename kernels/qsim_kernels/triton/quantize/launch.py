"""Launches from the operators' arguments: which kernel, with which numbers, on how many blocks."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.carrier import counts_wide
from qsim_kernels.grid import Coding, Grid, Mode, Rule
from qsim_kernels.triton.device.transposed import Tile
from qsim_kernels.triton.device.values import Variant
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launcher
from qsim_kernels.triton.host.layouts import work_on
from qsim_kernels.triton.quantize.kernels import decode_kernel, encode_kernel, quantize_and_encode_kernel, quantize_kernel


def quantize_into(
    out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, stream: int, offset: int, block: int | None = None
) -> None:
    """Round `x` onto a grid, into `out`; see `reference.quantize_into`.

    Args:
        out: Of `x`'s shape, in a dtype that holds the grid.
        x: Values.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        grid: The values to choose from.
        rule: How to choose.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of `x`'s first element.
        block: Elements of a block; by default the fastest number.
    """
    count = x.numel()
    if count:
        aligned = offset % 8 == 0
        work = work_on(rule.mode == Mode.STOCHASTIC, aligned, x, out)
        pointer, number = seed_of(seed, x)
        launcher = _quantizer(grid, rule, x.dtype, out.dtype, work.tile, aligned, block)
        work.launch(launcher, count, pointer, number, stream, offset, absent=pointer is None)
        work.finish(out)


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
    """Round `x` onto a grid and write the codes into `out`; see `reference.encode_into`.

    Returns:
        Whether there was a NaN without a code, on the device of `x`.
    """
    count = x.numel()
    if not count:
        return False
    aligned = offset % 8 == 0
    work = work_on(rule.mode == Mode.STOCHASTIC, aligned, x, out)
    pointer, number = seed_of(seed, x)
    check = check and coding.nan < 0
    lost = torch.zeros((), dtype=torch.int32, device=x.device) if check else None
    launcher = _encoder(grid, rule, coding, x.dtype, out.dtype, work.tile, aligned, block)
    work.launch(launcher, count, lost, pointer, number, stream, offset, absent=(lost is None, pointer is None))
    work.finish(out)
    return False if lost is None else lost


def decode_into(out: Tensor, codes: Tensor, grid: Grid, coding: Coding, block: int | None = None) -> None:
    """Write the values of `codes` into `out`; see `reference.decode_into`."""
    count = codes.numel()
    if count:
        work = work_on(False, True, codes, out)
        _decoder(grid, coding, out.dtype, block)(work.source, work.target, count)
        work.finish(out)


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
    """Round `x` onto two grids, into values and into codes; see `reference.quantize_and_encode_into`."""
    count = x.numel()
    if count:
        work = work_on(Mode.STOCHASTIC in (rule.mode, code_rule.mode), True, x, out, codes)
        pointer, number = seed_of(seed, x)
        launcher = _both(grid, rule, code_grid, code_rule, coding, x.dtype, out.dtype, codes.dtype, work.tile)
        written = work.others[0]
        work.launch(launcher, count, written, pointer, number, stream, code_stream, absent=(pointer is None, written.data_ptr() % 16))
        work.finish(out, codes)


@lru_cache(maxsize=4096)
def _quantizer(
    grid: Grid, rule: Rule, source: torch.dtype, target: torch.dtype, tile: Tile | None, aligned: bool, block: int | None
) -> Launcher:
    variant, numbers = arguments.rounding(grid, rule, torch.float64 in (source, target))
    run, steps = run_of(source, target), 1
    is_plain = aligned and not variant.wide and tile is None
    if is_plain:
        variant = drawn_later(variant, grid, source)
    draws_words = is_plain and rule.mode == Mode.STOCHASTIC and not variant.halves
    size, warps = 1024 if run == 4 else 2048, 4
    registers = 0
    if variant.later:
        # Several blocks amortize a thread's fixed costs, which matters where there is little to move.
        steps, registers = 4 if target.itemsize == 2 else 1, 64
    elif draws_words:
        # A Philox block has half words for eight neighbours.
        run, size, warps = 8, *((512, 2) if source.itemsize > target.itemsize else (1024, 4))
    if not registers and is_plain and source.itemsize == target.itemsize and (draws_words or source.itemsize == 2):
        # Where there is little to move, as many threads as fit must share the work.
        registers = 32
    block = block or size
    options = {"maxnreg": registers} if registers else {}
    return Launcher(quantize_kernel, numbers, (variant, tile, run, aligned, block, steps), steps * block, num_warps=warps, **options)


@lru_cache(maxsize=4096)
def _encoder(
    grid: Grid,
    rule: Rule,
    coding: Coding,
    source: torch.dtype,
    target: torch.dtype,
    tile: Tile | None,
    aligned: bool,
    block: int | None,
) -> Launcher:
    variant, numbers = arguments.rounding(grid, rule, source == torch.float64 or counts_wide(grid, coding))
    if aligned and tile is None:
        variant = drawn_later(variant, grid, source)
    code_variant, code_numbers = arguments.writing(grid, coding, variant.wide)
    block = block or 2048
    constants = (variant, code_variant, tile, run_of(source, target), aligned, block)
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
    tile: Tile | None,
) -> Launcher:
    variant, numbers = arguments.rounding(grid, rule, torch.float64 in (source, target))
    wide = source == torch.float64 or counts_wide(code_grid, coding)
    second_variant, second_numbers = arguments.rounding(code_grid, code_rule, wide)
    code_variant, code_numbers = arguments.writing(code_grid, coding, second_variant.wide)
    if tile is None:
        variant = drawn_later(variant, grid, source)
        second_variant = drawn_later(second_variant, code_grid, source)
    one_grid = grid == code_grid and variant.fast and second_variant.fast and code_variant.nan
    constants = (variant, second_variant, code_variant, tile, one_grid, run_of(source, target), 2048)
    # Two grids need so many registers that fewer threads fit.
    scarce = {"maxnreg": 40} if one_grid and source.itemsize == target.itemsize == 2 and tile is None else {}
    return Launcher(quantize_and_encode_kernel, (*numbers, *second_numbers, *code_numbers), constants, 2048, **scarce)


@lru_cache(maxsize=4096)
def _decoder(grid: Grid, coding: Coding, target: torch.dtype, block: int | None) -> Launcher:
    variant, numbers = arguments.reading(grid, coding, target == torch.float64 or counts_wide(grid, coding))
    block = block or 1024
    return Launcher(decode_kernel, numbers, (variant, block), block, num_warps=2 if target.itemsize == 2 else 4)


def drawn_later(variant: Variant, grid: Grid, source: torch.dtype) -> Variant:
    """The variant that draws later, unless so many bytes are moved that drawing all random bits takes no extra time."""
    return arguments.drawn_later(variant, grid, few=True) if significant_bits(source) <= 11 else variant


def run_of(source: torch.dtype, target: torch.dtype) -> int:
    """The number of neighbours a thread holds, so that it reads or writes 16 bytes of the narrower type at once."""
    return max(4, 16 // min(source.itemsize, target.itemsize))


def significant_bits(dtype: torch.dtype) -> int:
    """The number of bits in a dtype's significand."""
    return 2 - math.frexp(torch.finfo(dtype).eps)[1]


def seed_of(seed: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """The seed by pointer if it is on the device, without synchronizing; otherwise by value."""
    if seed is None:
        return None, 0
    return (seed, 0) if seed.device == x.device else (None, int(seed))
