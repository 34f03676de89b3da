"""From the operators' arguments to a launch: which kernel, with which numbers, on how many blocks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from qsim_kernels.carrier import DOUBLE, SINGLE, Plan, is_flat, plan
from qsim_kernels.grid import Coding, Grid, Mode, Rule
from qsim_kernels.triton.kernels import decode_kernel, encode_kernel, quantize_kernel

BLOCK = 1024

_FAST_MODES = (Mode.NEAREST, Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN, Mode.STOCHASTIC)


@lru_cache(maxsize=4096)
def rounding_arguments(grid: Grid, rule: Rule, wide: bool) -> tuple[Plan, dict[str, Any]]:
    """The numbers and the variant that a grid and a rule mean to a kernel."""
    late = rule.correction and rule.bits in (16, 32)
    how = plan(grid, wide or late)
    width = 32 if how.carrier == SINGLE else 33
    halves = 0 < rule.bits <= 16
    drawn = 16 if halves else 32
    keep = ((1 << rule.bits) - 1) << (drawn - rule.bits)
    # Half of the last random bit's weight, where there is room for it; behind 32 bits there is, in float64's arithmetic.
    correction = 1 << (drawn - 1 - rule.bits) if rule.correction and rule.bits < drawn else 0
    numbers = {
        "keep": keep,
        "correction": correction,
        "late_correction": (1 << (32 - rule.bits)) if late else 0,
        "shift": how.shift,
        "low": how.low,
        "least": how.least,
        "half": how.half,
        "parity": how.parity,
        "top": how.top,
        "bottom": how.bottom,
        "floor": how.floor,
        "over": how.over,
        "under": how.under,
        "scale": how.carrier.pattern(how.scale * 2.0 ** (width - 33)),
    }
    variant = {
        "MODE": int(rule.mode),
        "SATURATE": rule.saturate,
        "FAST": _is_fast(how, rule),
        "FLAT": is_flat(grid) and how.carrier == SINGLE,
        "SYMMETRIC": grid.min == -grid.max,
        "ZERO": grid.zero,
        "SIGNED": how.signed,
        "KEEP_SIGN": how.negative_zero,
        "WIDE": how.carrier == DOUBLE,
        "HALVES": halves,
        "WHOLE": rule.bits == drawn,
        "BINARY": grid.mantissa == 0,
    }
    return how, {**numbers, **variant}


def _is_fast(how: Plan, rule: Rule) -> bool:
    """Whether adding a power of two and taking it away again rounds: the power must exist, and leave room for a carry."""
    room = 1 <= how.shift <= 23 and (how.top >> 23) + 1 + how.shift < 254 and how.shift >= 2
    return how.carrier == SINGLE and how.low > 0 and how.zero and room and rule.saturate and rule.mode in _FAST_MODES


@lru_cache(maxsize=4096)
def coding_arguments(grid: Grid, coding: Coding, how: Plan) -> dict[str, Any]:
    """The numbers and the variant that a coding means to a kernel."""
    return {
        "lowest": grid.exponent + how.carrier.bias,
        "width": coding.bits,
        "nan_code": max(coding.nan, 0),
        "infinity_code": max(coding.infinity, 0),
        "HAS_NAN": coding.nan >= 0,
        "HAS_INFINITY": coding.infinity >= 0,
        "TWOS_COMPLEMENT": coding.twos_complement,
    }


def _flat(x: Tensor) -> Tensor:
    """The elements in logical order, without a copy where they lie so."""
    return x.reshape(-1)


def _seed_arguments(seed: Tensor | None) -> dict[str, Any]:
    if seed is None:
        return {"seed_pointer": None, "seed": 0}
    if seed.is_cuda or not torch.cuda.is_available():
        return {"seed_pointer": seed, "seed": 0}
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a seed on the CPU would be the same at every replay of the CUDA graph; pass a seed or generator on the device")
    return {"seed_pointer": None, "seed": int(seed)}


def quantize_into(
    out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, stream: int, offset: int, block: int = BLOCK
) -> None:
    """Rounds `x` onto a grid, into `out`; see `reference.quantize_into`."""
    count = x.numel()
    if not count:
        return
    _, arguments = rounding_arguments(grid, rule, torch.float64 in (x.dtype, out.dtype))
    source = _flat(x)
    target = out.view(-1) if out.is_contiguous() else torch.empty(count, dtype=out.dtype, device=out.device)
    quantize_kernel[(triton.cdiv(count, block),)](
        source, target, **_seed_arguments(seed), noise_stream=stream, offset=offset, count=count, **arguments, ALIGNED=offset % 8 == 0, BLOCK=block
    )
    if not out.is_contiguous():
        out.copy_(target.view(out.shape))


def encode_into(
    out: Tensor, x: Tensor, seed: Tensor | None, grid: Grid, rule: Rule, coding: Coding, stream: int, offset: int, block: int = BLOCK
) -> Tensor | bool:
    """Rounds `x` onto a grid and writes the codes into `out`; see `reference.encode_into`."""
    count = x.numel()
    if not count:
        return False
    how, arguments = rounding_arguments(grid, rule, x.dtype == torch.float64)
    target = out.view(-1) if out.is_contiguous() else torch.empty(count, dtype=out.dtype, device=out.device)
    lost = torch.zeros((), dtype=torch.int32, device=x.device) if coding.nan < 0 else None
    encode_kernel[(triton.cdiv(count, block),)](
        _flat(x), target, lost, **_seed_arguments(seed), noise_stream=stream, offset=offset, count=count, **arguments,
        **coding_arguments(grid, coding, how), ALIGNED=offset % 8 == 0, BLOCK=block,
    )  # fmt: skip
    if not out.is_contiguous():
        out.copy_(target.view(out.shape))
    return False if lost is None else lost


def decode_into(out: Tensor, codes: Tensor, grid: Grid, coding: Coding, block: int = BLOCK) -> None:
    """Writes the values of `codes` into `out`; see `reference.decode_into`."""
    count = codes.numel()
    if not count:
        return
    how = plan(grid, out.dtype == torch.float64)
    target = out.view(-1) if out.is_contiguous() else torch.empty(count, dtype=out.dtype, device=out.device)
    decode_kernel[(triton.cdiv(count, block),)](
        _flat(codes), target, count=count, shift=how.shift, least=how.least, top=how.top, **coding_arguments(grid, coding, how),
        ZERO=how.zero, SIGNED=how.signed, SUBNORMALS=grid.least < 2.0**grid.exponent, WIDE=how.carrier == DOUBLE, BLOCK=block,
    )  # fmt: skip
    if not out.is_contiguous():
        out.copy_(target.view(out.shape))
