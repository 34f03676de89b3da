"""The operators on CPUs, in loops compiled by Numba if it is installed; bit for bit the same as `qsim_kernels.torch`."""

from __future__ import annotations

from ctypes import addressof
from functools import lru_cache, partial

import torch
from torch import Tensor

from qsim_kernels import torch as reference
from qsim_kernels.numba import tables
from qsim_kernels.numba.arguments import STORED, held, in_memory_order, loop_noise, readable, strip, writable
from qsim_kernels.numba.jobs import EncodedValues, LoopRounding, Values, changeable, layout_of
from qsim_kernels.numba.native import check_numba
from qsim_kernels.numba.reductions import checksum, tally
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import DOUBLE, rounding_bits
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import Coding, Grid, GridRounding, Noise
from qsim_kernels.torch.rounding import as_values

__all__ = [
    "checksum", "decode_into", "encode_both_ways", "encode_into", "quantize_and_encode_into", "quantize_and_sum_into",
    "quantize_into", "tally",
]  # fmt: skip

check_numba()

_QUANTIZE, _ENCODE = (Loop("values", name) for name in ("quantize", "encode"))
#: A `Values` and an `EncodedValues` in memory, given their numbers: small tensors need them often.
_pack_values, _pack_codes = layout_of(Values).pack, layout_of(EncodedValues).pack


def quantize_into(out: Tensor, x: Tensor, rounding: GridRounding, noise: Noise) -> None:
    """Round `x` onto a grid, into `out`, which may be `x` itself; see `qsim_kernels.torch.quantize_into`."""
    known = _rounding(rounding, x.dtype, out.dtype)
    if known is None or not (x.is_contiguous() and out.is_contiguous()):
        _quantize_others(out, x, rounding, noise)
        return
    (out_is_narrow, x_is_narrow, loop, numbers), (seed, stream, offset) = known, noise
    values = out.data_ptr(), out_is_narrow, x.data_ptr(), x_is_narrow
    job = _pack_values(*values, loop, numbers, 0 if seed is None else seed.item(), stream, offset)
    _QUANTIZE.share(job, x.numel())


@lru_cache(maxsize=4096)
def _rounding(rounding: GridRounding, source: torch.dtype, target: torch.dtype) -> tuple[int, int, int, int] | None:
    """The numbers of `Values` that do not differ between calls, if the loop reads and writes these dtypes."""
    bits = rounding_bits(*rounding, wide=False)
    if bits.carrier == DOUBLE or source not in STORED or target not in STORED:
        return None
    return target == torch.bfloat16, source == torch.bfloat16, *strip(bits, rounding.rule)


def _quantize_others(out: Tensor, x: Tensor, rounding: GridRounding, noise: Noise) -> None:
    """Round in another order, by way of tensors that the loop reads and writes, or in plain torch."""
    bits = rounding_bits(*rounding, wide=torch.float64 in (x.dtype, out.dtype))
    if bits.carrier == DOUBLE:
        reference.quantize_into(out, x, rounding, noise)
        return
    if noise[0] is None:
        out, x = in_memory_order(out, x)
    result = writable(out)
    quantize_into(result, readable(x), rounding, noise)
    if result is not out:
        out.copy_(as_values(result.view(torch.int32), bits, out.dtype))


def encode_into(out: Tensor, x: Tensor, encoding: Encoding, noise: Noise, check: bool = True) -> bool:
    """Round `x` onto a grid and write the codes into `out`; see `qsim_kernels.torch.encode_into`."""
    known = _encoding(encoding, x.dtype)
    if known is None:
        return reference.encode_into(out, x, encoding, noise, check)
    if noise[0] is None:
        out, x = in_memory_order(out, x)
    (table, rounding), values = known, readable(x)
    codes = out if out.is_contiguous() else torch.empty(x.shape, dtype=out.dtype, device=out.device)
    lost = changeable((0,)) if check and encoding.coding.nan < 0 else None
    at = codes.data_ptr(), table.data_ptr(), 0 if lost is None else addressof(lost)
    _ENCODE.share(_pack_codes(*at, *held(values), *rounding, *loop_noise(noise)), values.numel())
    if codes is not out:
        out.copy_(codes)
    return lost is not None and bool(lost[0])


@lru_cache(maxsize=64)
def _encoding(encoding: Encoding, source: torch.dtype) -> tuple[Tensor, LoopRounding] | None:
    """The codes of bfloat16 numbers, and the rounding to them, if the loop can encode."""
    grid, rule, coding = encoding
    bits = rounding_bits(grid, rule, wide=source == torch.float64)
    if bits.carrier == DOUBLE or grid.table or not tables.has_codes(grid, coding):
        return None
    return tables.code_table(grid, coding), strip(bits, rule)


def decode_into(out: Tensor, codes: Tensor, grid: Grid, coding: Coding) -> None:
    """Write the values of `codes` into `out`."""
    out, codes = in_memory_order(out, codes)
    if codes.dtype != torch.uint8 or not out.is_contiguous() or not codes.is_contiguous():
        reference.decode_into(out, codes, grid, coding)
    else:
        tables.look_up(out, codes, tables.value_table(grid, coding, out.dtype))


encode_both_ways = partial(reference.encode_both_ways, encode=encode_into)
quantize_and_encode_into = partial(reference.quantize_and_encode_into, quantize=quantize_into, encode=encode_into)
quantize_and_sum_into = partial(reference.quantize_and_sum_into, quantize=quantize_into)
