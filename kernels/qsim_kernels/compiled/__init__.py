"""The operators on CPUs, in loops compiled by Numba if it is installed; bit for bit the same as `qsim_kernels.reference`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qsim_kernels import reference
from qsim_kernels.carrier import DOUBLE, Plan, plan
from qsim_kernels.compiled import tables
from qsim_kernels.compiled.jobs import Values, packed
from qsim_kernels.compiled.native import check
from qsim_kernels.compiled.rounding import strip
from qsim_kernels.compiled.threads import Loop
from qsim_kernels.grid import Coding, Grid, Rule
from qsim_kernels.reference import checksum
from qsim_kernels.reference.chunks import pieces
from qsim_kernels.reference.rounding import as_values

__all__ = ["checksum", "decode_into", "encode_into", "quantize_and_encode_into", "quantize_and_sum_into", "quantize_into"]

check()

_STORED = (torch.float32, torch.bfloat16)
_QUANTIZE = Loop("values", "quantize")


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
    loop, numbers, _ = strip(how, rule)
    where = out.data_ptr(), x.data_ptr(), out.element_size() == 2, x.element_size() == 2
    _QUANTIZE.share(packed(Values(*where, loop, numbers, seed or 0, stream, offset)), x.numel())


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
