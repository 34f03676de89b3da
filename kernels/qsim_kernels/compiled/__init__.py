"""The operators on processors, in loops compiled by Numba where it is installed; bit for bit what `qsim_kernels.reference` does."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.carrier import DOUBLE, Plan, bits_that_matter, plan
from qsim_kernels.compiled.loops import Stored, adding_loop, rounding_loop
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.grid import Coding, Grid, Mode, Rule
from qsim_kernels.reference import add_words, decode_into, encode_into as _encode_into
from qsim_kernels.reference.rounding import adds_exactly, as_values

__all__ = ["add_words", "decode_into", "encode_into", "quantize_and_encode_into", "quantize_and_sum_into", "quantize_into"]

_STORED = {
    torch.float32: int(Stored.FLOAT32),
    torch.bfloat16: int(Stored.BFLOAT16),
    torch.float16: int(Stored.FLOAT16),
    torch.float64: int(Stored.FLOAT64),
}


def quantize_into(out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, stream: int, offset: int) -> None:
    """Rounds `x` onto a grid, into `out`, which may be `x` itself; see `qsim_kernels.reference.quantize_into`."""
    how = plan(grid, torch.float64 in (x.dtype, out.dtype))
    wide = how.carrier == DOUBLE
    given = (x.to(torch.float64) if wide else x).contiguous()
    held = torch.float64 if wide else out.dtype
    result = out if out.dtype == held and out.is_contiguous() else torch.empty_like(given, dtype=held)
    _round(result, given, None if seed is None else int(seed), how, rule, stream, offset)
    if result is not out:
        out.copy_(as_values(result.view(torch.int64), how, out.dtype) if wide else result)


def _round(out: Tensor, x: Tensor, seed: int | None, how: Plan, rule: Rule, stream: int, offset: int) -> None:
    """Rounds between contiguous tensors, either both float64 or neither."""
    stored = _STORED[out.dtype], _STORED[x.dtype]
    out_at, x_at = out.data_ptr(), x.data_ptr()
    steps = out.element_size(), x.element_size()
    if rule.mode == Mode.NEAREST and rule.saturate and how.carrier != DOUBLE and how.signed and how.negative_zero and adds_exactly(how):
        add = adding_loop(*stored)
        in_parts(lambda at, count: add(out_at + at * steps[0], x_at + at * steps[1], count, how.shift, how.low, how.top), x.numel())
        return
    bits = bits_that_matter(how, rule) if rule.mode == Mode.STOCHASTIC else 0
    loop, numbers = rounding_loop(int(rule.mode), bits > 16, *stored), _numbers(how)
    flags = how.signed, how.negative_zero, how.zero, rule.saturate, rule.correction
    noise = 0 if seed is None else seed, stream
    in_parts(
        lambda at, count: loop(out_at + at * steps[0], x_at + at * steps[1], count, numbers, flags, bits, *noise, offset + at), x.numel()
    )


@lru_cache(maxsize=4096)
def _numbers(how: Plan) -> tuple[int, ...]:
    """A grid's patterns as the loops take them."""
    return how.shift, how.low, how.least, how.half, how.parity, how.top, how.bottom, how.floor, how.over, how.under


def encode_into(
    out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, coding: Coding, stream: int, offset: int, check: bool = True
) -> bool:
    """Rounds `x` onto a grid and writes the codes into `out`; see `qsim_kernels.reference.encode_into`."""
    return _encode_into(out, x, seed, grid, rule, coding, stream, offset, check, _rounded_patterns)


def _rounded_patterns(source: Tensor, how: Plan, rule: Rule, seed: int | None, stream: int, index: int) -> Tensor:
    wide = how.carrier == DOUBLE
    given = source.to(torch.float64).reshape(-1) if wide else source.reshape(-1)
    out = torch.empty(given.shape, dtype=torch.float64 if wide else torch.float32)
    _round(out, given, seed, how, rule, stream, index)
    return out.view(torch.int64 if wide else torch.int32)


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
    """Rounds `x` onto two grids; see `qsim_kernels.reference.quantize_and_encode_into`."""
    quantize_into(out, x, seed, grid, rule, stream, 0)
    encode_into(codes, x, seed, code_grid, code_rule, coding, code_stream, 0, check=False)


def quantize_and_sum_into(out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, stream: int) -> Tensor:
    """Rounds a matrix and adds up its rows; see `qsim_kernels.reference.quantize_and_sum_into`."""
    quantize_into(out, x, seed, grid, rule, stream, 0)
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
