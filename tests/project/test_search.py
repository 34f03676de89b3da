"""The site's search, on a small site: order, spelling, and one result per page. `make docs` asks the whole site twenty queries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.emitted import tool
from support.site_search import QUERIES, search

pytest.importorskip("sphinx")

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "changelog": "Changelog\n=========\n\nStochastic rounding\n-------------------\n\nRounding, seeds and kernels were changed.\n",
    "guides/rounding": "Stochastic rounding\n===================\n\nWords of the page.\n\nWith few bits\n-------------\n\nKahan.\n",
    "start": "Start\n=====\n\nInstall\n-------\n\nStochastic numbers, and rounding.\n\nHugging Face\n------------\n\n* bits\n",
    "api/optim": "Optimizers\n==========\n\n.. py:class:: qsim.optim.AdamW\n\n.. py:method:: qsim.optim.AdamW.step\n",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sphinx.cmd.build import build_main

    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name, text in PAGES.items():
        page = source / f"{name}.rst"
        page.parent.mkdir(exist_ok=True)
        page.write_text(":orphan:\n\n" + text)
    (source / "index.rst").write_text("Index\n=====\n")
    (source / "conf.py").write_text("language = 'en'\n")
    assert build_main(["-q", str(source), str(built)]) == 0
    shutil.copy(DOCS / "_static" / "search.js", built / "_static")
    return built


def first(site: Path, query: str) -> tuple[str | None, str]:
    """The first result of a query, and the query as it was understood."""
    (found,) = search(tool("node"), site, [query])
    return found.pages[0] if found.pages else None, found.query


def test_pages_that_teach_come_before_listings(site: Path) -> None:
    (found,) = search(tool("node"), site, ["stochastic rounding"])
    assert found.pages == ["guides/rounding", "start", "changelog#stochastic-rounding"]
    assert not found.corrected


@pytest.mark.parametrize(
    ("query", "page", "understood"),
    [
        ("with few bits", "guides/rounding#with-few-bits", "bits"),
        ("how do I install it?", "start#install", "install"),
        ("AdamW", "api/optim#qsim.optim.AdamW", "adamw"),
        ("adamw step", "api/optim#qsim.optim.AdamW.step", "adamw step"),
        ("huggingface", "start#hugging-face", "huggingface"),
        # Misspelled: a letter too few, one replaced, one too many, two swapped.
        ("stochstic rounding", "guides/rounding", "stochastic rounding"),
        ("optimisers", "api/optim", "optimizers"),
        ("kahhan", "guides/rounding", "kahan"),
        ("intsall", "start#install", "install"),
        # Nothing is that near.
        ("xylophone", None, "xylophone"),
        ("ka", None, "ka"),
    ],
)
def test_a_query_finds_its_page(site: Path, query: str, page: str | None, understood: str) -> None:
    assert first(site, query) == (page, understood)


def test_queries_name_pages_of_the_site() -> None:
    assert len(QUERIES) == 20
    assert [page for page in QUERIES.values() if not (DOCS / f"{page}.md").exists()] == []
