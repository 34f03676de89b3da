"""Tests of `qsim study`: listing, planning, running, and errors for bad arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import qsim.studies
from qsim.cli import main
from support.coins import Coins


@pytest.fixture(autouse=True)
def _coins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An additional study that takes no time."""
    monkeypatch.setitem(qsim.studies._STUDIES, "coins", "coins.Coins")
    own = qsim.studies.named
    monkeypatch.setattr(qsim.studies, "named", lambda name: Coins() if name == "coins" else own(name))


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["study", *words]) == code
    out, error = capsys.readouterr()
    return out if code == 0 else error


def test_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys).splitlines()
    assert [line.split()[0] for line in lines] == [*qsim.studies.names(), "sweep"]
    assert "Does a larger batch buy back bits of precision?" in lines[qsim.studies.names().index("batch-size")]


def test_a_study_is_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = said(capsys, "coins", "--out", str(tmp_path), "--workers", "1", "--sides", "heads", "--seeds", "2")
    assert out == (
        "the rim: heads | tails\n  measured: both\n  agrees: yes\n\nFair.\n\n"
        f"figure: {tmp_path / 'tosses.svg'}\nreport: {tmp_path / 'report.md'}\n"
    )
    page = (tmp_path / "report.md").read_text()
    # The results' location depends on the machine; their content does not.
    assert "`qsim study coins --sides heads --seeds 2`" in page
    assert "- 2 runs on" in page


@pytest.mark.usefixtures("blank_figures")
def test_a_plan_lists_what_is_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("coins", "--out", str(tmp_path), "--workers", "1", "--weight", "0.25")
    lines = said(capsys, *words, "--dry-run").splitlines()
    assert len(lines) == 7
    assert lines[0].endswith(" s  side=heads, weight=0.25, seed=0")
    assert re.fullmatch(r"6 runs to do, 0 done; about 0 s on cpu with 1 at a time, extrapolated from one run of \S+ s", lines[-1])
    assert not list(tmp_path.iterdir())
    said(capsys, *words)
    assert said(capsys, *words, "--dry-run") == "0 runs to do, 6 done; about 0 s on cpu with 1 at a time\n"


def test_the_time_of_a_full_form_is_estimated_only_where_it_is_meant_to_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ("coins", "--full", "--out", str(tmp_path), "--workers", "1", "--dry-run")
    lines = said(capsys, *words).splitlines()
    assert lines[0] == "side=heads, weight=0.5, seed=0"
    assert lines[10:] == [
        "10 runs to do, 0 done; no time is estimated, because --full is for a GPU and this machine has none (--device cpu measures it)"
    ]
    asked = said(capsys, *words, "--device", "cpu").splitlines()
    assert asked[-1].startswith("10 runs to do, 0 done; about 0 s on cpu with 1 at a time, extrapolated from one run of ")


def test_settings_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "coins", "--help"])
    out = capsys.readouterr().out
    assert "--sides A,B" in out
    assert "what to count (default: heads,tails)" in " ".join(out.split())
    assert "--weight X" in out
    assert "--seeds N" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dice",), "qsim: no study is called 'dice'. There are: accumulator, batch-size, "),
        (("coins", "--most-seeds", "3"), "qsim: most seeds: must be above the 3 seeds of the first look; got 3\n"),
        (("coins", "--device", "tpu"), "qsim: device: must be cpu, cuda or cuda:N; got 'tpu'\n"),
        (("coins", "--workers", "0"), "qsim: workers: must be at least 1, got 0\n"),
        (("coins", "--seeds", "0"), "qsim: seeds: must be at least 1, got 0\n"),
        (("coins", "--weight", "-1"), "qsim: no coin is that light\n"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    workers = () if "--workers" in words else ("--workers", "1")
    assert said(capsys, *words, *(("--out", str(tmp_path), *workers) if words[0] == "coins" else ()), code=2).startswith(message)


def test_a_folder_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = said(capsys, "coins", "--out", str(tmp_path / "file" / "results"), "--workers", "1", code=1)
    assert re.fullmatch(r"qsim: \[Errno \d+\] .*file.*\n", error)


@pytest.mark.parametrize(("words", "kind"), [(("--seeds", "a"), "int"), (("--batches", "4,b"), "list of int")])
def test_values_that_are_not_numbers(capsys: pytest.CaptureFixture[str], words: tuple[str, str], kind: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["study", "batch-size", *words])
    assert f"argument {words[0]}: invalid {kind} value: {words[1]!r}" in capsys.readouterr().err


def test_missing_packages_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("matplotlib", "scipy") else object())
    assert said(capsys, code=2) == "qsim: studies need matplotlib, scipy: pip install 'qsim-torch[study]'\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("batch-size", "--roundings", "nearest"), "qsim: roundings: must contain stochastic and nearest; got nearest"),
        (("batch-size", "--model", "vit"), "qsim: model: must be one of own, resnet, wide, resnet-18, gpt, pretrained; got 'vit'\n"),
        (("batch-size", "--batches", "64,16"), "qsim: batches: must be at least two, in increasing order; got 64,16\n"),
        (("batch-size", "--formats", "e4m1,e4m0"), "qsim: formats: must be at least one, from coarse to fine; got e4m1,e4m0\n"),
        (("batch-size", "--formats", "e4m1,e4m33"), "qsim: unknown format 'e4m33'"),
        (("batch-size", "--batches", "64"), "qsim: batches: must be at least two, in increasing order; got 64\n"),
        (("points", "--roundings", "stochastic"), "qsim: roundings: must contain stochastic and nearest"),
        (("learning-rate", "--levels", "1,4"), "qsim: levels: must be at least 2, the largest update; got 1,4\n"),
        (("learning-rate", "--methods", "kahan"), "qsim: methods: must contain mixed and stochastic; got kahan\n"),
        (("learning-rate", "--lowest", "0.9"), "qsim: lowest, highest: must be two rates, the lower one first; got 0.9, 0.5\n"),
        (("cancelled-updates", "--updates", "kahan"), "qsim: updates: must begin with nearest, stochastic, kahan; got kahan\n"),
        (("cancelled-updates", "--looks", "3"), "qsim: looks: must be at least 4, one per quarter, and at most the 400 steps; got 3\n"),
        (("random-bits", "--bits", "4,32"), "qsim: bits: must be from 1 to 31, because 32 is the reference; got 4,32\n"),
        (("stagnation", "--rates", "0.1"), "qsim: rates: must be at least two, from large to small; got 0.1\n"),
    ],
)
def test_settings_that_no_report_could_use_raise_errors_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    assert said(capsys, *words, "--workers", "1", "--out", str(tmp_path), code=2).startswith(message)
    assert not list(tmp_path.iterdir())
