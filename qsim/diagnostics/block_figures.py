"""Figures of blocks: heat maps, and histories of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from qsim.plot.axes import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from qsim.diagnostics.block_counts import BlockCounts, BlockValue

#: The most rows and columns of a map: of more blocks, each pixel shows the largest value of several.
_MOST = 512
_LABELS = {
    "amax": "largest magnitude",
    "scale": "scale",
    "saturated": "share saturated",
    "underflowed": "share underflowed",
    "error": "relative squared error",
}


def heat_map(counts: BlockCounts, value: BlockValue, matrix: int | None, ax: Axes | None) -> Axes:
    """A value of all blocks, or of those of one matrix."""
    values = counts.values(value)
    if matrix is not None and not 0 <= matrix < len(values):
        raise ValueError(f"heat_map: matrix must be below {len(values)}, the number of matrices, got {matrix}")
    shown = (values if matrix is None else values[matrix : matrix + 1]).flatten(0, 1)
    reach = [-(-size // _MOST) for size in shown.shape]
    pixels = F.max_pool2d(shown[None].nan_to_num(0.0), reach, ceil_mode=True)[0]
    with drawing("heat_map", ax, (4.6, 3.2)) as axes:
        image = axes.imshow(pixels.numpy(), aspect="auto", interpolation="nearest", extent=(0, shown.shape[1], shown.shape[0], 0))
        axes.figure.colorbar(image, ax=axes, label=_LABELS[value])
        axes.grid(visible=False)
        axes.set_title(f"{counts.layer or 'the model'}, {counts.point}: {counts.quantizer}, step {counts.step}", loc="left")
        axes.set_xlabel("block in a row")
        axes.set_ylabel("row of blocks")
    return axes


def histories(samples: Sequence[BlockCounts], value: BlockValue, ax: Axes | None) -> Axes:
    """The median and the range of a value over blocks, at each point over the steps."""
    if not samples:
        raise ValueError("no blocks have been sampled: give Monitor(…, blocks=…), and end a step")
    places: dict[tuple[str, str], list[BlockCounts]] = {}
    for counts in samples:
        places.setdefault((counts.layer, counts.point), []).append(counts)
    with drawing("plot", ax, (5.0, 3.0)) as axes:
        for number, ((layer, point), own) in enumerate(places.items()):
            steps = [counts.step for counts in own]
            ends = torch.stack([torch.stack([x.min(), x.median(), x.max()]) for x in (counts.values(value).flatten() for counts in own)])
            low, middle, high = ends.T.tolist()
            axes.plot(steps, middle, color=f"C{number}", label=f"{layer} {point}".strip(), marker="o")
            axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
        if value in ("amax", "scale"):
            axes.set_yscale("log", base=2)
        axes.set_xlabel("step")
        axes.set_ylabel(_LABELS[value])
        axes.legend(frameon=False)
    return axes
