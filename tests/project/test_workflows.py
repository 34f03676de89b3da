"""Workflows of the public host run commands that exist, on the Pythons that setup.cfg allows."""

from __future__ import annotations

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_commands_exist(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    targets = re.findall(r"\bmake ([a-z]+)", text)
    scripts = re.findall(r"\bbash (\S+)", text) + re.findall(r"\bpython (\S+\.py)", text)
    assert targets or scripts
    known = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(targets) <= set(known)
    assert all((ROOT / script).is_file() for script in scripts)


def test_every_python_that_is_allowed_is_tested() -> None:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    oldest = int(settings["options"]["python_requires"].removeprefix(">=3."))
    listed = re.search(r"python: \[(.*?)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    assert listed is not None
    minors = [int(version) for version in re.findall(r'"3\.(\d+)"', listed[1])]
    assert minors == list(range(oldest, oldest + len(minors)))
    assert len(minors) >= 5


def test_the_oldest_torch_that_is_allowed_is_tested() -> None:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    oldest = re.search(r"torch>=([\d.]+)", settings["options"]["install_requires"])
    releases = re.search(r"^RELEASES := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert oldest is not None
    assert releases is not None
    versions = [tuple(map(int, release.partition("+")[0].split("."))) for release in releases[1].split()]
    assert versions == sorted(versions)
    assert versions[0][:2] == tuple(map(int, oldest[1].split(".")))
    assert len(versions) >= 4


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.nn.calls.test_x" name="a"/><testcase classname="tests.nn.test_y" name="b"><failure/></testcase>
<testcase classname="tests.random.test_z" name="c"><skipped/></testcase></testsuite></testsuites>"""


def test_results_by_release_and_folder(tmp_path: Path) -> None:
    files = [tmp_path / name / "tests.xml" for name in ("torch-2.9.1+3.5.1", "torch-2.15.0+3.7.1")]
    for file, text in zip(files, (JUNIT, "<testsuites/>"), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    done = subprocess.run([sys.executable, ROOT / "tests/project/versions.py", *files], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "passed / failed / skipped",
        "torch   nn         random",
        "2.9.1   1 / 1 / 0  0 / 0 / 1",
        "2.15.0  -          -",
    ]
    assert done.returncode == 1
