"""Pure BF16 training under its names in other packages: arguments, dtypes, errors, and the same arithmetic."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import BF16 as BF16_FORMAT, FP32 as FP32_FORMAT
from qsim.optim import StochasticAdamW, adamw_stochastic_bf16_, copy_fp32_to_bf16_stochastic_
from support.bounds import check_share
from support.comparing import same_bits
from support.distributed_models import alike
from support.refusing import refused
from support.written_out_updates import Element, Options, move, random_integer

BF16, FP32 = torch.bfloat16, torch.float32
NUMBERS: dict[str, Any] = {"lr": 0.0625, "beta1": 0.75, "beta2": 0.875, "eps": 1e-3, "weight_decay": 0.1}


def arguments(function: Any, kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD) -> list[Any]:
    """The names of the arguments of a kind, and their defaults if any."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind is kind]
    return [p.name if p.default is inspect.Parameter.empty else (p.name, p.default) for p in found]


def keywords(function: Any) -> list[Any]:
    """Keyword-only arguments."""
    return arguments(function, inspect.Parameter.KEYWORD_ONLY)


def test_arguments_are_those_of_the_page() -> None:
    tail = [("betas", (0.9, 0.999)), ("eps", 1e-8), ("weight_decay", 0.01), ("generator", None), ("state_dtype", FP32)]
    assert arguments(StochasticAdamW.__init__) == ["params", "lr", *tail]
    tensors, numbers = ["params", "grads", "exp_avg", "exp_avg_sq"], ["lr", "beta1", "beta2", "eps", "weight_decay", "step"]
    assert arguments(adamw_stochastic_bf16_) == [*tensors, *numbers, ("generator", None)]
    assert arguments(copy_fp32_to_bf16_stochastic_) == ["target", "source", ("generator", None)]
    assert keywords(StochasticAdamW.__init__) == [("state_rounding", "stochastic")]
    assert keywords(adamw_stochastic_bf16_) == keywords(copy_fp32_to_bf16_stochastic_) == []
    assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(StochasticAdamW.__init__).parameters.values())


# adamw_stochastic_bf16_.


def tensors(grad: torch.dtype = FP32, state: torch.dtype = FP32, device: torch.device | str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(5, 3, generator=generator).to(device) for _ in range(4)]
    return [drawn[0].to(BF16), drawn[1].to(grad), drawn[2].to(state), drawn[3].square().to(state)]


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize("grad", [FP32, BF16])
def test_a_step_is_what_is_written_out(grad: torch.dtype, state: torch.dtype, step: int, device: torch.device) -> None:
    given = tensors(grad, state, device)
    before = [x.clone() for x in given]
    seed = int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(6)))
    adamw_stochastic_bf16_(*given, **NUMBERS, step=step, generator=torch.Generator().manual_seed(6))
    kept = FP32_FORMAT if state == FP32 else BF16_FORMAT
    options = Options(
        "adam", BF16_FORMAT, BF16_FORMAT, "stochastic", state=kept, state_stochastic=True, lr=NUMBERS["lr"],
        betas=(NUMBERS["beta1"], NUMBERS["beta2"]), eps=NUMBERS["eps"], weight_decay=NUMBERS["weight_decay"], decoupled=True,
    )  # fmt: skip
    due = []
    for index, (w, g, m, v) in enumerate(zip(*(x.flatten().tolist() for x in before), strict=True)):
        element = Element(w, {"exp_avg": m, "exp_avg_sq": v})
        move(element, g, step, options, lambda role, index=index: random_integer(seed, step, None, role, index))
        due.append((element.weight, *element.states.values()))
    for found, old, numbers in zip((given[0], *given[2:]), (before[0], *before[2:]), zip(*due, strict=True), strict=True):
        assert same_bits(found, torch.tensor(numbers, dtype=torch.float64).to(old.dtype).view(5, 3))
    assert same_bits(given[1], before[1])


