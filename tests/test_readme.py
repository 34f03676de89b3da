"""README's code prints what README says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from qsim.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


CODE, TEXTS = blocks("python"), blocks("text")


def test_every_code_is_followed_by_what_it_prints() -> None:
    assert len(CODE) == len(TEXTS) == 6
    assert re.findall(r"^```(python|text)$", README, flags=re.MULTILINE) == ["python", "text"] * 6


@pytest.mark.parametrize(
    ("code", "text"), list(zip(CODE, TEXTS, strict=False)), ids=["ten lines", "layers", "recipes", "optimizers", "units", "diagnostics"]
)
def test_code_prints_what_is_said(code: str, text: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == text


def test_the_console_session_prints_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command, _, expected = blocks("console")[0].partition("\n")
    assert main(command.removeprefix("$ qsim ").split()) == 0
    assert capsys.readouterr().out == expected
