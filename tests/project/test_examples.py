"""Tests that the examples run unchanged and print the expected results."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import NEEDS_GLOO
from support.running_examples import FOLDER, RunExample, run_in_ranks, running

__all__ = ["running"]  # a fixture
LIST = (FOLDER / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.slow


def test_every_example_is_tested() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_examples*.py"))
    names = [path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(names) == 17
    assert [name for name in names if f'"{name}"' not in tests] == []


def test_every_example_has_a_line_that_says_what_it_is_for() -> None:
    row = r"^\| \[`([\w.]+)`\]\(([\w.]+)\) \| .+ \| \[[^]]+\]\(\.\./([\w/.-]+)(?:#[\w-]+)?\) \|$"
    lines = re.findall(row, LIST, flags=re.MULTILINE)
    assert sorted(name for name, _, _ in lines) == sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb"))
    for name, link, page in lines:
        assert name == link
        assert (FOLDER.parent / page).exists(), page
        # An example names its page, and the page names the example.
        assert f"examples/{name}" in (FOLDER.parent / page).read_text(encoding="utf-8"), f"{page} does not name {name}"


def test_first_steps(run: RunExample) -> None:
    # A sum in BF16 that stagnates early, and one that does not.
    sums = dict(re.findall(r"^ +(nearest|stochastic) +(\S+) +\(mean of 256 sums\)$", run("first_steps.py"), flags=re.MULTILINE))
    assert float(sums["nearest"]) == 1
    assert float(sums["stochastic"]) == pytest.approx(3, abs=0.02)


def test_loss_scaling(run: RunExample) -> None:
    rows = re.findall(r"^(\S+(?:, \w+)?) +([\d. ]+)   ([\d^ ]+)$", run("loss_scaling.py"), flags=re.MULTILINE)
    accuracy, power = ({row[0]: float(row[i].split()[0].removeprefix("2^")) for row in rows} for i in (1, 2))
    assert len(accuracy) == 8
    for name in ("e4m3", "e5m2", "hfp8"):
        assert accuracy[name] >= 90
        assert power[name] < 30
    for name in ("e4m3", "e5m2"):
        assert (accuracy[name], power[name]) == (accuracy[f"{name}, nonfinite"], power[f"{name}, nonfinite"])
        assert power[f"{name}, saturate"] > 40, "nothing stops the scale"
    assert accuracy["e4m3, saturate"] < 50


def test_train_digits(run: RunExample) -> None:
    rows = re.findall(r"^(.+?) +(\d+\.\d)% +\d+\.\d$", run("train_digits.py", STEPS=100), flags=re.MULTILINE)
    accuracy = {name: float(percent) for name, percent in rows}
    assert list(accuracy) == [
        "float32 everywhere",
        "E4M3 forward, E5M2 gradients",
        "E4M0 backward, nearest",
        "E4M0 backward, stochastic",
    ]
    native, hybrid, nearest, stochastic = accuracy.values()
    # Over seeds 0 to 5 at least 92 %, at most 12.2 %, and at least 81 %.
    assert min(native, hybrid) > 90
    assert nearest < 30
    assert stochastic > 70


METHODS = ["stochastic", "kahan", "nearest", "o1", "o2"]
TINY = "--layers 2 --width 32 --heads 2 --context 32 --batch 4 --micro-batch 2 --validation 4 --steps 6 --lr 3e-3"
TEXT = sorted(map(str, Path(asyncio.__file__).parent.glob("*.py")))
QUICK = [*TINY.split(), "--text", *TEXT]


def lines(path: Path) -> list[dict[str, Any]]:
    """The results that runs have written, except their speed."""
    return [{name: value for name, value in json.loads(line).items() if name != "tokens_per_second"} for line in path.open()]


def train_gpt(*options: str) -> str:
    """The output of a separate run."""
    # Sums depend on the number of threads that share them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(FOLDER / "train_gpt.py"), *QUICK, *options]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The same in this process."""
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("train_gpt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *options: module.main([*QUICK, "--device", "cpu", *map(str, options)])
    torch.set_num_threads(threads)


COMPARED = ["--compare", ",".join(METHODS), "--rates", "2e-2,1e-9", "--steps", "8"]


def check_that_every_method_learns(results: list[dict[str, Any]], printed: str) -> None:
    assert [(result["method"], result["lr"]) for result in results] == [(method, lr) for method in METHODS for lr in (2e-2, 1e-9)]
    learnt = {result["method"]: result["validation_loss"] for result in results if result["lr"] == 2e-2}
    # A model that knows nothing has a loss of log 256, 5.5; one that cannot move stays there.
    assert all(loss < 4.2 for loss in learnt.values())
    assert all(result["validation_loss"] > 5.4 for result in results if result["lr"] == 1e-9)
    # There are five methods.
    assert len(set(learnt.values())) == len(METHODS)
    assert all(result["tokens"] == 8 * 4 * 32 for result in results)
    table = re.findall(r"^(\w+) +(\S+) +1 +(\d\.\d{4}) +- ", printed.split("at each method's best learning rate")[1], flags=re.MULTILINE)
    assert table == [(method, "0.02", f"{loss:.4f}") for method, loss in learnt.items()]


def test_train_gpt(main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(*COMPARED, "--json", tmp_path / "lines")
    check_that_every_method_learns(lines(tmp_path / "lines"), capsys.readouterr().out)


@pytest.mark.gpu
def test_train_gpt_on_a_gpu(tmp_path: Path) -> None:
    printed = train_gpt(*COMPARED, "--json", f"{tmp_path}/lines", "--device", "cuda", "--compile")
    check_that_every_method_learns(lines(tmp_path / "lines"), printed)
    assert all(result["peak_mib"] > 0 for result in lines(tmp_path / "lines"))


def test_train_gpt_with_a_recipe_writes_its_losses(main: Any, tmp_path: Path) -> None:
    for name, options in (("bf16", []), ("fp8", ["--recipe", "fp8_hybrid.with_(accumulate='h100_fp8')"])):
        main(*options, "--steps", 3, "--losses", tmp_path / name, "--json", tmp_path / "lines")
    losses = [[float(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("bf16", "fp8")]
    assert [(result["recipe"] is not None, result["training_loss"]) for result in lines(tmp_path / "lines")] == [
        (False, losses[0][-1]),
        (True, losses[1][-1]),
    ]
    assert all(0 < abs(fp8 - bf16) < 0.1 for bf16, fp8 in zip(*losses, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_train_gpt_goes_on_where_it_stopped(method: str, main: Any, tmp_path: Path) -> None:
    options = ["--method", method, "--checkpoint", tmp_path / "run", "--json", tmp_path / "lines"]
    main(*options, "--save-every", 4)
    main(*options, "--resume", 4)
    main(*options, "--resume")  # after the last step only validation remains
    whole, resumed, finished = lines(tmp_path / "lines")
    assert resumed == whole
    assert finished == {**whole, "training_loss": None}


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_train_gpt_goes_on_where_it_stopped_on_a_gpu(method: str, tmp_path: Path) -> None:
    options = ["--compile", "--deterministic", "--device", "cuda", "--method", method, "--checkpoint", f"{tmp_path}/run"]
    train_gpt(*options, "--save-every", "4", "--json", f"{tmp_path}/lines")
    train_gpt(*options, "--resume", "4", "--json", f"{tmp_path}/lines")
    whole, resumed = lines(tmp_path / "lines")
    # Memory is never compared: memory layout affects the allocated amount.
    assert resumed == {**whole, "peak_mib": resumed["peak_mib"]}


@NEEDS_GLOO
def test_train_gpt_goes_on_with_fewer_processes(main: Any, tmp_path: Path) -> None:
    # Two summands have one sum in any order; but the norm for clipping gradients is a sum of more.
    options = ["--device", "cpu", "--method", "stochastic", "--clip", "0", "--checkpoint", f"{tmp_path}/run", "--json", f"{tmp_path}/lines"]
    run_in_ranks("train_gpt.py", [*QUICK, *options, "--save-every", "4"], ranks=2)
    main(*options, "--resume", "4")
    whole, resumed = lines(tmp_path / "lines")
    assert (whole["ranks"], resumed["ranks"]) == (2, 1)
    assert resumed == {**whole, "ranks": 1}


@pytest.mark.parametrize(
    ("options", "sequences"), [("--batch 4", 64), ("--batch 48", 96), ("--batch 128", 128), ("--validation 8 --batch 4", 8)]
)
def test_train_gpt_validates_on_as_many_sequences_as_it_takes_at_once(
    options: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module, world = importlib.import_module("train_gpt"), importlib.import_module("gpt.world")
    args = module.arguments().parse_args(options.split())
    assert module.settings_of(args, world.World(torch.device("cpu"))).validation == sequences


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--steps 0", "--steps: 0 is not positive"),
        ("--micro-batch 3", "--batch: 4 sequences are no multiple of what all processes take at once, 3"),
        ("--validation 5", "--validation: 5 sequences are no multiple"),
        ("--heads 3", "--heads: a width of 32 cannot be shared by 3 heads"),
        ("--vocabulary 255", "--vocabulary: 255 rows are not enough for 256 bytes"),
        ("--context 100000", "of .* bytes in all; --context 100000 needs at least 2000020"),
        ("--text nowhere", "--text: there is no file or folder nowhere"),
        ("--compare stochastic,o3", "--compare: o3 is none of stochastic, kahan, nearest, o1, o2"),
        ("--rates 1,2", "--rates, --seeds: these are for --compare"),
        ("--recipe fp9", "unknown recipe 'fp9'"),
        ("--compare o1 --losses here", "--compare, --losses: the losses are those of one run"),
        ("--compare o1 --checkpoint here", "--compare, --checkpoint: a checkpoint is of one run"),
        ("--resume", "--save-every, --resume: --checkpoint is to say where"),
        ("--resume --checkpoint nowhere", "--resume: nowhere holds no run"),
    ],
)
def test_train_gpt_says_what_it_cannot_do(options: str, words: str, main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(*options.split())
    assert re.search(words, capsys.readouterr().err)


def test_train_gpt_takes_no_other_runs_folder(main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "o1", "--checkpoint", tmp_path]
    main(*options)
    for more, words in [
        ([], "is not empty; --resume continues the run in it"),
        (["--resume", "5"], r"holds the steps \[6\], not 5"),
        (["--resume", "--method", "o2", "--seed", "1"], "has method o1, not o2; seed 0, not 1"),
        (["--resume", "--text", *TEXT[1:]], r"has text \d+, not \d+"),
    ]:
        with pytest.raises(SystemExit):
            main(*options, *more)
        assert re.search(words, capsys.readouterr().err)
