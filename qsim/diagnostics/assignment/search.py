"""The choice of one option for each item, with the least loss within a budget: by steps of best value, or exactly.

This is the knapsack problem with multiple choices. Its linear relaxation is solved by the lower convex hulls of the items' options: the
steps of all hulls, the most valuable first. The exact search extends partial choices item by item. Of two partial choices it drops the one
that costs more and loses more, and it drops those whose bound, the relaxation of the remaining items, is no better than a known solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: The way to search.
Search = Literal["exact", "greedy"]


class Option(NamedTuple):
    """An option of an item: what it costs, and what it loses."""

    cost: float
    loss: float


class HullStep(NamedTuple):
    """A step along the hull of an item: to an option that costs more and loses less."""

    item: int
    option: int
    cost: float
    gain: float


def total(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> Option:
    """The cost and the loss of a choice.

    Example:
        >>> total([[Option(1, 5), Option(2, 3)], [Option(1, 4)]], [1, 0])
        Option(cost=3, loss=7)
    """
    picked = [options[index] for options, index in zip(items, chosen, strict=True)]
    return Option(sum(option.cost for option in picked), sum(option.loss for option in picked))


def cheapest(items: Sequence[Sequence[Option]]) -> list[int]:
    """The cheapest option of each item; of equally cheap ones, that of the least loss."""
    return [min(range(len(options)), key=lambda index: options[index]) for options in items]


def steps(items: Sequence[Sequence[Option]]) -> list[HullStep]:
    """The steps along the hulls of all items, the most valuable first; those of one item are in the order of its hull.

    Example:
        >>> steps([[Option(1, 9), Option(2, 6), Option(3, 0)]])
        [HullStep(item=0, option=2, cost=2, gain=9)]
    """
    found = [step for item, options in enumerate(items) for step in _hull(item, options)]
    return sorted(found, key=lambda step: -step.gain / step.cost)


def _hull(item: int, options: Sequence[Option]) -> list[HullStep]:
    """The steps along the lower convex hull of an item's options, from its cheapest one."""
    corners: list[int] = []
    for index in sorted(range(len(options)), key=lambda index: options[index]):
        while corners and options[index].loss < options[corners[-1]].loss and _is_above(options, corners, index):
            corners.pop()
        if not corners or options[index].loss < options[corners[-1]].loss:
            corners.append(index)
    return [
        HullStep(item, after, options[after].cost - options[before].cost, options[before].loss - options[after].loss)
        for before, after in pairwise(corners)
    ]


def _is_above(options: Sequence[Option], corners: Sequence[int], index: int) -> bool:
    """Whether the last corner is not below the line from the one before it to a new option."""
    if len(corners) < 2:
        return False
    before, last, new = options[corners[-2]], options[corners[-1]], options[index]
    return (before.loss - last.loss) * (new.cost - before.cost) <= (before.loss - new.loss) * (last.cost - before.cost)


def greedy(items: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """Take the most valuable step that fits into the budget, until none does.

    Args:
        items: The options of each item.
        budget: The largest total cost; the cheapest options must fit.

    Example:
        >>> greedy([[Option(1, 9), Option(2, 1)], [Option(1, 4), Option(2, 3)]], budget=3)
        [1, 0]
    """
    chosen = cheapest(items)
    spent, skipped = total(items, chosen).cost, set()
    for step in steps(items):
        if step.item in skipped:
            continue
        if spent + step.cost <= budget:
            chosen[step.item] = step.option
            spent += step.cost
        else:
            skipped.add(step.item)  # later steps of the item start here
    return chosen


def exact(items: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """The choice of the least loss within a budget.

    Args:
        items: The options of each item.
        budget: The largest total cost; the cheapest options must fit.

    Example:
        >>> items = [[Option(0, 10), Option(3, 1)], [Option(0, 9), Option(2, 3)], [Option(0, 9), Option(2, 3)]]
        >>> greedy(items, budget=4), exact(items, budget=4)
        ([1, 0, 0], [0, 1, 1])
    """
    relaxations = _relaxations(items)
    # Bounds are differences from the loss of the cheapest options, next to which the losses that decide can be small.
    known = total(items, greedy(items, budget)).loss + 1e-12 * total(items, cheapest(items)).loss
    costs, losses = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    trail: list[tuple[Tensor, Tensor]] = []
    for options, relaxation in zip(items, relaxations[1:], strict=True):
        own = torch.tensor(options, dtype=torch.float64)
        costs, losses = (costs[:, None] + own[:, 0]).flatten(), (losses[:, None] + own[:, 1]).flatten()
        kept = _undominated(costs, losses)
        bound = losses[kept] + relaxation.loss(budget - costs[kept])
        kept = kept[bound <= known]
        trail.append((kept // len(options), kept % len(options)))
        costs, losses = costs[kept], losses[kept]
    place, chosen = int(losses.argmin()), []
    for parents, options_of in reversed(trail):
        chosen.append(int(options_of[place]))
        place = int(parents[place])
    return chosen[::-1]


def _undominated(costs: Tensor, losses: Tensor) -> Tensor:
    """The indices of the partial choices than which no other is both cheaper and better, by their costs."""
    order = losses.argsort(stable=True)
    order = order[costs[order].argsort(stable=True)]
    best = losses[order].cummin(0).values
    is_better = torch.ones_like(best, dtype=torch.bool)
    is_better[1:] = losses[order][1:] < best[:-1]
    return order[is_better]


class _Relaxation:
    """The least loss of some items for a cost, if the last step may be taken in part."""

    def __init__(self, start: Option, path: Sequence[HullStep]) -> None:
        self._costs = list(accumulate((step.cost for step in path), initial=start.cost))
        self._losses = list(accumulate((-step.gain for step in path), initial=start.loss))

    def loss(self, costs: Tensor) -> Tensor:
        """The least losses for some costs; infinite for those that are too small for any choice."""
        knots, values = (torch.tensor(own, dtype=torch.float64) for own in (self._costs, self._losses))
        after = torch.bucketize(costs, knots, right=True).clamp(1, max(len(knots) - 1, 1)) if len(knots) > 1 else None
        if after is None:
            found = values.expand_as(costs)
        else:
            share = ((costs - knots[after - 1]) / (knots[after] - knots[after - 1])).clamp(0, 1)
            found = values[after - 1] + share * (values[after] - values[after - 1])
        return torch.where(costs < knots[0] - 1e-9 * abs(knots[0]), torch.inf, found)


def _relaxations(items: Sequence[Sequence[Option]]) -> list[_Relaxation]:
    """The relaxation of all items, of all but the first, and so on, down to that of none."""
    path, start = steps(items), cheapest(items)
    return [
        _Relaxation(total(items[first:], start[first:]), [step for step in path if step.item >= first]) for first in range(len(items) + 1)
    ]


def frontier(items: Sequence[Sequence[Option]]) -> list[Option]:
    """The costs and losses along the hull, from the cheapest choice to that of the least loss: none is below the lines between them."""
    path, start = steps(items), total(items, cheapest(items))
    costs = accumulate((step.cost for step in path), initial=start.cost)
    return [Option(cost, loss) for cost, loss in zip(costs, accumulate((-step.gain for step in path), initial=start.loss), strict=True)]
