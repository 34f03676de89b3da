"""The three tensors of a product (input, weight and gradient of the result): rounding, saving, recalling and observing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.nn.product.arithmetic import Left
from qsim.nn.product.observers import Observer
from qsim.nn.product.sites import Rounded, Site
from qsim_kernels.numbers.grid import Coding, read, spell
from qsim_kernels.ops.direct import DISPATCHED, Operators

#: Formats of at most this many bits are kept for the backward pass as codes.
CODE_BITS = 8


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: An operand for a product, what is left to multiply by, and what the backward pass needs: the operand itself, its codes, or nothing.
RoundedOperand = tuple[Tensor, Left | None, Tensor | None]


@dataclass(frozen=True)
class Operand:
    """An input or a weight, which is rounded forward, and backward for the gradient of the other operand.

    The backward pass sees the same values whether codes or the operand are kept, except for a NaN without a code in 8 bits: integers, and
    8-bit formats without special values, give it the code of the largest value.

    Attributes:
        forward: The site that rounds it forward.
        backward: The site that rounds it backward.
        is_reused: Whether the backward pass reuses the tensor rounded forward.
        clips: Whether its gradient is zero where it saturates forward.
        coding: The codes in which the backward pass keeps it; if there are none, it keeps the operand.
    """

    forward: Site
    backward: Site
    is_reused: bool
    clips: bool = False
    coding: str | None = None

    def round(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype, needed: bool) -> RoundedOperand:
        """The operand for the forward product, and the tensor kept for the backward pass, if needed."""
        if not needed or self.coding is None:
            return *self.forward.round(ops, x, seed, dtype), x if needed else None
        one, other = self.forward.quantizer, self.backward.quantizer
        assert other is not None  # codes are of its format
        spelt, stream = other.spelt, self.backward.stream
        chosen = seed if spelt.is_stochastic or (one is not None and one.spelt.is_stochastic) else None
        if one is None:
            return x.to(dtype), None, ops.encode(x, chosen, spelt.grid, spelt.rule, self.coding, stream, 0, False)
        first = one.spelt
        values, codes = ops.quantize_and_encode(
            x, chosen, first.grid, first.rule, self.forward.stream, dtype, spelt.grid, spelt.rule, self.coding, stream
        )
        return values, None, codes

    def recall(self, ops: Operators, kept: Tensor, seed: Tensor | None, dtype: torch.dtype, scales: Tensor | None) -> Rounded:
        """The operand for a product of the backward pass, from what was kept of it, and the scales of the forward pass, if reused."""
        if self.coding is None:
            if ops is DISPATCHED and self.forward.name == "weight" and torch.compiler.is_compiling():
                kept = self._unlike_forward(kept)
            return self.backward.round(ops, kept, seed, dtype, scales)
        assert self.backward.quantizer is not None
        return ops.decode(kept, self.backward.quantizer.spelt.grid, self.coding, dtype), None

    def _unlike_forward(self, weight: Tensor) -> Tensor:
        """A weight's values by an expression that a compiler does not find in the forward pass.

        It would keep what it finds rounded there: a second copy of every weight. Stochastic roundings differ from the forward pass anyway.
        """
        point = self.backward.quantizer
        if point is None or point.spelt.is_stochastic:
            return weight
        return weight.view(_BITS[weight.dtype.itemsize]).bitwise_or(0).view(weight.dtype)

    def show(self, observer: Observer, x: Tensor, kept: Tensor | None, seed: Tensor | None) -> Any:
        """Report to an observer what `round` did: forward, and backward if codes were kept.

        The latter counts once the backward pass uses the codes; the observer's record of them is returned.
        """
        if self.forward.quantizer is not None:
            observer.rounds(self.forward, x, seed)
        if self.coding is None or kept is None or self.is_reused:
            return None
        return observer.measured(self.backward, x, seed)

    def show_recalled(self, observer: Observer, kept: Tensor, noted: Any, seed: Tensor | None) -> None:
        """Report to an observer what `recall` did, given the result of `show`."""
        if noted is not None:
            observer.used(self.backward.name, noted)
        elif self.backward.quantizer is not None and self.coding is None and not self.is_reused:
            observer.rounds(self.backward, kept, seed)


def coding_of(fmt: Format) -> str:
    """The codes in which an operand is kept: the format's own, one bit wider where that makes room for a NaN that it lacks."""
    coding = read(Coding, fmt.spelling[1])
    if coding.nan >= 0 or coding.twos_complement or coding.bits == CODE_BITS:
        return fmt.spelling[1]
    magnitude_bits = coding.bits if fmt.min < 0 else coding.bits + 1
    return spell(coding._replace(bits=coding.bits + 1, nan=(1 << magnitude_bits) - 1))


class Received(NamedTuple):
    """The gradient of the result as the backward pass gets it.

    Attributes:
        ops: The operators.
        g: The gradient.
        seed: Needed only for stochastic rounding.
        observer: The observer, if any.
        needs_first: Whether the gradient of the first operand will be computed.
        needs_second: Whether that of the second will be.
        needs_sum: Whether its sum over rows will be needed.
    """

    ops: Operators
    g: Tensor
    seed: Tensor | None
    observer: Observer | None
    needs_first: bool
    needs_second: bool
    needs_sum: bool


class Upstream:
    """The gradient of the result in one backward pass: rounded for its products, and summed unrounded for the bias.

    Args:
        how: How it is rounded.
        received: The gradient.
    """

    def __init__(self, how: Gradient, received: Received) -> None:
        self._how, self._received, self.seed = how, received, received.seed
        self._rounded: Rounded | None = None
        #: Its sum over rows, if it was computed along with the rounding.
        self.total: Tensor | None = None

    def round(self, site: Site, dtype: torch.dtype) -> Rounded:
        """The gradient rounded at a site, for a product, in a dtype that holds it."""
        if self._rounded is not None:
            values, left = self._rounded
            return (values if values.dtype == dtype else values.to(dtype)), left
        ops, g, seed, observer, _, _, needs_sum = self._received
        if observer is not None and site.quantizer is not None:
            observer.rounds(site, g, seed)
        if needs_sum and self._how.is_summed and self.total is None:
            values, self.total = site.round_and_sum(ops, g, seed, dtype)
            found: Rounded = values, None
        else:
            found = site.round(ops, g, seed, dtype)
        if self._how.is_rounded_once:
            self._rounded = found
        return found


@dataclass(frozen=True)
class Gradient:
    """How the gradient of the result is rounded, for the products that give the gradients of the operands.

    Attributes:
        for_first: The site that rounds it for the gradient of the first operand.
        for_second: The site that rounds it for the gradient of the second.
        is_rounded_once: Whether one rounding serves both products.
        is_summed: Whether its sum over rows comes from the read that rounds it.
    """

    for_first: Site
    for_second: Site
    is_rounded_once: bool
    is_summed: bool

    def upstream(self, received: Received) -> Upstream:
        """The gradient in a backward pass."""
        return Upstream(self, received)
