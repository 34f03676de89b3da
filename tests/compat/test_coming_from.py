"""The guide's tables for torchao, d9d and optimi, compared with the packages if installed, otherwise with their code written out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint
from qsim.recipes import Recipe
from support.bounds import bernstein
from support.comparing import same_bits
from support.distributed_models import alike

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
SECTION = GUIDE.partition("\n## torchao\n")[2].partition("\n## ")[0]
IDENTICAL = "bit-identical"


class Row(NamedTuple):
    """A row of a table: code of torchao, code of qsim, and the kind of equality."""

    theirs: str
    ours: str
    equality: str


def rows(start: str) -> list[Row]:
    """The rows whose first cell starts with the given code."""
    found = [
        Row(*(cell.strip().strip("`") for cell in line.strip("|").split("|"))) for line in SECTION.splitlines() if line.startswith("| `")
    ]
    return [row for row in found if re.match(start, row.theirs)]


def names() -> dict[str, Any]:
    """The names that the guide's code defines for its table."""
    (code,) = re.findall(r"^```python\n(from qsim .*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {"qsim": qsim, "torch": torch}
    exec(code, found)
    return found


# Layers.

FLOAT8, MX = rows("Float8LinearConfig"), rows("MXFP8TrainingOpConfig")
TOKENS, INPUTS, OUTPUTS = 32, 32, 64


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers of nine bits from ±1 to ±16: all sums of products, of these and of rounded ones, are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2**5, 2**9, shape, generator=generator)
    return sizes * (2 * torch.randint(0, 2, shape, generator=generator) - 1) * 2.0**-5


def run(layer: nn.Module) -> list[Tensor]:
    """The output and both gradients of a layer without bias and with a given weight."""
    x = numbers(0, TOKENS, INPUTS).requires_grad_()
    y = layer(x)
    y.backward(numbers(1, TOKENS, OUTPUTS))
    assert x.grad is not None
    (weight,) = layer.parameters()
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def linear() -> nn.Linear:
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(numbers(2, OUTPUTS, INPUTS))
    return layer


def ours(row: Row) -> list[Tensor]:
    points = eval(row.ours, names())
    assert isinstance(points, (FivePoint, Recipe, str))
    return run(qsim.convert(nn.Sequential(linear()), points))


def check(found: list[Tensor], due: list[Tensor], equality: str) -> None:
    """Assert bit equality where the guide promises it; where it promises equal codes, equality up to float32 scales."""
    if equality == IDENTICAL:
        assert alike(found, due)
    else:
        assert equality.startswith("same codes")
        for a, b in zip(found, due, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2.0**-20 * float(b.abs().max()))


@pytest.mark.parametrize("row", FLOAT8, ids=lambda row: row.theirs)
def test_float8_layers(row: Row) -> None:
    float8 = pytest.importorskip("torchao.float8", exc_type=ImportError)
    config = eval(row.theirs, {"Float8LinearConfig": float8.Float8LinearConfig})
    object.__setattr__(config, "emulate", True)
    model = nn.Sequential(linear())
    float8.convert_to_float8_training(model, config=config)
    assert type(model[0]).__name__ == "Float8Linear"
    check(ours(row), run(model), row.equality)


@pytest.mark.parametrize("row", MX, ids=lambda row: row.theirs)
def test_mx_layers(row: Row) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config as choices
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    made = eval(row.theirs, {"MXFP8TrainingOpConfig": MXFP8TrainingOpConfig, "ScaleCalculationMode": choices.ScaleCalculationMode})
    kernels = (KernelPreference.EMULATED, choices.MXFP8Dim0CastKernelChoice.TORCH, choices.MXFP8Dim1CastKernelChoice.TORCH)

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            formats = (torch.float8_e4m3fn,) * 3
            found: Tensor = mx_mm.apply(input, self.weight, *formats, 32, *kernels, made.scale_calculation_mode, made.wgrad_with_hp)
            return found

    layer = linear()
    layer.__class__ = Layer
    check(ours(row), run(layer), row.equality)


class WrittenOut(torch.autograd.Function):
    """torchao's float8 layer: each operand scaled by a factor per row or per tensor, cast, and divided by it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: str) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        rows = recipe.startswith("rowwise")
        return cast(x, 1 if rows else None) @ cast(w, 1 if rows else None).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        rows = ctx.recipe.startswith("rowwise")
        fmt = torch.float8_e4m3fn if rows else torch.float8_e5m2
        back = cast(grad, 1 if rows else None, fmt) @ cast(w, 0 if ctx.recipe == "rowwise" else None)
        if ctx.recipe == "rowwise_with_gw_hp":
            return back, grad.t() @ x, None
        return back, cast(grad, 0 if rows else None, fmt).t() @ cast(x, 0 if rows else None), None


def cast(x: Tensor, dim: int | None, fmt: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    amax = (x.abs().amax(dim, keepdim=True) if dim is not None else x.abs().max()).double()
    scale = 2.0 ** (torch.finfo(fmt).max / amax).float().log2().floor()
    return (x * scale).to(fmt).float() / scale


@pytest.mark.parametrize(
    ("recipe", "theirs"),
    [
        ("tensorwise", "Float8LinearConfig(round_scales_to_power_of_2=True)"),
        ("rowwise", 'Float8LinearConfig.from_recipe_name("rowwise")'),
        ("rowwise_with_gw_hp", 'Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")'),
    ],
)
def test_float8_layers_written_out(recipe: str, theirs: str) -> None:
    """torchao's computation, without torchao."""
    (row,) = (row for row in FLOAT8 if row.theirs == theirs)
    weight = linear().weight
    x = numbers(0, TOKENS, INPUTS).requires_grad_()
    y = WrittenOut.apply(x, weight, recipe)
    y.backward(numbers(1, TOKENS, OUTPUTS))
    assert x.grad is not None
    assert weight.grad is not None
    assert row.equality == IDENTICAL
    assert alike(ours(row), [y.detach(), x.grad, weight.grad])


