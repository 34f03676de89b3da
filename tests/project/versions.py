"""Prints how many tests passed, failed and were skipped, by release of torch and folder, from what pytest writes with `--junitxml`.

`make versions` calls it: `python tests/project/versions.py FILE...`, each file in a folder named after a release. It fails if a test
did, or if none ran.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

KINDS = ("passed", "failed", "skipped")


def counts(file: Path) -> dict[str, Counter[str]]:
    """The numbers of tests by folder of `tests/` and by what became of them."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        folder = case.get("classname", "").split(".")[1]
        tags = {child.tag for child in case}
        kind = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        found.setdefault(folder, Counter())[kind] += 1
    return found


def main(files: list[Path]) -> None:
    """Print the table."""
    tables = {file.parent.name.removeprefix("torch-").partition("+")[0]: counts(file) for file in files}
    folders = sorted({folder for table in tables.values() for folder in table})
    rows = [["torch", *folders], *([release, *(_cell(table.get(name)) for name in folders)] for release, table in tables.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(" / ".join(KINDS))
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not all(table and not any(cell["failed"] for cell in table.values()) for table in tables.values()):
        sys.exit(1)


def _cell(cell: Counter[str] | None) -> str:
    return "-" if cell is None else " / ".join(str(cell[kind]) for kind in KINDS)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
