"""A plot of the records of a result that are worst."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsim.plot.axes import drawing
from qsim.text.records import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def worst(records: Records[Any], by: str, *, rows: int = 20, ax: Axes | None = None) -> Axes:
    """Plot a bar for each of the worst records of a result: of a sample, gradient errors, a coverage or others.

    Args:
        records: The result.
        by: What to rank its records by, as `records.worst` takes it.
        rows: The number of bars.
        ax: Where to draw; a new figure unless given.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If `records` is something else.
        ValueError: If records are not ranked by that.

    Example:
        >>> import torch, qsim
        >>> from qsim import plot
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)), qsim.FivePoint(act="e4m3"))
        >>> plot.worst(qsim.coverage(model, torch.randn(3, 8)), "unrounded", rows=3).get_xlabel()
        'unrounded'
    """
    if not isinstance(records, Records):
        raise TypeError(f"worst: records must be a result of qsim, such as a Sample or a Coverage, got {records!r}")
    ranking = records.ranking(by)[:rows]
    with drawing("worst", ax, (5.0, 0.8 + 0.22 * len(ranking))) as axes:
        axes.barh(range(len(ranking)), [loss for _, loss in ranking], color="C0")
        axes.set_yticks(range(len(ranking)), [" ".join(map(str, records.key(record))) for record, _ in ranking])
        axes.invert_yaxis()
        axes.set_xlabel(by)
    return axes
