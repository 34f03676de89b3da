"""Recipes train: a net on scikit-learn's digits and a transformer on text, beside native ones; and where FP4 needs stochastic gradients."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Recipe, recipes
from test_training import conv, digits

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt.model import GPT, Size
from gpt.text import Text

pytestmark = pytest.mark.slow

#: Another seed is another start, other batches and other random bits. Recipe and native share start and batches, seed by seed.
Loss = Callable[[Recipe | FivePoint | None, int], float]
NATIVE_SEEDS = range(4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are not worth a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def of_digits(recipe: Recipe | FivePoint | None, seed: int) -> float:
    """The loss on the test images. Smoothed labels give it a floor, 0.5, as text has one, beside which one percent means something."""
    x, y, test_x, test_y = digits()
    torch.manual_seed(seed)
    model = conv()
    if recipe is not None:
        qsim.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 200)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(200):
        chosen = torch.randint(len(y), (64,), generator=batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen], label_smoothing=0.1).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return F.cross_entropy(model(test_x), test_y, label_smoothing=0.1).item()


@cache
def text() -> Text:
    """The source of one module of Python's library, in odd numbers of bytes."""
    return Text([argparse.__file__], 33, torch.device("cpu"))


@cache
def of_text(recipe: Recipe | FivePoint | None, seed: int) -> float:
    """The loss of a GPT of two layers on text that was held out."""
    torch.manual_seed(seed)
    model, steps = GPT(Size(2, 64, 2), 256, text().context), 100
    if recipe is not None:
        qsim.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, (steps - step) / (steps - 20)))
    for step in range(steps):
        tokens = text().batch(8, seed, step).long()
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    tokens = text().validation(64).long()
    with torch.no_grad():
        return model(tokens[:, :-1], tokens[:, 1:]).item()


def above_native(loss: Loss, recipe: Recipe, seeds: range) -> float:
    """How far the mean loss is above the native one, as a share of it."""
    native = sum(loss(None, seed) for seed in seeds)
    return sum(loss(recipe, seed) for seed in seeds) / native - 1


def spread(loss: Loss) -> float:
    """The standard deviation of native losses over seeds, as a share of their mean."""
    losses = [loss(None, seed) for seed in NATIVE_SEEDS]
    return statistics.stdev(losses) / statistics.mean(losses)


LOSSES: dict[str, Loss] = {"digits": of_digits, "text": of_text}


# Percent above native, mean and standard deviation of the pairs, digits over seeds 0 to 5 and text over 0 to 2 (torch 2.13):
#
#           fp8_hybrid     mxfp8          nvfp4          mxfp4(None)    mxfp4          native over seeds
#   digits  0.22 ± 0.14    0.17 ± 0.21    1.39 ± 1.0     −0.01 ± 0.28   4.95 ± 0.83    ± 1.2
#   text    0.02 ± 0.04    0.05 ± 0.48    −0.01 ± 0.8    0.32 ± 0.37    0.57 ± 0.90    ± 1.0
#
# A single pair of text may be half a percent apart, because training amplifies the last bit; so the tests take means over three seeds. In
# eight bits their deviation is 0.3 percent at most, and one percent is three of them away.
SEEDS = range(3)


def test_the_native_models_learn() -> None:
    # Without a word of context text costs 3.06 nats a byte; digits told apart by chance cost 2.3.
    assert all(of_text(None, seed) < 2.7 for seed in NATIVE_SEEDS)
    assert all(of_digits(None, seed) < 0.8 for seed in NATIVE_SEEDS)


@pytest.mark.parametrize("recipe", [recipes.fp8_hybrid(), recipes.mxfp8()], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("task", LOSSES)
def test_eight_bits_come_within_one_percent(task: str, recipe: Recipe) -> None:
    assert abs(above_native(LOSSES[task], recipe, SEEDS)) < 0.01


@pytest.mark.parametrize(
    ("task", "recipe"),
    [("digits", recipes.nvfp4()), ("digits", recipes.mxfp4(None)), ("text", recipes.nvfp4()), ("text", recipes.mxfp4())],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_four_bits_come_within_the_margin_that_seeds_give(task: str, recipe: Recipe) -> None:
    # Two deviations: so far apart are two natives of other seeds in one case of six.
    assert above_native(LOSSES[task], recipe, SEEDS) < 2 * spread(LOSSES[task])


def test_a_small_convolution_pays_for_a_forward_pass_in_mxfp4() -> None:
    # Nine inputs a product and powers of two as scales: what rounding to nearest moves does not average out. The backward pass is not to
    # blame, for without the forward one's rounding the loss is native (above).
    assert 2 * spread(of_digits) < above_native(of_digits, recipes.mxfp4(), SEEDS) < 0.08


def of_wrong_labels(recipe: FivePoint | None, seed: int) -> float:
    """The training loss of one layer that sees all images at every step, a fifth of them with labels by chance."""
    x, y, _, _ = digits()
    x, y = x[:256].flatten(1), y[:256].clone()
    noise = torch.Generator().manual_seed(0)
    wrong: Tensor = torch.rand(256, generator=noise) < 0.2
    y[wrong] = torch.randint(10, (int(wrong.sum()),), generator=noise)
    torch.manual_seed(seed)
    layer = nn.Linear(64, 10)
    if recipe is not None:
        qsim.convert(layer, recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 200)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(layer(x), y).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return F.cross_entropy(layer(x), y).item()


# Where the loss is smallest, the gradients of single images do not vanish, only their sum does. Stochastic rounding leaves that sum alone
# in the mean; rounding to nearest errs alike at every step, and training ends where the sum of the rounded gradients vanishes. Wrong
# labels keep gradients large, and a layer that sees all images has no other noise. Loss over seeds 0 to 3, which are those of the start:
#
#   native 0.59429 ± 0.00100   stochastic gradients 0.59456 ± 0.00097   gradients to nearest 0.59686 ± 0.00094
#
# So nearest is 2.3 deviations worse, and for each start by itself 0.0018 at least. In nvfp4, whose other operands are to nearest anyhow, a
# model this small shows no difference.
def test_gradients_to_nearest_end_elsewhere_and_stochastic_ones_do_not() -> None:
    points = recipes.mxfp4(None).points
    nearest = FivePoint.from_dict({**points.to_dict(), "grad": {**points.to_dict()["grad"], "rounding": "nearest"}})
    seeds = range(4)
    native, noisy, near = ([loss(seed) for seed in seeds] for loss in (partial(of_wrong_labels, p) for p in (None, points, nearest)))
    deviation = max(statistics.stdev(native), statistics.stdev(noisy))
    assert abs(statistics.mean(noisy) - statistics.mean(native)) < 0.5 * deviation
    assert statistics.mean(near) - statistics.mean(noisy) > 1.5 * deviation
    assert all(worse - better > 0.001 for worse, better in zip(near, noisy, strict=True)), (near, noisy)
