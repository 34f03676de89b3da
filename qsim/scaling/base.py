"""The base class of scales, and the scale of a whole tensor, which can be the outer scale of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from qsim.formats import FP32, Format, format as resolve_format, holds, name_of
from qsim.formats.base import check_integer, shortest
from qsim.scaling.geometry import tiles_of_whole
from qsim.text.parsing import read_call
from qsim_kernels.numbers import scales as numbers
from qsim_kernels.numbers.grid import Grid, read
from qsim_kernels.numbers.scales import SMALLEST, ScaleRule, spell_scales
from qsim_kernels.private import constant

Rule = Literal["fit", "ceil", "floor", "even", "ceil_log2"]


@dataclass(frozen=True, init=False, repr=False)
class Scaling:
    """Base class of scales. Create a subclass: `PerTensor`, `PerRow`, `PerAxis`, `PerBlock`, `PerTile`, `Given` or `Delayed`.

    A scale follows from the largest magnitude `a` of the elements that share it and from the largest value `M` of the format that they are
    rounded to:

    - `"fit"`: the value of the scales' format that is nearest to `a / M`, so that `a` is mapped to `M` or close to it;
    - `"ceil"`: the smallest one that is not below `a / M`: nothing saturates, and stochastic rounding is unbiased. This is exact for powers
      of two; with other scales, whose inverse is rounded to float32, `a` may end up one unit in the last place beyond `M`;
    - `"floor"`: `2**(floor(log2 a) - floor(log2 M))`, the rule of OCP's MX formats; values beyond `M` saturate;
    - `"even"`: like `"floor"`, after `a` has been rounded to the format's precision;
    - `"ceil_log2"`: `2**(ceil(log2 a) - floor(log2 M))`, torchao's `CEIL`. (Its `RCEIL` is `"ceil"` here.)

    Scales that their format cannot hold become its largest or its smallest. None is smaller than 2**-127, for float64 tensors either, as
    scales are float32 numbers whose inverses are finite. Under that scale, round-to-nearest makes elements of at most 2**-128 times the
    smallest value of their format zero, such as 1e-42 in E4M3.

    If all elements are zero, the scale is the smallest one. An infinity or a NaN makes the scale NaN, and with it all elements that share
    it, but no others.

    Args:
        format: The scales' format: fp32, `"e8m0"` for powers of two, `"e4m3"`, or any other whose values are float32 numbers. Only the
            positive ones are used.
        rule: How a scale follows from its elements.
        margin: Makes scales larger by this many powers of two.
        outer: A scale of the whole tensor, which scales these scales: `PerTensor(…)`. It is `a / M / M'`, where `M'` is the largest value
            of the scales' format, so that the largest scale is mapped to `M'`.

    Example:
        >>> import torch, qsim
        >>> for rule in qsim.scaling.Rule.__args__:
        ...     scale = qsim.scaling.PerTensor("e8m0", rule)
        ...     print(rule, isinstance(scale, qsim.scaling.Scaling), qsim.quantize(torch.tensor([1.0, 7.9]), "e2m1", scale=scale).tolist())
        fit True [1.0, 6.0]
        ceil True [1.0, 8.0]
        floor True [1.0, 6.0]
        even True [1.0, 8.0]
        ceil_log2 True [1.0, 8.0]
    """

    format: Format
    rule: Rule
    margin: int
    outer: PerTensor | None
    _geometry: ClassVar[tuple[str, ...]] = ()
    #: What a short description calls the elements that share a scale; the name of the class by default.
    _sharing: ClassVar[str] = ""

    def __init__(
        self, format: str | torch.dtype | Format = "fp32", rule: Rule = "fit", margin: int = 0, outer: PerTensor | str | None = None
    ) -> None:
        owner = type(self).__name__
        if isinstance(outer, str):
            outer = PerTensor() if outer == "tensor" else read_call(outer, {"PerTensor": PerTensor}) or outer
        if rule not in get_args(Rule):
            raise ValueError(f"{owner}: rule must be {', '.join(map(repr, get_args(Rule)))}, got {rule!r}")
        if outer is not None and (not isinstance(outer, PerTensor) or outer.outer is not None):
            raise TypeError(f"{owner}: outer must be a qsim.scaling.PerTensor without an outer scale of its own, got {outer!r}")
        object.__setattr__(self, "format", _check_scales(owner, resolve_format(format)))
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "margin", check_integer(owner, "margin", margin, -64, 64))
        object.__setattr__(self, "outer", outer)

    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)!r}" for name in self._geometry]
        given.append(f"format={name_of(self.format)!r}")
        given.append(f"rule={self.rule!r}")
        given += [f"margin={self.margin}"] if self.margin else []
        given += [f"outer={repr(self.outer)!r}"] if self.outer is not None else []
        return f"{type(self).__name__}({', '.join(given)})"

    def __str__(self) -> str:
        """A short description: which elements share a scale, and the non-default settings."""
        facts = [str(getattr(self, name)) for name in self._geometry if name != "dim"]
        facts += [name_of(self.format)] if self.format != FP32 else []
        facts += [self.rule] if self.rule != "fit" else []
        facts += [f"margin={self.margin}"] if self.margin else []
        facts += [f"under {self.outer}"] if self.outer is not None else []
        return (self._sharing or type(self).__name__.lower()) + (f"({', '.join(facts)})" if facts else "")

    @property
    def is_directed(self) -> bool:
        """Whether elements share a scale along one direction of a tensor, so that another direction has other scales."""
        return True

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:
        """Return the groups of elements that share a scale, for a tensor of a shape.

        Raises:
            IndexError: If the shape lacks the dimensions.
        """
        raise NotImplementedError

    @property
    def is_recorded(self) -> bool:
        """Whether scales follow from the largest magnitudes of other tensors, too: see `used`."""
        return False

    def used(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitudes from which scales are computed, given those of the current tensor."""
        return amaxes

    @property
    def repeated(self) -> Scaling:
        """A scaling that scales the last tensor again in the same way, without recording anything."""
        return self

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return how many elements share a scale along each dimension of a tensor of a shape.

        Raises:
            IndexError: If the shape lacks the dimensions.

        Example:
            >>> import qsim
            >>> qsim.scaling.PerBlock(32, dim=0).extent((100, 7))
            (32, 1)
        """
        raise NotImplementedError

    def counts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the number of scales along each dimension of a tensor of a shape.

        Example:
            >>> import qsim
            >>> qsim.scaling.PerBlock(32, dim=0).counts((100, 7))
            (4, 7)
            >>> qsim.scaling.PerRow().counts((100, 7))
            (100, 1)
        """
        # A count of 1 is explicit, because compiled code would see only a quotient of unknown sizes.
        pairs = zip(shape, self.extent(shape), strict=True)
        return tuple(min(size, 1) if size == reach else -(-size // reach) for size, reach in pairs)

    def spelling(self, element: Format, under: Format | None = None) -> tuple[str, str]:
        """Return the parameters of the scales, in the form that the operators take.

        Args:
            element: The format of the scaled elements.
            under: The format of the scales between these and the elements.
        """
        return _spelling(
            self.rule, str(self.margin), self.format.spelling[0], element.spelling[0], "" if under is None else under.spelling[0]
        )


def _spelling(*facts: str) -> tuple[str, str]:
    known = _SPELT.get(facts)
    if known is None:
        known = _SPELT[facts] = _spell(*facts)
    return known


def _spell(rule: str, margin: str, scales: str, element: str, under: str) -> tuple[str, str]:
    grid: Grid = read(Grid, element)
    largest = grid.max * (read(Grid, under).max if under else 1.0)
    if not largest > 0:
        raise ValueError("a format whose largest value is zero cannot have scales")
    own: Grid = read(Grid, scales)
    least = max(own.least, SMALLEST)
    if under:
        # Large enough that its product with the smallest scale has an inverse within float32's range.
        least = max(least, SMALLEST / max(read(Grid, under).least, SMALLEST))
    return spell_scales(numbers.Scales(int(ScaleRule[rule.upper()]), int(margin), largest, _bits_after_the_first(grid), least, own))


def _bits_after_the_first(grid: Grid) -> int:
    """Those of the largest value: fewer than a binade's, if all values lie below the lowest binade, as integers do."""
    top = math.frexp(grid.max)[1] - 1
    return grid.mantissa - max(0, grid.exponent - top)


# See `qsim.formats.dtypes`: compiled code keeps the result for strings as a constant, but makes variables of numbers.
constant(_spelling)

_SPELT: dict[tuple[str, ...], tuple[str, str]] = {}


@dataclass(frozen=True, init=False, repr=False)
class Whole(Scaling):
    """Base of scalings with one scale per tensor."""

    @property
    def is_directed(self) -> bool:  # noqa: D102 (documented above)
        return False

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        return tiles_of_whole(shape)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        return tuple(shape)


@dataclass(frozen=True, init=False, repr=False)
class PerTensor(Whole):
    """One scale for the whole tensor.

    Example:
        >>> import qsim
        >>> qsim.scaling.PerTensor()
        PerTensor(format='fp32', rule='fit')
    """

    _sharing = "tensor"


def _check_scales(owner: str, fmt: Format) -> Format:
    """Raise an error for formats without usable scales: positive values that are float32 numbers, as are their inverses."""
    if fmt.grid.table:
        raise ValueError(f"{owner}: scales are floats, integers, fixed point or powers of two, not in a table like {name_of(fmt)}")
    if fmt.grid.flush:
        raise ValueError(f"{owner}: scales do not flush: give {fmt!r} with subnormals=False, or with subnormals")
    if not fmt.max >= SMALLEST:
        raise ValueError(f"{owner}: format must hold scales, numbers of 2**-127 or more; the largest of {fmt!r} is {shortest(fmt.max)}")
    if not holds(torch.float32, fmt):
        raise ValueError(f"{owner}: scales are float32, which cannot hold every value of {fmt!r}")
    return fmt
