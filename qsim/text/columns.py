"""Rows of text as aligned columns, for whatever prints a table."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest

_GAP = "  "


def aligned(
    rows: Sequence[Sequence[str]], left: int | None = None, indent: str = "", width: int | None = None, right: Collection[int] = ()
) -> str:
    """Align the columns of rows.

    Args:
        rows: The cells. A row that is shorter than the first one ends in a remark, which may be of any length.
        left: How many columns begin at the left; the others end at the right. All of them by default.
        indent: The text before each row.
        width: Wrap cells between words so that no line is longer, if the longest words allow it. Only for rows without remarks.
        right: Columns that end at the right, wherever they are.

    Example:
        >>> print(aligned([["work", "GB/s", "ratio"], ["copy", "7.5", "1.0"], ["paste", "12.3", "1.6"], ["cut", "not measured"]], left=1))
        work   GB/s  ratio
        copy    7.5    1.0
        paste  12.3    1.6
        cut    not measured
        >>> print(aligned([["fit", "the value nearest to the ratio"], ["ceil", "the next one above"]], width=20))
        fit   the value
              nearest to the
              ratio
        ceil  the next one
              above
    """
    rows = rows if width is None else _wrapped(rows, width - len(indent))
    count = len(rows[0]) if rows else 0
    split = [(row, "") if len(row) == count else (row[:-1], row[-1]) for row in rows]
    widths = [max(len(cells[place]) for cells, _ in split if place < len(cells)) for place in range(count)]
    turns = [str.ljust if (left is None or place < left) and place not in right else str.rjust for place in range(count)]
    lines = ([*(turn(cell, width) for turn, cell, width in zip(turns, cells, widths, strict=False)), rest] for cells, rest in split)
    return "\n".join((indent + _GAP.join(line)).rstrip() for line in lines)


def _wrapped(rows: Sequence[Sequence[str]], width: int) -> list[Sequence[str]]:
    """Rows whose cells are split into several rows, as far as it takes."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    room = width - len(_GAP) * (len(columns) - 1)
    while sum(widths) > room and widths != least:
        # The widest column that can still be narrower.
        _, place = max((size, place) for place, size in enumerate(widths) if size > least[place])
        widths[place] -= 1
    found: list[Sequence[str]] = []
    for row in rows:
        cells = [_lines(cell, size) for cell, size in zip(row, widths, strict=True)]
        found += zip_longest(*cells, fillvalue="")
    return found


def _lines(text: str, width: int) -> list[str]:
    """A text in lines of a width, as it is if it fits; words stay whole."""
    return [text] if len(text) <= width else textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
