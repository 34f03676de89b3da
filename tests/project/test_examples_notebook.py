"""All cells of the notebook run in order, with the stated results; `test_course.py` checks that it is valid."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.running_examples import FOLDER

NOTEBOOK = json.loads((FOLDER / "qsim.ipynb").read_text(encoding="utf-8"))
CELLS = NOTEBOOK["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def held() -> Iterator[dict[str, Any]]:
    """The values of the notebook's names after its last cell."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    pyplot.close("all")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in CODE:
        exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
    names["figures"] = len(pyplot.get_fignums())
    yield names
    pyplot.close("all")
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)


@pytest.mark.slow
def test_rounding(held: dict[str, Any]) -> None:
    assert held["rounded"].tolist() == [0.5, -1.5, 6, 6]
    assert held["x"].grad.tolist() == [1, 1, 1, 1]
    noisy = held["noisy"]
    assert noisy.unique().tolist() == [0, 0.5]
    # Hoeffding: a mean of n numbers from 0 to 0.5 is off by more than t with a probability of at most 2 exp(-8 n t²).
    assert abs(noisy.double().mean().item() - 0.3) < math.sqrt(math.log(2 / 1e-9) / (8 * len(noisy)))


@pytest.mark.slow
def test_points(held: dict[str, Any]) -> None:
    forward, backward = held["errors"]["forward"], held["errors"]["backward"]
    # tests/project/test_examples_rounding.py derives these: two operands in E4M3, one in E5M2.
    assert 0.025 < forward[0] < 0.052
    assert forward[1] == backward[0] == 0
    assert 0.036 < backward[1] < 0.073


@pytest.mark.slow
def test_training(held: dict[str, Any]) -> None:
    native, nearest, stochastic = held["found"].values()
    assert all(len(losses) == 150 for losses, _, _ in (native, nearest, stochastic))
    # To nearest every gradient becomes zero except that of the last bias: ten logits that are the same for all images.
    assert nearest[0][-1] == pytest.approx(math.log(10), abs=0.05)
    assert nearest[1] < 0.3
    assert native[1] > 0.9
    assert stochastic[1] > 0.75
    assert stochastic[0][-1] < 0.7


@pytest.mark.slow
def test_monitor(held: dict[str, Any]) -> None:
    samples = held["monitor"].samples
    assert [sample.step for sample in samples] == [0, 50, 100]
    assert all(sample["2", "grad"].shares["underflowed"] == 1 for sample in samples)
    assert all(sample["0", "grad"].zero == sample["0", "grad"].elements for sample in samples)


@pytest.mark.slow
def test_figures(held: dict[str, Any]) -> None:
    # Number lines, staircases and losses are drawn with pyplot. The monitor's counts are a separate figure, the last value of its cell.
    assert held["figures"] == 3
    assert "".join(CODE[-1]["source"]).endswith("\nseen")
    assert [ax.get_title(loc="left").split(":")[0] for ax in held["seen"].axes] == ["grad"]
    line, stairs = held["axes"][0].get_title(loc="left"), held["axes"][1].get_title(loc="left")
    assert (line, stairs) == ("e2m1, nearest", "e2m1, stochastic")
