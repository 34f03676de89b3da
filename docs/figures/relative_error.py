"""The largest relative error of rounding to nearest, against magnitude."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import qsim

FORMATS = ("e4m3", "e5m2", "e2m1", "int8")


def draw() -> Figure:
    exponents = torch.arange(-20, 18)
    within = 2.0 ** torch.linspace(0, 1, 513)[:-1]
    x = 2.0 ** exponents[:, None] * within
    figure, axes = plt.subplots(figsize=(4.2, 2.6))
    for name in FORMATS:
        error = ((qsim.quantize(x, name) - x).abs() / x).amax(1)
        axes.step(2.0**exponents, error, where="post", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="magnitude", ylabel="largest relative error")
    axes.legend(ncols=len(FORMATS), loc="upper center")
    axes.set_ylim(top=8)
    axes.grid(alpha=0.5)
    return figure
