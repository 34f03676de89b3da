"""A recipe: points for the layers of a model, the number of layers left out, and its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from qsim.accumulators.chips import Chip
from qsim.formats.base import check_integer
from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import POINTS, Accumulate, FivePoint
from qsim.text.columns import aligned

_TITLES = ("point", "format", "scale", "rounding", "after")


@dataclass(frozen=True)
class Recipe:
    """Points for a whole model.

    Args:
        name: The recipe's name.
        points: The points at which layers round.
        first: Number of layers left in high precision at the beginning of the model, in module order.
        last: Number of layers left in high precision at its end.
        source: The paper or specification it comes from.

    Example:
        >>> import qsim
        >>> recipe = qsim.recipes.Recipe("half", qsim.FivePoint(act="e4m3"), last=1)
        >>> print(recipe)
        half: act=e4m3; high precision: the last layer
        >>> qsim.recipes.Recipe.from_dict(recipe.to_dict()) == recipe
        True
    """

    name: str
    points: FivePoint
    first: int = 0
    last: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"Recipe: {name} must be a string, got {getattr(self, name)!r}")
        if not isinstance(self.points, FivePoint):
            raise TypeError(f"Recipe: points must be a FivePoint, got {self.points!r}")
        for name in ("first", "last"):
            check_integer("Recipe", name, getattr(self, name), 0, 2**31)

    def with_(
        self,
        *,
        first: int | None = None,
        last: int | None = None,
        accumulate: Accumulate | Literal["unchanged"] = "unchanged",
        chip: Chip | None = None,
    ) -> Recipe:
        """The recipe with other options, those that all recipes share; what is not given stays.

        Args:
            first: Number of layers left in high precision at the beginning of the model.
            last: Number of layers left in high precision at its end.
            accumulate: The accumulator of all products, or three, as `FivePoint` takes them; `None` for torch's float32 sums.
            chip: Whether the GPU itself may multiply where it has the accumulator's bits, as `FivePoint` takes it.

        Example:
            >>> import qsim
            >>> recipe = qsim.recipes.hfp8().with_(first=0, last=2, accumulate="h100_bf16")
            >>> print(recipe.first, recipe.last, str(recipe).partition("; ")[2])
            0 2 high precision: the last 2 layers
        """
        options: dict[str, Any] = {} if accumulate == "unchanged" else {"accumulate": accumulate}
        options |= {} if chip is None else {"chip": chip}
        points = replace(self.points, **options) if options else self.points
        first, last = self.first if first is None else first, self.last if last is None else last
        return replace(self, points=points, first=first, last=last)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain strings, numbers and dictionaries, for a configuration file."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"points": self.points.to_dict()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Recipe:
        """Create a recipe from a configuration.

        Args:
            given: A dictionary as `to_dict` returns; `points` as `FivePoint.from_dict` takes them.

        Raises:
            TypeError: If it is not a dictionary, or lacks a name or points.
            ValueError: If it has an entry that a recipe does not have.
        """
        if not isinstance(given, Mapping):
            raise TypeError(f"Recipe: a configuration is a dictionary, got {given!r}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"Recipe has no {name!r}; it has {', '.join(known)}")
        for name in ("name", "points"):
            if name not in given:
                raise TypeError(f"Recipe: a configuration needs {name}, got {dict(given)!r}")
        return cls(**{**given, "points": FivePoint.from_dict(given["points"])})

    def describe(self, width: int | None = None) -> str:
        """The points, the layers left in high precision and the source, as a human-readable table.

        Args:
            width: Wrap lines that are longer.

        Example:
            >>> import qsim
            >>> print(qsim.recipes.hfp8().describe())
            hfp8
              point       format          scale  rounding  after
              act         e4m3b11fnuz     -      nearest   -
              weight      e4m3b11fnuz     -      nearest   -
              act_bwd     same as act
              weight_bwd  same as weight
              grad        e5m2            -      nearest   -
              range without scales: act, weight from 0.000122 to 30; grad from 1.53e-05 to 57344
              high precision: the first and the last layer
              source: Sun et al., Hybrid 8-bit Floating Point Training and Inference, NeurIPS 2019
        """
        rows = [_TITLES, *(_row(name, getattr(self.points, name), self.points) for name in POINTS)]
        # Both products share one gradient unless the second has its own.
        rows = [row for row in rows if row[0] not in ("grad_w", "output", "bias") or getattr(self.points, row[0]) is not None]
        lines = [self.name, aligned(rows, indent="  ", width=width)]
        points = self.points.to_dict()
        named = points.get("accumulate")
        sums = named if isinstance(named, str) else ", ".join(map(str, named or ()))
        sums += f"; chip: {points['chip']}" if "chip" in points else ""
        facts = [*self._ranges(), f"high precision: {self._kept()}", *([f"source: {self.source}"] if self.source else [])]
        facts = [f"sums: {sums}", *facts] if sums else facts
        return "\n".join([*lines, *(aligned([[fact]], indent="  ", width=width) for fact in facts)])

    def __str__(self) -> str:
        """A short description: the name, the points that round, and the layers left in high precision."""
        kept = f"; high precision: {self._kept()}" if self.first or self.last else ""
        return f"{self.name}: {self.points}{kept}"

    def _ranges(self) -> list[str]:
        """The ranges of points without scales, beyond which numbers saturate or become zero; none of formats as wide as float32."""
        found: dict[str, list[str]] = {}
        for name in POINTS:
            point = getattr(self.points, name)
            if isinstance(point, Quantizer) and point.scale is None and point.format.max < 2.0**127:
                found.setdefault(f"from {point.format.smallest:.3g} to {point.format.max:g}", []).append(name)
        ranges = "; ".join(f"{', '.join(names)} {span}" for span, names in found.items())
        return [f"range without scales: {ranges}"] if found else []

    def _kept(self) -> str:
        """The layers left in high precision, in words."""
        ends = [
            f"the {end}" if count == 1 else f"the {end} {count}" for end, count in (("first", self.first), ("last", self.last)) if count
        ]
        if not ends:
            return "no layer"
        return f"{' and '.join(ends)} layer{'s' if max(self.first, self.last) > 1 else ''}"


def _row(name: str, point: Quantizer | CallablePoint | str | None, points: FivePoint) -> Sequence[str]:
    """A point as a row of the table."""
    if point is None or (point == "same" and getattr(points, name.removesuffix("_bwd")) is None):
        return name, "high precision", "", "", ""
    if isinstance(point, str):
        again = "" if point == "same" else ", rounded again"
        return name, f"same as {name.removesuffix('_bwd')}{again}", "", "", ""
    if isinstance(point, CallablePoint):
        return name, str(point), "", "", ""
    facts = point.to_dict()
    after = "-" if point.transform is None else f"hadamard({point.transform.size})"
    return name, facts["format"], "-" if point.scale is None else str(point.scale), facts["rounding"], after
