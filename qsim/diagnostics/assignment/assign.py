"""Assigning formats to the layers of a model, within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import nn

from qsim.diagnostics.assignment.assignment import UNITS, Assignment, Uniform
from qsim.diagnostics.assignment.choices import TENSORS, Per, PointChoice, choices, default_candidates, named_candidates
from qsim.diagnostics.assignment.costs import Cost, LayerSize, charge
from qsim.diagnostics.assignment.operands import is_one_product
from qsim.diagnostics.assignment.probe import probing
from qsim.diagnostics.assignment.search import Option, Search, exact, frontier, greedy, total
from qsim.diagnostics.assignment.sensitivity import Sensitivities
from qsim.diagnostics.gradients.drawn import Loss
from qsim.formats.base import check_integer
from qsim.nn import convert, revert
from qsim.nn.converting.checks import check_layer
from qsim.nn.converting.layers import Layer, layers as layers_of, target
from qsim.nn.converting.patterns import matches, patterns_of_layers, patterns_of_modules
from qsim.nn.coverage.run import check_plain
from qsim.nn.modules import FivePointModule
from qsim.recipes.five_point import FivePoint

_SEARCHES = {"exact": exact, "greedy": greedy}


def assign(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    budget: float | str,
    candidates: Sequence[Any] | Mapping[str, Any] | None = None,
    cost: Cost = "bits",
    per: Per = "point",
    search: Search = "exact",
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    probes: int = 4,
    seed: int = 0,
) -> Assignment:
    """Choose a candidate for each layer, or for each of its tensors, so that gradients have the least error within a budget.

    The error is the mean square of what rounding adds to the gradients of the weights, bias and variance, relative to each weight's
    gradient. Each probe moves all weights a little along random directions, in two passes: how the operands of all layers change shows what
    rounding errors of each do to all gradients, to first order. Errors of inputs in the forward pass are neither small nor independent, so
    they are measured, in a pass for each layer and candidate; and where inputs or weights of all layers are rounded, a measurement gives
    the sum of their errors. The errors of different layers and tensors are added.

    Linear layers and convolutions are assigned. Embeddings, layers of attention and of recurrence, and products that modules compute by
    functions of torch, such as both of attention, are not: `left` of the result names them, and such products keep their points. Layers
    are in full precision meanwhile, and the model is unchanged afterwards, points included. `qsim.convert(model, found.recipe)` applies the
    result.

    Args:
        model: The model, converted or not, best after some training: sensitivities at the start are those of random weights.
        batches: At least 3 batches, of one size, on which sensitivities are measured.
        loss: `loss(model, batch)`, a scalar; rounding must be its only source of random numbers, so no dropout. By default the batches are
            inputs of the model, as `qsim.coverage` takes them, which returns a scalar or something with a `loss`.
        budget: The largest mean cost, or the name of a candidate: as much as it costs in all layers.
        candidates: Formats, recipes, points or their names, in a list or in a dictionary of names. The points of a recipe count, and not
            the layers that it leaves in high precision. By default E2M1, E2M3 and E4M3 in blocks of 32 with power-of-two scales, nearest
            forward and stochastic backward, and BF16.
        cost: What the budget limits. `"bits"`: the mean bits per element of the six operands of all products, scales included. `"time"`:
            the mean time of a multiply-add relative to BF16, on units where half as many bits take half the time. `"luts"`: the mean lookup
            tables of a multiply-add, for which Yosys is needed, and up to a minute for each pair of formats.
        per: `"point"`: the input, the weight and the gradient of each layer have candidates of their own, each with the points that round
            it backward. Candidates that differ in transforms or accumulators are not combined. `"layer"`: one for all points of a layer.
        search: `"exact"` finds the assignment of the least error, `"greedy"` takes the step of most error per cost as long as one fits.
        include: Pattern or patterns of the layers to assign; all of them by default.
        exclude: Pattern or patterns of layers to leave alone.
        probes: The number of random directions.
        seed: The seed of directions and of stochastic rounding.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has another value than these, a layer cannot have a candidate, the budget is below the cheapest
            candidates, gradients are zero, infinite or NaN, weights are not float32 or float64, or the loss is not a scalar or draws random
            numbers.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> batches = [(torch.randn(64, 32), torch.randint(8, (64,))) for _ in range(3)]
        >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> found = qsim.assign(model, batches, loss, budget=5.0)
        >>> found.spent <= 5.0, found.uniform[0].candidate, found.error < found.uniform[0].error
        (True, 'e2m1', True)
        >>> _ = qsim.convert(model, found.recipe)
    """
    check_plain("assign", model)
    named = default_candidates() if candidates is None else named_candidates(candidates)
    for name, value, allowed in (("cost", cost, Cost), ("per", per, Per), ("search", search, Search)):
        if value not in get_args(allowed):
            raise ValueError(f"assign: {name} must be {', '.join(map(repr, get_args(allowed)))}, got {value!r}")
    check_integer("assign", "probes", probes, 1, 10_000)
    check_integer("assign", "seed", seed, -(2**63), 2**63 - 1)
    if isinstance(budget, bool) or not (budget in named if isinstance(budget, str) else isinstance(budget, (int, float)) and budget > 0):
        raise ValueError(f"assign: budget must be a positive number or the name of a candidate, got {budget!r}")
    chosen, left = _chosen(model, include, exclude, named)
    possible = choices(named, per)
    names = [layer.names[0] for layer in chosen]
    with _converted(model, chosen), probing("assign", model, batches, loss, names, seed) as probe:
        sizes = probe.sizes
        budget = _mean_cost(sizes, named[budget], cost) if isinstance(budget, str) else float(budget)
        _check_budget(sizes, possible, cost, budget)
        left += probe.products_of_calls()
        sensitivities = probe.measure({name: dict.fromkeys(names, points) for name, points in named.items()}, probes)
    _check_finite(sensitivities)
    found, options = _options(sensitivities, sizes, possible, cost)
    # Sums of costs are rounded: a budget that uniform candidates meet exactly must hold them.
    picked = _SEARCHES[search](options, budget * (1 + 1e-12))
    records = [
        sensitivities[name, tensor, candidate]
        for (name, own), index in zip(found.items(), picked, strict=True)
        for tensor, candidate in zip(TENSORS, own[index].names, strict=True)
    ]
    spent = total(options, picked)
    points = tuple((name, own[index]) for (name, own), index in zip(found.items(), picked, strict=True))
    errors = {name: sum(record.error for record in sensitivities.filter(candidate=name)) for name in named}
    uniform = tuple(Uniform(name, _mean_cost(sizes, each, cost), errors[name]) for name, each in named.items())
    return Assignment(
        tuple(records), cost, budget, spent.cost, spent.loss, points, uniform, tuple(frontier(options)), sensitivities, tuple(left)
    )


def _chosen(
    model: nn.Module, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None, candidates: Mapping[str, FivePoint]
) -> tuple[list[Layer], list[str]]:
    """The layers to assign, and the names of those that could round, and are not."""
    known = [layer for layer in layers_of(model) if target(layer.module) is not None]
    usable = [layer for layer in known if not layer.obstacle and not layer.by_default and is_one_product(layer.module)]
    included = None if include is None else patterns_of_layers("include", include, usable, [])
    excluded = patterns_of_modules("exclude", exclude, model)
    chosen = [layer for layer in usable if included is None or matches(layer.names, included)]
    chosen = [layer for layer in chosen if not matches(layer.names, excluded)]
    if not chosen:
        raise ValueError("assign: the model has no linear layer or convolution to assign, or none that is included")
    for layer in chosen:
        for points in candidates.values():
            check_layer(layer, points)
    return chosen, [layer.title for layer in known if layer not in chosen]


@contextmanager
def _converted(model: nn.Module, chosen: Sequence[Layer]) -> Iterator[None]:
    """Make layers that have no points have some that round nothing meanwhile."""
    others = [layer.names[0] for layer in chosen if not isinstance(layer.module, FivePointModule)]
    is_first = not any(isinstance(module, FivePointModule) for module in model.modules())
    generators = torch.get_rng_state()
    try:
        if others:
            convert(model, lambda name, _: FivePoint(), include=others, calls="none")
        yield
    finally:
        if others and is_first:
            revert(model)
        elif others:
            convert(model, lambda name, _: None, include=others, calls="none")
        torch.set_rng_state(generators)


def _options(
    sensitivities: Sensitivities, sizes: Mapping[str, LayerSize], possible: Sequence[PointChoice], cost: Cost
) -> tuple[dict[str, list[PointChoice]], list[list[Option]]]:
    """The choices of each layer, without those than which another is cheaper and better, and what they cost of the mean and lose."""
    errors = {sensitivities.key(record): record.error for record in sensitivities}
    charges = {name: [charge(cost, own.points, size) for own in possible] for name, size in sizes.items()}
    units = sum(own[0].units for own in charges.values())
    found: dict[str, list[PointChoice]] = {}
    options: list[list[Option]] = []
    for name, own in charges.items():
        losses = [sum(errors[name, tensor, candidate] for tensor, candidate in zip(TENSORS, each.names, strict=True)) for each in possible]
        pairs = [Option(each.amount / units, error) for each, error in zip(own, losses, strict=True)]
        kept: list[int] = []
        for index in sorted(range(len(pairs)), key=lambda index: pairs[index]):
            if not kept or pairs[index].loss < pairs[kept[-1]].loss:
                kept.append(index)
        found[name], options = [possible[index] for index in kept], [*options, [pairs[index] for index in kept]]
    return found, options


def _check_budget(sizes: Mapping[str, LayerSize], possible: Sequence[PointChoice], cost: Cost, budget: float) -> None:
    least = [min((charge(cost, own.points, size) for own in possible), key=lambda own: own.amount) for size in sizes.values()]
    mean = sum(own.amount for own in least) / sum(own.units for own in least)
    if budget < mean * (1 - 1e-12):
        raise ValueError(f"assign: the budget of {budget:g} {UNITS[cost]} is below the cheapest candidates, which cost {mean:.4g}")


def _check_finite(sensitivities: Sensitivities) -> None:
    """Raise an error if gradients overflow."""
    overflown = [record for record in sensitivities if not math.isfinite(record.error)]
    if not overflown:
        return
    candidate = overflown[0].candidate
    layers = ", ".join(dict.fromkeys(record.layer or "(the model)" for record in overflown if record.candidate == candidate))
    raise ValueError(f"assign: {candidate} makes gradients infinite or NaN in {layers}: give it scales or overflow='saturate', or omit it")


def _mean_cost(sizes: Mapping[str, LayerSize], points: FivePoint, cost: Cost) -> float:
    """The mean cost of one candidate in all layers."""
    charges = [charge(cost, points, size) for size in sizes.values()]
    return sum(own.amount for own in charges) / sum(own.units for own in charges)
