"""A plot of what a monitor counted at one point of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@runtime_checkable
class PlotsPoints(Protocol):
    """A `qsim.diagnostics.Monitor`, which knows its samples and draws them."""

    def plot_point(self, layer: str, point: str = "act", *, step: int | None = None, ax: Axes | None = None) -> Axes:
        """Plot the distribution at a point."""


def monitor(monitor: PlotsPoints, layer: str, point: str = "act", *, step: int | None = None, ax: Axes | None = None) -> Axes:
    """Plot the distribution over powers of two of the values at a point of a layer, with the range of the format.

    `Monitor.plot_exponents` draws all points of a layer, and `Monitor.plot_shares` their outcomes over the steps.

    Args:
        monitor: The monitor.
        layer: The layer's name.
        point: The point's.
        step: Which sample; the last one with the layer by default.
        ax: Where to draw; a new figure unless given.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If nothing was seen there.

    Example:
        >>> import torch, qsim
        >>> from qsim import plot
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(8, 2)), qsim.FivePoint(act="e4m3"))
        >>> with qsim.diagnostics.Monitor(model) as monitor:
        ...     y = model(torch.randn(16, 8))
        ...     monitor.step()
        >>> plot.monitor(monitor, "0").get_ylabel()
        'share of elements (%)'
    """
    if not isinstance(monitor, PlotsPoints):
        raise TypeError(f"monitor: monitor must be a qsim.diagnostics.Monitor, got {monitor!r}")
    return monitor.plot_point(layer, point, step=step, ax=ax)
