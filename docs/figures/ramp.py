"""A ramp in E2M1 under one of several roundings."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import qsim


def draw(rounding: str) -> Figure:
    ramp = torch.linspace(0, 4, 801)
    figure, axes = plt.subplots(figsize=(2.6, 2.6))
    axes.plot([0, 4], [0, 4], linewidth=0.8, linestyle=":", color=plt.rcParams["text.color"])
    rounded = qsim.quantize(ramp, "e2m1", rounding=rounding, seed=0)
    if rounding == "stochastic":
        axes.plot(ramp, rounded, ".", markersize=2, alpha=0.6, label="one draw")
        many = qsim.quantize(ramp.expand(400, -1), "e2m1", rounding=rounding, seed=1)
        axes.plot(ramp, many.mean(0), color="C1", label="mean of 400")
        axes.legend(loc="upper left")
    else:
        axes.plot(ramp, rounded)
    axes.set(title=rounding, xlabel="before", ylabel="after")
    return figure
