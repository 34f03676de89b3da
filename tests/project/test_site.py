"""Extensions and checks of the site that need no full build: versions, notebooks, weights."""

from __future__ import annotations

import functools
import http.server
import json
import runpy
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chromium import Chromium
from support.site_weights import unsized, weight

pytest.importorskip("sphinx")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = '<html data-content_root="./"><a class="sidebar-brand">qsim</a><script src="_static/versions.js"></script></html>'


def extension(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "_ext" / f"{name}.py"))


def build(folder: Path, *pages: str) -> Path:
    """A site with some pages."""
    (folder / "_static").mkdir(parents=True)
    shutil.copy(DOCS / "_static" / "versions.js", folder / "_static")
    for page in pages:
        (folder / page).write_text(PAGE)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The site of the main branch with those of two releases."""
    releases = tmp_path / "releases"
    releases.mkdir()
    for name in ("v0.9.0", "v0.10.0"):
        folder = build(tmp_path / name, "index.html", *["start.html"] * (name == "v0.10.0"))
        with tarfile.open(releases / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(folder, arcname=".")
    site = build(tmp_path / "site", "index.html", "start.html")
    (releases / "notes.txt").touch()
    assert extension("versions")["add"](site, releases) == ["v0.10.0", "v0.9.0"]
    return site


def listed(folder: Path) -> dict[str, str]:
    entries = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry["path"] for entry in entries}


def test_each_version_lists_the_paths_to_all_others(site: Path) -> None:
    assert list(listed(site).items()) == [("development", ""), ("v0.10.0", "v0.10.0/"), ("v0.9.0", "v0.9.0/")]
    assert listed(site / "v0.9.0") == {"development": "../", "v0.10.0": "../v0.10.0/", "v0.9.0": ""}
    for folder in (site, site / "v0.9.0", site / "v0.10.0"):
        assert all((folder / path / "index.html").exists() for path in listed(folder).values())


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The address under which a server of this machine shows the site."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_the_menu_leads_to_the_same_page_of_another_version(address: str, tmp_path: Path) -> None:
    browser = Chromium(tmp_path / "profile")
    browser.open(f"{address}start.html")
    menu = "document.querySelector('select.versions')"
    browser.wait_until(f"{menu} !== null")
    # The oldest version has no such page.
    for version, page in {"v0.10.0": "/v0.10.0/start.html", "v0.9.0": "/v0.9.0/index.html", "development": "/index.html"}.items():
        choose = f"{menu}.value = [...{menu}.options].find(({{ text }}) => text === '{version}').value"
        browser.evaluate(f"{choose}; {menu}.dispatchEvent(new Event('change')); 0")
        browser.wait_until(f"location.pathname === '{page}' && {menu} !== null")
        assert browser.evaluate(f"{menu}.selectedOptions[0].text") == version
    browser.close()


def test_a_notebook_becomes_text_and_blocks_of_code(tmp_path: Path) -> None:
    cells = [("markdown", ["# Title\n", "Text."]), ("code", ["x = 1\n", "x"]), ("markdown", ["## More"])]
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}))
    assert extension("notebooks")["text"](notebook, "../a.ipynb") == (
        "# Title\nText.\n\n{download}`Download this notebook <../a.ipynb>`\n\n```python\nx = 1\nx\n```\n\n## More"
    )


def test_every_notebook_has_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "course").glob("*.md"))
    notebooks = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").rglob("*.ipynb"))]
    assert len(notebooks) == 5
    assert [name for name in notebooks if f"{{notebook}} ../../{name}\n" not in pages] == []


def test_a_page_weighs_what_is_transferred_to_show_it(tmp_path: Path) -> None:
    (tmp_path / "light.svg").write_text("<svg/>")
    (tmp_path / "dark.svg").write_text("<svg>dark</svg>")
    (tmp_path / "site.js").write_text("1;")
    page = tmp_path / "page.html"
    page.write_text(
        '<link rel="icon" href="icon.svg"><script src="site.js?v=1"></script><script src="https://example.org/x.js"></script>'
        '<img class="only-light" src="light.svg" width="1" height="1" loading="lazy"><img class="only-dark" src="dark.svg">'
    )
    found = weight(page)
    assert found.pictures == weight(tmp_path / "light.svg").text
    assert found.code == weight(tmp_path / "site.js").text
    assert found.whole == found.text + found.code + found.pictures
    assert unsized(page) == ['<img class="only-dark" src="dark.svg">']
