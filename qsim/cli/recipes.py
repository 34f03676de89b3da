"""`qsim recipes`: list the recipes for models, or show one of them with all its points."""

from __future__ import annotations

import argparse
import json
from typing import Any

from qsim import recipes
from qsim.cli.text import terminal_width
from qsim.recipes.named import SHOWN_IN

_EXAMPLES = """\
examples:
  qsim recipes                        every recipe
  qsim recipes nvfp4                  one of them: its points, layers in high precision, its source
  qsim recipes "nvfp4.with_(last=4)"  with arguments, as in Python
  qsim recipes "weight_only('e4m1')"  a recipe for any format; by name only, it is shown in E4M3
  qsim recipes mxfp8 --json           as JSON, which qsim.recipes.Recipe.from_dict takes
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "recipes",
        help="list the recipes for models, or show one",
        description="List the recipes.\nWith NAME: that recipe's points, the layers it keeps in high precision, and its source.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="a recipe, such as mxfp8, or the call that creates it")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.json:
        names = recipes.NAMED if args.name is None else (args.name,)
        found = {name: recipes.resolve(name, SHOWN_IN).to_dict() for name in names}
        print(json.dumps(found if args.name is None else found[args.name], indent=2))
    else:
        width = terminal_width()
        print(recipes.listing(width) if args.name is None else recipes.resolve(args.name, SHOWN_IN).describe(width))
    return 0
