"""Solutions of the notebook on training in FP4."""

import torch

import qsim


def share_lost(x, format, scale=None):
    """The share of nonzero numbers that rounding turns into zero."""
    rounded = qsim.quantize(x, format, scale=scale)
    return ((rounded == 0) & (x != 0)).sum().item() / (x != 0).sum().item()


def error_of_mean(gradient, rounding, draws):
    """The relative error of the mean of `draws` roundings to E2M1 with a scale per tensor."""
    total = torch.zeros_like(gradient, dtype=torch.float64)
    for draw in range(draws):
        seed = draw if rounding == "stochastic" else None
        total += qsim.quantize(
            gradient, "e2m1", scale="tensor", rounding=rounding, seed=seed
        )
    return ((total / draws - gradient).norm() / gradient.norm()).item()


def points(rounding):
    """Points in E2M1 with a scale per tensor; the gradient is rounded with `rounding`."""
    nearest = qsim.Quantizer("e2m1", scale="tensor")
    return qsim.FivePoint(
        act=nearest,
        weight=nearest,
        grad=qsim.Quantizer("e2m1", scale="tensor", rounding=rounding),
    )
