"""The relative error of what each recipe rounds inputs and gradients to, for normal and for heavy-tailed numbers."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

from qsim import Quantizer, recipes
from qsim.functional.callables import CallablePoint
from qsim.recipes.named import SHOWN_IN

SHAPE = (128, 256)


def draw() -> Figure:
    torch.manual_seed(0)
    normal = torch.randn(SHAPE)
    # Student's t distribution with three degrees of freedom.
    tailed = torch.randn(SHAPE) / torch.randn(3, *SHAPE).square().mean(0).sqrt()
    points = {name: recipes.resolve(name, SHOWN_IN).points.used for name in recipes.NAMED}
    figure, both = plt.subplots(1, 2, figsize=(6.8, 0.19 * len(points) + 0.9), sharey=True)
    for axes, place, title in zip(both, ("act", "grad"), ("inputs", "gradients"), strict=True):
        for x, marker, label in ((normal, "o", "normal"), (tailed, "x", "heavy-tailed")):
            errors = [_error(used[place], x) for used in points.values()]
            axes.plot(errors, range(len(points)), marker, label=label, markersize=4)
        axes.set(title=title, xscale="log", xlabel="relative error", ylim=(len(points) - 0.5, -0.5))
        axes.grid(axis="both", alpha=0.4)
    both[0].set_yticks(range(len(points)), points)
    both[1].legend(loc="upper right")
    return figure


def _error(point: Quantizer | CallablePoint | None, x: Tensor) -> float:
    """The root mean square of the error over that of the numbers; NaN, which is not drawn, for a point that does not round."""
    if point is None:
        return float("nan")
    rounded = point(x) if isinstance(point, Quantizer) else point.rounded("", x)
    return ((rounded - x).norm() / x.norm()).item()
