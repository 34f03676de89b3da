"""The values that survive in FP4 next to an outlier: without a scale, with one per tensor, and with one per block of 16."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import qsim
from qsim import scaling

SCALES = {
    "none": ("no scale", None),
    "tensor": ("one scale of the tensor", scaling.PerTensor()),
    "blocks": ("blocks of 16", scaling.PerBlock(16)),
}


def draw(part: str) -> Figure:
    title, scale = SCALES[part]
    x = 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(3))
    x[40] = 3.0
    figure, axes = plt.subplots(figsize=(2.6, 2.6))
    rounded = qsim.quantize(x, "e2m1", scale=scale)
    axes.vlines(range(64), 0, x, linewidth=1, color=plt.rcParams["grid.color"])
    axes.plot(x, ".", markersize=3, color=plt.rcParams["text.color"], alpha=0.5, label="before")
    axes.plot(rounded, ".", markersize=4, label="after")
    axes.set_title(f"{title}\n{int((rounded == 0).sum())} of 64 become 0")
    axes.set_xlabel("index")
    axes.set_yscale("symlog", linthresh=0.2)
    axes.set_yticks([-0.2, -0.1, 0, 0.1, 0.2, 1, 3], ["−0.2", "−0.1", "0", "0.1", "0.2", "1", "3"])
    if part == "none":
        axes.legend(loc="upper left")
    return figure
