"""Options that several measurements share, and the output of all: a heading and tables, or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qsim.cli.bench import _settings
from qsim.cli.bench._settings import BenchSettings
from qsim.text.records import Values
from qsim.text.tables import Row, Table

#: A part of a measurement: its rows, and their columns.
Part = tuple[Callable[[], Iterable[Row]], Values]
#: The options that several measurements have: their metavar, and their help.
_OPTIONS = {
    "device": ("NAME", "cuda or cpu (default: cuda if available)"),
    "elements": ("N", "such as 4096 or 2^27 (default: {} on a GPU, {} on the CPU)"),
    "formats": ("A,B", "default: %(default)s"),
    "roundings": ("A,B", "default: %(default)s"),
    "dtypes": ("FROM:TO,…", "default: %(default)s"),
    "repeats": ("N", "number of times each call is timed (default: %(default)s)"),
}


def add_options(parser: argparse.ArgumentParser, *, elements: Sequence[str] = (), **defaults: Any) -> None:
    """Add shared options: `--device`, `--json` and those for which there are defaults.

    Args:
        parser: The parser.
        elements: The default of `--elements` on a GPU and on the CPU.
        **defaults: The defaults of other options, by their names.
    """
    for name, default in {"device": None, **({"elements": None} if elements else {}), **defaults}.items():
        metavar, text = _OPTIONS[name]
        kind = int if isinstance(default, int) else str
        shown = text.format(*elements) if name == "elements" else text
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=shown)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(elements_by_device=elements)


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add the option that selects parts."""
    parser.add_argument("--only", metavar="PART,…", help=f"some of {', '.join(parts)} (default: all)")


def read(args: argparse.Namespace, repeats: str | None = None) -> BenchSettings:
    """The settings of a measurement from the shared options that it has."""
    device = _settings.device(args.device)
    given = vars(args)
    formats = given.get("formats") if given.get("read_formats", True) else None
    return BenchSettings(
        device=device,
        elements=_settings.count(args.elements or args.elements_by_device[device.type == "cpu"], "--elements"),
        formats=_settings.formats(formats) if formats else {},
        roundings=_settings.roundings(args.roundings) if given.get("roundings") else {},
        dtypes=_settings.dtypes(args.dtypes) if given.get("dtypes") else (),
        repeats=_settings.count(repeats or args.repeats, "--repeats"),
    )


def chosen(args: argparse.Namespace, parts: Sequence[str]) -> list[str]:
    """The parts to run, in their own order."""
    named = parts if args.only is None else _settings.among(args.only, "--only", parts)
    return [part for part in parts if part in named]


def show_parts(args: argparse.Namespace, settings: BenchSettings, parts: Mapping[str, Part]) -> int:
    """Run parts, and print each as soon as it is done, or all of them as JSON."""
    if not args.json:
        print(settings.heading())
    everything: list[Row] = []
    for name, (measure, columns) in parts.items():
        rows = list(measure())
        everything += rows
        if not args.json:
            print(f"\n{name}\n{Table(tuple(rows), columns)}", flush=True)
    if args.json:
        print(json.dumps({"heading": settings.heading(), "rows": everything}, indent=2))
    return 0


def show(args: argparse.Namespace, heading: str, columns: Values, rows: Iterable[Row]) -> int:
    """Print a heading, then a table of rows, which may take long to measure; or JSON."""
    if not args.json:
        print(heading)
    table = Table(tuple(rows), columns, heading)
    print(table.to_json(indent=2) if args.json else table)
    return 0
