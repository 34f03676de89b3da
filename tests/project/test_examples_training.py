"""The output of the examples that train, within the limits that formats, updates and chance allow."""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from support.running_examples import FOLDER, RunExample, running, table

__all__ = ["running"]  # a fixture
pytestmark = pytest.mark.slow


def test_assign_formats(run: RunExample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    candidates = importlib.import_module("assign_formats").CANDIDATES
    narrow = {name: candidates[name] for name in ("ternary", "e2m0", "e2m2")}
    options = ("--model", "resnet", "--steps", 12, "--warm-up", 6, "--seeds", 1)
    printed = run("assign_formats.py", *options, CANDIDATES=narrow, BATCH=16)
    assert len(re.findall(r"^seed 0: assigned in \d+ s$", printed, flags=re.MULTILINE)) == 1
    spent, budget = re.findall(r"^([\d.]+) bits per element, budget ([\d.]+);", printed, flags=re.MULTILINE)[0]
    assert float(spent) <= float(budget)
    losses = dict(re.findall(r"^(.+?)  +([\d.]+) \[", printed.partition("test loss")[2], flags=re.MULTILINE))
    assert list(losses) == ["float32", "e2m0 everywhere", "assigned", "random search"]
    assert float(losses["assigned"]) < float(losses["e2m0 everywhere"])


def test_train_transformer(run: RunExample) -> None:
    printed = run("train_transformer.py", "--steps", 30, BATCH=8)
    rows = table(printed, "layers that round")
    assert list(rows) == ["float32", "fp8_hybrid", "mxfp8", "mxfp4", "nvfp4"]
    # Attention and two linear layers; the head is unchanged.
    assert [row[0] for row in rows.values()] == [0, 3, 3, 3, 3]
    losses = {name: row[1] for name, row in rows.items()}
    # The loss has four digits: two recipes may print the same by chance, but all four only if nothing rounds.
    assert len(set(losses.values())) >= 3, "five recipes, and most do the same"
    # Without looking back, the best possible loss is the entropy of single characters. A lower loss means that the model uses context.
    text = Path(argparse.__file__).read_bytes().decode("ascii", "replace").replace("\ufffd", "?")
    shares = [count / len(text) for count in collections.Counter(text).values()]
    entropy = -sum(share * math.log(share) for share in shares)
    assert f"a loss of {entropy:.2f}" in printed
    # On twelve other beginnings of the text, the loss was 0.28 to 0.41 less.
    assert all(1 < loss < entropy - 0.15 for loss in losses.values())
    # Over seeds 0 to 2, FP8 ended within 0.002 of float32, and FP4 within 0.02.
    assert all(abs(losses[name] - losses["float32"]) < 0.02 for name in ("fp8_hybrid", "mxfp8"))
    assert all(abs(losses[name] - losses["float32"]) < 0.08 for name in ("mxfp4", "nvfp4"))


def skip_if_torch_cannot_attend_in_bfloat16() -> None:
    """torch alone fails on a CPU with AMX if ATEN_CPU_CAPABILITY restricts it to less than AVX-512."""
    x = torch.zeros(2, 4, 64, 32, dtype=torch.bfloat16)
    try:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError as error:
        pytest.skip(f"torch's own attention fails in bfloat16: {error}")


def test_tutorial_gpt(run: RunExample, tmp_path: Path) -> None:
    skip_if_torch_cannot_attend_in_bfloat16()
    small = {"LAYERS": 1, "WIDTH": 64, "HEADS": 2, "CONTEXT": 32, "BATCH": 8}
    printed = run("tutorial_gpt.py", "--steps", 25, "--seeds", 0, "--json", tmp_path / "results.json", **small)
    rows = table(printed, "held out")
    assert list(rows) == ["float32", "bf16", "fp8", "fp4"]
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    losses = {run["method"]: run["validation"] for run in results["runs"]}
    assert [row[2] for row in rows.values()] == pytest.approx([curve[-1] for curve in losses.values()], abs=5e-4)
    # The entropy of single characters, counted once more.
    text = (FOLDER / "hamlet.txt").read_text(encoding="ascii")
    counts = collections.Counter(text[: len(text) * 19 // 20])
    entropy = -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())
    assert results["entropy"] == pytest.approx(entropy, abs=1e-4)
    # Over seeds 0 to 2 losses were 0.27 to 0.30 below the entropy, and within 0.006 of float32's.
    assert all(len(curve) == 1 and curve[0] < entropy - 0.2 for curve in losses.values())
    outcomes = {run["method"]: (*run["training"], *run["validation"], results["samples"][run["method"]]) for run in results["runs"]}
    # BF16 may agree with float32 in all digits by chance.
    assert len({outcomes[name] for name in ("float32", "fp8", "fp4")}) == 3, "each method computes something else"
    assert all(abs(curve[0] - losses["float32"][0]) < 0.05 for curve in losses.values())
    assert all(sample.startswith("HAMLET.\n") and len(sample) == 8 + 240 for sample in results["samples"].values())


def test_bf16_adamw(run: RunExample) -> None:
    rows = table(run("bf16_adamw.py", STEPS=150), "updates")
    nearest, stochastic, kahan, copy = rows.values()
    # Weight and two moments of two bytes; two more for Kahan's compensation; or a weight of two, and a copy and moments of four.
    assert [row[2] for row in rows.values()] == [6, 6, 8, 14]
    # While gradients keep their sign an update is as large as the rate, 3e-4, and otherwise less; with nearest, what is less than 1/512 of
    # a weight is lost. Of the first layer's weights, which lie evenly within 1/4, two fifths are larger than 512 times the rate.
    unmoved = (1 - 512 * 3e-4 / 0.25) * 17 * 128 / (18 * 128 + 1)
    assert nearest[1] > 100 * unmoved
    # In float32 updates below 2**-24 of a weight are lost.
    assert copy[1] < 0.5
    # Three methods that lose nothing on average agree: over seeds 0 to 5 they differed by 0.2 % at most, and the loss of nearest
    # was 4.3 to 6.3 % higher.
    assert [stochastic[0], kahan[0]] == pytest.approx([copy[0]] * 2, rel=0.01)
    assert nearest[0] > 1.025 * max(stochastic[0], kahan[0], copy[0])


def test_made_up_chip(run: RunExample) -> None:
    printed = run("made_up_chip.py")
    assert "12 (1 sign, 6 exponent, 5 mantissa)" in printed
    rows = table(printed, "weights in E6M5")
    wide, bf16, chip, kept, stochastic = rows.values()
    # All that the chip writes is in its format. A number of bfloat16 has two bits more, and both are zero in a quarter of all; one of
    # float32 has 18. There are 6346 weights: a share of a quarter deviates by 0.5 %, and few weights begin at a power of two.
    assert [chip[2], kept[2], stochastic[2]] == [100, 100, 100]
    assert bf16[2] == pytest.approx(25, abs=6)
    assert wide[2] < 0.5
    # Guessing gets a tenth right. Over seeds 0 to 2 the chip's loss was 1.48 to 1.61 times that of float32 with nearest, and 0.96 to 1.04
    # times that of float32 stochastically.
    assert all(row[1] > 80 for row in rows.values())
    assert stochastic[0] < 1.2 * wide[0]
    assert min(chip[0], kept[0]) > 1.25 * max(wide[0], stochastic[0])


def sections(printed: str) -> dict[str, str]:
    return {part.split(":")[0]: part for part in re.split(r"\n\n", printed)}


def test_monitor(run: RunExample, tmp_path: Path) -> None:
    parts = sections(run("monitor.py", tmp_path / "figures", STEPS=75))
    names = ["narrow", "loss-scale", "tensor-scale"]
    losses = {name: float(re.search(r"a loss of (\d\.\d{3}) after", parts[name])[1]) for name in names}  # type: ignore[index]
    cells = {
        name: {line.split()[0]: line.split("  ") for line in parts[name].splitlines() if re.match(r"\d +grad", line)} for name in names
    }
    shares = {
        name: {layer: [cell.strip() for cell in row if cell.strip()][4:] for layer, row in rows.items()} for name, rows in cells.items()
    }
    assert all(list(rows) == ["0", "2", "4"] for rows in shares.values())
    # 1/512 is less than half of 1/16: nothing passes the last layer, the others get zeros, and only the last bias learns.
    assert shares["narrow"]["4"] == ["0 %", "100 %", "0 %", "0 %", "0 %", "0.0 dB"]
    assert shares["narrow"]["0"] == shares["narrow"]["2"] == ["0 %", "0 %", "100 %", "100 %", "0 %", "-"]
    assert losses["narrow"] == pytest.approx(math.log(10), abs=0.05)
    # 4096/512 is 8: no gradient of an output is beyond 28. Errors of normal numbers are at most an eighth of them, which is 18 dB.
    assert shares["loss-scale"]["4"][0] == "0 %"
    for name in ("loss-scale", "tensor-scale"):
        assert losses[name] < 0.5
        assert all(float(row[5].removesuffix(" dB")) > 18 for row in shares[name].values())
    figures = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in figures] == sorted(f"{name}-{kind}.png" for name in names for kind in ("exponents", "shares"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    assert len({path.read_bytes() for path in figures}) == 6


@pytest.mark.usefixtures("run")
def test_monitor_finds_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("monitor")
    monkeypatch.setattr(module, "STEPS", 1)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path: path.touch())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["monitor.py"])
    module.main()
    assert len(list(tmp_path.glob("*/*.png"))) == 6
