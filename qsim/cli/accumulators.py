"""`qsim accumulators`: the named accumulators, or one of them with its properties."""

from __future__ import annotations

import argparse
import json
from typing import Any

from qsim import accumulators
from qsim.accumulators import Accumulator
from qsim.cli.text import terminal_width

_EXAMPLES = """\
examples:
  qsim accumulators                         every accumulator that has a name, and how its model is known
  qsim accumulators h100_fp8                one of them: its steps, and the source of its model
  qsim accumulators "Rounded('fp16', 64)"   any accumulator, by the call that creates it
  qsim accumulators --json                  the same for programs
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "accumulators",
        help="list how matrix units of chips add, or show one",
        description="List the named accumulators.\nWith NAME: that accumulator's steps, and the source of its model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="an accumulator, such as h100_fp8, or the call that creates it")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.name is None:
        found = {name: facts(known) for name, known in accumulators.NAMED.items()}
        print(json.dumps(found, indent=2) if args.json else accumulators.listing(terminal_width()))
        return 0
    known = accumulators.resolve(args.name)
    if args.json:
        print(json.dumps(facts(known), indent=2))
        return 0
    print(known.describe())
    evidence, source = accumulators.EVIDENCE.get(accumulators.name_of(known), ("", ""))
    if evidence:
        print(f"  {'model':<16} {evidence}: {source}")
    return 0


def facts(accumulator: Accumulator) -> dict[str, Any]:
    """The properties of an accumulator, for JSON."""
    evidence, source = accumulators.EVIDENCE.get(accumulators.name_of(accumulator), (None, None))
    return {"accumulator": repr(accumulator), "evidence": evidence, "source": source}
