"""Results on the front page: accuracy by format (`accuracy`), time by recipe (`time`), and sums compared with a chip's (`chip`).

Next to the time of a step, Speed shows that of the first one (`first_step`).
"""

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
    """Time of a step by recipe, relative to native bf16."""
    _bars(axes, *(_column(table, r"([\d.]+) ×") for table in _training()))
    axes.axvline(1, color=plt.rcParams["text.color"], linewidth=1, linestyle=":")
    axes.set_xlabel("× native bf16, GPT-2 medium, compiled")
    axes.set_title("Time of a training step, H200", loc="left")


def first_step(axes: Axes) -> None:
    """Seconds of the first step by recipe, which compiles; below, those of native bf16."""
    _bars(axes, *(_column(table, r"[\d.]+ × \| ([\d.]+) s") for table in _training()))
    natives = (re.search(r"^\| none.*?\| ([\d.]+) s", table, flags=re.MULTILINE) for table in _training())
    as_one, by_blocks = (found[1] for found in natives if found is not None)
    axes.set_xlabel(f"seconds; native bf16: {as_one} and {by_blocks}")
    axes.set_title("Time of the first step", loc="left")


def _training() -> list[str]:
    """The tables of a model that is compiled as one, and of one that is compiled block by block."""
    section = SPEED.read_text(encoding="utf-8").partition("\n## Training\n")[2]
    return re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)[:2]


def _column(table: str, cell: str) -> dict[str, str]:
    """A cell of each recipe, by name."""
    return dict(re.findall(rf"^\| `(\w+)` \| {cell}", table, flags=re.MULTILINE))


def _bars(axes: Axes, as_one: dict[str, str], by_blocks: dict[str, str]) -> None:
    """Two bars for each recipe, with numbers."""
    longest = max(map(float, (*as_one.values(), *by_blocks.values())))
    for shift, values, alpha, text in ((-0.19, as_one, 1.0, "compiled as one"), (0.19, by_blocks, 0.45, "block by block")):
        for row, value in enumerate(values.values()):
            axes.barh(row + shift, float(value), 0.36, color="C0", alpha=alpha, label=None if row else text)
            axes.text(float(value) + longest / 60, row + shift, value, va="center", fontsize=8)
    axes.set(yticks=range(len(as_one)), yticklabels=as_one, ylim=(len(as_one) + 0.25, -0.5), xlim=(0, longest * 1.15))
    axes.legend(loc="lower right", fontsize=7, ncols=2)


def chip(axes: Axes) -> None:
    """Numbers of sums compared with an H200, and of those that differ."""
    text = " ".join(NUMERICS.read_text(encoding="utf-8").split())
    sums = r"FP8, BF16 and FP16 in more than (\d+) million sums each.*?TF32 in more than (\d+) million.*?All agree, bit for bit"
    found = re.search(sums, text)
    assert found is not None
    for row, millions in enumerate([found[1]] * 3 + [found[2]]):
        axes.barh(row, int(millions), 0.6, color="C2")
        axes.text(int(millions) * 1.15, row, "0 differ", va="center", fontsize=8)
    axes.set(xscale="log", xlim=(1, 700), yticks=range(4), yticklabels=("FP8", "BF16", "FP16", "TF32"), ylim=(3.6, -0.6))
    axes.set_xticks([1, 10, 100], labels=["1", "10", "100"])
    axes.set_xlabel("million sums compared, at least")
    axes.set_title("Emulated sums against an H200's", loc="left")


def draw(part: str) -> Figure:
    figure, axes = plt.subplots(figsize=(3.5, 3.0))
    {"accuracy": accuracy, "time": time, "first_step": first_step, "chip": chip}[part](axes)
    return figure
