"""Tables of plain values: measurements, and the numbers of a study."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qsim.text.records import Records, Values, plain

#: A row's values by their keys. A row without numbers has a "note" with the reason instead.
Row = dict[str, Any]


@dataclass(frozen=True)
class Quantity:
    """A column of numbers.

    Attributes:
        key: The key of the numbers in a row.
        places: The number of decimals.
        scale: A factor, for other units.
        missing: The text of `None`.
    """

    key: str
    places: int = 0
    scale: float = 1.0
    missing: str = ""

    def of(self, row: Mapping[str, Any]) -> float:
        """The number; NaN if there is none."""
        number = row.get(self.key)
        return math.nan if number is None else float(number)

    def __call__(self, row: Mapping[str, Any]) -> str:
        """The number as text."""
        return self.missing if row.get(self.key) is None else f"{self.of(row) * self.scale:.{self.places}f}"


@dataclass(frozen=True)
class Table(Records[Row]):
    """Rows of plain values: dictionaries, with the columns in which they are printed.

    Attributes:
        columns: The key or the `Quantity` of each column, by its title: texts first, then numbers, which a row's note replaces.
        heading: Subject, for pages and JSON.

    Example:
        >>> rows = ({"work": "copy", "speed": 12.34}, {"work": "paste", "note": "not done"})
        >>> table = Table(rows, {"work": "work", "GB/s": Quantity("speed", 1)}, "Speed")
        >>> print(table)
        work   GB/s
        copy   12.3
        paste  not done
        >>> table.filter(work="copy").to_dict()
        {'heading': 'Speed', 'rows': [{'work': 'copy', 'speed': 12.34}]}
    """

    columns: Values = field(repr=False)
    heading: str = ""

    NAME: ClassVar[str] = "rows"

    @classmethod
    def of(cls, heading: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
        """A table of texts.

        Args:
            heading: Its heading.
            titles: The titles of its columns.
            rows: The texts of each row.

        Raises:
            ValueError: If two columns have the same title, or a row has another number of texts.

        Example:
            >>> from qsim import studies
            >>> print(studies.Table.of("Losses", ["format", "loss"], [["e4m3", "0.31"]]).markdown())
            | format | loss |
            | --- | --- |
            | e4m3 | 0.31 |
        """
        if len(set(titles)) < len(titles):
            raise ValueError(f"Table: each column needs a title of its own, got {', '.join(titles)}")
        return cls(tuple(dict(zip(titles, row, strict=True)) for row in rows), {title: title for title in titles}, heading)

    def to_dict(self) -> dict[str, Any]:
        """The heading, if there is one, and the rows, for JSON."""
        return {**({"heading": self.heading} if self.heading else {}), self.NAME: [plain(row) for row in self]}

    def rows(self) -> list[Row]:
        """The rows."""
        return [*self.records]

    def _columns(self) -> Values:
        return self.columns

    def _right(self) -> Collection[str]:
        return [title for title, value in self.columns.items() if isinstance(value, Quantity)]

    def _losses(self) -> Values:
        return {value.key: value.of for value in self.columns.values() if isinstance(value, Quantity)}

    def _key(self) -> tuple[str, ...]:
        return tuple(value for value in self.columns.values() if isinstance(value, str))

    def _line(self, record: Row) -> list[str]:
        if "note" not in record:
            return super()._line(record)
        return [*map(str, self.key(record)), record["note"]]
