"""Short sums that are added in float32."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.accumulators.aligned import Aligned
from qsim.accumulators.base import Accumulator, brief
from qsim.accumulators.rounded import Rounded
from qsim.accumulators.units import UNITS
from qsim.formats import FP32, Float, Format, contains
from qsim.formats.base import check_integer
from qsim.text.parsing import read_call
from qsim_kernels.numbers import sums

#: The units whose sums can be promoted.
_INNER = {name: unit.accumulator for name, unit in UNITS.items() if isinstance(unit.accumulator, Aligned)}


@dataclass(frozen=True, init=False, repr=False)
class Promoted(Accumulator):
    """A fresh inner sum for every so many products; the results are added in float32 with round-to-nearest.

    This keeps sums of narrow units short: DeepSeek-V3 promotes every 128 products (section 3.3.2 of arXiv 2412.19437), as NVIDIA's library
    does without fast accumulation. In a layer, scales of blocks and tiles whose extent along the sum is a multiple of `every` do not
    change within an inner sum. They are not part of the operands then: they multiply its result, which is added with one rounding.

    Args:
        inner: The short sums: a `Rounded`, an `Aligned`, or the name of a unit.
        every: Number of products in each, a multiple of the inner chunk or block.

    Example:
        >>> import torch, qsim
        >>> a, b = torch.ones(1, 8192), torch.ones(8192, 1)
        >>> qsim.matmul(a, b, qsim.accumulators.Promoted(qsim.accumulators.Rounded("fp16"), every=1024))
        tensor([[8192.]])
        >>> qsim.accumulators.Promoted("h100_fp8", 128)
        Promoted('h100_fp8', 128)
    """

    inner: Rounded | Aligned
    every: int

    def __init__(self, inner: Rounded | Aligned | str, every: int) -> None:
        found = _resolve_inner(inner)
        if isinstance(found, Rounded) and not contains(FP32, found.format):
            raise ValueError(f"Promoted: inner sums are added in float32, which does not hold every value of {brief(found.format)}")
        check_integer("Promoted", "every", every, 1, 2**31)
        if every % found.step:
            raise ValueError(f"Promoted: every must be a multiple of {found.step}, the products that {found!r} adds at once, got {every}")
        object.__setattr__(self, "inner", found)
        object.__setattr__(self, "every", every)
        names = [found.label] if found.label else [name for name, unit in _INNER.items() if unit == found]
        text = repr(names[0]) if names else repr(found)
        self._derive(f"Promoted({text}, {every})", is_stochastic=found.is_stochastic, step=every)

    @property
    def taken(self) -> tuple[Float, ...] | None:
        """The formats of operands that the inner sums take, if not any."""
        return self.inner.taken

    @property
    def chain(self) -> int:
        """The number of products in an inner sum, with which scales enter."""
        return self.every

    def _rows(self) -> list[tuple[str, str]]:
        every = f"{self.every} products, a fresh inner sum; the results are added in fp32 with round-to-nearest"
        return [("every", every), *self.inner._rows()]

    def sum_of(self, a: Format, b: Format) -> sums.Sum:  # noqa: D102 (documented above)
        inner = self.inner.sum_of(a, b)
        assert isinstance(inner, (sums.RoundedSum, sums.AlignedSum))
        return sums.PromotedSum(inner, self.every)


def _resolve_inner(inner: Accumulator | str) -> Rounded | Aligned:
    found: object = inner
    if isinstance(inner, str):
        found = _INNER.get(inner.lower()) or read_call(inner, {"Rounded": Rounded, "Aligned": Aligned})
    if not isinstance(found, (Rounded, Aligned)):
        raise ValueError(f"Promoted: inner sums must be Rounded(…), Aligned(…) or one of {', '.join(_INNER)}, got {inner!r}")
    return found
