"""The committed reports say what this code makes of the committed results, whatever changed since they were written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from qsim import studies
from qsim.cli.study import planned_study
from support import idx_files

pytest.importorskip("scipy")

PAGES = sorted((Path(__file__).parents[2] / "docs" / "studies").glob("*/report.md"))


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d,]*", "#", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_committed_report_is_that_of_its_results(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which runs there are can depend on the number of a net's layers, and this on the shape of the images; reports use 512 of them.
    idx_files.write(tmp_path / "fashion-mnist", training=512)
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    (command,) = re.findall(r"^`qsim study (.+)`$", text, re.MULTILINE)
    # Its results may be a GPU's; reading them needs none.
    name, *options = shlex.split(re.sub(r" --device \S+", "", command))
    plan = planned_study(name, [*options, "--device", "cpu", "--out", str(page.parent)])
    assert all(plan.at(seeds).missing() == 0 for seeds in plan.looks.seeds or (plan.settings.seeds,))
    report = plan.decided().report()
    assert text.startswith(f"# {report.title or report.study.question}\n\n**{report.meaning}**\n\n")
    for paragraph in (part for part in report.parts if isinstance(part, str)):
        # The stand-in for Fashion-MNIST has another number of images.
        assert without_numbers(f"\n\n{paragraph}\n\n") in without_numbers(text), f"write {page} again: {command}"
    for table in (report.verdicts, report.tests, *(part for part in report.parts if isinstance(part, studies.Table))):
        assert f"## {table.heading}\n\n{table.markdown()}\n" in text, f"write {page} again: {command}"
    names = [each["source"] for each in map(vars, report.claims) if not (each["test"] and each["rule"] and each["power"])]
    assert names == [], "claims without a test, a rule, or the smallest effect that would have shown"
