"""`qsim bench NAME`: run a measurement. Each is a module of this folder, with its `OPTIONS`, and `measure` of their values."""

from __future__ import annotations

import argparse
import importlib
import pkgutil

HELP = "measure speed"
DESCRIPTION = "Run a measurement. Each has its own options."
EXAMPLES = """\
examples:
  qsim bench                     list the measurements
  qsim bench quantize            GB/s compared with a copy of the same bytes
  qsim bench quantize --help     the options of this one
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("name", nargs="?", metavar="NAME", help="a measurement; without one, all are listed")
    command.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")


def measurements() -> list[str]:
    """The names of the measurements: the modules of this folder, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    known = measurements()
    if args.name is None:
        print("\n".join(known))
        return 0
    if args.name not in known:
        raise ValueError(f"no measurement is called {args.name!r}. There are: {', '.join(known)}")
    from qsim.cli.bench._options import add_options, read_options

    module = importlib.import_module(f"{__name__}.{args.name}")
    parser = argparse.ArgumentParser(prog=f"qsim bench {args.name}", description=module.__doc__)
    add_options(parser, module.OPTIONS)
    given = parser.parse_args(args.options)
    module.measure(read_options(given, module.OPTIONS)).show(as_json=given.json)
    return 0
