"""Gradients in 8 bits without scales of their own, under dynamic loss scaling: the scale grows until something overflows.

A `torch.amp.GradScaler` doubles the loss's scale every few steps, and halves it when a gradient is not finite. Gradients that a layer
rounds without a scale overflow. With `overflow="saturate"` they stay finite, nothing ever stops the scale, and training fails.

    python examples/loss_scaling.py --seeds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import nn

import qsim
from qsim import FivePoint, Quantizer

SETTINGS: dict[str, FivePoint | str | None] = {
    "float32": None,
    "e4m3": FivePoint("e4m3", "e4m3", "e4m3"),
    "e4m3, nonfinite": FivePoint("e4m3", "e4m3", Quantizer("e4m3", overflow="nonfinite")),
    "e4m3, saturate": FivePoint("e4m3", "e4m3", Quantizer("e4m3", overflow="saturate")),
    "e5m2": FivePoint("e4m3", "e4m3", "e5m2"),
    "e5m2, nonfinite": FivePoint("e4m3", "e4m3", Quantizer("e5m2", overflow="nonfinite")),
    "e5m2, saturate": FivePoint("e4m3", "e4m3", Quantizer("e5m2", overflow="saturate")),
    "hfp8": "hfp8",
}


def trained(points: FivePoint | str | None, seed: int, steps: int = 300, growth_interval: int = 10) -> tuple[float, float]:
    """Train a perceptron on digits; return its test accuracy and the last loss scale."""
    torch.manual_seed(seed)
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    test = torch.arange(len(x)) % 4 == 0
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if points is not None:
        qsim.convert(model, points)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    rows = (~test).nonzero().view(-1)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (64,))]
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        accuracy = (model.eval()(x[test]).argmax(1) == y[test]).float().mean().item()
    return accuracy, scaler.get_scale()


def main(seeds: int, names: Iterable[str] = SETTINGS, steps: int = 300) -> dict[str, list[float]]:
    """Train every setting with every seed, and print accuracies in percent and the last scales as powers of two."""
    accuracies: dict[str, list[float]] = {}
    for name in names:
        results = [trained(SETTINGS[name], seed, steps) for seed in range(seeds)]
        accuracies[name] = [accuracy for accuracy, _ in results]
        powers = " ".join(f"2^{torch.tensor(scale).log2().item():.0f}" for _, scale in results)
        print(f"{name:<16} {' '.join(f'{100 * accuracy:5.1f}' for accuracy in accuracies[name])}   {powers}")
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    main(parser.parse_args().seeds)
