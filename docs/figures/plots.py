"""The plots of `qsim.plot` for a custom format."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import qsim
from qsim import plot


def draw() -> Figure:
    narrow = qsim.Float(3, 2, bias=6)
    figure, (line, stairs, error) = plt.subplots(3, 1, figsize=(6.8, 6.6), height_ratios=(2, 5, 5))
    plot.number_line(narrow, ax=line)
    plot.rounding(narrow, "stochastic", ax=stairs)
    plot.error(narrow, ax=error)
    return figure
