"""Products on a chip that were compared with the emulator: each kind once, with random operands, before it is used.

A library chooses one of its kernels by the shape, the layout and the dtypes of a product. Some of these split the sum, so that the result
has other bits; such products stay on the emulator. Nothing can be compared while a CUDA graph is captured: what was not compared before is
emulated there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.chip.library import ChipProduct, Multiply, ProductLibrary, one_on, product_of
from qsim_kernels.chip.trials import spread_indices, trial_operands
from qsim_kernels.numbers.sums import read_sum
from qsim_kernels.torch.recent import Recent

#: Emulates a product of two matrices, in float32.
Emulate = Callable[[Tensor, Tensor], Tensor]

#: Lengths of the parts of random operands: none, a part of the products that are added at once, all of them, and as many as between two
#: promotions.
_UNITS = (None, 4, 16, 128)
#: The most kinds of products to remember. Others are compared again, which takes four products of each; a model has at most hundreds.
_KEPT = 1 << 14
#: Operands must begin at a multiple of so many bytes; otherwise the library may choose another kernel.
_ALIGNMENT = 16


class ChipCase(NamedTuple):
    """Everything on which the library's choice of a kernel depends.

    Attributes:
        product: The product.
        rows: Rows of the result.
        length: Elements along the sum.
        columns: Columns of the result.
        by_rows: Whether each operand is stored by rows, and not by columns.
        dtype: The dtype of the result.
        bias: That of the bias, if there is one.
        device: The GPU.
        settings: The library's.
    """

    product: ChipProduct
    rows: int
    length: int
    columns: int
    by_rows: tuple[bool, bool]
    dtype: torch.dtype
    bias: torch.dtype | None
    device: torch.device
    settings: Hashable

    def __str__(self) -> str:
        """The shape: rows, length and columns."""
        return f"{self.rows} × {self.length} × {self.columns}"

    @property
    def obstacle(self) -> str:
        """The reason why the library has no such product; empty if it has."""
        return self.product.obstacle(self.rows, self.length, self.columns)

    def has_side(self, rows: int, columns: int) -> bool:
        """Whether one of the three matrices has such sides, in either order."""
        sides = (self.rows, self.length), (self.length, self.columns), (self.rows, self.columns)
        return (rows, columns) in sides or (columns, rows) in sides

    def stored(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The operands as the library is given them."""
        return _stored(a, self.product.a, self.by_rows[0]), _stored(b, self.product.b, self.by_rows[1])

    def is_stored(self, a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
        """Whether operands need no copy for that, apart from the alignment of their first element."""
        strides = [(x.shape[1], 1) if by_rows else (1, x.shape[0]) for x, by_rows in zip((a, b), self.by_rows, strict=True)]
        in_dtypes = (a.dtype, b.dtype) == (self.product.a, self.product.b)
        return in_dtypes and [a.stride(), b.stride()] == strides and (bias is None or bias.stride() == (1,))


class ChipRoute(NamedTuple):
    """How the library computes a case.

    Attributes:
        case: The case.
        is_direct: Whether it returns the result; otherwise it returns sums in float32, to which a bias is added before they are rounded.
    """

    case: ChipCase
    is_direct: bool

    def call(self, library: ProductLibrary, one: Tensor) -> Multiply:
        """The call that computes it, given the number 1 on the chip."""
        product, dtype = self.case.product, self.case.dtype
        if self.is_direct:
            return library.multiplier(product, dtype, one)
        return partial(_multiplied_then_rounded, library.multiplier(product, torch.float32, one), dtype)


class VerifiedChip:
    """A chip that multiplies where it has the bits of the emulator.

    Args:
        library: The library that multiplies on it.
    """

    def __init__(self, library: ProductLibrary) -> None:
        self.library = library
        # How the library computes a case, or the reason why it does not.
        self._known: Recent[ChipCase, ChipRoute | str] = Recent(_KEPT)
        # The calls for operands that need no copy, by everything that their case follows from.
        self._calls: Recent[Hashable, Multiply] = Recent(_KEPT)

    def at_once(self, a: Tensor, b: Tensor, how: str, dtype: torch.dtype | None, bias: Tensor | None) -> Tensor | None:
        """`multiply` for operands of a kind that it has multiplied in place before; `None` for others.

        Layers wait for this on each call, so it makes as few calls as possible.
        """
        call = self._calls.get(_kind(a, b, how, dtype, bias))
        if call is None or a.data_ptr() % _ALIGNMENT or b.data_ptr() % _ALIGNMENT:
            return None
        if bias is None:
            return call(a, b)
        return None if bias.data_ptr() % _ALIGNMENT else call(a, b, bias=bias)

    def multiply(self, a: Tensor, b: Tensor, how: str, dtype: torch.dtype | None, bias: Tensor | None, emulate: Emulate) -> Tensor | str:
        """The product of two operands, or the reason why the chip does not compute it; the arguments are those of `find`."""
        way = self.find(a, b, how, dtype, bias, emulate)
        if isinstance(way, str):
            return way
        call = way.call(self.library, one_on(a.device))
        if way.case.settings == () and way.case.is_stored(a, b, bias):
            self._calls.put(_kind(a, b, how, dtype, bias), call)
        left, right = way.case.stored(a, b)
        return call(left, right, bias=None if bias is None else _placed(bias.contiguous()))

    def find(self, a: Tensor, b: Tensor, how: str, dtype: torch.dtype | None, bias: Tensor | None, emulate: Emulate) -> ChipRoute | str:
        """How the library computes a product, which is compared with the emulator if it is the first; the reason if it does not.

        Args:
            a: The left operand, in any dtype that holds its values.
            b: The right one.
            how: The sum, spelled.
            dtype: The dtype of the result, to which the sum is rounded to nearest; float32 by default.
            bias: Added to each row in float32, before that; none by default.
            emulate: The emulator, used once for each kind of product.
        """
        case = self._case(a, b, how, dtype, bias)
        if isinstance(case, str):
            return case
        way = self._known.get(case)
        if way is None:
            if not case.obstacle and self.library.is_capturing():
                return f"no product of {case} has been compared with the emulator yet, which a CUDA graph cannot record: run it once before"
            way = case.obstacle or self._compared(case, emulate)
            self._known.put(case, way)
        return way

    def obstacle(self, a: Tensor, b: Tensor, how: str, dtype: torch.dtype | None, bias: Tensor | None) -> str:
        """The reason why the chip does not compute a product; empty if it does, because such a product has been compared."""
        case = self._case(a, b, how, dtype, bias)
        if isinstance(case, str):
            return case
        way = self._known.get(case) or case.obstacle or f"no product of {case} has been compared with the emulator yet"
        return way if isinstance(way, str) else ""

    def outcomes(self, sums: Iterable[str], rows: int, columns: int, device: torch.device) -> list[bool]:
        """Whether the chip computes them, for all kinds of products with a matrix of a shape that it was asked for.

        Args:
            sums: The sums, spelled.
            rows: Rows of the matrix.
            columns: Its columns.
            device: Where it is.
        """
        products = {product_of(read_sum(how)) for how in sums}
        if self.library.obstacle(device):
            return [False]
        cases = [(case, way) for case, way in self._known.items() if case.product in products and case.device == device]
        emulated = [False] if None in products else []
        return emulated + [isinstance(way, ChipRoute) for case, way in cases if case.has_side(rows, columns)]

    def _case(self, a: Tensor, b: Tensor, how: str, dtype: torch.dtype | None, bias: Tensor | None) -> ChipCase | str:
        product = product_of(read_sum(how))
        if product is None:
            return "no chip is known to add like this accumulator"
        obstacle = self.library.obstacle(a.device)
        if obstacle:
            return obstacle
        if a.dim() != 2:
            return "products of batches of matrices are emulated"
        (rows, length), columns = a.shape, b.shape[1]
        by_rows = (True, False) if product.is_fp8 else (_is_by_rows(a), _is_by_rows(b))
        dtypes = dtype or torch.float32, None if bias is None else bias.dtype
        return ChipCase(product, rows, length, columns, by_rows, *dtypes, a.device, self.library.settings(product))

    def _compared(self, case: ChipCase, emulate: Emulate) -> ChipRoute | str:
        """The first way that gives the emulator's bits; the reason if there is none."""
        adds = case.bias is None or case.product.adds_bias(case.bias, case.dtype)
        ways = [ChipRoute(case, is_direct=True)] if adds and case.dtype in case.product.results else []
        if case.dtype != torch.float32 or case.bias is not None:
            ways.append(ChipRoute(case, is_direct=False))
        for way in ways:
            call = way.call(self.library, one_on(case.device))
            if all(_has_bits(call, case, emulate, unit) for unit in _UNITS):
                return way
        return f"the library adds a product of {case} otherwise: its bits differ from the emulator's"


def finished(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums plus a bias, if there is one, rounded once."""
    if bias is None:
        return sums.to(dtype)
    return torch.ops.qsim.rescaled.default(sums, (), bias, dtype)  # type: ignore[no-any-return]


def _multiplied_then_rounded(multiply: Multiply, dtype: torch.dtype, a: Tensor, b: Tensor, /, *, bias: Tensor | None = None) -> Tensor:
    return finished(multiply(a, b), bias, dtype)


def _has_bits(call: Multiply, case: ChipCase, emulate: Emulate, unit: int | None) -> bool:
    """Whether a call's results have the emulator's bits, for random operands."""
    a, b = trial_operands(case.rows, case.columns, case.length, case.product, unit, case.device)
    row, column = spread_indices(case.rows, case.device), spread_indices(case.columns, case.device)
    # A bias that cancels the first row leaves what sums lose if they are rounded before it is added.
    bias = None if case.bias is None else -emulate(a[:1], b)[0].to(case.bias)
    wanted = finished(emulate(a[row], b[:, column]), None if bias is None else bias[column], case.dtype)
    result = call(*case.stored(a, b), bias=bias)[row][:, column]
    return torch.equal(_bits(result), _bits(wanted))


def _kind(a: Tensor, b: Tensor, how: str, dtype: torch.dtype | None, bias: Tensor | None) -> Hashable:
    """Everything about operands in place that their case follows from, if no settings count."""
    of_bias = None if bias is None else (bias.dtype, bias.stride())
    return how, a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, dtype, of_bias, a.device


def _is_by_rows(x: Tensor) -> bool:
    """Whether a matrix will be passed by rows: unless it is stored by columns."""
    return x.is_contiguous() or not x.mT.is_contiguous()


def _stored(x: Tensor, dtype: torch.dtype, by_rows: bool) -> Tensor:
    """A matrix in a dtype, dense by rows or by columns, as the library is given all of them."""
    x = x.to(dtype)
    lines = _placed((x if by_rows else x.mT).contiguous())
    lines = lines.view(-1).view(lines.shape)  # with the usual strides, also of dimensions of size 1
    return lines if by_rows else lines.mT


def _placed(x: Tensor) -> Tensor:
    """A dense tensor that begins where the library's operands begin."""
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


#: The chip of this process, with what has been compared so far.
CHIP = VerifiedChip(ProductLibrary())
