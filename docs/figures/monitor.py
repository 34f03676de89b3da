"""A monitor's counts at one point of a layer: the powers of two of gradients, and the range of E4M3."""

import warnings

import torch
from matplotlib.figure import Figure

import qsim


def draw() -> Figure:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
    qsim.convert(model, qsim.FivePoint(act="e4m3", weight="e4m3", grad="e4m3"))
    # It warns that gradients underflow, which is what the figure shows.
    with warnings.catch_warnings(), qsim.diagnostics.Monitor(model) as monitor:
        warnings.simplefilter("ignore")
        loss = torch.nn.functional.cross_entropy(model(torch.randn(256, 64)), torch.randint(10, (256,)))
        loss.backward()
        monitor.step()
    figure = monitor.plot_exponents("0")
    figure.set_size_inches(5.2, 3.8)
    return figure