def test_the_generator_of_a_step() -> None:
    found = []
    for seed in (1, 1, 2):
        given = tensors()
        torch.manual_seed(seed)
        adamw_stochastic_bf16_(*given, **NUMBERS, step=1)
        found.append(given[0])
    assert same_bits(found[0], found[1])
    assert not same_bits(found[0], found[2])
    generator = torch.Generator().manual_seed(1)
    draws = []
    for _ in range(2):
        given = tensors()
        adamw_stochastic_bf16_(*given, **NUMBERS, step=1, generator=generator)
        draws.append(given[0])
    assert not same_bits(*draws), "each call draws again"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: lambda x: x.float()}, ["params must be bfloat16", "float32"]),
        ({1: lambda x: x[:4]}, ["grads has shape (4, 3)", "(5, 3)"]),
        ({2: lambda x: x.flatten()}, ["exp_avg has shape (15,)"]),
        ({3: lambda x: x[:, :2]}, ["exp_avg_sq has shape (5, 2)"]),
        ({1: lambda x: x.double()}, ["grads must be bfloat16 or float32", "float64"]),
        ({2: lambda x: x.half(), 3: lambda x: x.half()}, ["exp_avg must be bfloat16 or float32", "float16"]),
        ({2: lambda x: x.bfloat16()}, ["exp_avg is torch.bfloat16, exp_avg_sq torch.float32", "the same"]),
        ({0: lambda x: x.t().contiguous().t()}, ["params must be contiguous"]),
        ({2: lambda x: x.t().contiguous().t()}, ["exp_avg must be contiguous"]),
        ({3: lambda x: x.t().contiguous().t()}, ["exp_avg_sq must be contiguous"]),
        ({1: lambda x: x.to("meta")}, ["grads is on meta, params on cpu"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_arguments_of_a_step(change: dict[int, Any], words: list[str]) -> None:
    given = tensors()
    for number, make in change.items():
        given[number] = make(given[number])
    kept = tuple(x for x in given if x.device.type == "cpu" and x.dtype in (BF16, FP32) and x.is_contiguous())
    with refused(ValueError, *words, untouched=kept):
        adamw_stochastic_bf16_(*given, **NUMBERS, step=1)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("step", value, ["step must be an integer of at least 1", repr(value)]) for value in (0, -1, 1.0, True)),
        ("lr", -0.5, ["lr must be in [0, inf)", "-0.5"]),
        ("beta1", -0.5, ["beta1 must be in [0, 1)", "-0.5"]),
        ("beta2", 1.0, ["beta2 must be in [0, 1)", "1.0"]),
        ("eps", math.nan, ["eps must be in [0, inf)", "nan"]),
        ("weight_decay", -1.0, ["weight_decay must be in [0, inf)", "-1.0"]),
    ],
)
def test_numbers_that_a_step_refuses(name: str, value: Any, words: list[str]) -> None:
    given = tensors()
    with refused(ValueError, *words, untouched=tuple(given)):
        adamw_stochastic_bf16_(*given, **{**NUMBERS, "step": 1, name: value})


def test_weights_that_require_gradients_are_moved_outside_of_the_graph() -> None:
    given, others = tensors(), tensors()
    others[0].requires_grad_()
    for x in (given, others):
        adamw_stochastic_bf16_(*x, **NUMBERS, step=2, generator=torch.Generator().manual_seed(0))
    assert same_bits(given[0], others[0])
    assert others[0].is_leaf
    target = torch.zeros(3, dtype=BF16, requires_grad=True)
    copy_fp32_to_bf16_stochastic_(target, torch.ones(3, requires_grad=True))
    assert target.is_leaf
    assert target.tolist() == [1.0] * 3


def test_gradients_need_not_be_contiguous() -> None:
    given, others = tensors(), tensors()
    others[1] = others[1].t().contiguous().t()
    for x in (given, others):
        adamw_stochastic_bf16_(*x, **NUMBERS, step=2, generator=torch.Generator().manual_seed(0))
    assert alike(given, others)


# copy_fp32_to_bf16_stochastic_.


def test_a_copy(device: torch.device) -> None:
    source = torch.tensor([1.0, 1 + 2.0**-9, -1 - 3 * 2.0**-9, 0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38]).repeat(1 << 14).to(device)
    target = torch.empty_like(source, dtype=BF16)
    assert copy_fp32_to_bf16_stochastic_(target, source) is target
    columns = target.view(-1, 9).t()
    for column, value in zip(columns[[0, 3, 4, 5, 6, 7]], (1.0, 0.0, -0.0, math.inf, -math.inf, math.nan), strict=True):
        assert same_bits(column.nan_to_num(7.0), torch.full_like(column, value).nan_to_num(7.0))
        assert column.isnan().all() == math.isnan(value)
    check_share(int((columns[1] == 1 + 2.0**-7).sum()), 1 << 14, 0.25)
    check_share(int((columns[2] == -1 - 2.0**-7).sum()), 1 << 14, 0.75)
    assert set(columns[1].tolist()) == {1.0, 1 + 2.0**-7}
    assert set(columns[2].tolist()) == {-1.0, -1 - 2.0**-7}


def test_a_copy_is_quantize(device: torch.device) -> None:
    source = torch.randn(3, 50, device=device)[:, ::2]
    target = torch.empty(3, 25, dtype=BF16, device=device)
    copy_fp32_to_bf16_stochastic_(target, source, torch.Generator().manual_seed(2))
    rounding = {"rounding": qsim.Stochastic(16), "overflow": "nonfinite", "dtype": BF16}
    assert same_bits(target, qsim.quantize(source, "bf16", generator=torch.Generator().manual_seed(2), **rounding))


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        (torch.zeros(3), torch.ones(3), ["target must be bfloat16 and source float32", "got torch.float32"]),
        (torch.zeros(3, dtype=BF16), torch.ones(3, dtype=BF16), ["target must be bfloat16 and source float32", "got torch.bfloat16"]),
        (torch.zeros(3, dtype=BF16), torch.ones(4), ["target has shape (3,), source has (4,)"]),
        (torch.zeros(2, 3, dtype=BF16).t(), torch.ones(3, 2), ["target must be contiguous"]),
        (torch.zeros(3, dtype=BF16), torch.ones(3, device="meta"), ["target is on cpu, source on meta"]),
    ],
)  # fmt: skip
def test_invalid_arguments_of_a_copy(target: Tensor, source: Tensor, words: list[str]) -> None:
    before = target.clone()
    with refused(ValueError, *words):
        copy_fp32_to_bf16_stochastic_(target, source)
    assert same_bits(target, before)
