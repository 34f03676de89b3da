"""Give an empty environment pip and what a wheel requires, as links: `python tests/project/link_requirements.py dist/*.whl SITE_PACKAGES`.

`make dist` tries the wheel with its requirements and nothing else. Installing these again would copy more than a gigabyte of torch.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement


def requirements_of(wheel: Path) -> list[Requirement]:
    """The requirements in a wheel's metadata."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(opened.read(name)).requires_dist or []


def installed(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """The installed distributions that meet requirements, and what these require in turn; of extras, only those that are asked for."""
    found: dict[str, Distribution] = {}
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        own = found[requirement.name] = distribution(requirement.name)
        assert requirement.specifier.contains(own.version, prereleases=True), f"{requirement}: {own.version} is installed"
        further = [Requirement(line) for line in own.requires or []]
        waiting += [(other, extra) for extra in ("", *requirement.extras) for other in further if other.name not in found]
    return found


def link(own: Distribution, folder: Path) -> None:
    """Link a distribution's packages, modules and metadata into a folder."""
    for name in {file.parts[0] for file in own.files or []} - {"..", "__pycache__"}:
        target = folder / name
        if not target.exists():
            target.symlink_to(Path(str(own.locate_file(name))).resolve())


if __name__ == "__main__":
    wheel, site_packages = map(Path, sys.argv[1:])
    linked = installed(requirements_of(wheel))
    for found in (distribution("pip"), *linked.values()):
        link(found, site_packages)
    print(f"{wheel.name} requires {', '.join(sorted(linked))}")
