"""torch's default dtype and device change no numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.recipes import mxfp8
from qsim.scaling import Given, PerBlock
from support.comparing import same_bits

pytest.importorskip("safetensors")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


#: Whatever uses a default device fails on the meta device, which has no numbers.
DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def model() -> nn.Sequential:
    found = nn.Sequential(nn.Linear(64, 64, dtype=torch.float32, device="cpu"))
    for parameter in found.parameters():
        parameter.data.copy_(numbers(*parameter.shape))
    return found


def optimized() -> list[Tensor]:
    """Three steps whose products of betas have more bits than bfloat16."""
    weight = nn.Parameter(numbers(10))
    optimizer = qsim.optim.AdamW([weight], 0.1, (0.9, 0.99), 1e-3, weight="fp16", arithmetic="format", seed=1)
    for _ in range(3):
        weight.grad = numbers(10)
        optimizer.step()
    return [weight.detach(), *optimizer.state[weight].values()]


def scaled() -> list[Tensor]:
    return [qsim.quantize(numbers(64), "e2m1", scale=Given(0.0123))]


def exported(points: FivePoint) -> list[Tensor]:
    from safetensors.torch import load_file

    with TemporaryDirectory() as folder:
        qsim.export(qsim.convert(model(), points), folder)
        files = [load_file(path, device="cpu") for path in sorted(Path(folder).glob("*.safetensors"))]
        loaded = qsim.load(model(), folder)
    return [*(file[name] for file in files for name in sorted(file)), *loaded.state_dict().values()]


GIVEN = FivePoint(act=Quantizer("e4m3", scale=Given(0.0123)), weight=Quantizer("e4m3", scale="tensor"))
FP4 = Quantizer("e2m1", scale=PerBlock(16, format="e4m3"))
WORK: dict[str, Callable[[], list[Tensor]]] = {
    "a given scale": scaled,
    "a format's arithmetic": optimized,
    "an exported given scale": lambda: exported(GIVEN),
    "exported blocks": lambda: exported(mxfp8().points),
    "exported blocks without an outer scale": lambda: exported(FivePoint(act=FP4, weight=FP4)),
    "exported integers": lambda: exported(FivePoint(weight=Quantizer("int4", scale=PerBlock(32)))),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("work", WORK)
def test_defaults_change_nothing(work: str, default: str) -> None:
    due = WORK[work]()
    with DEFAULTS[default]():
        found = WORK[work]()
    assert all(map(same_bits, found, due))
