"""The library at a glance: formats, roundings, and what both do to training."""

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import qsim

FORMATS = {"int4": "int4", "e2m1": "e2m1", "e3m1": "e3m1", "e2m3": "e2m3", "e3m2, bias 5": qsim.Float(3, 2, bias=5)}
STEPS, EVERY = 600, 10


def draw() -> Figure:
    figure, panels = plt.subplots(1, 3, figsize=(10.4, 3.1), width_ratios=(10, 9, 11))
    formats(panels[0])
    roundings(panels[1])
    training(panels[2])
    return figure


def formats(axes: Axes) -> None:
    for row, (name, spec) in enumerate(FORMATS.items()):
        values = [v for v in qsim.format(spec).values() if 0 <= v <= 8]
        axes.hlines(row, 0, 8, linewidth=0.8, color=plt.rcParams["grid.color"])
        axes.plot(values, [row] * len(values), "|", markersize=15, markeredgewidth=1.3, color=f"C{row}")
        axes.text(0, row - 0.36, name, fontsize=8)
    axes.set(ylim=(len(FORMATS) - 0.6, -0.75), xlim=(-0.15, 8.15), yticks=[], xlabel="value")
    axes.spines["left"].set_visible(False)
    axes.set_title("Any format", weight="bold", loc="left")


def roundings(axes: Axes) -> None:
    ramp = torch.linspace(0, 4, 801)
    draws = qsim.quantize(ramp.expand(400, -1), "e2m1", rounding="stochastic", seed=0)
    axes.plot(ramp[::4], draws[0, ::4], ".", markersize=2.5, color="C1", alpha=0.6)
    axes.plot(ramp, qsim.quantize(ramp, "e2m1"), color="C0", label="nearest")
    axes.plot(ramp, draws.mean(0), color="C1", label="stochastic, mean of 400")
    axes.set(xlabel="before", ylabel="after, in e2m1", xticks=range(5), yticks=range(5))
    axes.legend(loc="upper left", borderaxespad=0)
    axes.set_title("Any rounding", weight="bold", loc="left")


def training(axes: Axes) -> None:
    wide = {"color": plt.rcParams["text.color"], "alpha": 0.35, "linewidth": 5}
    axes.plot(range(0, STEPS, EVERY), losses(None), label="weights in float32", **wide)
    for update, colour in (("nearest", "C0"), ("stochastic", "C1")):
        axes.plot(range(0, STEPS, EVERY), losses(update), color=colour, label=f"weights in bf16, {update}")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.set_yticks([0.3, 0.5, 1, 2], labels=["0.3", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.legend(loc="lower left", borderaxespad=0)
    axes.set_title("What it does to training", weight="bold", loc="left")


def losses(update: str | None) -> list[float]:
    """The loss of a small net on scikit-learn's digits: weights in bfloat16, updated in one of the ways of `qsim.optim`, or in float32."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    options = {} if update is None else {"update": update, "weight": "bf16", "seed": 0}
    optimizer = qsim.optim.SGD(model.parameters(), lr=0.05, **options)
    found = []
    for step in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        if step % EVERY == 0:
            found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found
