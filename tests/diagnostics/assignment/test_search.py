"""The searches compared with all choices."""

from __future__ import annotations

import itertools
import random

import pytest

from qsim.diagnostics.assignment.search import Option, exact, frontier, greedy, total


def items_of(seed: int) -> tuple[list[list[Option]], float]:
    """Items with options, and a budget that the cheapest ones meet."""
    draw = random.Random(seed)
    kind = draw.choice([draw.random, lambda: draw.randint(0, 4)])
    items = [[Option(kind(), 3 * draw.random()) for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, 5))]
    low, high = (sum(own(option.cost for option in options) for options in items) for own in (min, max))
    return items, low + draw.random() * (high - low)


@pytest.mark.parametrize("seed", range(60))
def test_the_exact_search_finds_the_best_of_all_choices(seed: int) -> None:
    items, budget = items_of(seed)
    every = [total(items, chosen) for chosen in itertools.product(*(range(len(options)) for options in items))]
    best = min(found.loss for found in every if found.cost <= budget + 1e-12)
    found = total(items, exact(items, budget))
    assert found.cost <= budget + 1e-12
    assert found.loss == pytest.approx(best)
    steps = total(items, greedy(items, budget))
    assert steps.cost <= budget + 1e-12
    assert steps.loss >= best - 1e-12


def test_losses_may_differ_by_many_powers_of_ten() -> None:
    items = [
        [Option(27 / 7, 186887.94704930854), Option(4.0, 1.3972355785947628e-09)],
        [Option(10 / 7, 0.29611706662188136), Option(23 / 7, 0.0005002461890788216), Option(34 / 7, 0.00021078338833046463)],
        [Option(1 / 7, 877.2589051657267), Option(19 / 7, 0.00012122460682072278)],
        [Option(1 / 7, 68.4568122172703), Option(8 / 7, 0.20920247287767385), Option(20 / 7, 6.486045285139096e-10)],
    ]
    assert exact(items, 1000.0) == [1, 2, 1, 2]


def test_no_choice_is_below_the_frontier() -> None:
    items, _ = items_of(7)
    path = frontier(items)
    for chosen in itertools.product(*(range(len(options)) for options in items)):
        found = total(items, chosen)
        for one, other in itertools.pairwise(path):
            if one.cost <= found.cost <= other.cost:
                share = (found.cost - one.cost) / (other.cost - one.cost)
                assert found.loss >= one.loss + share * (other.loss - one.loss) - 1e-12


def test_many_layers_take_little_time() -> None:
    draw = random.Random(0)
    items = [[Option(draw.choice([1, 3, 4]) * bits, draw.lognormvariate(0, 2) * 4.0**-bits) for bits in range(5)] for _ in range(150)]
    assert total(items, exact(items, 600.0)).cost <= 600
