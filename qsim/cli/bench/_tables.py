"""Results as rows of plain values, and their printing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qsim.text.columns import aligned

#: The values of a row, as printed in JSON. A row without numbers has a "note" with the reason instead.
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        key: The key of its values in a row.
        show: Formats a number as text. Columns with numbers are right-aligned.
    """

    title: str
    key: str
    show: Callable[[Any], str] | None = None


def whole(value: float) -> str:
    """A number without decimals."""
    return f"{value:.0f}"


def tenths(value: float) -> str:
    """A number with one decimal."""
    return f"{value:.1f}"


def hundredths(value: float) -> str:
    """A number with two decimals."""
    return f"{value:.2f}"


def thousandths(value: float) -> str:
    """A number with three decimals."""
    return f"{value:.3f}"


def render(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Format rows as a table of fixed width.

    Args:
        rows: The rows.
        columns: The columns to show: texts first, then numbers. A row's note replaces its numbers.

    Example:
        >>> columns = [Column("work", "work"), Column("GB/s", "speed", tenths)]
        >>> print(render([{"work": "copy", "speed": 12.34}, {"work": "paste", "note": "not done"}], columns))
        work   GB/s
        copy   12.3
        paste  not done
    """
    texts = [column for column in columns if column.show is None]
    numbers = [column for column in columns if column.show is not None]
    lines = [[str(row.get(column.key, "")) for column in texts] + _figures(row, numbers) for row in rows]
    return aligned([[column.title for column in (*texts, *numbers)], *lines], left=len(texts))


def _figures(row: Row, numbers: Sequence[Column]) -> list[str]:
    if "note" in row:
        return [row["note"]]
    return [column.show(row[column.key]) for column in numbers if column.show is not None]
