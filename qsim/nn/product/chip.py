"""Operands of products on a chip: FP8 codes, stored along the dimension that a product sums over.

A layer uses these where the chip has the accumulators of all three of its products. The input and the gradient are then read once for both
of their products. Products that the chip does not compute after all take the same codes to the emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.formats import E4M3, E5M2
from qsim.functional.arguments import Spelling
from qsim.nn.product.bilinear import rows
from qsim.nn.product.operands import Gradient, Operand, Received, RoundedOperand, Upstream
from qsim.nn.product.sites import Rounded, Site
from qsim_kernels.chip.products import product_of
from qsim_kernels.numbers.encoding import spell_encoding
from qsim_kernels.numbers.sums import read_sum
from qsim_kernels.ops.direct import Operators

#: The dtypes whose values are a format's, by the text of its grid.
_DTYPES = {E4M3.spelling[0]: torch.float8_e4m3fn, E5M2.spelling[0]: torch.float8_e5m2}


@dataclass(frozen=True)
class CodedOperand(Operand):
    """An input or a weight whose FP8 codes are multiplied; the backward pass keeps those of an input, and encodes a weight again."""

    def round(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype, needed: bool) -> RoundedOperand:
        """The operand for the forward product, and the tensor kept for the backward pass, if needed."""
        if not needed or self.coding is None:
            return _encoded(ops, x, self.forward, seed), None, x if needed else None
        forward, backward = _encoded_twice(ops, x, self.forward, self.backward, seed)
        return forward, None, backward

    def recall(self, ops: Operators, kept: Tensor, seed: Tensor | None, dtype: torch.dtype, scales: Tensor | None) -> Rounded:
        """The operand for a product of the backward pass."""
        return (_encoded(ops, kept, self.backward, seed) if self.coding is None else kept), None


class CodedUpstream(Upstream):
    """The gradient of the result in FP8 codes, for two products from one read, or for one of them."""

    _waiting: Tensor | None = None

    def round(self, site: Site, dtype: torch.dtype) -> Rounded:
        """The gradient for a product."""
        ops, g, seed, observer, needs_first, needs_second, _ = self._received
        is_second = self._waiting is not None
        if observer is not None and not (is_second and self._how.is_rounded_once):
            observer.rounds(site, g, seed)
        if self._waiting is not None:
            return self._waiting, None
        if not (needs_first and needs_second):
            return _encoded(ops, g, site, seed), None
        codes, self._waiting = _encoded_twice(ops, g, self._how.for_first, self._how.for_second, seed)
        return codes, None


class CodedGradient(Gradient):
    """The gradient of the result, whose FP8 codes are multiplied."""

    def upstream(self, received: Received) -> CodedUpstream:
        """The gradient in a backward pass."""
        return CodedUpstream(self, received)


def takes_codes(sites: Iterable[Site], sums: Sequence[str | None]) -> bool:
    """Whether a layer's products may be multiplied in FP8 codes: plain points in E4M3 and E5M2, and the sums of FP8 products."""
    are_fp8 = all(
        site.quantizer is not None and site.is_plain and site.quantizer.spelt.grid in _DTYPES and not (site.place.row or site.place.offset)
        for site in sites
    )
    return are_fp8 and all(how is not None and _adds_fp8(how) for how in sums)


def coded_operand(operand: Operand) -> CodedOperand:
    """The operand in FP8 codes."""
    point = operand.backward.quantizer
    assert point is not None  # `takes_codes` has found one
    coding = point.format.spelling[1] if operand.forward.name == "act" else None
    return CodedOperand(operand.forward, operand.backward, operand.is_reused, operand.clips, coding)


def coded_gradient(gradient: Gradient) -> CodedGradient:
    """The gradient in FP8 codes."""
    return CodedGradient(gradient.for_first, gradient.for_second, gradient.is_rounded_once, gradient.is_summed)


def _adds_fp8(how: str) -> bool:
    product = product_of(read_sum(how))
    return product is not None and product.is_fp8


def _encoded(ops: Operators, x: Tensor, site: Site, seed: Tensor | None) -> Tensor:
    """A tensor as codes, stored along the dimension that its product sums over."""
    how = _how(site)
    chosen = seed if how.is_stochastic else None
    if not _is_by_rows(site):
        return _turned_back(ops.encode_transpose(rows(x), chosen, *_arguments(site)), x)
    if torch.compiler.is_compiling() and not how.is_stochastic:
        # Rounding and the conversion fuse.
        return ops.quantize(x.contiguous(), None, how.grid, how.rule, 0, 0, x.dtype).to(_DTYPES[how.grid])  # type: ignore[no-any-return]
    codes = ops.encode(x.contiguous(), chosen, how.grid, how.rule, _coding(site), site.stream, 0, False)
    return codes.view(_DTYPES[how.grid])  # type: ignore[no-any-return]


def _encoded_twice(ops: Operators, x: Tensor, one: Site, other: Site, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """A tensor as the codes of two sites, whose products sum over different dimensions, from one read."""
    by_rows, turned = (one, other) if _is_by_rows(one) else (other, one)
    chosen = seed if _how(one).is_stochastic or _how(other).is_stochastic else None
    codes, turned_codes = ops.encode_with_transpose(rows(x), chosen, *_arguments(by_rows), *_arguments(turned))
    plain, back = codes.view(x.shape), _turned_back(turned_codes, x)
    return (plain, back) if by_rows is one else (back, plain)


def _turned_back(codes: Tensor, x: Tensor) -> Tensor:
    """Transposed codes as a tensor with the shape of the one that was encoded."""
    return codes.t().view(x.shape)


def _is_by_rows(site: Site) -> bool:
    return site.direction.summed == -1


def _arguments(site: Site) -> tuple[str, int, torch.dtype]:
    """A site's rounding as operators take it."""
    how = _how(site)
    return spell_encoding(how.grid, how.rule, _coding(site)), site.stream, _DTYPES[how.grid]


def _how(site: Site) -> Spelling:
    assert site.quantizer is not None  # `takes_codes` has found one
    return site.quantizer.spelt


def _coding(site: Site) -> str:
    assert site.quantizer is not None
    return site.quantizer.format.spelling[1]


# Under torch.compile strings are constants, and so is the result of a function marked like this.
_adds_fp8._dynamo_marked_constant = True  # type: ignore[attr-defined]
