"""Errors of sums as they grow, for four accumulators."""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import qsim
from qsim.accumulators import Promoted, Rounded

LENGTH = 1024


def draw() -> Figure:
    """The error of running sums of positive products against their number."""
    figure, axes = plt.subplots(figsize=(3.9, 3.3))
    generator = torch.Generator().manual_seed(0)
    a, b = (qsim.quantize(torch.rand(16, LENGTH, generator=generator) + 0.25, "e4m3") for _ in range(2))
    steps = range(64, LENGTH + 1, 64)
    exact = [(a[:, :k].double() * b[:, :k].double()).sum(1) for k in steps]
    chosen = (
        ("h100_fp8", qsim.accumulators.resolve("h100_fp8")),
        ("h100_fp8_promoted", qsim.accumulators.resolve("h100_fp8_promoted")),
        ("Rounded('bf16')", Rounded("bf16")),
        ("Promoted(Rounded('bf16'), 32)", Promoted(Rounded("bf16"), 32)),
    )
    for i, (name, accumulator) in enumerate(chosen):
        rows = [qsim.matmul(a[:, None, :k], b[:, :k, None], accumulator).view(-1) for k in steps]
        errors = [((row.double() - right).abs() / right).mean().item() for row, right in zip(rows, exact, strict=True)]
        axes.semilogy(list(steps), errors, label=name, color=f"C{i}", linewidth=1.5)
    axes.set(xlabel="products added", title="mean relative error of running sums", ylim=(1e-6, 1))
    axes.legend(loc="lower right", fontsize=7)
    return figure
