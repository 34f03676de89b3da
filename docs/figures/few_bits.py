"""With which probability stochastic rounding of few random bits rounds up."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure


def draw() -> Figure:
    p = np.linspace(0, 1, 2001)[:-1]
    figure, panels = plt.subplots(1, 2, figsize=(7.4, 2.9), sharey=True)
    for axes, bits in zip(panels, (2, 4), strict=True):
        axes.plot(p, p, linewidth=0.8, linestyle=":", color=plt.rcParams["text.color"], label="exactly")
        axes.plot(p, np.floor(p * 2**bits) / 2**bits, label="as it is")
        axes.plot(p, np.floor(p * 2**bits + 0.5) / 2**bits, label="corrected")
        axes.set_title(f"{bits} random bits")
        axes.set_xlabel("position between the neighbours")
    panels[0].set_ylabel("probability of the upper one")
    panels[0].legend(loc="upper left")
    return figure
