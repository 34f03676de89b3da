"""The figure of an assignment: error against cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qsim.diagnostics.assignment.assignment import UNITS, Assignment
from qsim.plot.axes import drawing
from qsim.plot.figures import LOOKS, REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def trade_off(found: Assignment, ax: Axes | None) -> Axes:
    """The errors of the best assignments by their costs, those of uniform candidates, and the assignment."""
    with drawing("Assignment.plot", ax, (4.6, 3.2)) as axes:
        axes.plot(
            [option.cost for option in found.frontier], [option.loss for option in found.frontier], color="C0", label="best assignments"
        )
        axes.plot(
            [own.spent for own in found.uniform], [own.error for own in found.uniform], label="one for all layers", **LOOKS[1].alone()()
        )
        for own in found.uniform:
            axes.annotate(own.candidate, (own.spent, own.error), (4, 4), textcoords="offset points", fontsize=8)
        axes.axvline(found.budget, label="budget", **REFERENCE(linewidth=1))
        axes.plot([found.spent], [found.error], label="assigned", **LOOKS[0].alone()())
        axes.set_yscale("log")
        axes.set_xlabel(UNITS[found.unit])
        axes.set_ylabel("squared error of gradients")
        axes.legend(frameon=False)
    return axes
