"""The result of comparing two runs: the first tensor that differs, and where the difference grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qsim.text.records import Records, Values, scientific

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor between two runs, a and b. All sizes are norms relative to that of run a's tensor.

    Attributes:
        layer: The layer, or the module that calls the function.
        operation: The class of the layer or the name of the function, with the number of the call if it is not the first.
        tensor: `output`, `grad_input`, or a parameter with `.grad` or `.updated`.
        error: The whole difference.
        ulps: Largest difference of an element, in units in the last place.
        own: Part that arises here: b's operation with a's inputs, compared with a's. NaN if it cannot be repeated.
        operands: The part of it that comes from the roundings of operands and the values of parameters. NaN if it is not a product.
        accumulation: The rest of it: the formats and the order of sums, and the rounding of the result.
        inherited: Part that comes from inputs that differ.
        cause: What differs: `settings`, `state` (parameters and buffers), `arithmetic` if neither, `inherited`, or nothing.
        settings: Settings of the operation in both runs.

    Example:
        >>> import copy, torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 4))
        >>> narrow = qsim.convert(copy.deepcopy(model), qsim.FivePoint(act="e4m3"))
        >>> found = qsim.compare(model, narrow, torch.full((3, 16), 0.3))["0", "Linear", "output"]
        >>> found.title, found.cause, found.inherited
        ('output of 0 (Linear)', 'settings', 0.0)
    """

    layer: str
    operation: str
    tensor: str
    error: float
    ulps: float
    own: float
    operands: float
    accumulation: float
    inherited: float
    cause: str
    settings: tuple[str, str] = ("", "")

    @property
    def title(self) -> str:
        """The tensor, described in words."""
        return f"{self.tensor} of {self.layer or '(the model)'} ({self.operation})"


_SIZES = ("error", "own", "operands", "accumulation", "inherited")


@dataclass(frozen=True)
class RunComparison(Records[TensorDifference]):
    """Tensors of two runs compared, in causal order: what `qsim.compare` returns; prints as a table.

    Attributes:
        records: A record of each tensor that both runs computed.
        tolerance: Relative error up to which tensors count as equal.
        only_a: Operations that only run a has, and gradients of parameters for which run b computes none.
        only_b: The same of run b.

    Example:
        >>> import copy, torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        >>> other = qsim.convert(copy.deepcopy(model), qsim.FivePoint(weight="e4m3"), exclude="0")
        >>> found = qsim.compare(model, other, torch.ones(3, 4), backward=False)
        >>> found.first.layer, found.first.tensor, found.first.cause
        ('2', 'output', 'settings')
        >>> [record.layer for record in found if record.error > 0]
        ['2']
    """

    tolerance: float = 0.0
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    COLUMNS: ClassVar[Values] = {
        "layer": lambda record: record.layer or "(the model)",
        "operation": "operation",
        "tensor": "tensor",
        "error": scientific("error"),
        "ulp": lambda record: f"{record.ulps:.0f}" if record.ulps < 1000 else f"{record.ulps:.0e}",
        **{name: scientific(name) for name in _SIZES[1:]},
        "cause": "cause",
    }
    RIGHT: ClassVar[tuple[str, ...]] = tuple(COLUMNS)[3:-1]
    KEY: ClassVar[tuple[str, ...]] = ("layer", "operation", "tensor")
    LOSSES: ClassVar[Values] = {name: name for name in (*_SIZES, "ulps")}
    NAME: ClassVar[str] = "differences"

    @property
    def first(self) -> TensorDifference | None:
        """The first tensor that differs, in causal order; `None` if all are equal."""
        return next((record for record in self.records if record.error > self.tolerance), None)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the difference of each tensor in causal order, and the part that arises there.

        Args:
            ax: The axes to draw on; new ones by default.
        """
        from qsim.diagnostics.traces.figure import growth

        return growth(self, ax)

    def _above(self) -> list[str]:
        first = self.first
        if first is None:
            limit = f" beyond {self.tolerance:g}" if self.tolerance else ""
            return [f"no difference{limit} in {len(self)} tensors"]
        lines = [f"first difference: {first.title}"]
        if first.settings[0] != first.settings[1]:
            # A module with children prints as several lines.
            lines += [f"  {run}: {' '.join(settings.split())}" for run, settings in zip("ab", first.settings, strict=True)]
        if first.cause == "inherited" and (self.only_a or self.only_b):
            lines.append("  inherited, perhaps from an operation that only one run has: it is not compared")
        return lines

    def _below(self) -> list[str]:
        lists = (("a", self.only_a), ("b", self.only_b))
        return [f"only in {run}: {', '.join(name or '(the model)' for name in names)}" for run, names in lists if names]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, for JSON, with the place of the first difference."""
        first = self.first
        return {"first": None if first is None else list(self.key(first)), **super().to_dict()}
