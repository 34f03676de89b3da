"""Common code of all studies: runs and their keys, results that are complete at any moment, parts, workers, reports, errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import qsim
from qsim import studies
from qsim.plot import figures
from qsim.studies import Result, Study
from qsim.studies.measuring import machine
from qsim.studies.report import described_machine, provenance
from qsim.studies.store import Store
from qsim.studies.study import Run
from support.coins import Coins, Settings, Toss

CPU = torch.device("cpu")


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for file in sorted(folder.glob("results*.jsonl")) for line in file.read_text().splitlines()]


def of_machine(line: dict[str, object]) -> dict[str, object]:
    """The part of a line that does not depend on when it was written."""
    return {name: value for name, value in line.items() if name not in ("seconds", "machine")}


def test_a_study_ends_in_a_report(tmp_path: Path) -> None:
    report = studies.run(Coins(), out=tmp_path)
    assert report.meaning == "Fair."
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == [
        "report.md", "results.jsonl", "tosses-dark.svg", "tosses.svg",
    ]  # fmt: skip
    page = (tmp_path / "report.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == [
        "# Is the coin fair?", "## Verdicts", "## Figures", "## Setting", "## Tosses", "## How each claim was judged", "## How it was run",
    ]  # fmt: skip
    assert page.splitlines()[2] == "**Fair.**"
    assert "| where | claim | measured here | smallest effect | agrees |\n| --- | --- | --- | --- | --- |\n" in page
    assert "| 1. the rim | heads \\| tails | both | a coin | yes |" in page
    assert "| 1. the rim | the side that is up | yes if it is up |" in page
    assert "![Shares.](tosses.svg)" in page
    assert "`qsim.studies.run(Coins())`" in page
    assert "- 6 runs on one core of" in page


@pytest.mark.parametrize(
    ("study", "options", "origin"),
    [
        (Coins(), {}, "qsim.studies.run(Coins())"),
        (Coins(), {"form": "quick", "most_seeds": 8}, "qsim.studies.run(Coins(), form='quick', most_seeds=8)"),
        ("formats", {}, "qsim study formats"),
        ("formats", {"form": "quick"}, "qsim study formats --quick"),
        ("formats", {"settings": {"steps": 2}}, "qsim.studies.run('formats', settings={'steps': 2})"),
        (Coins(), {"command": "make coins"}, "make coins"),
    ],
)
def test_a_report_names_a_command_that_exists(study: str | Coins, options: dict[str, Any], origin: str, tmp_path: Path) -> None:
    """The command line has no study of a user's own, and the call repeats its settings."""
    assert studies.plan(study, out=tmp_path, **options).command == origin


def test_a_run_is_its_values() -> None:
    run = Run(format="e4m3", seed=1)
    assert run == Run(seed=1, format="e4m3") != Run(format="e4m3", seed=2)
    assert hash(run) == hash(Run(seed=1, format="e4m3"))
    assert (run.format, repr(run)) == ("e4m3", "Run(format='e4m3', seed=1)")
    assert pickle.loads(pickle.dumps(run)) == run
    with pytest.raises(AttributeError, match="a run does not change: seed"):
        run.seed = 2


def test_results_of_earlier_versions_are_read_with_what_they_lack(tmp_path: Path) -> None:
    plan = studies.plan("batch-size", form="quick", out=tmp_path)
    store, first = Store(tmp_path, plan.study), plan.runs[0]
    line = {"study": "batch-size", "version": 1, "values": {}, "seconds": 1.0, "machine": machine(CPU)}
    old = {name: value for name, value in vars(first).items() if name not in ("model", "looks", "weights")}
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps({**line, "run": old}) + "\n")
    assert [result.run for result in store.results().values()] == [first]
    file.write_text(json.dumps({**line, "run": {"seed": 0, "data": "digits"}}) + "\n")
    with pytest.raises(qsim.FileError, match=r"line 1 is malformed: its run lacks rate, steps"):
        store.results()


