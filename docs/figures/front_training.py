"""The library at a glance, last of three: what formats and roundings do to training."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import qsim

SIZE = (3.5, 3.1)
STEPS, EVERY = 600, 10


def draw() -> Figure:
    figure, axes = plt.subplots(figsize=SIZE)
    wide = {"color": plt.rcParams["text.color"], "alpha": 0.35, "linewidth": 5}
    axes.plot(range(0, STEPS, EVERY), losses(None), label="weights in float32", **wide)
    for update, colour in (("nearest", "C0"), ("stochastic", "C1")):
        axes.plot(range(0, STEPS, EVERY), losses(update), color=colour, label=f"weights in bf16, {update}")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.set_yticks([0.3, 0.5, 1, 2], labels=["0.3", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.legend(loc="lower left", borderaxespad=0)
    axes.set_title("What it does to training", weight="bold", loc="left")
    return figure


def losses(update: str | None) -> list[float]:
    """The loss of a small net on scikit-learn's digits: weights in bfloat16, updated in one of the ways of `qsim.optim`, or in float32."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    options = {} if update is None else {"update": update, "format": "bf16", "seed": 0}
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