def test_the_tables_are_found() -> None:
    assert [len(FLOAT8), len(MX), len(TENSORS)] == [4, 3, 4]


# Tensors.

TENSORS = rows("MXTensor|NVFP4Tensor")


@pytest.mark.parametrize("row", TENSORS, ids=lambda row: row.ours)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_tensors(row: Row, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    if row.equality == IDENTICAL:
        x = x * torch.logspace(-20, 20, 256)[:, None]
    x = x.to(dtype)
    if "nvfp4" in row.ours:
        # Its values are float32 numbers.
        x = x.float()
    theirs = {"MXTensor": MXTensor, "NVFP4Tensor": NVFP4Tensor, "ScaleCalculationMode": ScaleCalculationMode}
    found = eval(row.theirs, {**theirs, "torch": torch, "x": x, "per_tensor_amax_to_scale": per_tensor_amax_to_scale}).dequantize(x.dtype)
    assert same_bits(eval(row.ours, {**names(), "x": x}), found)


# Optimizers.

COUNT, STEPS = 512, 24


def moved(make: Callable[..., torch.optim.Optimizer]) -> tuple[Tensor, dict[str, Any]]:
    """Weights in bfloat16 after steps with the same gradient for all, and the optimizer's state of them."""
    w = nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
    optimizer = make([w])
    for _ in range(STEPS):
        w.grad = torch.full_like(w, 0.25)
        optimizer.step()
    return w.detach(), optimizer.state[w]


def check_mean(w: Tensor) -> None:
    """Each step subtracts a thousandth, plus the decay: check the mean of stochastic rounding, with units of 2**-8."""
    due = 1.0
    for _ in range(STEPS):
        due = due * (1 - 1e-5) - 1e-3
    # A step's variance is at most a quarter of a squared unit; float32 and bfloat16 moments add a thousandth of an update.
    assert abs(w.double().mean().item() - due) < bernstein(STEPS * 2.0**-18, STEPS * 2.0**-8, COUNT) + 1e-3 * STEPS * 1e-3


def test_torchaos_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults and moments are the same: in bfloat16, rounded to nearest, which keeps the second from shrinking."""
    found = [moved(lambda params: qsim.optim.AdamW(params, lr=1e-3))]
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    theirs = pytest.importorskip("torchao.optim", exc_type=ImportError)._AdamW
    found.append(moved(lambda params: theirs(params, lr=1e-3, bf16_stochastic_round=True)))
    for w, state in found:
        check_mean(w)
        assert state["exp_avg_sq"].dtype == torch.bfloat16
    w = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    for make in (qsim.optim.AdamW, theirs):
        optimizer = make([w], lr=1e-3)
        w.grad = torch.zeros_like(w)
        optimizer.step()
        moment = optimizer.state[w]["exp_avg_sq"].fill_(1)
        optimizer.step()
        assert moment.tolist() == [1.0] * 8


def test_d9ds_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel in Triton's interpreter: moments in bfloat16 shrink on average on both sides, and those in float32 are equal."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is used where there is no GPU")
    module = pytest.importorskip("d9d.optim.stochastic", exc_type=ImportError)
    from d9d.kernel.stochastic import adamw_step

    kernel = adamw_step._adamw_stochastic_bf16_kernel

    class Untuned:
        """The kernel without its autotuner, which needs a GPU."""

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: kernel.fn[grid({"BLOCK_SIZE": 1024})](*args, BLOCK_SIZE=1024, **options)

    monkeypatch.setattr(adamw_step, "_adamw_stochastic_bf16_kernel", Untuned())
    torch.manual_seed(0)
    states = []
    for make in (module.StochasticAdamW, qsim.optim.StochasticAdamW):
        w, state = moved(lambda params, make=make: make(params, lr=1e-3))
        check_mean(w)
        states.append(state)
        w2 = nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
        optimizer = make([w2], lr=1e-3, state_dtype=torch.bfloat16)
        w2.grad = torch.zeros_like(w2)
        optimizer.step()
        moment = optimizer.state[w2]["exp_avg_sq"].fill_(1)
        for _ in range(STEPS):
            optimizer.step()
        # As in `check_mean`, with a unit of 2**-8.
        assert abs(moment.double().mean().item() - 0.999**STEPS) < bernstein(STEPS * 2.0**-18, STEPS * 2.0**-8, COUNT)
        assert moment.unique().numel() > 1
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-6, atol=0)


def test_optimis_adamw() -> None:
    """With the guide's options both follow float64's AdamW, closer than the spacing of bfloat16 weights."""
    make = pytest.importorskip("optimi", exc_type=ImportError).AdamW
    before = torch.randn(1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, theirs, here = nn.Parameter(before.double()), nn.Parameter(before.clone()), nn.Parameter(before.clone())
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6}
    optimizers = {
        exact: torch.optim.AdamW([exact], weight_decay=1e-2, **options),
        theirs: make([theirs], lr=1e-3, kahan_sum=True),
        here: qsim.optim.AdamW([here], update="kahan", **options),
    }
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        gradient = (torch.randn(1024, generator=generator) * 1e-2).bfloat16()
        for p, optimizer in optimizers.items():
            p.grad = gradient.to(p.dtype, copy=True)
            optimizer.step()
    errors = [(p.double() - exact).abs().mean().item() for p in (theirs, here)]
    stuck = (before.double() - exact).abs().mean().item()
    assert max(errors) < 0.25 * stuck, errors
