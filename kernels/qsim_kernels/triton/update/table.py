"""The table by which kernels find the tensors of an update, one row per parameter."""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.numbers.updates import UpdateTensors

#: Columns of the table of tensors: addresses, then numbers.
COLUMNS: tl.constexpr = tl.constexpr(16)
GRAD: tl.constexpr = tl.constexpr(1)
FIRST: tl.constexpr = tl.constexpr(2)
SECOND: tl.constexpr = tl.constexpr(3)
LARGEST: tl.constexpr = tl.constexpr(4)
COMPENSATION: tl.constexpr = tl.constexpr(5)
STEP: tl.constexpr = tl.constexpr(6)
PRODUCTS: tl.constexpr = tl.constexpr(7)
COUNT: tl.constexpr = tl.constexpr(8)
OFFSET: tl.constexpr = tl.constexpr(9)
ROW: tl.constexpr = tl.constexpr(10)
STRIDE: tl.constexpr = tl.constexpr(11)
STREAM: tl.constexpr = tl.constexpr(12)

#: Room for the factors of a tensor, in the order of `updates.Factors`, and for the keys of its random bits.
FACTORS: tl.constexpr = tl.constexpr(16)
KEYS: tl.constexpr = tl.constexpr(8)


@triton.jit
def address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table of tensors."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        # Attached to the conversion itself: the compiler would lose it on any later value.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def addresses(row, PARAM: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """The addresses of one parameter's tensors, null for absent ones; if they are aligned, accesses are wide."""
    return UpdateTensors(
        address(row, 0, PARAM, ALIGNED), address(row, GRAD, GRADIENT, ALIGNED), address(row, FIRST, MOMENT, ALIGNED),
        address(row, SECOND, MOMENT, ALIGNED), address(row, LARGEST, MOMENT, ALIGNED), address(row, COMPENSATION, PARAM, ALIGNED),
    )  # fmt: skip
