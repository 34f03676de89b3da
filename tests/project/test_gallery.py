"""The gallery has every example, and its outputs are those of the examples as they are now.

Whether an example still prints these words is checked where the tests run it: `running_examples.py`.
"""

from __future__ import annotations

import re

import pytest

from support.running_examples import FOLDER, outputs, words

PAGE = (FOLDER.parent / "docs" / "gallery.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```\{printed\} (\S+)$", PAGE, flags=re.MULTILINE)


def test_every_example_is_in_the_gallery() -> None:
    names = [path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")]
    assert [name for name in names if f"](../examples/{name})" not in PAGE] == []


@pytest.mark.parametrize("name", SHOWN)
def test_outputs_are_of_the_examples_as_they_are(name: str) -> None:
    assert outputs.is_current(name), f"run: python docs/_ext/outputs.py {name}"


def test_every_output_is_shown() -> None:
    assert sorted(path.name for path in outputs.PRINTED.iterdir()) == sorted(outputs.written(name).name for name in SHOWN)


def test_columns_of_seconds_are_left_out() -> None:
    timed = "loss below\n\nname  loss  seconds\na     0.12      3.4\nb     0.1      12.0\n\nThe end of it.\nseconds matter"
    assert outputs.without_seconds(timed) == "loss below\n\nname  loss\na     0.12\nb     0.1\n\nThe end of it.\nseconds matter"


def test_numbers_and_folders_may_differ() -> None:
    assert words("a loss of 2.30, 1e-3\nin /tmp/x/figures:") == words("a loss of 1, -0.5 in other/figures:")
    assert words("a loss of 2") != words("a gain of 2")
