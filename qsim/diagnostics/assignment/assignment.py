"""The result of an assignment: the candidate of each tensor of each layer, and a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qsim.diagnostics.assignment.choices import PointChoice
from qsim.diagnostics.assignment.search import Option
from qsim.diagnostics.assignment.sensitivity import Sensitivities, Sensitivity
from qsim.text.records import Records, Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What costs are measured in, for texts.
UNITS = {"bits": "bits per element", "time": "of the time in BF16", "luts": "lookup tables per multiply-add"}


@dataclass(frozen=True)
class Uniform:
    """One candidate in all layers, for comparison.

    Attributes:
        candidate: Its name.
        spent: What it costs.
        error: The mean squared error of the gradients, relative to these.

    Example:
        >>> import qsim
        >>> qsim.diagnostics.Uniform("e2m1", spent=4.25, error=0.11).spent
        4.25
    """

    candidate: str
    spent: float
    error: float


@dataclass(frozen=True)
class Assignment(Records[Sensitivity]):
    """The candidate of each tensor of each layer, with its sensitivity; prints as a table.

    Attributes:
        records: The sensitivities to the candidates that were chosen.
        unit: What costs are measured in.
        budget: The budget.
        spent: What the assignment costs.
        error: The predicted mean squared error of the gradients, relative to these: the sum of that of the records.
        points: The points of each layer.
        uniform: The cost and the error of each candidate in all layers.
        frontier: The costs and errors of the best assignments for other budgets.
        sensitivities: The sensitivities to all candidates.
        left: What could round, and was not assigned: layers, and products outside of layers by their names in a trace.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> batches = [(torch.randn(64, 32), torch.randint(8, (64,))) for _ in range(3)]
        >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> found = qsim.assign(model, batches, loss, budget=6.0, candidates=["e2m1", "e4m3", "bf16"])
        >>> found.spent <= 6.0, sorted(found.recipe)
        (True, ['0', '2'])
    """

    unit: str
    budget: float
    spent: float
    error: float
    points: tuple[tuple[str, PointChoice], ...]
    uniform: tuple[Uniform, ...]
    frontier: tuple[Option, ...]
    sensitivities: Sensitivities
    left: tuple[str, ...]

    COLUMNS: ClassVar[Values] = Sensitivities.COLUMNS
    RIGHT: ClassVar[tuple[str, ...]] = Sensitivities.RIGHT
    NAME: ClassVar[str] = "assigned"
    LOSSES: ClassVar[Values] = Sensitivities.LOSSES

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe: the points of each layer in plain values, as `qsim.convert` takes it and JSON keeps it."""
        return {name: choice.points.to_dict() for name, choice in self.points}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the error against the cost: of the best assignments, of uniform candidates, and of this one.

        Args:
            ax: The axes to draw on; new ones by default.
        """
        from qsim.diagnostics.assignment.figure import trade_off

        return trade_off(self, ax)

    def _above(self) -> list[str]:
        return [f"{self.spent:.4g} {UNITS[self.unit]}, budget {self.budget:g}; squared error of gradients {self.error:.2g}"]

    def _below(self) -> list[str]:
        lines = [f"uniform: {', '.join(f'{own.candidate} {own.spent:.4g} ({own.error:.2g})' for own in self.uniform)}"]
        return [*lines, *([f"not assigned: {', '.join(self.left)}"] if self.left else [])]

    def aggregates(self) -> dict[str, Any]:
        """The cost and the error."""
        return {"spent": self.spent, "error": self.error}
