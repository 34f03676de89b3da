"""The bilinear operations of layers: the forward product of each, and the two products of its backward pass.

Operands are in their carrier and results in the requested dtype; nothing here rounds to a format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.functional.matmul import accumulated
from qsim.nn.product import float32
from qsim.nn.product.convolution_gradients import convolution_gradient
from qsim.nn.product.directions import CONVOLUTION, LINEAR, MATMUL, TRANSPOSED, Directions

Factors = Sequence[Tensor]


class Adder(NamedTuple):
    """The emulated accumulator of a product.

    Attributes:
        how: The sum, spelled as for the operator.
        seed: Needed only for stochastic rounding.
        stream: The stream of random bits.
    """

    how: str
    seed: Tensor | None
    stream: int


class Product(Protocol):
    """An operation that is linear in two operands.

    Each method takes the dtype of its result, whether its operands are float32 whose precision must not be reduced, factors (scales that
    its operands were divided by, as `directions` spreads them, by which the result is multiplied before anything else), and the emulated
    accumulator that adds, if any.

    Attributes:
        gradient_first: Whether the gradient is the left operand of the product that gives the second operand's gradient.
        sums_rows: Whether the gradient of the bias is the sum over all dimensions of the result but the last.
    """

    gradient_first: ClassVar[bool]
    sums_rows: ClassVar[bool]

    @property
    def directions(self) -> Directions:
        """The dimensions along which operands are scaled."""

    def merges_rows(self, dims: int) -> bool:
        """Whether all dimensions but the last of the first operand and the result count as one, given the second's dimensions."""

    def narrow_carrier(self, dtype: torch.dtype) -> torch.dtype | None:
        """The only 16-bit carrier allowed for a result of this dtype; float32 if there is none, `None` if any is allowed."""

    def forward(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The result, with the bias added."""

    def grad_a(
        self,
        g: Tensor,
        w: Tensor,
        a_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the first operand."""

    def grad_w(
        self,
        g: Tensor,
        a: Tensor,
        w_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the second operand."""

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""


@dataclass(frozen=True)
class Linear:
    """`a @ w.T`, over the last dimension of `a`, which may have any number of others."""

    gradient_first: ClassVar[bool] = True
    sums_rows: ClassVar[bool] = True
    directions: ClassVar[Directions] = LINEAR

    def merges_rows(self, dims: int) -> bool:
        """Tokens are rows, in whichever dimensions they are."""
        return True

    def narrow_carrier(self, dtype: torch.dtype) -> torch.dtype | None:
        """Matrix products sum in float32 whatever their operands are."""
        return None

    def forward(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The result, with the bias added."""
        if a.dtype == dtype and not exact and not factors and adder is None:
            return F.linear(a, w, bias)
        own = dtype if bias is None or factors else torch.promote_types(dtype, torch.float32)
        result = multiply(rows(a), w.t(), own, exact=exact, factors=factors, bias=bias, adder=adder)
        if bias is not None and not factors:
            result = in_dtype(result + bias, dtype)
        return result.view(*a.shape[:-1], w.shape[0])

    def grad_a(
        self,
        g: Tensor,
        w: Tensor,
        a_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the first operand."""
        return multiply(rows(g), w, dtype, exact=exact, factors=factors, adder=adder).view(a_shape)

    def grad_w(
        self,
        g: Tensor,
        a: Tensor,
        w_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the second operand."""
        return multiply(rows(g).t(), rows(a), dtype, exact=exact, factors=factors, adder=adder)

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return rows(g).sum(0)


def rows(x: Tensor) -> Tensor:
    """All dimensions but the last merged into one; torch does not allow -1 for rows without elements."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@dataclass(frozen=True)
class Convolution:
    """A convolution or a transposed one, of an input with a batch dimension, in one, two or three dimensions.

    Attributes:
        stride: One number for each spatial dimension, as are the next three.
        padding: Zeros on both sides.
        dilation: Steps between the kernel's elements.
        output_padding: For transposed ones.
        groups: Number of groups of channels.
        transposed: Whether it is a transposed convolution.
    """

    gradient_first: ClassVar[bool] = True
    sums_rows: ClassVar[bool] = False

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def directions(self) -> Directions:
        """Channels are summed over, and samples for the gradient of the weight."""
        return TRANSPOSED if self.transposed else CONVOLUTION

    def merges_rows(self, dims: int) -> bool:
        """Every dimension counts separately."""
        return False

    def narrow_carrier(self, dtype: torch.dtype) -> torch.dtype | None:
        """Torch's convolutions round their results to their operands' dtype."""
        return dtype if dtype.itemsize == 2 else torch.float32

    def forward(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The result, with the bias added."""
        given = bias if a.dtype == dtype and not factors else None
        convolution = float32.convolution if exact else torch.ops.aten.convolution
        result = _times(convolution(a, w, given, *self._numbers()), factors, dtype)
        if bias is not None and given is None:
            result = result + bias.view(-1, *[1] * len(self.stride))
        return in_dtype(result, dtype)

    def grad_a(
        self,
        g: Tensor,
        w: Tensor,
        a_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the first operand."""
        return _times(self._gradient(g, w, a_shape, False, exact), factors, dtype).to(dtype)

    def grad_w(
        self,
        g: Tensor,
        a: Tensor,
        w_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the second operand."""
        return _times(self._gradient(g, a, w_shape, True, exact), factors, dtype).to(dtype)

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return g.sum([0, *range(2, g.dim())])

    def _gradient(self, g: Tensor, other: Tensor, shape: torch.Size, second: bool, exact: bool) -> Tensor:
        """The gradient of one operand, from the other one."""
        gradient = float32.convolution_gradient if exact else convolution_gradient
        return gradient(g, other, list(shape), second, *self._numbers())

    def _numbers(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        return list(self.stride), list(self.padding), list(self.dilation), self.transposed, list(self.output_padding), self.groups


@dataclass(frozen=True)
class Matmul:
    """`a @ b` of matrices or batches of them, batch dimensions being broadcast."""

    gradient_first: ClassVar[bool] = False
    sums_rows: ClassVar[bool] = False
    directions: ClassVar[Directions] = MATMUL

    def merges_rows(self, dims: int) -> bool:
        """Matrices that share their second operand are one."""
        return dims == 2

    def narrow_carrier(self, dtype: torch.dtype) -> torch.dtype | None:
        """Matrix products sum in float32 whatever their operands are."""
        return None

    def forward(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The result; there is no bias."""
        return _batched(a, w, dtype, exact=exact, factors=factors, adder=adder)

    def grad_a(
        self,
        g: Tensor,
        w: Tensor,
        a_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the first operand."""
        return _summed(g, w.mT, a_shape, dtype, exact=exact, factors=factors, adder=adder)

    def grad_w(
        self,
        g: Tensor,
        a: Tensor,
        w_shape: torch.Size,
        dtype: torch.dtype,
        *,
        exact: bool = False,
        factors: Factors = (),
        adder: Adder | None = None,
    ) -> Tensor:
        """The gradient of the second operand."""
        if len(w_shape) == 2:
            return multiply(rows(a).t(), rows(g), dtype, exact=exact, factors=factors, adder=adder)
        return _summed(a.mT, g, w_shape, dtype, exact=exact, factors=factors, adder=adder)

    def grad_bias(self, g: Tensor) -> Tensor:
        """There is none."""
        raise NotImplementedError


def _times(result: Tensor, factors: Factors, dtype: torch.dtype) -> Tensor:
    """A convolution's result times its factors, in at least float32."""
    if not factors:
        return result
    wide = torch.promote_types(dtype, torch.float32)
    return rescaled(result.to(wide), factors, wide)


def _batched(a: Tensor, b: Tensor, dtype: torch.dtype, *, exact: bool = False, factors: Factors = (), adder: Adder | None = None) -> Tensor:
    """A product of batches of matrices; those that share their second operand are multiplied as one."""
    if b.dim() == 2:
        return multiply(rows(a), b, dtype, exact=exact, factors=factors, adder=adder).view(*a.shape[:-1], b.shape[-1])
    if factors:
        return rescaled(_batched(a, b, torch.promote_types(dtype, torch.float32), exact=exact, adder=adder), factors, dtype)
    if a.dtype == dtype or adder is not None:
        return multiply(a, b, dtype, exact=exact, adder=adder)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    a3 = a.expand(*batch, *a.shape[-2:]).reshape(count, *a.shape[-2:])
    b3 = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    return multiply(a3, b3, dtype, exact=exact).view(*batch, a.shape[-2], b.shape[-1])


def _summed(
    a: Tensor,
    b: Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    exact: bool = False,
    factors: Factors = (),
    adder: Adder | None = None,
) -> Tensor:
    """A product that is summed over the batches to which its operand was broadcast, before it is rounded to 16 bits."""
    broadcast = shape[:-2] != torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    own = torch.promote_types(dtype, torch.float32) if broadcast else dtype
    result = _batched(a, b, own, exact=exact, factors=factors, adder=adder)
    return result.sum_to_size(shape).to(dtype)


def multiply(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    *,
    exact: bool = False,
    factors: Factors = (),
    bias: Tensor | None = None,
    adder: Adder | None = None,
) -> Tensor:
    """The matrix product of two operands in their carrier, summed in float32 or by an adder, times factors, in the dtype of the result.

    A bias is added if there are factors.
    """
    if factors:
        return rescaled(multiply(a, b, torch.promote_types(dtype, torch.float32), exact=exact, adder=adder), factors, dtype, bias)
    if adder is not None:
        return in_dtype(accumulated(a, b, adder.seed, adder.how, adder.stream), dtype)
    if exact:
        return in_dtype(float32.matmul(a, b), dtype)
    if a.dtype == dtype:
        return torch.matmul(a, b)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a, b, out_dtype=torch.float32) if a.dim() == 2 else torch.bmm(a, b, out_dtype=torch.float32)
        return in_dtype(product, dtype)
    return torch.matmul(a, b).to(dtype)


def rescaled(product: Tensor, factors: Factors, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A product of float32 or float64 times scales that were left out of its operands, plus a bias, in the result's dtype."""
    return torch.ops.qsim.rescaled.default(product, factors, bias, dtype)  # type: ignore[no-any-return]


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in the requested dtype.

    torch 2.11's compiler gives zero for the gradients of an autograd function whose result went through a conversion to its own dtype.
    """
    return x if x.dtype == dtype else x.to(dtype)
