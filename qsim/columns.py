"""Rows of text as aligned columns, for whatever prints a table."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int | None = None, indent: str = "") -> str:
    """Rows as aligned columns.

    Args:
        rows: The cells. A row that is shorter than the first one ends in a remark, which may be of any length.
        left: How many columns begin at the left; the others end at the right. All of them unless told otherwise.
        indent: What stands before each row.

    Example:
        >>> print(aligned([["work", "GB/s", "ratio"], ["copy", "7.5", "1.0"], ["paste", "12.3", "1.6"], ["cut", "not measured"]], left=1))
        work   GB/s  ratio
        copy    7.5    1.0
        paste  12.3    1.6
        cut    not measured
    """
    count = len(rows[0]) if rows else 0
    split = [(row, "") if len(row) == count else (row[:-1], row[-1]) for row in rows]
    widths = [max(len(cells[place]) for cells, _ in split if place < len(cells)) for place in range(count)]
    turns = [str.ljust if left is None or place < left else str.rjust for place in range(count)]
    lines = ([*(turn(cell, width) for turn, cell, width in zip(turns, cells, widths, strict=False)), rest] for cells, rest in split)
    return "\n".join((indent + "  ".join(line)).rstrip() for line in lines)
