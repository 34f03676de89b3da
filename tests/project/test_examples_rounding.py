"""The output of the examples about formats, roundings and gradients, compared with independent derivations."""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import qsim
from support.running_examples import FOLDER, RunExample, running, table

__all__ = ["running"]  # a fixture
ROOT = FOLDER.parent
pytestmark = pytest.mark.slow


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(name)


def test_wrap_linear(run: RunExample) -> None:
    printed = run("wrap_linear.py")
    errors = table(printed, "relative error")
    forward, same, grad, noisy, everything = errors.values()
    # Points of one pass do not affect the other one.
    assert forward[1:] == [0, 0]
    assert (grad[0], noisy[0]) == (0, 0)
    # Half a step of E4M3 is between 1/32 and 1/16 of a number, of E5M2 twice that. The root mean square of errors spread evenly within it
    # is smaller by sqrt(3), and a product of random matrices is off by as much as its operands: squares add up.
    e4m3, e5m2 = [(100 / 32 / math.sqrt(3), 100 / 16 / math.sqrt(3)), (100 / 16 / math.sqrt(3), 100 / 8 / math.sqrt(3))]
    assert math.sqrt(2) * e4m3[0] < forward[0] < math.sqrt(2) * e4m3[1]
    assert all(e4m3[0] < error < e4m3[1] for error in same[1:])
    assert all(e5m2[0] < error < e5m2[1] for error in grad[1:])
    assert forward[0] == same[0] == everything[0]
    for both, operand, gradient in zip(everything[1:], same[1:], grad[1:], strict=True):
        assert both == pytest.approx(math.hypot(operand, gradient), rel=0.05)
    # Between two neighbours the mean square is 1/12 of their squared distance with round-to-nearest, and 1/6 with stochastic rounding.
    assert all(loud == pytest.approx(math.sqrt(2) * quiet, rel=0.05) for loud, quiet in zip(noisy[1:], grad[1:], strict=True))
    assert table(printed, "largest difference") == {"qsim.nn.Linear": [0], "qsim.convert": [0], "a module of one's own": [0]}


def nearest(x: Tensor, fmt: qsim.formats.Format) -> Tensor:
    """Round to nearest by comparing with the midpoint of any two values."""
    values = torch.tensor(fmt.values(), dtype=torch.float64)
    return values[torch.bucketize(x.double(), (values[1:] + values[:-1]) / 2)]


def decibels(x: Tensor, rounded: Tensor) -> float:
    return 10 * math.log10(x.double().square().sum().item() / (rounded - x).square().sum().item())


def under_one_scale(x: Tensor, fmt: qsim.formats.Format) -> float:
    scale = x.abs().max().double() / fmt.max
    return decibels(x, nearest(x / scale, fmt) * scale)


