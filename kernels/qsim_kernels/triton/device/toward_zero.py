"""Float32 arithmetic that rounds toward zero."""

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED


@triton.jit
def add_single_toward_zero(a, b):
    """The sum of two positive float32 blocks, rounded toward zero: one instruction, which Triton's language and interpreter lack."""
    if INTERPRETED:
        total = a + b
        second = total - a
        error = (a - (total - second)) + (b - second)
        return (total.to(tl.int32, bitcast=True) - (error < 0).to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise("add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def multiply_add_toward_zero(a, b, c):
    """`a * b + c`, rounded once, toward zero, where the product is exact and nothing is negative."""
    if INTERPRETED:
        return add_single_toward_zero(a * b, c)
    return tl.inline_asm_elementwise("fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1)
