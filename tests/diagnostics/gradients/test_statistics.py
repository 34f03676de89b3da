"""The estimators of gradients' bias and variance: unbiased, with confidence intervals that have the stated coverage."""

from __future__ import annotations

import math

import pytest
import torch

from qsim.diagnostics.gradients.statistics import Moments, rounding_variance, sampling, squared_bias, student, total_moments, weight_moments
from support.bounds import check_means, surprise

TRIALS, BATCHES, DRAWS = 1501, 12, 3
# One element has the most skewed estimates, many have the least. Intervals are most difficult for a bias of zero.
CASES = [(1, 0.0), (40, 0.0), (40, 0.3)]


def known(elements: int, offset: float) -> tuple[list[Moments], dict[str, float]]:
    """Many measurements of normally distributed gradients, and their true values."""
    generator = torch.Generator().manual_seed(elements)
    scale = torch.linspace(0.5, 1.5, elements, dtype=torch.float64)
    shape = TRIALS, BATCHES, elements
    reference = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + 2
    # The effect of rounding on the mean of a batch also differs from batch to batch.
    expected = reference + offset + 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    draws = expected + 0.7 * scale * torch.randn(DRAWS, *shape, generator=generator, dtype=torch.float64)
    spread = draws.var(0).sum(-1)
    found = [weight_moments(mean, own, base) for mean, own, base in zip(draws.mean(0), spread, reference, strict=True)]
    squares = float(scale.square().sum())
    return found, {"bias": offset**2 * elements, "sampling": squares + 0.04 * elements, "rounding": 0.49 * squares}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("elements", "offset"), CASES)
def test_estimates_are_unbiased_and_intervals_cover(elements: int, offset: float) -> None:
    found, due = known(elements, offset)
    estimates = [{"bias": squared_bias(one), "sampling": sampling(one, DRAWS), "rounding": rounding_variance(one)} for one in found]
    check_means(
        torch.tensor([[float(one[name].value) for name in due] for one in estimates], dtype=torch.float64),
        torch.tensor(list(due.values()), dtype=torch.float64),
    )
    for name, number in due.items():
        intervals = [one[name].estimate(0.95) for one in estimates]
        covered = sum(interval.low <= number <= interval.high for interval in intervals)
        # For skewed estimates, 95 % intervals cover less than they claim: for the variance of one element about 87 %.
        least = 0.83 if elements == 1 else 0.9
        assert covered / TRIALS >= least or surprise(covered, TRIALS, least) >= 1e-9, (name, covered / TRIALS)
        # Nor may they be too wide to be useful. For a bias of zero the jackknife doubles the variance: about 99.5 % are covered.
        assert covered < TRIALS, name


def test_leaving_out_a_batch_is_what_it_says() -> None:
    means, reference = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    spread = torch.rand(6, dtype=torch.float64)
    whole = weight_moments(means, spread, reference)
    for estimate in (rounding_variance, squared_bias, lambda found: sampling(found, 4)):
        for i in range(6):
            rest = [k for k in range(6) if k != i]
            part = estimate(weight_moments(means[rest], spread[rest], reference[rest])).value
            assert torch.allclose(estimate(whole).without[i], part)


def test_moments_of_weights_add_up() -> None:
    means, reference, spread = torch.randn(5, 7), torch.randn(5, 7), torch.rand(5)
    parts = [weight_moments(means[:, own], spread / 2, reference[:, own]) for own in (slice(0, 3), slice(3, 7))]
    for together, apart in zip(total_moments(parts), weight_moments(means, spread, reference), strict=True):
        torch.testing.assert_close(together, apart)


def test_quantiles_are_those_of_tables() -> None:
    due = {(0.95, 1): 12.706205, (0.95, 2): 4.302653, (0.99, 5): 4.032143, (0.95, 30): 2.042272, (0.9, 7): 1.894579}
    for (level, degrees), number in due.items():
        assert math.isclose(student(level, degrees), number, rel_tol=1e-6)
