"""The mean of weights in bfloat16 under updates that are a sixteenth of the distance between their values."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import qsim

STEPS = 256


def draw() -> Figure:
    figure, axes = plt.subplots(figsize=(4.2, 2.6))
    axes.plot([0, STEPS], [1, 1 - STEPS * 2.0**-12], linewidth=5, alpha=0.3, color=plt.rcParams["text.color"], label="exactly")
    for update, style in (("nearest", "-"), ("kahan", "-"), ("stochastic", "--")):
        w = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = qsim.optim.SGD([w], lr=2**-12, update=update, seed=0)
        means = [1.0]
        for _ in range(STEPS):
            w.grad = torch.ones_like(w)
            optimizer.step()
            means.append(w.detach().double().mean().item())
        axes.plot(means, style, linewidth=1.5, label=update)
    axes.set(xlabel="step", ylabel="mean weight")
    axes.legend(loc="lower left")
    return figure
