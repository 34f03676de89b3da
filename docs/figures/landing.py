"""Three results on the front page: accuracy by format (`accuracy`), time by recipe (`time`), and sums compared with a chip's (`chip`)."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import qsim

#: Where the numbers are.
READS = ("studies/formats/results.jsonl", "speed.md", "numerics.md")
RESULTS, SPEED, NUMERICS = (Path(__file__).parents[1] / name for name in READS)


def accuracy(axes: Axes) -> None:
    """Every format of the study, and the mean over formats of a width."""
    found: dict[str, dict[str, list[float]]] = {"nearest": {}, "stochastic": {}}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        run, values = (json.loads(line)[name] for name in ("run", "values"))
        found[run["rounding"]].setdefault(run["format"], []).append(100 * values["own_accuracy"])
    full = found["nearest"].pop("fp32")
    axes.axhline(sum(full) / len(full), color=plt.rcParams["text.color"], linewidth=5, alpha=0.3, label="float32")
    for i, (rounding, formats) in enumerate(found.items()):
        widths: dict[int, list[float]] = {}
        for name, runs in formats.items():
            widths.setdefault(qsim.format(name).bits, []).append(sum(runs) / len(runs))
        means = {bits: sum(values) / len(values) for bits, values in sorted(widths.items())}
        axes.plot(list(means), list(means.values()), color=f"C{i}", label=rounding)
        for bits, values in widths.items():
            axes.plot([bits] * len(values), values, ".", color=f"C{i}")
    axes.set(xlabel="bits of a number", ylim=(0, 100), xticks=range(2, 10))
    axes.set_title("Test accuracy on digits, %", loc="left")
    axes.legend(loc="lower right", title="gradients", alignment="left")


def time(axes: Axes) -> None:
    """Bars of two tables: whole blocks compiled one by one, and a net of six layers compiled as one."""
    tables = re.findall(r"(?:^\|.*\n)+", SPEED.read_text(encoding="utf-8").partition("\n## Training\n")[2], flags=re.MULTILINE)
    blocks, whole = (dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) ×", tables[i], flags=re.MULTILINE)) for i in (2, 1))
    for row, name in enumerate(blocks):
        for shift, times, alpha in ((-0.19, blocks, 1.0), (0.19, whole, 0.45)):
            if name in times:
                axes.barh(row + shift, float(times[name]), 0.36, color="C0", alpha=alpha)
                axes.text(float(times[name]) + 0.03, row + shift, times[name], va="center", fontsize=8)
    axes.axvline(1, color=plt.rcParams["text.color"], linewidth=1, linestyle=":")
    axes.set(yticks=range(len(blocks)), yticklabels=blocks, ylim=(len(blocks) - 0.5, -0.5), xlim=(0, 2.05), xlabel="× native bf16, GPT, compiled")
    for shift, text in ((-0.19, "24 layers, block by block"), (0.19, "6 layers, as one")):
        axes.text(0.03, shift, text, va="center", fontsize=6.5, color="white" if shift < 0 else plt.rcParams["text.color"])
    axes.set_title("Time of a training step, H200", loc="left")


def chip(axes: Axes) -> None:
    """Numbers of sums compared with an H200, and of those that differ."""
    text = " ".join(NUMERICS.read_text(encoding="utf-8").split())
    found = re.search(r"FP8, BF16 and FP16 in more than (\d+) million sums each.*?TF32 in more than (\d+) million.*?All agree, bit for bit", text)
    assert found is not None
    for row, (name, millions) in enumerate(zip(("FP8", "BF16", "FP16", "TF32"), [found[1]] * 3 + [found[2]], strict=True)):
        axes.barh(row, int(millions), 0.6, color="C2")
        axes.text(int(millions) * 1.15, row, "0 differ", va="center", fontsize=8)
    axes.set(xscale="log", xlim=(1, 700), yticks=range(4), yticklabels=("FP8", "BF16", "FP16", "TF32"), ylim=(3.6, -0.6))
    axes.set_xticks([1, 10, 100], labels=["1", "10", "100"])
    axes.set_xlabel("million sums compared, at least")
    axes.set_title("Emulated sums against an H200's", loc="left")


def draw(part: str) -> Figure:
    figure, axes = plt.subplots(figsize=(3.5, 3.0))
    {"accuracy": accuracy, "time": time, "chip": chip}[part](axes)
    return figure