def test_claims_that_are_judged_alike_share_a_row() -> None:
    found = [
        studies.Claim(where, what, "1", agrees=True, test=test, rule="a rule", power="2")
        for where, what, test in (("Figure 1", "a", "x"), ("Figure 1", "b", "y"), ("Figure 1", "c", "x"), ("Figure 2", "d", "x"))
    ]
    report = studies.Report(Coins(), [], found, "Fair.")
    assert [row["where"] for row in report.verdicts] == ["1. Figure 1", "2. Figure 1", "3. Figure 1", "4. Figure 2"]
    assert [[*row.values()][:2] for row in report.tests] == [["1, 3. Figure 1", "x"], ["2. Figure 1", "y"], ["4. Figure 2", "x"]]


def test_reports_name_runs_of_older_versions() -> None:
    here = machine(CPU)
    found = [
        Result(Toss("heads", 0.5, seed), {}, 1.0, {**here, "qsim": version})
        for seed, version in enumerate(("0.1.0", here["qsim"], "0.1.0"))
    ]
    assert f"- 2 runs are of qsim 0.1.0: {qsim.__version__} judges them, but has not repeated them" in provenance("qsim study coins", found)
    assert "has not repeated" not in provenance("qsim study coins", found[1:2])


def test_results_name_the_commit() -> None:
    here = machine(CPU)
    assert bool(here["commit"]) == (Path(__file__).parents[2] / ".git").exists()
    assert described_machine({**here, "commit": "a2c9455"}).endswith(f", qsim {qsim.__version__} at a2c9455, {here['date']}")
    old = {"device": "abacus", "torch": "0", "qsim": "0.1", "date": "1623"}
    assert described_machine(old) == "abacus, torch 0, qsim 0.1, 1623"
    assert described_machine({**old, "python": "3.11.7"}) == "abacus, Python 3.11.7, torch 0, qsim 0.1, 1623"


def test_figures_suit_light_and_dark_pages(tmp_path: Path) -> None:
    studies.run(Coins(), out=tmp_path, settings={"seeds": 1})
    light, dark = ((tmp_path / name).read_text() for name in ("tosses.svg", "tosses-dark.svg"))
    assert "#0072b2" in light
    assert "#0072b2" not in dark
    # Only light pages have a background, so that they are legible in any viewer.
    assert "fill: #ffffff" in light
    assert "fill: #ffffff" not in dark


def test_panels_are_files_of_their_own(tmp_path: Path) -> None:
    def draw() -> list[Figure]:
        drawn, axes = figures.row(2)
        for panel, last in zip(axes, (1.0, 5.0), strict=True):
            panel.plot([0, 1], [0, last], label="one")
            panel.plot([0, 1], [0, last], label="two")
        figures.share_y(axes)
        assert axes[0].get_ylim() == axes[1].get_ylim()
        for panel in axes:
            figures.label_ends(panel)
        places = [text.xyann[1] for text in axes[0].texts]
        assert places[1] - places[0] == pytest.approx(0.085), "labels of equal lines do not overlap"
        return drawn

    report = studies.Report(Coins(), [studies.Picture("both", "Two.", draw)], [], "Fair.")
    assert [path.name for path in report.write(tmp_path, "nowhere")] == ["report.md", "both-1.svg", "both-2.svg"]
    assert "![Two.](both-1.svg)\n![Two.](both-2.svg)" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("blank_figures")
def test_no_run_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studies.run(Coins(), out=tmp_path, settings={"seeds": 2})
    before = lines(tmp_path)
    seen: list[Toss] = []
    own = Coins.measure
    monkeypatch.setattr(Coins, "measure", lambda self, run, device: seen.append(run) or own(self, run, device))
    studies.run(Coins(), out=tmp_path, settings={"seeds": 3})
    assert sorted(seen, key=str) == [Toss("heads", 0.5, 2), Toss("tails", 0.5, 2)]
    assert lines(tmp_path)[: len(before)] == before
    # Another setting is another run.
    seen.clear()
    studies.run(Coins(), out=tmp_path, settings={"seeds": 1, "weight": 0.25})
    assert len(seen) == 2


