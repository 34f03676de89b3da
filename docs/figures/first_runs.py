"""The runs of Start: a small net on scikit-learn's digits in FP8 without a scale (`fp8`), and in FP4 with one scale per tensor (`fp4`)."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import qsim

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


# As on the page: a test compares the two.
def train(points=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if points is not None:
        qsim.convert(model, points)  # from now on, its layers round
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(100):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def points(part: str, rounding: str) -> qsim.FivePoint:
    format, scale = {"fp8": ("e4m3", None), "fp4": ("e2m1", "tensor")}[part]
    operand = qsim.Quantizer(format, scale=scale)
    return qsim.FivePoint(act=operand, weight=operand, grad=qsim.Quantizer(format, scale=scale, rounding=rounding))


def draw(part: str) -> Figure:
    figure, axes = plt.subplots(figsize=(3.7, 2.9))
    with torch.random.fork_rng(devices=[]):
        axes.plot(train(), color=plt.rcParams["text.color"], linewidth=5, alpha=0.3, label="float32")
        for rounding, name in (("nearest", "gradient rounded to nearest"), ("stochastic", "gradient rounded stochastically")):
            axes.plot(train(points(part, rounding)), linewidth=1.4, label=name)
    axes.set(xlabel="step", ylabel="loss", yscale="log", ylim=(0.13, 3))
    axes.set_yticks([0.2, 0.5, 1, 2], labels=["0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_title({"fp8": "FP8, no scale", "fp4": "FP4, a scale per tensor"}[part], loc="left")
    if part == "fp8":
        axes.legend(loc="lower left", borderaxespad=0)
    return figure
