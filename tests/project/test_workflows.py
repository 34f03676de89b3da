"""Workflows of the public host run commands that exist, on the Pythons that setup.cfg allows."""

from __future__ import annotations

import re
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
