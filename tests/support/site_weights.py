"""Weights of the site's pages: `python tests/support/site_weights.py docs/_build/html --all` prints the heaviest.

A page weighs what a browser transfers to show all of it, compressed as hosts do: the page, styles, scripts, and pictures in one of both
themes. The others are loaded lazily, that is, not at all.
"""

from __future__ import annotations

import gzip
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

#: Bytes that a page may weigh.
HEAVIEST = 200_000
_TAG = re.compile(r"<(?:script|img|link)\b[^>]*>")
_ADDRESS = re.compile(r'\b(?:src|href)="([^"#?:]+)[^":]*"')
_NOT_SHOWN = re.compile(r'class="[^"]*\bonly-dark\b|rel="(?!stylesheet")')


class Weight(NamedTuple):
    """Compressed bytes of a page, by what they are."""

    text: int
    code: int
    pictures: int

    @property
    def whole(self) -> int:
        """All bytes."""
        return sum(self)


@cache
def _compressed(file: Path) -> int:
    return len(gzip.compress(file.read_bytes(), compresslevel=6))


def weight(page: Path) -> Weight:
    """The weight of a page."""
    tags = [tag for tag in _TAG.findall(page.read_text(encoding="utf-8")) if not _NOT_SHOWN.search(tag)]
    named = {(page.parent / unquote(match[1])).resolve(): tag for tag in tags if (match := _ADDRESS.search(tag))}
    pictures = {file for file, tag in named.items() if tag.startswith("<img")}
    return Weight(_compressed(page.resolve()), sum(map(_compressed, named.keys() - pictures)), sum(map(_compressed, pictures)))


def unsized(page: Path) -> list[str]:
    """Pictures that move the text below them when they arrive, or are loaded before they are near; Sphinx's own are small."""
    pictures = [tag for tag in _TAG.findall(page.read_text(encoding="utf-8")) if tag.startswith("<img") and "_static/" not in tag]
    return [tag for tag in pictures if not all(f" {name}=" in tag for name in ("width", "height", "loading"))]


def main() -> None:
    """Print what is too heavy, and fail if something is."""
    site = Path(sys.argv[1])
    weights = {page: weight(page) for page in site.rglob("*.html")}
    ranked = sorted(weights, key=lambda page: weights[page].whole, reverse=True)
    bad = [page for page in ranked if weights[page].whole > HEAVIEST]
    for page in ranked[:20] if "--all" in sys.argv else bad:
        print(f"{weights[page].whole:>7,} bytes  {page.relative_to(site)}: {weights[page]}")
    tags = [(page, tag) for page in ranked for tag in unsized(page)]
    for page, tag in tags:
        print(f"{page.relative_to(site)}: a picture without a size, or not lazy: {tag}")
    sys.exit(bool(bad or tags))


if __name__ == "__main__":
    main()
