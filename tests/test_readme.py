"""README's code prints what README says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from qsim.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"README has {len(found)} blocks of {language}"
    return found[0]


def test_the_ten_lines_print_what_is_said() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block("python"), "README.md", "exec"), {})
    assert printed.getvalue() == block("text")


def test_the_console_session_prints_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command, _, expected = block("console").partition("\n")
    assert main(command.removeprefix("$ qsim ").split()) == 0
    assert capsys.readouterr().out == expected
