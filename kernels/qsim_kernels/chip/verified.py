"""Products on a chip that were compared with the emulator: each kind once, with random operands, before it is used.

A library chooses one of its kernels by the shape, the layout and the dtypes of a product. Some of these split the sum, so that the result
has other bits; such products stay on the emulator. Nothing can be compared while a CUDA graph is captured: what was not compared before is
emulated there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.chip.library import Hopper, Library
from qsim_kernels.chip.products import ChipProduct, product_of
from qsim_kernels.chip.trials import spread, trial
from qsim_kernels.sums import Sum

#: Emulates a product of two matrices, in float32.
Emulate = Callable[[Tensor, Tensor], Tensor]

#: Lengths of the parts of random operands: as many products as are added at once, and as many as between two promotions.
_UNITS = (16, 128)
#: Operands must begin at a multiple of so many bytes; otherwise the library may choose another kernel.
_ALIGNMENT = 16


class Case(NamedTuple):
    """Everything on which the library's choice of a kernel depends.

    Attributes:
        product: The product.
        rows: Rows of the result.
        length: Elements along the sum.
        columns: Columns of the result.
        by_rows: Whether each operand is stored by rows, and not by columns.
        dtype: The dtype of the result.
        device: The GPU.
        settings: The library's.
    """

    product: ChipProduct
    rows: int
    length: int
    columns: int
    by_rows: tuple[bool, bool]
    dtype: torch.dtype
    device: torch.device
    settings: Hashable

    def __str__(self) -> str:
        """The shape: rows, length and columns."""
        return f"{self.rows} × {self.length} × {self.columns}"


class VerifiedChip:
    """A chip that multiplies where it has the bits of the emulator.

    Args:
        library: The library that multiplies on it.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        # The dtype in which the library returns the results of a case, or why it does not compute them.
        self._known: dict[Case, torch.dtype | str] = {}

    def multiply(self, a: Tensor, b: Tensor, how: Sum, dtype: torch.dtype, emulate: Emulate) -> Tensor | str:
        """The product of two operands, or the reason why the chip does not compute it.

        Args:
            a: The left operand, in any dtype that holds its values.
            b: The right one.
            how: The sum.
            dtype: The dtype of the result, to which the sum is rounded to nearest.
            emulate: The emulator, used once for each kind of product.
        """
        case = self._case(a, b, how, dtype)
        if isinstance(case, str):
            return case
        found = self._known.get(case)
        if found is None:
            if self._library.is_capturing():
                return f"no product of {case} has been compared with the emulator yet, which a CUDA graph cannot record: run it once before"
            found = self._known[case] = self._compared(case, emulate)
        if isinstance(found, str):
            return found
        left, right = _stored(a, case.product.a, case.by_rows[0]), _stored(b, case.product.b, case.by_rows[1])
        return self._library.multiply(left, right, case.product, found).to(dtype)

    def obstacle(self, a: Tensor, b: Tensor, how: Sum, dtype: torch.dtype) -> str:
        """The reason why the chip does not compute a product; empty if it does, because such a product has been compared."""
        case = self._case(a, b, how, dtype)
        if isinstance(case, str):
            return case
        found = self._known.get(case, f"no product of {case} has been compared with the emulator yet")
        return found if isinstance(found, str) else ""

    def _case(self, a: Tensor, b: Tensor, how: Sum, dtype: torch.dtype) -> Case | str:
        product = product_of(how)
        if product is None:
            return "no chip is known to add like this accumulator"
        obstacle = self._library.obstacle(a.device)
        if obstacle:
            return obstacle
        if a.dim() != 2:
            return "products of batches of matrices are emulated"
        (rows, length), columns = a.shape, b.shape[1]
        obstacle = product.obstacle(rows, length, columns)
        if obstacle:
            return obstacle
        by_rows = (True, False) if product.is_fp8 else (_is_by_rows(a), _is_by_rows(b))
        return Case(product, rows, length, columns, by_rows, dtype, a.device, self._library.settings())

    def _compared(self, case: Case, emulate: Emulate) -> torch.dtype | str:
        """The first dtype of the library's results that gives the emulator's bits; the reason if there is none."""
        for dtype in dict.fromkeys((case.dtype, torch.float32)):
            if dtype in case.product.results and all(self._has_bits(case, dtype, emulate, unit) for unit in _UNITS):
                return dtype
        return f"the library adds a product of {case} otherwise: its bits differ from the emulator's"

    def _has_bits(self, case: Case, dtype: torch.dtype, emulate: Emulate, unit: int) -> bool:
        """Whether the library's results in a dtype have the emulator's bits, for random operands."""
        a, b = trial(case.rows, case.columns, case.length, case.product, unit, case.device)
        row, column = spread(case.rows, case.device), spread(case.columns, case.device)
        wanted = emulate(a[row], b[:, column]).to(case.dtype)
        left, right = _stored(a, case.product.a, case.by_rows[0]), _stored(b, case.product.b, case.by_rows[1])
        found = self._library.multiply(left, right, case.product, dtype)[row][:, column].to(case.dtype)
        return torch.equal(_bits(found), _bits(wanted))


def _is_by_rows(x: Tensor) -> bool:
    """Whether a matrix will be passed by rows: unless it is stored by columns."""
    return x.is_contiguous() or not x.mT.is_contiguous()


def _stored(x: Tensor, dtype: torch.dtype, by_rows: bool) -> Tensor:
    """A matrix in a dtype, dense by rows or by columns, as the library is given all of them."""
    x = x.to(dtype)
    lines = (x if by_rows else x.mT).contiguous()
    if lines.data_ptr() % _ALIGNMENT:
        lines = lines.clone()
    lines = lines.view(-1).view(lines.shape)  # with the usual strides, also of dimensions of size 1
    return lines if by_rows else lines.mT


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


#: The chip of this process, with what has been compared so far.
CHIP = VerifiedChip(Hopper())
