"""`qsim formats`: list the named formats, or show one of them with all its values."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

import torch

import qsim
from qsim.cli.text import hexadecimal, json_number, show, terminal_width
from qsim.formats import NAMED, TABULATED, Format, name_of, names
from qsim.formats.base import shortest
from qsim.formats.table import ListedValues
from qsim.scaling import block_formats
from qsim.scaling.block_formats import Block
from qsim.text.columns import aligned

#: Wider formats have too many codes to print.
CHART_BITS = 8
_CHART_COLUMNS = 8
_CHART_CELL = 14
#: Columns of the listing that are dropped on narrow terminals, in this order.
_LEFT_OUT_FIRST = ("epsilon", "smallest normal", "specials", "smallest")

HELP = "list the named formats, or show one with its values"
DESCRIPTION = "List the named formats.\nWith NAME: that format's properties, and each code's value if it has at most 8 bits."
EXAMPLES = """\
examples:
  qsim formats            every named format
  qsim formats e4m3       one of them: its facts, and every code's value
  qsim formats mxfp4      a block format: its elements, its scales, bits per element
  qsim formats e3m7ieee   any ExMy, intN or uintN, also if it is not in the table
  qsim formats --json     the same as JSON
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("name", nargs="?", metavar="NAME", help="a format, such as e4m3, bf16, e5m7ieee, int8")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    width = terminal_width()
    if args.name is None:
        everything = {name: facts(fmt) for name, fmt in (NAMED | TABULATED).items()}
        everything |= {name: block_facts(fmt) for name, fmt in block_formats.NAMED.items()}
        return show(f"{listing(width)}\n\n{listing_of_blocks(width)}", everything, as_json=args.json)
    fmt = block_formats.resolve(args.name)
    if isinstance(fmt, Block):
        return show(describe_block(fmt), block_facts(fmt), as_json=args.json)
    known, has_chart = names(fmt), fmt.bits <= CHART_BITS
    text = "\n".join([fmt.describe(), *_names_line(known), *([f"\n{chart(fmt, width)}"] if has_chart else [])])
    codes = [json_number(value) for value in code_values(fmt)] if has_chart else None
    return show(text, {**facts(fmt), "names": known, "values": codes}, as_json=args.json)


def facts(fmt: Format) -> dict[str, Any]:
    """The properties of a format, for JSON."""
    numbers = ("max", "min", "smallest_normal", "smallest", "epsilon")
    return {
        "format": repr(fmt),
        "bits": fmt.bits,
        **{name: json_number(getattr(fmt, name)) for name in numbers},
        "has_inf": fmt.has_inf,
        "has_nan": fmt.has_nan,
    }


def block_facts(fmt: Block) -> dict[str, Any]:
    """The properties of a block format, for JSON."""
    parts = {"element": name_of(fmt.element), "size": fmt.size, "scale": name_of(fmt.scale), "rule": fmt.rule}
    return {"format": repr(fmt), "bits": fmt.bits, **parts, "outer": None if fmt.outer is None else repr(fmt.outer)}


def describe_block(fmt: Block) -> str:
    """The properties of a block format, and a pointer to its elements' values."""
    known = [name for name, other in block_formats.NAMED.items() if other == fmt]
    return "\n".join(
        [fmt.describe(), *_names_line(known), f"\nqsim formats {shlex.quote(name_of(fmt.element))} shows the elements' values"]
    )


def _names_line(known: Sequence[str]) -> list[str]:
    """The line with a format's names, if it has any."""
    return [f"  {'names':<16} {', '.join(known)}"] if known else []


def listing_of_blocks(width: int | None = None) -> str:
    """The table of the named block formats."""
    rows = [["name", "block format", "bits per element"]]
    rows += [[name, repr(fmt), f"{fmt.bits:g}"] for name, fmt in block_formats.NAMED.items()]
    return aligned(rows, width=width)


def listing(width: int | None = None) -> str:
    """The table of the named formats; if it is wider than `width`, with fewer columns and a line that names the missing ones."""
    rows = [["name", "format", "bits", "max", "smallest normal", "smallest", "epsilon", "specials"]]
    for name, fmt in (NAMED | TABULATED).items():
        numbers = [f"{value:.7g}" for value in (fmt.max, fmt.smallest_normal, fmt.smallest, fmt.epsilon)]
        rows.append([name, _call(fmt), str(fmt.bits), *numbers, _specials(fmt)])
    left_out: list[str] = []
    text = aligned(rows, width=width)
    while width is not None and len(left_out) < len(_LEFT_OUT_FIRST) and max(map(len, text.splitlines())) > width:
        left_out.append(_LEFT_OUT_FIRST[len(left_out)])
        place = rows[0].index(left_out[-1])
        rows = [[*row[:place], *row[place + 1 :]] for row in rows]
        text = aligned(rows, width=width)
    if not left_out:
        return text
    note = f"Omitted for lack of space: {', '.join(left_out)}; qsim formats NAME shows them."
    return f"{text}\n{aligned([[note]], width=width)}"


def _call(fmt: Format) -> str:
    """The call that creates a format; a table's is too long for a listing."""
    return f"Table of {len(fmt.values())} values" if isinstance(fmt, ListedValues) else repr(fmt)


def _specials(fmt: Format) -> str:
    found = [word for word, there in (("inf", fmt.has_inf), ("NaN", fmt.has_nan)) if there]
    return ", ".join(found) or "-"


def code_values(fmt: Format) -> list[float]:
    """The value of every code, in the order of the codes."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    values: list[float] = qsim.decode(codes, fmt, dtype=torch.float64).tolist()
    return values


def chart(fmt: Format, width: int | None = None) -> str:
    """Every code with its value. A row starts with its first code; codes increase to the right."""
    values = [shortest(value) for value in code_values(fmt)]
    columns = min(_CHART_COLUMNS if max(map(len, values)) <= _CHART_CELL else _CHART_COLUMNS // 2, len(values))
    text = _chart(fmt, values, columns)
    while width is not None and columns > 1 and max(map(len, text.splitlines())) > width:
        columns //= 2
        text = _chart(fmt, values, columns)
    return text


def _chart(fmt: Format, values: Sequence[str], columns: int) -> str:
    rows = [["code", *(f"+{column}" for column in range(columns))]]
    rows += [[hexadecimal(first, fmt), *values[first : first + columns]] for first in range(0, len(values), columns)]
    return aligned(rows, indent="  ")
