"""The study `hardware-cost`: its circuits round as the definition does, and its verdicts follow from the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qsim import rounding, studies
from qsim.silicon.graphs import significand
from qsim.silicon.printers import javascript
from qsim.silicon.synthesis import Fpga
from qsim.studies import hardware_cost
from qsim.studies.hardware_cost import ACCURACY, CELLS, FACTOR, SIGNIFICAND, HardwareCostStudy, Run, Settings
from support import made_up
from support.emitted import run, tool

pytest.importorskip("sklearn")
CPU = torch.device("cpu")
STUDY = HardwareCostStudy()


def results(how: str, folder: Path) -> Tensor:
    """The results of the circuit that rounds a significand, for all its inputs and random bits, in Node."""
    routine = significand(4, 6, rounding.resolve(how))
    calls = f"for (let x = 0; x < 1024; x++) for (let random = 0; random < 64; random++) y.push({routine.name}(x, random));"
    (folder / "main.mjs").write_text(f"{javascript.module((), [routine])}\nconst y = [];\n{calls}\nconsole.log(JSON.stringify(y));\n")
    text = run(tool("node"), folder / "main.mjs")
    return torch.tensor(list(map(int, text.strip()[1:-1].split(",")))).view(1024, 64)


def test_significands_are_rounded(tmp_path: Path) -> None:
    x, random = torch.arange(1024).view(-1, 1), torch.arange(64)
    assert torch.equal(results("Stochastic(bits=6)", tmp_path), (x + random) >> 6)
    assert torch.equal(results("nearest", tmp_path)[:, :1], (x / 64).round().long())


def test_the_quick_form_runs(quick_study: Callable[..., studies.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Yosys, which takes seconds for each circuit."""
    monkeypatch.setattr(hardware_cost, "fpga", lambda source, top: Fpga(len(source.splitlines()), 0, 0, 0))
    report = quick_study("hardware-cost").report()
    assert "LUTs" in report.meaning
    assert [len(part) for part in report.parts if isinstance(part, studies.Table)] == [2]


@pytest.mark.slow
def test_yosys_counts_the_cells_of_a_significand() -> None:
    tool("yosys")
    cells = STUDY.measure(Run(what=SIGNIFICAND, format="10 to 4 bits", rounding="nearest"), CPU)
    assert 0 < cells["luts"] < 20
    assert cells["registers"] == 0


def test_without_yosys_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="qsim cost and qsim prove need Yosys, which is not installed: `apt install yosys`"):
        STUDY.measure(Run(what=CELLS, format="e2m1", rounding="nearest", source="bf16"), CPU)


@pytest.mark.slow
def test_accuracy_and_factor_are_numbers_of_training() -> None:
    settings = STUDY.quick()
    trained = {(run.what, run.format): run for run in STUDY.runs(settings) if run.seed == 0}
    accuracy = STUDY.measure(trained[ACCURACY, "e4m3"], CPU)["own_accuracy"]
    assert 0.3 < accuracy <= 1
    few, many = (STUDY.measure(trained[FACTOR, name], CPU)["factor"] for name in settings.formats)
    assert few > many > 0.9


@pytest.mark.parametrize("is_worse", [True, False])
def test_verdicts_follow_from_the_numbers(is_worse: bool) -> None:
    """The narrow format costs training something and saves hardware, or the other way around; the paper's claim leaves its widths open."""

    def values(run: Run) -> dict[str, float]:
        sign = (1 if is_worse else -1) * {"e2m1": 1, "e4m3": 0, "fp32": 0}.get(run.format, 0)
        small = 0.001 * made_up.noise(STUDY, run)
        if run.what == SIGNIFICAND:
            return {"luts": 9 + (not is_worse and run.rounding != "nearest")}
        return {"luts": 60 - 10 * sign, "factor": 1.2 + 0.4 * sign + small, "own_accuracy": 0.7 - 0.1 * sign + small}

    assert made_up.verdicts(STUDY, Settings(formats=("e2m1", "e4m3")), values) == [None] + [is_worse] * 3


@pytest.mark.parametrize("names", [("e2m1",), ("e4m3", "e2m1"), ("e4m3", "e5m2")])
def test_formats_have_increasing_widths(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="formats: must be at least two, from narrow to wide, each of another width; got e"):
        STUDY.runs(Settings(formats=names))
