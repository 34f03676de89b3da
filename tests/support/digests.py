"""Digests of the results of every deterministic operator: recorded once, compared on every backend ever after."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import qsim
from qsim import accumulators, scaling
from qsim.formats import Format
from qsim.formats.dtypes import holds
from qsim.random import Noise
from support import catalogue, inputs

_NAMES = ("nearest", "nearest_away", "nearest_up", "toward_zero", "up", "down", "odd", "stochastic")
ROUNDINGS = [*_NAMES, *(qsim.Stochastic(bits, correction) for bits in (1, 6, 16, 20, 32) for correction in (False, True))]
_SCALINGS = (
    scaling.PerTensor(),
    scaling.PerTensor(rule="even", format="e8m0"),
    scaling.PerAxis(0),
    scaling.PerAxis(-1, rule="ceil"),
    scaling.PerBlock(32, -1, "e8m0", "floor"),
    scaling.PerBlock(32, 0, "e8m0", "ceil"),
    scaling.PerBlock(16, -1, "e4m3", outer=scaling.PerTensor()),
    scaling.PerBlock(7, 0, "e8m0", "floor", margin=1),
    scaling.PerTile(16, 16, "e4m3", outer=scaling.PerTensor()),
    scaling.PerTile(3, 5, "e5m2"),
)


def digest(results: Iterator[Tensor]) -> str:
    """The first 64 bits of the SHA-256 of tensors' bytes, every NaN as the same one."""
    sha = hashlib.sha256()
    for x in results:
        x = x.detach().cpu().contiguous()
        if x.is_floating_point():
            x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
        sha.update(x.view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return sha.hexdigest()[:16]


def _rounded(fmt: Format, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """All roundings of a format, as values and, where there are codes, as codes and back."""
    results = {"dtype": None if holds(dtype, fmt) else torch.float64}
    x = torch.cat([inputs.spread_patterns(1500, dtype, seed=fmt.bits), inputs.ordinary((1500,), dtype)]).to(device)
    for rounding, overflow in itertools.product(ROUNDINGS, ("saturate", "nonfinite")):
        random = {"seed": Noise(2**62 + 5, 7, 3)} if "tochastic" in str(rounding) else {}
        yield qsim.quantize(x, fmt, rounding=rounding, overflow=overflow, **random, **results)
    finite = x[x.isfinite()]
    for rounding in ("nearest", "odd", "stochastic"):
        codes = qsim.encode(finite, fmt, rounding=rounding, seed=11 if rounding == "stochastic" else None)
        yield codes
        yield qsim.decode(codes, fmt, dtype=torch.float64)


#: Sums without names, of every kind.
_ACCUMULATORS = (
    "Rounded('fp16')",
    "Rounded('e5m10', rounding='stochastic')",
    "Rounded('e5m12', rounding='up', overflow='saturate')",
    "Rounded('bf16', product='fp16', rounding='Stochastic(9, correction=True)')",
    "Rounded('fp16', order='kahan')",
    "Rounded('fp16', order='kahan', rounding='stochastic')",
    "Rounded('fp16', order='pairwise')",
    "Rounded('fp16', order='pairwise', product='bf16', rounding='stochastic')",
    "Rounded('fp16', chunk=32)",
    "Rounded('fp16', chunk=16, order='kahan', rounding='stochastic')",
    "Promoted(Rounded('fp16', rounding='stochastic'), 24)",
    "Promoted(Aligned(8, 13, 'e8m13ieee', rounding='nearest'), 64)",
    "BlockScaled(6, 20, 3)",
    "TwoStep(5, 9, 12, apart=True)",
)


def _scaled(element: str, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    x = inputs.ordinary((48, 37), dtype).to(device)
    for scale, rounding in itertools.product(_SCALINGS, ("nearest", "stochastic", "toward_zero")):
        yield qsim.quantize(x, element, scale=scale, rounding=rounding, seed=5 if rounding == "stochastic" else None)


def _blocks(name: str, device: torch.device) -> Iterator[Tensor]:
    for dtype, rounding in itertools.product((torch.float32, torch.bfloat16), ("nearest", "stochastic")):
        x = inputs.ordinary((48, 64), dtype).to(device)
        seed = 5 if rounding == "stochastic" else None
        yield qsim.quantize(x, name, rounding=rounding, seed=seed)
        coded = qsim.encode(x, name, rounding=rounding, seed=seed)
        yield coded.codes
        yield coded.scales.view(torch.uint8) if coded.scales.element_size() == 1 else coded.scales
        yield qsim.decode(coded, name)


def _sums(name: str, device: torch.device) -> Iterator[Tensor]:
    operand = "e2m1" if name in ("b200_mxfp4", "b200_nvfp4") else "e4m3"
    for length, seed in ((5, 0), (96, 1), (300, 2)):
        a, b = (
            qsim.quantize(inputs.ordinary(shape, torch.float32, seed + k), operand).to(device)
            for k, shape in ((0, (9, length)), (7, (length, 11)))
        )
        yield qsim.matmul(a, b, name, seed=3) if accumulators.resolve(name).is_stochastic else qsim.matmul(a, b, name)


def _transformed(device: torch.device) -> Iterator[Tensor]:
    for size, dtype in itertools.product((2, 16, 128), (torch.float32, torch.bfloat16)):
        yield qsim.transforms.Hadamard(size, seed=3)(inputs.ordinary((24, 128), dtype).to(device))


def _steps(make: Callable[..., torch.optim.Optimizer], update: str, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(inputs.ordinary(shape, dtype, 3).to(device)) for shape in ((37,), (8, 16))]
    optimizer = make(params, lr=0.01, update=update)
    for number in range(3):
        for parameter in params:
            parameter.grad = inputs.ordinary(tuple(parameter.shape), dtype, number).to(device)
        optimizer.step()
        yield from (parameter.data for parameter in params)


def cases() -> dict[str, Callable[[torch.device], Iterator[Tensor]]]:
    """The results that are recorded, by name."""
    found: dict[str, Callable[[torch.device], Iterator[Tensor]]] = {}
    for fmt, dtype in itertools.product((*catalogue.NAMED, *catalogue.VARIETY, *catalogue.TABULATED), inputs.DTYPES):
        found[f"{fmt!r} from {dtype}"] = partial(_rounded, fmt, dtype)
    for element, dtype in itertools.product(("e2m1", "e4m3", "e5m2", "int8"), inputs.DTYPES):
        found[f"scaled {element} from {dtype}"] = partial(_scaled, element, dtype)
    for name in scaling.NAMED:
        found[f"block {name}"] = partial(_blocks, name)
    for name in (*accumulators.NAMED, *_ACCUMULATORS):
        found[f"sum {name}"] = partial(_sums, name)
    for make, update, dtype in itertools.product(
        (qsim.optim.AdamW, qsim.optim.SGD), ("nearest", "stochastic", "kahan"), (torch.bfloat16, torch.float16)
    ):
        found[f"{make.__name__} {update} {dtype}"] = partial(_steps, make, update, dtype)
    found["hadamard"] = _transformed
    return found
