"""Plots of formats, roundings, monitor samples and other results. They need matplotlib, which is in qsim's extra `study`.

Each function draws into one Axes and returns it: a given one, whose figure keeps the user's style, or one of a new figure.

Example:
    >>> from qsim import plot
    >>> ax = plot.number_line("e2m1")
    >>> ax.figure.savefig("e2m1.png")  # doctest: +SKIP
"""

from qsim.plot.formats import error, number_line, rounding
from qsim.plot.monitors import monitor
from qsim.plot.ranking import worst

__all__ = ["error", "monitor", "number_line", "rounding", "worst"]
