"""Other packages doing the same work as qsim, timed in turns with it, on the same tensors.

    python examples/compare_speed.py rounding    # QPyTorch, torchao and d9d
    python examples/compare_speed.py optimizer   # torch's fused AdamW, torchao, optimi and d9d
    python examples/compare_speed.py linear      # a layer at five points, written with QPyTorch

Packages that are not installed are named. Both sides round to the same formats with different random bits, and ties and the largest values
may differ. A ratio is their time divided by qsim's; times are those that a user waits for a new tensor or for a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim.cli.bench._timing import Call, clock_of, interleaved
from qsim.text.tables import Quantity, Table

COLUMNS = {
    "peer": "peer",
    "the same work in both": "work",
    "theirs ms": Quantity("their_milliseconds", 3),
    "qsim ms": Quantity("milliseconds", 3),
    "ratio": Quantity("ratio", 2),
}
#: A package, its work, its call and qsim's; or the reason why it is not timed.
Race = tuple[str, str, Call, Call] | tuple[str, str]
#: The layer that is written with QPyTorch: rows, inputs and outputs. And the points of both.
LAYER = 4096, 768, 3072
POINTS = qsim.FivePoint(*["e4m3"] * 2, **dict.fromkeys(("act_bwd", "weight_bwd", "grad"), qsim.Quantizer("e4m3", "stochastic")))
#: AdamW: package, module, class, the options that make it round like qsim's with these, and whether it needs a GPU.
BF16, FP32, _D9D = torch.bfloat16, torch.float32, "d9d.optim.stochastic"
ADAMW: list[tuple[str, str, str, dict[str, Any], dict[str, Any], bool]] = [
    ("torch", "torch.optim", "AdamW", {"fused": True}, {"update": "nearest"}, False),
    ("torch", "torch.optim", "AdamW", {"fused": True}, {"update": "stochastic"}, False),  # torch rounds to nearest
    ("torchao", "torchao.optim", "_AdamW", {"bf16_stochastic_round": True}, {"update": "stochastic"}, False),
    ("torch-optimi", "optimi", "AdamW", {"kahan_sum": True}, {"update": "kahan"}, False),
    ("d9d", _D9D, "StochasticAdamW", {"state_dtype": BF16}, {"update": "stochastic", "state_rounding": "stochastic"}, True),
    ("d9d", _D9D, "StochasticAdamW", {"state_dtype": FP32}, {"update": "stochastic", "state": FP32}, True),
]


def loaded(package: str, module: str, name: str, device: str, needs_gpu: bool = False) -> Any:
    """A function or a class of a package; text if it cannot be timed here."""
    if needs_gpu and device != "cuda":
        return "runs on cuda only"
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        return f"not installed (pip install {package}): {error}"


def rounding(device: str, elements: int) -> Iterator[Race]:
    """New rounded tensors."""
    x = torch.randn(elements, generator=torch.Generator(device).manual_seed(0), device=device)
    float_quantize = loaded("qtorch", "qtorch.quant", "float_quantize", device)
    if isinstance(float_quantize, str):
        yield "QPyTorch", float_quantize
    else:
        for how in ("nearest", "stochastic"):
            ours = partial(qsim.quantize, x, "e4m3", rounding=how)
            yield "QPyTorch", f"E4M3, {how}", partial(float_quantize, x, 4, 3, how), ours
    ours = partial(qsim.quantize, x, "bf16", rounding="stochastic", dtype=BF16)
    work = "fp32 → bf16, stochastic"
    to_bf16 = loaded("torchao", "torchao.optim.quant_utils", "_fp32_to_bf16_sr", device)
    if isinstance(to_bf16, str):
        yield "torchao", to_bf16
    else:
        yield "torchao", work, partial(to_bf16, x), ours
        if device == "cuda":  # as in torchao's own optimizers
            yield "torchao, compiled", work, partial(torch.compile(to_bf16), x), ours
    copy = loaded("d9d", "d9d.kernel.stochastic", "copy_fp32_to_bf16_stochastic_", device, needs_gpu=True)
    yield ("d9d", copy) if isinstance(copy, str) else ("d9d", work, lambda: copy(torch.empty_like(x, dtype=BF16), x), ours)


def optimizer(device: str, elements: int) -> Iterator[Race]:
    """Steps of AdamW on weights and gradients in bf16: one tensor, and those of GPT-2 medium's blocks (on a CPU, a tiny GPT's)."""
    layers, width = (24, 1024) if device == "cuda" else (2, 64)
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = [*matrices, *((rows,) for rows, _ in matrices), *[(width,)] * 4]
    for package, module, name, options, own, needs_gpu in ADAMW:
        make = loaded(package, module, name, device, needs_gpu)
        if isinstance(make, str):
            yield package, make
            continue
        for shapes in ([(elements,)], block * layers):
            theirs, ours = (
                _stepped(which, shapes, device)
                for which in (
                    partial(make, lr=1e-5, **options),
                    partial(qsim.optim.AdamW, lr=1e-5, betas=(0.9, 0.95), **{"state": BF16, **own}),
                )
            )
            yield package, f"{len(shapes)} tensor{'s' * (len(shapes) > 1)}, {', '.join(map(str, own.values()))}", theirs, ours


def _stepped(make: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, ...]], device: str) -> Call:
    """The step of an optimizer that has taken one, which creates its states."""
    parameters = [nn.Parameter(torch.randn(shape, device=device).to(BF16)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    found = make(parameters)
    found.step()
    return found.step


def linear(device: str, _: int) -> Iterator[Race]:
    """A layer forward and backward: QPyTorch's in float32, qsim's in bf16 on a GPU."""
    float_quantize = loaded("qtorch", "qtorch.quant", "float_quantize", device)
    if isinstance(float_quantize, str):
        yield "QPyTorch", float_quantize
        return
    rows, inputs, outputs = LAYER
    dtype = BF16 if device == "cuda" else FP32
    ours = qsim.nn.Linear(inputs, outputs, device=device, dtype=dtype, points=POINTS)
    theirs = QPyTorchLinear(ours, POINTS, float_quantize)
    yield "QPyTorch", f"{rows} × {inputs} → {outputs}", *(_pass(layer, rows) for layer in (theirs, ours))  # type: ignore[misc]


def _pass(layer: nn.Linear, rows: int) -> Call:
    given = layer.weight.new_empty(rows, layer.in_features).normal_().requires_grad_()
    upstream = layer.weight.new_empty(rows, layer.out_features).normal_()

    def step() -> None:
        layer.weight.grad = given.grad = None
        layer(given).backward(upstream)

    return step


class QPyTorchLinear(nn.Linear):
    """A linear layer written with QPyTorch: float32 tensors, its kernel at all five points, float32 products."""

    def __init__(self, layer: nn.Linear, points: qsim.FivePoint, float_quantize: Callable[..., Tensor]) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device=layer.weight.device)
        self.load_state_dict(layer.state_dict())
        own = (getattr(points, name) for name in ("act", "weight", "act_bwd", "weight_bwd", "grad"))
        self.roundings = [_rounding(point, float_quantize) for point in own]

    def forward(self, input: Tensor) -> Tensor:
        """The rounded product."""
        return _QPyTorchProduct.apply(input, self.weight, self.bias, self.roundings)


def _rounding(point: Any, float_quantize: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    fmt, how = point.format, "stochastic" if point.rounding.is_stochastic else "nearest"
    return lambda x: float_quantize(x, fmt.exponent, fmt.mantissa, how)


class _QPyTorchProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, bias: Tensor | None, roundings: Any) -> Tensor:
        act, weight, *ctx.roundings = roundings
        ctx.save_for_backward(a, w)
        return F.linear(act(a), weight(w), bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, w = ctx.saved_tensors
        act, weight, grad = ctx.roundings
        rounded = grad(g.contiguous())
        return rounded @ weight(w), rounded.t() @ act(a), g.sum(0) if ctx.needs_input_grad[2] else None, None


#: Each with the number of elements of a tensor on a GPU and on a CPU.
WORKS = {"rounding": (rounding, 2**28, 2**22), "optimizer": (optimizer, 2**27, 2**20), "linear": (linear, 0, 0)}


def measured(races: Iterator[Race], device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each race, or for a package that does not take part."""
    for race in races:
        if len(race) == 2:
            yield {"peer": race[0], "note": race[1]}
            continue
        peer, work, *calls = race
        theirs, ours = interleaved(calls, clock_of(torch.device(device)), repeats)
        yield {"peer": peer, "work": work, "their_milliseconds": theirs * 1e3, "milliseconds": ours * 1e3, "ratio": theirs / ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, help="of a tensor")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    races, on_gpu, on_cpu = WORKS[args.work]
    elements = args.elements or (on_gpu if args.device == "cuda" else on_cpu)
    print(Table(tuple(measured(races(args.device, elements), args.device, args.repeats)), COLUMNS))


if __name__ == "__main__":
    main()
