"""The three tensors of a product (input, weight and gradient of the result): rounding, saving, recalling and observing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.nn.product.observers import Observer
from qsim.nn.product.sites import Rounded, Site, round_and_sum
from qsim_kernels.grid import Coding, read, spell

#: Formats of at most this many bits are kept for the backward pass as codes.
CODE_BITS = 8


class Kept(NamedTuple):
    """The data that the backward pass needs of an operand.

    Attributes:
        values: The operand itself, or its codes.
        scales: The scales of the forward pass, if they are reused.
    """

    values: Tensor | None = None
    scales: Tensor | None = None


@dataclass(frozen=True)
class Operand:
    """An input or a weight, which is rounded forward, and backward for the gradient of the other operand.

    The backward pass sees the same values whether codes or the operand are kept, except for a NaN without a code in 8 bits: integers, and
    8-bit formats without special values, give it the code of the largest value.

    Attributes:
        forward: The site that rounds it forward.
        backward: The site that rounds it backward.
        is_reused: Whether the backward pass reuses the tensor rounded forward.
        coding: The codes in which the backward pass keeps it; if there are none, it keeps the operand.
    """

    forward: Site
    backward: Site
    is_reused: bool
    coding: str | None = None

    def round(self, x: Tensor, seed: Tensor | None, dtype: torch.dtype, needed: bool) -> tuple[Rounded, Kept]:
        """The operand for the forward product, and the data kept for the backward pass, if needed."""
        if not needed:
            return self.forward.round(x, seed, dtype), Kept()
        if self.coding is None:
            rounded = self.forward.round(x, seed, dtype)
            return rounded, Kept(x, rounded.scales if self.is_reused else None)
        values, codes = self._with_codes(x, seed, self.coding, dtype)
        return Rounded(values), Kept(codes)

    def _with_codes(self, x: Tensor, seed: Tensor | None, coding: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        one, other = self.forward.quantizer, self.backward.quantizer
        assert other is not None  # codes are of its format
        spelt, stream = other.spelt, self.backward.stream
        chosen = seed if spelt.is_stochastic or (one is not None and one.spelt.is_stochastic) else None
        if one is None:
            return x.to(dtype), torch.ops.qsim.encode.default(x, chosen, spelt.grid, spelt.rule, coding, stream, 0, False)
        given = (one.spelt.grid, one.spelt.rule, self.forward.stream, dtype, spelt.grid, spelt.rule, coding, stream)
        return torch.ops.qsim.quantize_and_encode.default(x, chosen, *given)  # type: ignore[no-any-return]

    def recall(self, kept: Kept, seed: Tensor | None, dtype: torch.dtype) -> Rounded:
        """The operand for a product of the backward pass."""
        assert kept.values is not None  # it was needed
        if self.coding is None:
            return self.backward.round(kept.values, seed, dtype, kept.scales)
        assert self.backward.quantizer is not None
        grid = self.backward.quantizer.spelt.grid
        return Rounded(torch.ops.qsim.decode.default(kept.values, grid, self.coding, dtype))

    def show(self, observer: Observer, x: Tensor, kept: Kept, seed: Tensor | None) -> Any:
        """Report to an observer what `round` did: forward, and backward if codes were kept.

        The latter counts once the backward pass uses the codes; the observer's record of them is returned.
        """
        if self.forward.quantizer is not None:
            observer.rounds(self.forward, x, seed)
        if self.coding is None or kept.values is None or self.is_reused:
            return None
        return observer.measured(self.backward, x, seed)

    def show_recalled(self, observer: Observer, kept: Kept, noted: Any, seed: Tensor | None) -> None:
        """Report to an observer what `recall` did, given the result of `show`."""
        if noted is not None:
            observer.used(self.backward.name, noted)
        elif self.backward.quantizer is not None and self.coding is None and not self.is_reused:
            assert kept.values is not None
            observer.rounds(self.backward, kept.values, seed)


def coding_of(fmt: Format) -> str:
    """The codes in which an operand is kept: the format's own, one bit wider where that makes room for a NaN that it lacks."""
    coding = read(Coding, fmt.spelling[1])
    if coding.nan >= 0 or coding.twos_complement or coding.bits == CODE_BITS:
        return fmt.spelling[1]
    magnitude_bits = coding.bits if fmt.min < 0 else coding.bits + 1
    return spell(coding._replace(bits=coding.bits + 1, nan=(1 << magnitude_bits) - 1))


class Upstream:
    """The gradient of the result: rounded for two products (once if one rounding serves both), and summed unrounded for the bias.

    Args:
        g: The gradient.
        seed: Needed only for stochastic rounding.
        observer: The observer, if any.
        serves_both: Whether one rounding serves both products.
        is_summed: Whether its sum over rows will be needed, and can come from the same read.
    """

    def __init__(self, g: Tensor, seed: Tensor | None, observer: Observer | None, serves_both: bool, is_summed: bool) -> None:
        self._g, self._observer = g, observer
        self.seed = seed
        self._serves_both, self._is_summed = serves_both, is_summed
        self._rounded: Rounded | None = None
        #: Its sum over rows, if it was computed along with the rounding.
        self.total: Tensor | None = None

    def round(self, site: Site, dtype: torch.dtype) -> Rounded:
        """The gradient rounded at a site, for a product, in a dtype that holds it."""
        if self._rounded is not None:
            return self._rounded._replace(values=self._rounded.values.to(dtype))
        if site.quantizer is not None and self._observer is not None:
            self._observer.rounds(site, self._g, self.seed)
        if self._is_summed and self.total is None:
            values, self.total = round_and_sum(self._g, site, self.seed, dtype)
            found = Rounded(values)
        else:
            found = site.round(self._g, self.seed, dtype)
        self._rounded = found if self._serves_both else None
        return found
