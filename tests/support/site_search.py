"""The site's search: `python tests/support/site_search.py docs/_build/html --all` prints the rank of the right page for twenty queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

#: Queries, some of them misspelled, and the page that answers each. None is a term of the glossary: when Sphinx builds again, it forgets
#: the index entries of pages that did not change.
QUERIES = {
    "install": "start",
    "loss is nan": "cookbook/training",
    "stochastic rounding": "cookbook/rounding",
    "stochstic ronding": "cookbook/rounding",
    "batch size": "guides/batch-size",
    "resume on more GPUs": "cookbook/running",
    "torch.compile": "guides/compile",
    "qsim.quantize": "api/rounding",
    "quantise": "api/rounding",
    "AdamW": "api/optim",
    "optimzer": "api/optim",
    "hugingface": "guides/hugging-face",
    "a format of my own": "guides/own-format",
    "SystemVerilog": "cookbook/hardware",
    "acumulator": "api/accumulators",
    "fsdp": "guides/distributed",
    "lower()": "api/qtorch",
    "export checkpoint": "guides/serving",
    "reproducable": "guides/reproducibility",
    "my run diverges": "guides/diverged",
}
#: A page that answers a query is among so many first.
_FIRST = 3


class Found(NamedTuple):
    """Answer to a query.

    Attributes:
        pages: Pages and places in them, best first.
        query: The query as it was understood.
        corrected: Whether that differs from what was asked.
    """

    pages: list[str]
    query: str
    corrected: bool

    def rank(self, page: str) -> int | None:
        """The place of a page among the results, from 1."""
        names = [place.partition("#")[0] for place in self.pages]
        return names.index(page) + 1 if page in names else None


def search(node: str, site: Path, queries: Sequence[str]) -> list[Found]:
    """Ask the search of a built site, in Node."""
    script = Path(__file__).with_suffix(".cjs")
    done = subprocess.run([node, script, site, json.dumps(queries)], capture_output=True, text=True, check=True)
    return [Found(**answer) for answer in json.loads(done.stdout)]


def main() -> None:
    """Print the ranks, and fail if a page is missing or too far down."""
    node = shutil.which("node")
    if node is None:
        print("search not tested: Node is not installed")
        return
    found = search(node, Path(sys.argv[1]), list(QUERIES))
    ranks = [answer.rank(page) for answer, page in zip(found, QUERIES.values(), strict=True)]
    is_bad = [rank is None or rank > _FIRST for rank in ranks]
    if any(is_bad) or "--all" in sys.argv:
        for (query, page), answer, rank in zip(QUERIES.items(), found, ranks, strict=True):
            print(f"{rank or 'missing'}  {query}{f' → {answer.query}' if answer.corrected else ''}: {page}")
    sys.exit(any(is_bad))


if __name__ == "__main__":
    main()
