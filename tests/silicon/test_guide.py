"""The commands of the guide "From an idea to RTL" print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsim.cli import main
from qsim.silicon import emit
from qsim.silicon.synthesis import Fpga
from qsim.studies import hardware_cost
from support.emitted import tool

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "from-idea-to-rtl.md"


def commands() -> Iterator[tuple[str, list[str]]]:
    """The commands, and the lines that the guide shows of their output."""
    text = GUIDE.read_text(encoding="utf-8").replace(" \\\n  ", " ")
    for block in re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for part in re.split(r"^(?!# )", block, flags=re.MULTILINE):
            if part.strip():
                command, *shown = part.splitlines()
                yield command, [line.removeprefix("# ") for line in shown]


@pytest.mark.parametrize(
    "section", ["vectors", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gcc", "iverilog", "yosys", "study"))]
)
def test_commands_print_what_the_guide_shows(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tool's commands, and those of qsim before them; those of the study are not synthesized, which takes Yosys a minute."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware_cost, "fpga", lambda source, top: Fpga(len(source.splitlines()), 0, 0, 0))
    if section not in ("vectors", "study"):
        tool(section)
    ran = 0
    for command, shown in commands():
        words = shlex.split(command)
        if words[:2] == ["qsim", "study"]:
            if section == "study":
                main(words[1:])
                assert shown[0] in capsys.readouterr().out
                assert "| e3m2b4fn | 6 |" in (tmp_path / "study" / "report.md").read_text()
                ran += 1
        elif words[:2] == ["qsim", "prove"]:
            if section == "yosys":
                main(words[1:])
                assert capsys.readouterr().out.splitlines() == shown
                ran += 1
        elif words[:2] == ["qsim", "cost"]:
            if section == "yosys":
                main(words[1:])
                rows = [line.split() for line in capsys.readouterr().out.splitlines()]
                assert [row[0] for row in rows] == [line.split()[0] for line in shown]
                assert all(int(cell) >= 0 for row in rows[1:] for cell in row[1:])
                ran += 1
        elif section == "study" or not is_run(words, section):
            continue
        elif words[0] == "qsim":
            code = main(words[1:])
            printed = capsys.readouterr().out.splitlines()
            assert code == (1 if "--check" in words else 0), command
            assert printed[: len(shown)] == shown, command
            ran += 1
        else:
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr)
            assert done.stdout.splitlines()[: len(shown)] == shown, command
            ran += 1
    assert ran == {"vectors": 1, "gcc": 12, "iverilog": 14, "yosys": 3, "study": 1}[section]


def test_the_guide_shows_the_emitted_module() -> None:
    (shown,) = re.findall(r"^```systemverilog\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    emitted = emit("systemverilog", "e3m2b4fn", operations=["encode"], source="bf16").splitlines()
    assert [line for line in shown.splitlines() if line not in emitted] == []
    assert shown.count("\n") < 35


def is_run(words: list[str], section: str) -> bool:
    """Whether a tool's section needs a command."""
    text = " ".join(words)
    if words[0] == "qsim" and text.endswith(".hex") and "--form" not in words:
        return section == "iverilog" or (section == "vectors" and text.endswith("own.hex"))
    if section == "yosys":
        return "systemverilog" in words and "own.sv" in words
    if section == "gcc":
        return words[0] in ("gcc", "./own_test") or "own.h" in words
    is_module = words[0] in ("iverilog", "vvp", "sed") or "systemverilog" in words or "testbench" in words or "--check" in words
    return section == "iverilog" and is_module
