"""Versions of the site: `versions.json` lists them, and `_static/versions.js` makes a menu of the list.

A build is a site with one version. `python docs/_ext/versions.py SITE RELEASES` adds the sites of releases to it, each in a folder of its
own: RELEASES holds them as `v1.0.0.tar.gz`.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from sphinx.application import Sphinx

_NEWEST = "development"
_RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)\.tar\.gz")


def add(site: Path, releases: Path) -> list[str]:
    """Unpack the sites of releases into a site, list them in all of its versions, and return their names, newest first."""
    archives = {tuple(map(int, match.groups())): path for path in releases.iterdir() if (match := _RELEASE.fullmatch(path.name))}
    names = [archives[number].name.removesuffix(".tar.gz") for number in sorted(archives, reverse=True)]
    for name in names:
        with tarfile.open(releases / f"{name}.tar.gz") as archive:
            archive.extractall(site / name, filter="data")
    write(site, names)
    return names


def write(site: Path, names: Sequence[str]) -> None:
    """Write the list: into the site, and into the folder of each release. Paths lead from the version that is shown to the others."""
    for shown in (None, *names):
        up = "../" if shown is not None else ""
        paths = {_NEWEST: up, **{name: f"{up}{name}/" for name in names}}
        entries = [{"name": name, "path": "" if name == (shown or _NEWEST) else path} for name, path in paths.items()]
        (site / (shown or "") / "versions.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def list_one(app: Sphinx, error: Exception | None) -> None:
    """List the only version of a new site."""
    if error is None and app.builder.format == "html":
        write(Path(app.outdir), [])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("build-finished", list_one)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    print("\n".join(add(*map(Path, sys.argv[1:]))))
