"""`qsim bench NAME`: run a measurement. Each is a module of this folder, with `add_arguments(parser)` and `main(args)`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Any

_EXAMPLES = """\
examples:
  qsim bench                     list the measurements
  qsim bench quantize            GB/s compared with a copy of the same bytes
  qsim bench quantize --help     the options of this one
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "bench",
        help="measure speed",
        description="Run a measurement. Each has its own options.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="a measurement; without one, all are listed")
    command.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")
    command.set_defaults(run=run)


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
    module = importlib.import_module(f"{__name__}.{args.name}")
    own = argparse.ArgumentParser(prog=f"qsim bench {args.name}", description=module.__doc__)
    module.add_arguments(own)
    code: int = module.main(own.parse_args(args.options))
    return code
