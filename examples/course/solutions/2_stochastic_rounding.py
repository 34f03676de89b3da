"""Solutions of the notebook on stochastic rounding and bias."""

import torch

import qsim


def probability_up(x, below, above):
    """The probability of rounding x to its upper neighbour, for a mean of x."""
    return (x - below) / (above - below)


def round_stochastically(x, below, above, u):
    """Each element of x rounded to `below` or `above`, by the random numbers u."""
    return torch.where(u < probability_up(x, below, above), above, below)


def largest_cancelled_update(mantissa):
    """The largest update of a weight of 1 that round-to-nearest cancels, with this many mantissa bits."""
    return 2.0**-mantissa / 2


def train(weight, update, steps, rounding):
    """The weights after `steps` updates, each rounded to BF16."""
    for step in range(steps):
        seed = step if rounding == "stochastic" else None
        weight = qsim.quantize(weight + update, "bf16", rounding=rounding, seed=seed)
    return weight
