"""Open every page of the built site in Chromium, on a phone and a laptop, light and dark: what is cut off, and what axe-core objects to.

    npm install --prefix /tmp/axe axe-core
    PYTHONPATH=tests python tests/support/site_browser.py docs/_build/html /tmp/axe/node_modules/axe-core/axe.min.js

Without the second argument, accessibility is not tested. With a third, that folder gets pictures of each page. Of reports of studies and of
pages of source code, one is opened.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.chromium import Chromium

WIDTHS, THEMES = (390, 1280), ("light", "dark")
#: Pictures end here, in pixels.
_HIGHEST = 6000
#: Elements that reach beyond the window, unless something around them scrolls or hides its excess.
_CUT_OFF = """
(() => {
  const clipped = (element) => {
    for (let above = element; above && above !== document.body; above = above.parentElement)
      if (getComputedStyle(above).overflowX !== "visible" || getComputedStyle(above).position === "fixed") return true;
    return false;
  };
  return [...document.querySelectorAll("main *, article *, header *")]
    .filter((element) => element.getBoundingClientRect().right > innerWidth + 1 && element.offsetWidth > 1 && !clipped(element))
    .map((element) => `${element.tagName.toLowerCase()}.${element.className} ${element.textContent.trim().slice(0, 40)}`).slice(0, 3);
})()
"""
_AXE = """
axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => violations.flatMap(({ id, nodes }) =>
  nodes.slice(0, 3).map(({ target, html }) => `${id} ${target.join(" ")} ${html.slice(0, 100)}`)))
"""


def pages(site: Path) -> list[Path]:
    """The pages that are opened."""
    names = [page.relative_to(site) for page in sorted(site.rglob("*.html"))]
    own = [name for name in names if name.parts[0] not in ("_modules", "studies")]
    kinds = [next((name for name in names if name.parts[0] == kind), None) for kind in ("_modules", "studies")]
    return [site / name for name in (*own, *kinds) if name is not None]


def faults(browser: Chromium, page: Path, axe: str | None, picture: Path | None = None) -> Iterator[str]:
    """Faults of a page, each with the width and the theme."""
    browser.open(page.resolve().as_uri())
    if axe is not None:
        browser.evaluate(axe)
    for width in WIDTHS:
        for theme in THEMES:
            browser.resize(width, theme)
            if picture is not None:
                height = min(browser.evaluate("document.documentElement.scrollHeight"), _HIGHEST)
                browser.screenshot(picture.with_name(f"{picture.name}-{width}-{theme}.png"), width, height)
            for text in browser.evaluate(_CUT_OFF) if theme == "light" else []:
                yield f"{width} cut off: {text}"
            for text in browser.evaluate(_AXE) if axe is not None else []:
                yield f"{width} {theme} {text}"


def main() -> None:
    """Print all faults, and fail if there are any."""
    site, script, pictures = [*map(Path, sys.argv[1:]), None, None][:3]
    axe = script.read_text(encoding="utf-8") if script is not None else None
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        browser = Chromium(Path(folder))
        for page in pages(site):
            name = page.relative_to(site)
            picture = pictures / "_".join(name.with_suffix("").parts) if pictures is not None else None
            for fault in faults(browser, page, axe, picture):
                print(f"{name} {fault}", flush=True)
                count += 1
        browser.close()
    print(f"{len(pages(site))} pages, {count} faults")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
