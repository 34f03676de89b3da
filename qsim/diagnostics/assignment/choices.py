"""The points that a layer can have: candidates as they are, or one candidate for each of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.recipes.points_of import points_of
from qsim.scaling.block_formats import Block

#: Whether each layer has one candidate, or each of its tensors.
Per = Literal["point", "layer"]
#: The tensors of a layer, each by the name of the point that rounds it first.
TENSORS = ("act", "weight", "grad")


class PointChoice(NamedTuple):
    """Points for a layer.

    Attributes:
        points: The points.
        names: The name of the candidate of each tensor.

    Example:
        >>> import qsim
        >>> qsim.diagnostics.PointChoice(qsim.FivePoint("e2m1", "e4m3"), ("e2m1", "e4m3", "bf16")).points.weight.format.bits
        8
    """

    points: FivePoint
    names: tuple[str, str, str]


def block_points(element: str) -> FivePoint:
    """Blocks of 32 elements with power-of-two scales, which are rounded up: round-to-nearest forward, stochastic rounding backward.

    Example:
        >>> points = block_points("e2m1")
        >>> points.act.rounding, points.grad.rounding, points.grad.scale
        (NEAREST, Stochastic(), PerBlock(size=32, dim=-1, format='e8m0', rule='ceil'))
    """
    block = Block(element, 32, rule="ceil")
    noisy = Quantizer(block, "stochastic")
    return FivePoint(block, block, noisy, act_bwd=noisy, weight_bwd=noisy)


def default_candidates() -> dict[str, FivePoint]:
    """Elements of 4, 6 and 8 bits in blocks, by their names, and BF16.

    Example:
        >>> list(default_candidates())
        ['e2m1', 'e2m3', 'e4m3', 'bf16']
    """
    return {name: block_points(name) for name in ("e2m1", "e2m3", "e4m3")} | {"bf16": points_of("bf16")}


def named_candidates(given: Sequence[Any] | Mapping[str, Any]) -> dict[str, FivePoint]:
    """Candidates by name: those of a list are named by what they are.

    Raises:
        TypeError: If a candidate is no points, or one of its points is a callable.
        ValueError: If they are fewer than two, two have the same name, or one has delayed scales.

    Example:
        >>> list(named_candidates(["mxfp4", "e4m3"]))
        ['mxfp4', 'e4m3']
    """
    if isinstance(given, str) or not isinstance(given, (Sequence, Mapping)):
        raise TypeError(f"assign: candidates must be several formats, recipes or points, in a list or by name, got {given!r}")
    pairs = list(given.items()) if isinstance(given, Mapping) else [(str(each), each) for each in given]
    found: dict[str, FivePoint] = {}
    for name, each in pairs:
        if name in found:
            raise ValueError(f"assign: two candidates are named {name!r}: give a dictionary of names and candidates")
        found[name] = measurable("assign", f"the candidate {name!r}", points_of(each))
    if len(found) < 2:
        raise ValueError(f"assign: there must be 2 or more candidates to choose from, got {len(found)}")
    return found


def measurable(owner: str, title: str, points: FivePoint) -> FivePoint:
    """The points, if their effects can be measured and their bits are known.

    Raises:
        TypeError: If one of them is a callable.
        ValueError: If one has a delayed scale.
    """
    if points.is_delayed:
        raise ValueError(f"{owner}: {title} has delayed scales, which follow from other steps: give scale='tensor'")
    for point in POINTS:
        used = getattr(points, point)
        if isinstance(used, CallablePoint):
            raise TypeError(f"{owner}: {title} has the callable {used.name} at {point}, whose bits are not known: give a Quantizer")
    return points


def choices(candidates: Mapping[str, FivePoint], per: Per) -> list[PointChoice]:
    """The points that a layer can have.

    A candidate is combined with others if nothing forbids it: operands of a product must have the same transform, and an accumulator is
    that of the whole layer.

    Example:
        >>> import qsim
        >>> candidates = {name: qsim.FivePoint(name, name, name) for name in ("e2m1", "e4m3")}
        >>> len(choices(candidates, "layer")), len(choices(candidates, "point")), choices(candidates, "point")[1].names
        (2, 8, ('e2m1', 'e2m1', 'e4m3'))
    """
    found = [PointChoice(points, (name, name, name)) for name, points in candidates.items()] if per == "layer" else []
    for names in product(candidates, repeat=len(TENSORS)) if per == "point" else ():
        points = _combined(*(candidates[name] for name in names))
        if points is not None:
            found.append(PointChoice(points, names))  # type: ignore[arg-type]
    return found


def _combined(act: FivePoint, weight: FivePoint, grad: FivePoint) -> FivePoint | None:
    """Points of three candidates; `None` if they do not fit together."""
    if len({(own.accumulate, own.chip, own.output, own.bias) for own in (act, weight, grad)}) > 1:
        return None
    try:
        return replace(act, weight=weight.weight, weight_bwd=weight.weight_bwd, grad=grad.grad, grad_w=grad.grad_w)
    except ValueError:
        return None
