"""A ramp under several roundings, in E2M1."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import qsim


def draw() -> Figure:
    ramp = torch.linspace(0, 4, 801)
    figure, panels = plt.subplots(1, 3, figsize=(7.4, 2.9), sharey=True)
    for axes, rounding in zip(panels, ("nearest", "toward_zero", "stochastic"), strict=True):
        axes.plot([0, 4], [0, 4], linewidth=0.8, linestyle=":", color=plt.rcParams["text.color"])
        rounded = qsim.quantize(ramp, "e2m1", rounding=rounding, seed=0)
        if rounding == "stochastic":
            axes.plot(ramp, rounded, ".", markersize=2, alpha=0.6, label="one draw")
            many = qsim.quantize(ramp.expand(400, -1), "e2m1", rounding=rounding, seed=1)
            axes.plot(ramp, many.mean(0), color="C1", label="mean of 400")
            axes.legend(loc="upper left")
        else:
            axes.plot(ramp, rounded)
        axes.set_title(rounding)
        axes.set_xlabel("before")
    panels[0].set_ylabel("after")
    return figure
