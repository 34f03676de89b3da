"""A package index of the files that `make dist` built: `python tests/project/simple_index.py dist build/index`.

`pip install --index-url file://…/build/index qsim-torch` then chooses between wheel and sdist as it would on a public index.
"""

from __future__ import annotations

import hashlib
import html
import shutil
import sys
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename


def page(title: str, links: list[tuple[str, str]]) -> str:
    """A page of links, as the simple repository API wants it."""
    lines = [f'<a href="{html.escape(address)}">{html.escape(text)}</a><br>' for address, text in links]
    return "\n".join(["<!DOCTYPE html>", f"<html><head><title>{html.escape(title)}</title></head><body>", *lines, "</body></html>\n"])


def write(files: list[Path], index: Path) -> None:
    """Copy the files into folders by project, each with a page of links and checksums."""
    projects: dict[str, list[Path]] = {}
    for file in files:
        name, *_ = parse_wheel_filename(file.name) if file.suffix == ".whl" else parse_sdist_filename(file.name)
        projects.setdefault(canonicalize_name(name), []).append(file)
    index.mkdir(parents=True)
    (index / "index.html").write_text(page("index", [(f"{name}/", name) for name in projects]), encoding="utf-8")
    for name, own in projects.items():
        folder = index / name
        folder.mkdir()
        for file in own:
            shutil.copy(file, folder)
        links = [(f"{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}", file.name) for file in own]
        (folder / "index.html").write_text(page(name, links), encoding="utf-8")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    found = sorted([*source.glob("*.whl"), *source.glob("*.tar.gz")])
    assert len(found) == 2, f"a wheel and an sdist, got {[file.name for file in found]}"
    write(found, target)