def test_custom_format(run: RunExample, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run("custom_format.py")
    steps = [*(k / 16 for k in range(8)), *((4 + m) * 2.0**e / 4 for e in range(-1, 5) for m in range(4))]
    assert printed.splitlines()[0] == f"E3M2, from zero on: {' '.join(f'{value:g}' for value in steps)}"
    rows = table(printed, "values")
    # Zero has two codes in a float; IEEE reserves eight of 64 codes, and six are subnormal. E4M3 has two NaNs.
    assert [row[:2] for row in rows.values()] == [[6, 63], [6, 63], [6, 55], [6, 57], [6, 63], [6, 64], [8, 253]]
    assert [row[2] for row in rows.values()] == [28, 14, 14, 28, 7.5, 3.875, 448]
    torch.manual_seed(0)
    x = torch.randn(100_000)
    layer, inputs = nn.Linear(256, 256), torch.randn(64, 256)
    for row, fmt in zip(rows.values(), imported("custom_format", monkeypatch).FORMATS.values(), strict=True):
        found = [decibels(x, nearest(x, fmt)), decibels(0.02 * x, nearest(0.02 * x, fmt))]
        assert row[4:6] == pytest.approx(found, abs=0.06)
        assert row[6] == pytest.approx(under_one_scale(0.02 * x, fmt), abs=0.51)
        # The squares of both operands' errors add.
        noise = sum(10 ** (-under_one_scale(operand.detach(), fmt) / 10) for operand in (inputs, layer.weight))
        assert row[7] == pytest.approx(-10 * math.log10(noise), abs=0.5)


def test_compare_runs(run: RunExample) -> None:
    """Each pair parts at the operation that differs, and the emulator agrees with itself."""
    printed = run("compare_runs.py")
    titles = re.findall(r"^(\S.*) \(\d+ tensors, [\d.]+ s\)$", printed, flags=re.MULTILINE)
    assert len(titles) == 6
    assert printed.count("  no difference") == 1
    first = re.findall(r"first: output of (\S+) \((\w+)\), \w+, relative error (\S+)$", printed, flags=re.MULTILINE)
    places = [*["transformer.h.0.attn.c_attn"] * 3, "model.layers.0.self_attn.kv_b_proj", "model.layers.0.mlp.gate"]
    assert [place for place, _, _ in first] == places
    units, narrow, order, latents, router = (float(error) for _, _, error in first)
    # Units in the last place of float32, of BF16, of the unit's 14 bits, and of E4M3.
    assert order < 1e-7 < units < 1e-3 < router < narrow < latents < 0.1


def test_batch_size(run: RunExample, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run("batch_size.py", DRAWS=20)
    errors = table(printed, "backward pass")
    sizes = imported("batch_size", monkeypatch).SIZES
    assert errors["full precision"] == pytest.approx([sampling_error() / size for size in sizes], rel=0.35)
    # The variance of stochastic rounding falls in the same way (Lemma 3). That of round-to-nearest does not depend on the batch.
    for name in ("E8M1, stochastic", "E8M0, stochastic"):
        assert errors[name][0] / errors[name][2] == pytest.approx(sizes[2] / sizes[0], rel=0.45)
    assert errors["E8M0, stochastic"][2] < 1.5 * errors["full precision"][2]
    assert errors["E8M0, nearest"][2] > 2 * errors["E8M0, stochastic"][2]
    # Theorem 1: at most four times. One more bit quarters the variance of rounding, and so the compensation by a larger batch.
    found = {int(line.split()[0]): [float(line.split()[i]) for i in (1, 2, 4)] for line in printed.splitlines()[-4:]}
    assert list(found) == [0, 1, 2, 3]
    assert 1 < found[0][1] < found[0][2] < 4
    assert 1 < found[1][0] < 1 + (found[0][0] - 1) / 2
    assert all(low <= value <= high < 1.1 for value, low, high in [found[1], found[2], found[3]])


def sampling_error() -> float:
    """The mean squared error of the gradient of one image, as a share of the gradient's square: written out, image by image.

    That of a batch is less by its size. The squared errors of single batches deviate by 0.39 to 0.44 of their mean. A mean of twenty
    deviates by 0.1: less than a third of what the test allows, 0.35.
    """
    module = importlib.import_module("batch_size")
    torch.manual_seed(0)
    x, y = module.digits()
    first, _, last = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    with torch.no_grad():
        hidden = first(x).tanh()
        out = last(hidden).softmax(1) - nn.functional.one_hot(y, 10)
        back = (out @ last.weight) * (1 - hidden.square())
        # The square of an outer product is the product of squares; a bias is one more input, which is 1.
        squares = [(g.square().sum(1) * (1 + a.square().sum(1))).mean() for a, g in ((x, back), (hidden, out))]
        means = [(g.T @ torch.cat([a, torch.ones(len(a), 1)], 1) / len(a)).square().sum() for a, g in ((x, back), (hidden, out))]
    whole = sum(means)
    return ((sum(squares) - whole) / whole).item()


BIASED = """
import pytest
import torch

import qsim
from test_unbiased import test_the_mean_is_the_number


def nearest(x, fmt, seed):
    return qsim.quantize(x, fmt)


def few_bits(x, fmt, seed):
    return qsim.quantize(x, fmt, rounding=qsim.Stochastic(bits=3), seed=seed)


def hardly(x, fmt, seed):
    \"\"\"Right except for a twentieth of all elements.\"\"\"
    right = qsim.quantize(x, fmt, rounding="stochastic", seed=seed)
    return torch.where(torch.arange(len(x)) % 20 == 0, qsim.quantize(x, fmt, rounding="down"), right)


@pytest.fixture(params=[nearest, few_bits, hardly], scope="module", ids=lambda f: f.__name__)
def rounded(request):
    return request.param
"""


def test_test_unbiased_passes_and_finds_a_bias(tmp_path: Path) -> None:
    # A wrong rounding fails, through its mean; the copied file need not be edited.
    shutil.copy(FOLDER / "test_unbiased.py", tmp_path)
    (tmp_path / "test_mine.py").write_text(BIASED, encoding="utf-8")
    # To look for the simplest number that fails takes longer than everything else.
    profile = 'from hypothesis import Phase, settings\n\nsettings.register_profile("unshrunk", phases=[Phase.generate])\n'
    (tmp_path / "conftest.py").write_text(profile, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--hypothesis-profile=unshrunk"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "3 failed, 4 passed" in found.stdout, found.stdout
    for name in ("nearest", "few_bits", "hardly"):
        assert f"test_mine.py::test_the_mean_is_the_number[{name}]" in found.stdout, found.stdout
    assert found.stdout.count("are chance") >= 3
