"""The operators on CPUs, in loops compiled by Numba if it is installed; bit for bit the same as `qsim_kernels.reference`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from qsim_kernels import reference
from qsim_kernels.carrier import DOUBLE, Plan, plan
from qsim_kernels.compiled import tables
from qsim_kernels.compiled.deterministic import deterministic_loop
from qsim_kernels.compiled.loops import nearest_loop, stochastic_loop
from qsim_kernels.compiled.stochastic import way_of
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.grid import Coding, Grid, Mode, Rule
from qsim_kernels.reference import checksum
from qsim_kernels.reference.chunks import pieces
from qsim_kernels.reference.rounding import as_values, rounds_by_addition

__all__ = ["checksum", "decode_into", "encode_into", "quantize_and_encode_into", "quantize_and_sum_into", "quantize_into"]

_STORED = (torch.float32, torch.bfloat16)
#: Elements per piece when rounding in place.
_PIECE = 1 << 20


def quantize_into(out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, stream: int, offset: int) -> None:
    """Round `x` onto a grid, into `out`, which may be `x` itself; see `qsim_kernels.reference.quantize_into`."""
    how = plan(grid, wide=torch.float64 in (x.dtype, out.dtype))
    if how.carrier == DOUBLE:
        reference.quantize_into(out, x, seed, grid, rule, stream, offset)
        return
    given = (x if x.dtype in _STORED else x.to(torch.float32)).contiguous()
    held = out.dtype if out.dtype in _STORED else torch.float32
    result = out if out.dtype == held and out.is_contiguous() else torch.empty_like(given, dtype=held)
    _round(result, given, None if seed is None else int(seed), how, rule, stream, offset)
    if result is not out:
        out.copy_(as_values(result.view(torch.int32), how, out.dtype) if out.dtype != held else result)


def _round(out: Tensor, x: Tensor, seed: int | None, how: Plan, rule: Rule, stream: int, offset: int) -> None:
    """Round between contiguous tensors of float32 or bfloat16."""
    out_at, x_at, steps = out.data_ptr(), x.data_ptr(), (out.element_size(), x.element_size())
    if out_at == x_at and x.numel():
        # Loops vectorize only if they do not write where they read, so in-place rounding reads a copy, piece by piece.
        for start in range(0, x.numel(), _PIECE):
            piece = slice(start, start + _PIECE)
            _round(out.view(-1)[piece], x.view(-1)[piece].clone(), seed, how, rule, stream, offset + start)
        return
    loop, *chosen = _loop(out.dtype, x.dtype, how, rule)
    if rule.mode != Mode.STOCHASTIC:
        in_parts(lambda at, count: loop(out_at + at * steps[0], x_at + at * steps[1], count, *chosen), x.numel())
        return
    in_parts(lambda at, count: loop(out_at + at * steps[0], x_at + at * steps[1], count, *chosen, seed, stream, offset + at), x.numel())


@lru_cache(maxsize=1024)
def _loop(out: torch.dtype, x: torch.dtype, how: Plan, rule: Rule) -> tuple[Any, ...]:
    """The loop for a rounding between two dtypes, and its numbers."""
    if how.negative_zero and rounds_by_addition(how, rule):
        return nearest_loop(out, x), how.shift, how.low, how.top
    numbers = how.shift, how.low, how.least, how.top, how.bottom, how.floor, how.over, how.under
    flags = how.signed, how.negative_zero, how.zero, rule.saturate, rule.correction
    if rule.mode == Mode.STOCHASTIC:
        return stochastic_loop(out, x), way_of(how, rule), numbers, flags, rule.bits
    return deterministic_loop(out, x), int(rule.mode), numbers, flags, how.half, how.parity


def encode_into(
    out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, coding: Coding, stream: int, offset: int, check: bool = True
) -> bool:
    """Round `x` onto a grid and write the codes into `out`; see `qsim_kernels.reference.encode_into`."""
    if not tables.has_codes(grid, coding):
        return reference.encode_into(out, x, seed, grid, rule, coding, stream, offset, check)
    lost = False
    for index, (source, target) in pieces(x, out, first=offset):
        values = torch.empty(source.shape, dtype=torch.bfloat16, device=source.device)
        quantize_into(values, source, seed, grid, rule, stream, index)
        found = target if target.is_contiguous() else torch.empty(source.shape, dtype=out.dtype, device=out.device)
        tables.look_up(found, values, tables.codes(grid, coding))
        if found is not target:
            target.copy_(found)
        lost = lost or (check and coding.nan < 0 and bool(values.isnan().any()))
    return lost


def decode_into(out: Tensor, codes: Tensor, grid: Grid, coding: Coding) -> None:
    """Write the values of `codes` into `out`."""
    if codes.dtype != torch.uint8 or not out.is_contiguous() or not codes.is_contiguous():
        reference.decode_into(out, codes, grid, coding)
    else:
        tables.look_up(out, codes, tables.values(grid, coding, out.dtype))


quantize_and_encode_into = partial(reference.quantize_and_encode_into, quantize=quantize_into, encode=encode_into)
quantize_and_sum_into = partial(reference.quantize_and_sum_into, quantize=quantize_into)