@pytest.mark.usefixtures("blank_figures")
def test_an_error_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Coins.measure

    def fails(self: Coins, run: Toss, device: torch.device) -> dict[str, object]:
        if run.seed == 2:
            raise RuntimeError("the coin is lost")
        return own(self, run, device)

    with monkeypatch.context() as patched:
        patched.setattr(Coins, "measure", fails)
        with pytest.raises(RuntimeError, match="lost"):
            studies.run(Coins(), out=tmp_path)
    # Whole seeds, in order.
    assert [line["run"]["seed"] for line in lines(tmp_path)] == [0, 0, 1, 1]  # type: ignore[index]
    studies.run(Coins(), out=tmp_path)
    assert len(lines(tmp_path)) == 6


@pytest.mark.usefixtures("blank_figures")
def test_one_thread_computes(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        studies.run(Coins(), out=tmp_path)
        assert {line["values"]["threads"] for line in lines(tmp_path)} == {1}  # type: ignore[index]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("blank_figures")
def test_processes_give_what_one_gives(tmp_path: Path) -> None:
    one, two = (sorted(map(json.dumps, map(of_machine, _with_workers(tmp_path / str(count), count)))) for count in (1, 2))
    assert one == two
    assert (tmp_path / "1" / "tosses.svg").read_bytes() == (tmp_path / "2" / "tosses.svg").read_bytes()


def _with_workers(folder: Path, count: int) -> list[dict[str, object]]:
    studies.run(Coins(), out=folder, workers=count)
    return lines(folder)


def test_an_error_in_a_worker_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no coin is that light"):
        studies.run(Coins(), out=tmp_path, workers=2, settings={"weight": -1.0})


@pytest.mark.usefixtures("blank_figures")
def test_a_file_has_one_writer(tmp_path: Path) -> None:
    written = "is being written by another process; give each its own --out"
    with Store(tmp_path, Coins()).writing(), pytest.raises(ValueError, match=written):
        studies.run(Coins(), out=tmp_path)
    studies.run(Coins(), out=tmp_path)


@pytest.mark.usefixtures("blank_figures")
def test_results_of_another_version_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studies.run(Coins(), out=tmp_path)
    monkeypatch.setattr(Coins, "version", 2)
    assert studies.plan(Coins(), out=tmp_path).missing() == 6
    studies.run(Coins(), out=tmp_path)
    assert len(lines(tmp_path)) == 12


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    store = Store(tmp_path, Coins())
    values = {"inf": float("inf"), "tenth": 0.1, "list": [1e-300, -0.0], "nan": float("nan"), "none": None}
    with store.writing():
        store.add(Result(Toss("heads", 0.1, 3), values, 1.5, machine(CPU)))
    (found,) = store.results().values()
    assert found.run == Toss("heads", 0.1, 3)
    assert found.seconds == 1.5
    assert json.dumps(found.values) == json.dumps(values)


@pytest.mark.usefixtures("blank_figures")
def test_lines_that_are_not_results_are_named(tmp_path: Path) -> None:
    studies.run(Coins(), out=tmp_path)
    file = tmp_path / "results.jsonl"
    content = file.read_text()
    file.write_text(content + '{"study": "coins"\n')
    with pytest.raises(ValueError, match=r"results.jsonl, line 7 is malformed"):
        studies.run(Coins(), out=tmp_path)
    file.write_text(content.replace('"study": "coins"', '"study": "dice"', 1))
    with pytest.raises(ValueError, match=r"^studies: .*line 1: a result of the study 'dice', not of 'coins'; give it another --out"):
        studies.run(Coins(), out=tmp_path)


def test_estimates_follow_from_work(tmp_path: Path) -> None:
    plan = studies.plan(Coins(), out=tmp_path)
    fresh = plan.estimate().seconds
    assert len(fresh) == 6
    assert not lines(tmp_path)  # the timed run is not stored
    coins = Coins()
    first = fresh[coins.key(Toss("heads", 0.5, 0))]
    assert first > 0
    assert fresh[coins.key(Toss("heads", 0.5, 2))] == pytest.approx(3 * first)
    # Results of this machine determine the time per unit of work.
    with plan.store.writing():
        plan.store.add(Result(Toss("heads", 0.5, 2), {"share": 0.5}, 60.0, machine(CPU)))
    assert plan.estimate().seconds[coins.key(Toss("heads", 0.5, 1))] == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "huge"}, "form: must be one of default, quick, full; got 'huge'"),
        ({"workers": 0}, "workers: must be at least 1, got 0"),
        ({"workers": 2, "scheduler": "tcp://host:1"}, "workers: a scheduler has its own; got 2"),
        ({"device": "cuda:1", "scheduler": "tcp://host:1"}, "device: must be cpu or cuda with a scheduler"),
        ({"device": "tpu"}, "device: must be cpu, cuda or cuda:N; got 'tpu'"),
        ({"device": "mps"}, "device: must be cpu, cuda or cuda:N; got 'mps'"),
        ({"device": "cuda:99"}, "device: cuda:99 was asked for, but this machine has"),
        ({"settings": {"seed": 1}}, "coins has no setting 'seed'. It has: seeds, sides, weight"),
    ],
)
def test_errors(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        studies.plan(Coins(), out=tmp_path, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("study", "setting", "value"), [("batch-size", "steps", 0), ("batch-size", "batches", (0, 8)), ("formats", "batch", -1)]
)
def test_trainings_have_steps_and_examples(study: str, setting: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{setting}: must be at least 1; got {'0,8' if setting == 'batches' else value}"):
        assert studies.plan(study, out=tmp_path, settings={setting: value}).runs


def test_runs_that_measure_time_do_not_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert studies.plan("batch-size", device="cuda", workers=4, out=tmp_path).engine.device.type == "cuda"
    assert studies.plan("llm", device="cuda", workers=2, out=tmp_path).engine.device.type == "cuda"
    assert studies.plan("llm", device="cuda", workers=4, out=tmp_path, settings={"measures": ("perplexity",)}).engine.device.type == "cuda"
    for device, most in (("cuda", 2), ("cuda:1", 1)):
        with pytest.raises(ValueError, match=f"workers: must be at most {most}, one for each GPU, because the study measures times; got 4"):
            studies.plan("llm", device=device, workers=4, out=tmp_path)


def test_unknown_studies_are_named() -> None:
    with pytest.raises(ValueError, match=r"no study is called 'batchsize'. There are: accumulator, batch-size"):
        studies.named("batchsize")


@pytest.mark.parametrize("name", studies.names())
@pytest.mark.parametrize("form", ["settings", "quick", "full"])
def test_runs_of_every_study_are_their_own_keys(name: str, form: str) -> None:
    study: Study[object, object] = studies.named(name)
    runs = study.runs(getattr(study, form)())
    assert len({study.key(run) for run in runs}) == len(runs) > 0
    for run in (*runs[:3], runs[-1]):
        assert study.read(json.loads(study.key(run))) == run
        assert study.work(run) > 0


def test_settings_are_defaults_of_the_form() -> None:
    assert len(studies.plan(Coins(), form="full").runs) == 10
    assert studies.plan(Coins(), form="full").folder == Path("studies/coins-full")
    assert studies.plan(Coins()).folder == Path("studies/coins")
    assert studies.plan(Coins(), settings={"seeds": 1}).settings == Settings(seeds=1)


@pytest.mark.usefixtures("blank_figures")
def test_a_quick_form_warns_that_its_verdicts_are_not_evidence(tmp_path: Path) -> None:
    for form, said in (("quick", True), ("default", False)):
        studies.run(Coins(), form=form, out=tmp_path / form)
        assert ("its verdicts are not evidence" in (tmp_path / form / "report.md").read_text()) == said
