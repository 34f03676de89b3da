"""The library at a glance, second of three: roundings."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import qsim

SIZE = (3.5, 3.1)


def draw() -> Figure:
    figure, axes = plt.subplots(figsize=SIZE)
    ramp = torch.linspace(0, 4, 801)
    draws = qsim.quantize(ramp.expand(400, -1), "e2m1", rounding="stochastic", seed=0)
    axes.plot(ramp[::4], draws[0, ::4], ".", markersize=2.5, color="C1", alpha=0.6)
    axes.plot(ramp, qsim.quantize(ramp, "e2m1"), color="C0", label="nearest")
    axes.plot(ramp, draws.mean(0), color="C1", label="stochastic, mean of 400")
    axes.set(xlabel="before", ylabel="after, in e2m1", xticks=range(5), yticks=range(5))
    axes.legend(loc="upper left", borderaxespad=0)
    axes.set_title("Any rounding", weight="bold", loc="left")
    return figure
