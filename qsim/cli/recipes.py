"""`qsim recipes`: list the recipes for models, or show one of them with all its points."""

from __future__ import annotations

import argparse

from qsim import recipes
from qsim.cli.text import show, terminal_width
from qsim.recipes.named import SHOWN_IN

HELP = "list the recipes for models, or show one"
DESCRIPTION = "List the recipes.\nWith NAME: that recipe's points, the layers it keeps in high precision, and its source."
EXAMPLES = """\
examples:
  qsim recipes                        every recipe
  qsim recipes nvfp4                  one of them: its points, layers in high precision, its source
  qsim recipes "nvfp4.with_(last=4)"  with arguments, as in Python
  qsim recipes "weight_only('e4m1')"  a recipe for any format; by name only, it is shown in E4M3
  qsim recipes mxfp8 --json           as JSON, which qsim.recipes.Recipe.from_dict takes
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("name", nargs="?", metavar="NAME", help="a recipe, such as mxfp8, or the call that creates it")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    width = terminal_width()
    if args.name is None:
        found = {name: recipes.resolve(name, SHOWN_IN).to_dict() for name in recipes.NAMED}
        return show(recipes.listing(width), found, as_json=args.json)
    recipe = recipes.resolve(args.name, SHOWN_IN)
    return show(recipe.describe(width), recipe.to_dict(), as_json=args.json)
