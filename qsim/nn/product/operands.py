"""The three tensors of a product (input, weight and gradient of the result): rounding, keeping, recalling and observing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsim.nn.product.codes import encoded_twice
from qsim.nn.product.observers import Observer
from qsim.nn.product.sites import RoundedOperand, Site
from qsim_kernels.ops.direct import DISPATCHED, Operators


@dataclass(frozen=True)
class Operand:
    """An input or a weight, which is rounded forward, and backward for the gradient of the other operand.

    The backward pass sees the same values whether codes or the operand are kept, except for a NaN without a code in 8 bits: integers, and
    8-bit formats without special values, give it the code of the largest value.

    Attributes:
        forward: The site that rounds it forward.
        backward: The site that rounds it backward.
        is_reused: Whether the backward pass reuses what the forward pass rounded.
        clips: Whether its gradient is zero where it saturates forward.
        coding: The codes in which the backward pass keeps it; if there are none, it keeps the operand.
        is_requantized: Whether the backward pass rounds again what the forward pass rounded.
        is_ahead: Whether the forward pass can find the scale of the whole tensor in the backward pass; see `Site.round`.
    """

    forward: Site
    backward: Site
    is_reused: bool
    clips: bool = False
    coding: str | None = None
    is_requantized: bool = False
    is_ahead: bool = False

    def round(
        self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype, *, keeps: bool, raw: Tensor | None = None
    ) -> tuple[RoundedOperand, Tensor | None]:
        """The operand for the forward product, and what the backward pass needs: the tensor, what it was rounded to, codes, or nothing."""
        one, other = self.forward.quantizer, self.backward.quantizer
        if not keeps or self.coding is None or other is None:
            later = self.backward if keeps and raw is None and self.is_ahead else None
            rounded = self.forward.round(ops, x, seed, dtype, later=later)
            return rounded, self._kept(ops, x if raw is None else raw, rounded, seed) if keeps else None
        if self.forward.on_chip:
            codes, kept = encoded_twice(ops, x, self.forward, self.backward, seed)
            return RoundedOperand(codes), kept
        spelt, stream = other.spelt, self.backward.stream
        if one is None:
            kept = ops.encode(x, seed if spelt.is_stochastic else None, spelt.grid, spelt.rule, self.coding, stream, 0, False)
            return RoundedOperand(x.to(dtype)), kept
        first = one.spelt
        chosen = seed if spelt.is_stochastic or first.is_stochastic else None
        values, codes = ops.quantize_and_encode(
            x, chosen, first.grid, first.rule, self.forward.stream, dtype, spelt.grid, spelt.rule, self.coding, stream
        )
        return RoundedOperand(values), codes

    def _kept(self, ops: Operators, x: Tensor, rounded: RoundedOperand, seed: Tensor | None) -> Tensor:
        """The tensor that the backward pass rounds again: the operand, or for a callable, which may not repeat itself, its result."""
        if self.forward.call is not None:
            return rounded.values if self.is_reused or self.is_requantized else x
        return self.forward.restored(ops, x, seed) if self.is_requantized else x

    def recall(self, ops: Operators, kept: Tensor, seed: Tensor | None, dtype: torch.dtype, known: Tensor | None) -> RoundedOperand:
        """The operand for a product of the backward pass, from what was kept of it, and what the forward pass found of its scales."""
        point = self.backward.quantizer
        if self.coding is not None and point is not None:
            return RoundedOperand(kept if self.forward.on_chip else ops.decode(kept, point.spelt.grid, self.coding, dtype))
        if self.is_reused and self.forward.call is not None:
            return RoundedOperand(kept if kept.dtype == dtype else kept.to(dtype))
        is_traced = ops is DISPATCHED and not self.forward.on_chip and torch.compiler.is_compiling()
        if is_traced and point is not None and not point.spelt.is_stochastic:
            # Otherwise a compiler would keep what the forward pass has rounded: a second copy of weights and of results of attention.
            kept = torch.ops.qsim.again.default(kept, self.forward.name == "weight")
        return self.backward.round(ops, kept, seed, dtype, known)

    def show(self, observer: Observer, x: Tensor, rounded: RoundedOperand, kept: Tensor | None, seed: Tensor | None) -> Any:
        """Report to an observer what `round` did: forward, and backward if codes were kept.

        The latter counts once the backward pass uses the codes; the observer's record of them is returned.
        """
        self.forward.show(observer, x, seed, rounded)
        if self.coding is None or kept is None or self.is_reused:
            return None
        return observer.measured(self.backward, x, seed)

    def show_recalled(self, observer: Observer, kept: Tensor, rounded: RoundedOperand, noted: Any, seed: Tensor | None) -> None:
        """Report to an observer what `recall` did, given the result of `show`."""
        if noted is not None:
            observer.used(self.backward.name, noted)
        elif self.coding is None and not self.is_reused:
            self.backward.show(observer, kept, seed, rounded)


@dataclass(frozen=True)
class Gradient:
    """The gradient of the result, which is rounded for the products that give the gradients of the operands.

    Attributes:
        for_first: The site that rounds it for the gradient of the first operand.
        for_second: The site that rounds it for the gradient of the second.
        is_rounded_once: Whether one rounding serves both products.
        is_summed: Whether its sum over rows comes from the read that rounds it.
        is_rounded_both_ways: Whether the sites differ only in the direction of blocks, so that one read serves both, unless in groups.
        is_ahead: Whether the first rounding can find the scale of the whole tensor in the second; see `Site.round`.
    """

    for_first: Site
    for_second: Site
    is_rounded_once: bool
    is_summed: bool
    is_rounded_both_ways: bool = False
    is_ahead: bool = False

    def round(
        self,
        ops: Operators,
        g: Tensor,
        seed: Tensor | None,
        carriers: Sequence[torch.dtype],
        observer: Observer | None,
        *,
        sums: bool,
        is_second: bool = False,
        known: Tensor | None = None,
    ) -> tuple[RoundedOperand, RoundedOperand | None, Tensor | None]:
        """The gradient for a product, for the second one, if it comes from the same read, and its sum, if it is needed, likewise.

        Args:
            ops: The operators.
            g: The gradient.
            seed: Needed only for stochastic rounding.
            carriers: The carrier of the product, and that of the second one if it follows.
            observer: The observer of the layer, if there is one.
            sums: Whether the sum over rows is needed.
            is_second: Whether the product is that for the second operand.
            known: What the first rounding found for the second one.
        """
        site = self.for_second if is_second else self.for_first
        carrier, *others = carriers
        other = total = None
        if site.on_chip and others:
            rounded, other = map(RoundedOperand, encoded_twice(ops, g, self.for_first, self.for_second, seed))
        elif self.is_rounded_both_ways and others and carrier == others[0] and site.groups is None:
            rounded, other = site.round_both_ways(ops, g, self.for_second, carrier)
        elif sums and self.is_summed:
            rounded, total = site.round_and_sum(ops, g, seed, carrier)
        else:
            rounded = site.round(ops, g, seed, carrier, known, self.for_second if self.is_ahead and others else None)
        if observer is not None:
            site.show(observer, g, seed, rounded)
            if other is not None and not self.is_rounded_once:
                self.for_second.show(observer, g, seed, other)
        if others and other is None and self.is_rounded_once:
            other = rounded if carrier == others[0] else rounded._replace(values=rounded.values.to(others[0]))
        return rounded, other, total
