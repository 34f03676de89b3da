"""The probability with which stochastic rounding of two (`two`) or four (`four`) random bits rounds up."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure


def draw(part: str) -> Figure:
    bits = {"two": 2, "four": 4}[part]
    p = np.linspace(0, 1, 2001)[:-1]
    figure, axes = plt.subplots(figsize=(3.7, 2.9))
    axes.plot(p, p, linewidth=0.8, linestyle=":", color=plt.rcParams["text.color"], label="exactly")
    axes.plot(p, np.floor(p * 2**bits) / 2**bits, label="uncorrected")
    axes.plot(p, np.floor(p * 2**bits + 0.5) / 2**bits, label="corrected")
    axes.set(title=f"{bits} random bits", xlabel="position between the neighbours", ylabel="probability of the upper one")
    axes.legend(loc="upper left")
    return figure
