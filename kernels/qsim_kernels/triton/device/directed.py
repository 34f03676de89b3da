"""Products and sums of floats with one rounding in a given direction, or to odd, from which any coarser rounding gives the right result.

Rounding to odd keeps exact values and takes every other one to its neighbour whose last bit is 1. Two bits more than a format has are then
enough to round to it as the exact value would be rounded.
"""

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED

#: The directions, by the names that PTX gives them: to nearest, toward zero, down, up.
NEAREST, TOWARD_ZERO, DOWN, UP = map(tl.constexpr, ("rn", "rz", "rm", "rp"))


@triton.jit
def multiply_add(a, b, c, TOWARD: tl.constexpr):
    """`a * b + c`, rounded once.

    Args:
        a: Blocks of float32 or float64, all of the same dtype. In float64 the values of `a` and `b` must be those of float32.
        b: The same.
        c: The same.
        TOWARD: The direction.
    """
    if INTERPRETED:
        return _multiply_add_interpreted(a, b, c, TOWARD)
    elif a.dtype == tl.float64:
        DOUBLE: tl.constexpr = "fma." + TOWARD + ".f64 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(DOUBLE, "=d,d,d,d", [a, b, c], dtype=tl.float64, is_pure=True, pack=1)
    else:
        SINGLE: tl.constexpr = "fma." + TOWARD + ".f32 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(SINGLE, "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def multiply_add_to_odd(a, b, c):
    """`a * b + c`, rounded once, to odd; an exact zero has the sign that rounding to nearest gives it."""
    WORD: tl.constexpr = tl.int64 if c.dtype == tl.float64 else tl.int32
    inward = multiply_add(a, b, c, TOWARD_ZERO).to(WORD, bitcast=True)
    below = multiply_add(a, b, c, DOWN).to(WORD, bitcast=True)
    above = multiply_add(a, b, c, UP).to(WORD, bitcast=True)
    # Of two neighbours one ends in 1; one of them is the inward one.
    return (inward | ((below | above) & 1)).to(c.dtype, bitcast=True)


@triton.jit
def add_toward_zero(a, b):
    """`a + b` of float32 or float64 blocks of one dtype, rounded toward zero."""
    if INTERPRETED:
        return multiply_add(a, tl.full(a.shape, 1.0, a.dtype), b, TOWARD_ZERO)
    elif a.dtype == tl.float64:
        return tl.inline_asm_elementwise("add.rz.f64 $0, $1, $2;", "=d,d,d", [a, b], dtype=tl.float64, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def from_halves(upper, lower):
    """The float64 of two halves of its pattern, int32 and uint32."""
    return (upper.to(tl.int64) << 32 | lower.to(tl.int64)).to(tl.float64, bitcast=True)


@triton.jit
def upper_bits(x):
    """The sign, the exponent and the first bits of a float, as int32."""
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) >> 32).to(tl.int32)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def power_with_signs(upper, first, second, DTYPE: tl.constexpr):
    """A power of two whose sign is the product of two signs, which the compiler would otherwise combine before it.

    Args:
        upper: The power's `upper_bits`.
        first: `upper_bits` with only a sign.
        second: The same.
        DTYPE: `tl.float32` or `tl.float64`.
    """
    if INTERPRETED:
        bits = upper ^ first ^ second
        return bits.to(tl.float32, bitcast=True) if DTYPE == tl.float32 else (bits.to(tl.int64) << 32).to(tl.float64, bitcast=True)
    elif DTYPE == tl.float32:
        SINGLE: tl.constexpr = "lop3.b32 $0, $1, $2, $3, 0x96;"
        return tl.inline_asm_elementwise(SINGLE, "=f,r,r,r", [upper, first, second], dtype=tl.float32, is_pure=True, pack=1)
    else:
        DOUBLE: tl.constexpr = "{ .reg .b32 bits, none; lop3.b32 bits, $1, $2, $3, 0x96; mov.b32 none, 0; mov.b64 $0, {none, bits}; }"
        return tl.inline_asm_elementwise(DOUBLE, "=d,r,r,r", [upper, first, second], dtype=tl.float64, is_pure=True, pack=1)


@triton.jit
def to_single_toward_zero(x):
    """Float64 values as float32, rounded toward zero."""
    if INTERPRETED:
        nearest = x.to(tl.float32)
        return _stepped(nearest, x - nearest.to(tl.float64), TOWARD_ZERO)
    else:
        return tl.inline_asm_elementwise("cvt.rz.f32.f64 $0, $1;", "=f,d", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _multiply_add_interpreted(a, b, c, TOWARD: tl.constexpr):
    """Triton's interpreter has neither directions nor a fused product: the exact sum of two float64 numbers and its error replace them."""
    product, addend = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
    total = product + addend
    second = total - product
    error = (product - (total - second)) + (addend - second)
    error = tl.where(error == error, error, 0.0)
    if c.dtype == tl.float64:
        return _stepped(total, error, TOWARD)
    else:
        # To odd in float64, so that float32 is rounded once.
        pattern = total.to(tl.int64, bitcast=True)
        inward = pattern - ((error < 0) & (total > 0) | (error > 0) & (total < 0)).to(tl.int64)
        odd = tl.where(error != 0, inward | 1, pattern).to(tl.float64, bitcast=True)
        nearest = odd.to(tl.float32)
        return _stepped(nearest, odd - nearest.to(tl.float64), TOWARD)


@triton.jit
def _stepped(nearest, rest, TOWARD: tl.constexpr):
    """The neighbour of the nearest float in a direction, given the sign of what the exact value has beyond it."""
    WORD: tl.constexpr = tl.int64 if nearest.dtype == tl.float64 else tl.int32
    LEAST_BELOW_ZERO: tl.constexpr = -(2**63) + 1 if nearest.dtype == tl.float64 else -(2**31) + 1
    pattern = nearest.to(WORD, bitcast=True)
    if TOWARD == TOWARD_ZERO:
        moved = pattern - ((rest < 0) & (nearest > 0) | (rest > 0) & (nearest < 0)).to(WORD)
    elif TOWARD == DOWN:
        below = tl.where(nearest == 0.0, LEAST_BELOW_ZERO, pattern + tl.where(nearest > 0, -1, 1))
        moved = tl.where(rest < 0, below, pattern)
    elif TOWARD == UP:
        above = tl.where(nearest == 0.0, 1, pattern + tl.where(nearest > 0, 1, -1))
        moved = tl.where(rest > 0, above, pattern)
    else:
        moved = pattern
    return moved.to(WORD).to(nearest.dtype, bitcast=True)
