"""Check the output of `make dist` before anything is installed: `python tests/project/distribution.py dist`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]


def has_valid_metadata(wheel: zipfile.ZipFile) -> None:
    """Check that the metadata follows its specification, with the fields that an index shows."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(wheel.read(name), validate=True)
    assert metadata.name == "qsim-torch"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.license_expression == "BSD-3-Clause"
    assert metadata.summary
    assert metadata.provides_extra is not None
    assert {"cpu", "study"} <= {*metadata.provides_extra}


def has_every_module(wheel: zipfile.ZipFile) -> None:
    """Check that no module and no words of a study are missing from setup.cfg, and nothing else was added."""
    folders = {"qsim": ROOT, "qsim_kernels": ROOT / "kernels"}
    files = (
        (folder, path) for name, folder in folders.items() for ending in ("py", "ini") for path in (folder / name).rglob(f"*.{ending}")
    )
    due = {path.relative_to(folder).as_posix() for folder, path in files}
    due |= {f"{name}/py.typed" for name in folders}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == due, f"missing {sorted(due - found)}, not expected {sorted(found - due)}"


def has_sources(sdist: tarfile.TarFile) -> None:
    """Check that packagers can run the tests."""
    found = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/conftest.py", "docs/conf.py", "examples/train_gpt.py"} <= found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        has_valid_metadata(opened)
        has_every_module(opened)
    with tarfile.open(sdist) as unpacked:
        has_sources(unpacked)
    print(f"{wheel.name} and {sdist.name} have what they should")
