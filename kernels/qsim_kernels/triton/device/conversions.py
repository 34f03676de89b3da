"""FP8 codes of bfloat16 values, rounded to nearest by the GPU's own conversion: an override of rounding one by one, in NVIDIA's PTX.

The conversion saturates. Where E4M3 is to become NaN instead, as in gradients, values that do not round to one of its own are made NaN
first: the excess over the last value that does, times a number that makes any excess infinite, is multiplied by zero and added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import Coding, Grid, Mode
from qsim_kernels.triton.host.capabilities import supports_packed_16_bit

_E4M3 = Grid(3, -6, 2.0**-9, 448.0, -448.0, True, True, False), Coding(8, False, 127, -1)
_E5M2 = Grid(2, -14, 2.0**-16, 57344.0, -57344.0, True, True, True), Coding(8, False, 127, 124)
#: Two bfloat16 numbers each: one, 2**127, minus the largest magnitude that rounds to E4M3's largest value, and minus zero.
_NUMBERS = {"one": 0x3F803F80, "large": 0x7F007F00, "end": 0xC3E8C3E8, "zero": 0x80008000}


def conversion_of(encoding: Encoding, source: torch.dtype) -> str | None:
    """The PTX that converts four values, or `None` if the GPU has no conversion to these codes."""
    grid, rule, coding = encoding
    name = {_E4M3: "e4m3x2", _E5M2: "e5m2x2"}.get((grid, coding))
    if source != torch.bfloat16 or name is None or rule.mode != Mode.NEAREST or not supports_packed_16_bit():
        return None
    if not rule.saturates and name != "e4m3x2":
        return None
    lines = [
        ".reg .b32 pair, bits, one, large, end, zero;",
        ".reg .b16 half1, half2;",
        ".reg .f32 low, high;",
        *(f"mov.b32 {number}, {bits};" for number, bits in _NUMBERS.items()),
    ]
    for i in (1, 2):
        lines.append(f"mov.b32 pair, ${i};")
        if not rule.saturates:
            lines += ["and.b32 bits, pair, 0x7FFF7FFF;", "fma.rn.relu.bf16x2 bits, bits, one, end;"]
            lines += ["mul.bf16x2 bits, bits, large;", "fma.rn.bf16x2 pair, bits, zero, pair;"]
        lines += ["shl.b32 bits, pair, 16;", "mov.b32 low, bits;", "and.b32 bits, pair, 0xFFFF0000;", "mov.b32 high, bits;"]
        lines.append(f"cvt.rn.satfinite.{name}.f32 half{i}, high, low;")
    return "{" + "\n".join([*lines, "mov.b32 $0, {half1, half2};", "}"])


@triton.jit
def converted(x, CONVERSION: tl.constexpr):
    """Convert bfloat16 values, four at a time; see `conversion_of`."""
    return tl.inline_asm_elementwise(CONVERSION, "=r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
