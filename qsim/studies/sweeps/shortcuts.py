"""Sweeps by what they vary: each is `sweep` with points that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qsim import FivePoint, Quantizer, Stochastic, convert, format as resolve_format, scaling
from qsim.diagnostics.gradients.batches import refuse_underflow
from qsim.recipes import resolve
from qsim.studies.formats import everywhere
from qsim.studies.points import POINTS, only
from qsim.studies.sweeps import FULL, check_positive, sweep
from qsim.studies.sweeps.results import DESIGNS, Sweep
from qsim.studies.sweeps.sources import Loss, Sources

#: What every shortcut takes first: a function that makes a model, data and a loss, as `sweep` does.
MakeModel = Callable[[], nn.Module]


def _check(function: str, source: str, options: Mapping[str, Any]) -> None:
    """Raise an error if the options have points, which a shortcut makes itself."""
    if "points" in options:
        raise TypeError(f"{function} makes the points itself, from {source}; qsim.studies.sweep takes points= of your own")


def _check_signs(function: str, *formats: str) -> None:
    """Raise an error for formats that round negative numbers to NaN or to zero."""
    for name in formats:
        found = resolve_format(name)
        if found.min >= 0:
            raise ValueError(f"{function}: {name!r} has no negative numbers, which operands and gradients have; use a format with a sign")


def compare_batch_sizes(
    make_model: MakeModel,
    data: Any,
    loss: Loss,
    *,
    formats: Sequence[str] = ("e4m1",),
    batches: Sequence[int] = (16, 64, 256),
    roundings: Sequence[str] = ("stochastic", "nearest"),
    designs: Sequence[str] = tuple(DESIGNS),
    scale: Any = "tensor",
    **options: Any,
) -> Sweep:
    """Test whether a larger batch compensates for fewer bits in the backward pass, with equal steps and with equal examples.

    A larger batch of a mean loss makes each gradient smaller. Gradients that underflow would decide the answer, so they are scaled, and
    if half of them underflow nevertheless, with the largest batch and the initial weights, there is an error instead of an answer.

    Args:
        make_model: See `sweep`.
        data: See `sweep`.
        loss: See `sweep`.
        formats: The formats of inputs and gradients in the backward pass.
        batches: The numbers of examples per update.
        roundings: The roundings of both.
        designs: See `sweep`.
        scale: The scale of both; None if the loss is scaled, or the formats have enough exponent bits.
        **options: Others of `sweep`.

    Raises:
        ValueError: If gradients underflow with the largest batch, or a format lacks negative numbers.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> found = studies.compare_batch_sizes(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss,
        ...     batches=[8, 32], roundings=["stochastic"], steps=2, seeds=2, folder=tempfile.mkdtemp(),
        ... )
        >>> found.settings.labels, found.settings.designs
        (('full precision', 'e4m1, stochastic'), ('steps', 'examples'))
    """
    _check("compare_batch_sizes", "formats and roundings", options)
    _check_signs("compare_batch_sizes", *formats)
    ways = {f"{name}, {how}": Quantizer(name, how, scale=scale) for name in formats for how in roundings}
    points = {label: FivePoint(act_bwd=rounded, grad=rounded) for label, rounded in ways.items()}
    check_positive("batches", batches)
    sources = Sources(make_model, data, loss)
    sources.check_model()
    batch = sources.first_batch(max(batches))
    with torch.random.fork_rng(devices=[]):
        for label, own in points.items():
            model = convert(make_model(), own)
            refuse_underflow("compare_batch_sizes", model, lambda net, pair: loss(net(pair[0]), pair[1]), batch, own, repr(label))
    return sweep(make_model, data, loss, points={FULL: None, **points}, batches=batches, designs=designs, **options)


def compare_formats(
    make_model: MakeModel, data: Any, loss: Loss, *, formats: Sequence[str], rounding: str = "nearest", **options: Any
) -> Sweep:
    """Measure the cost of each format at all five points, with scales per tensor; `rounding` is that of the backward pass.

    Args:
        make_model: See `sweep`.
        data: See `sweep`.
        loss: See `sweep`.
        formats: The formats.
        rounding: The rounding of the backward pass.
        **options: Others of `sweep`.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> found = studies.compare_formats(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss, formats=["e4m3"], steps=1, seeds=2,
        ...     folder=tempfile.mkdtemp(),
        ... )
        >>> found.settings.labels
        ('full precision', 'e4m3')
    """
    _check("compare_formats", "formats", options)
    _check_signs("compare_formats", *formats)
    points = {name: everywhere(name, rounding) for name in formats}
    return sweep(make_model, data, loss, points={FULL: None, **points}, **options)


def compare_points(make_model: MakeModel, data: Any, loss: Loss, *, format: str, rounding: str = "nearest", **options: Any) -> Sweep:
    """Measure the cost of each of the five points by itself in one format, with scales per tensor.

    Args:
        make_model: See `sweep`.
        data: See `sweep`.
        loss: See `sweep`.
        format: The format.
        rounding: The rounding.
        **options: Others of `sweep`.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> found = studies.compare_points(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss, format="e4m3", steps=1, seeds=2,
        ...     folder=tempfile.mkdtemp(),
        ... )
        >>> found.settings.labels
        ('full precision', 'act', 'weight', 'act_bwd', 'weight_bwd', 'grad')
    """
    _check("compare_points", "format and rounding", options)
    _check_signs("compare_points", format)
    points = {name: only(name, format, rounding) for name in POINTS}
    return sweep(make_model, data, loss, points={FULL: None, **points}, **options)


def compare_learning_rates(
    make_model: MakeModel, data: Any, loss: Loss, *, points: Mapping[str, Any] | Sequence[str], rates: Sequence[float], **options: Any
) -> Sweep:
    """Measure the loss at each learning rate, with and without rounding; points are judged at their best rates.

    Args:
        make_model: See `sweep`.
        data: See `sweep`.
        loss: See `sweep`.
        points: See `sweep`.
        rates: The learning rates.
        **options: Others of `sweep`.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> found = studies.compare_learning_rates(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss,
        ...     points=["mxfp8"], rates=[0.01, 0.001], steps=1, seeds=2,
        ...     folder=tempfile.mkdtemp(),
        ... )
        >>> found.settings.labels
        ('full precision', 'mxfp8')
    """
    return sweep(make_model, data, loss, points=points, rates=rates, **options)


def compare_random_bits(
    make_model: MakeModel, data: Any, loss: Loss, *, format: str, bits: Sequence[int] = (1, 2, 4, 8), **options: Any
) -> Sweep:
    """Measure the cost of few random bits where the backward pass rounds stochastically; the reference has 32.

    Args:
        make_model: See `sweep`.
        data: See `sweep`.
        loss: See `sweep`.
        format: The format of inputs and gradients in the backward pass.
        bits: The numbers of random bits.
        **options: Others of `sweep`.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> found = studies.compare_random_bits(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss, format="e4m3", bits=[1], steps=1, seeds=2,
        ...     folder=tempfile.mkdtemp(),
        ... )
        >>> found.settings.labels
        ('32 bits', '1 bit', 'full precision')
    """
    _check("compare_random_bits", "bits and format", options)
    _check_signs("compare_random_bits", format)

    def points(count: int) -> FivePoint:
        rounded = Quantizer(format, Stochastic(count), scale=scaling.PerTensor())
        return FivePoint(act_bwd=rounded, grad=rounded)

    labelled = {"32 bits": points(32), **{f"{count} bit{'s' * (count > 1)}": points(count) for count in bits}, FULL: None}
    return sweep(make_model, data, loss, points=labelled, **options)


def compare_accumulators(
    make_model: MakeModel, data: Any, loss: Loss, *, accumulators: Sequence[str], recipe: str = "fp8_hybrid", **options: Any
) -> Sweep:
    """Measure the cost of narrow sums in a recipe; the reference is the recipe with float32 sums.

    Args:
        make_model: See `sweep`.
        data: See `sweep`.
        loss: See `sweep`.
        accumulators: The accumulators; see `qsim.accumulators`.
        recipe: The recipe.
        **options: Others of `sweep`.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> found = studies.compare_accumulators(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss,
        ...     accumulators=["Rounded('fp16')"], steps=1, seeds=2,
        ...     folder=tempfile.mkdtemp(),
        ... )
        >>> found.settings.labels
        ('fp8_hybrid', "Rounded('fp16')", 'full precision')
    """
    _check("compare_accumulators", "recipe and accumulators", options)
    points = {name: resolve(recipe).with_(accumulate=name) for name in accumulators}
    return sweep(make_model, data, loss, points={recipe: resolve(recipe).with_(accumulate=None), **points, FULL: None}, **options)


def compare_recipes(make_model: MakeModel, data: Any, loss: Loss, *, recipes: Sequence[str], **options: Any) -> Sweep:
    """Measure the cost of each recipe.

    Args:
        make_model: See `sweep`.
        data: See `sweep`.
        loss: See `sweep`.
        recipes: The names of recipes, or the calls that make them.
        **options: Others of `sweep`.

    Example:
        >>> import tempfile, torch
        >>> from qsim import studies
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> found = studies.compare_recipes(
        ...     lambda: torch.nn.Linear(1, 1), (x, x, x, x), torch.nn.functional.mse_loss, recipes=["mxfp8"], steps=1, seeds=2,
        ...     folder=tempfile.mkdtemp(),
        ... )
        >>> found.settings.labels
        ('full precision', 'mxfp8')
    """
    _check("compare_recipes", "recipes", options)
    return sweep(make_model, data, loss, points=recipes, **options)
