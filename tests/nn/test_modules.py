"""qsim.nn's modules compared with torch.nn's without points, and with qsim.nn.functional with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from support.comparing import same_bits
from support.module_cases import NEAREST, NOISY, ModuleCase, cases, few

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def by_functions(case: ModuleCase, points: FivePoint, module: nn.Module) -> list[Tensor]:
    """The result of a case with qsim.nn.functional, following torch's documentation of the module."""
    m: Any = module

    def forward(x: Tensor, **call: Any) -> Tensor:
        if case.name == "Linear":
            return functional.linear(x, m.weight, m.bias, points, stream=m.stream)
        if case.name == "Embedding":
            return functional.embedding(x, m.weight, m.padding_idx, points, scale_grad_by_freq=m.scale_grad_by_freq, stream=m.stream)
        dims = m.weight.dim() - 2
        function = getattr(functional, f"conv{'_transpose' if 'Transpose' in case.name else ''}{dims}d")
        if "Transpose" not in case.name:
            padding = m.padding
            if m.padding_mode != "zeros":
                total = [step * (size - 1) for step, size in zip(m.dilation, m.kernel_size, strict=True)]
                pairs = [(n // 2, n - n // 2) for n in total] if padding == "same" else [(n, n) for n in padding]
                x, padding = F.pad(x, [n for pair in reversed(pairs) for n in pair], mode=m.padding_mode), 0
            return function(x, m.weight, m.bias, m.stride, padding, m.dilation, m.groups, points, stream=m.stream)
        extra = m.output_padding
        if "output_size" in call:
            least = F.__dict__[f"conv_transpose{dims}d"](x, m.weight, None, m.stride, m.padding, 0, m.groups, m.dilation).shape[-dims:]
            extra = [size - smallest for size, smallest in zip(call["output_size"], least, strict=True)]
        return function(x, m.weight, m.bias, m.stride, m.padding, tuple(extra), m.groups, m.dilation, points, stream=m.stream)

    class Described(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor, **call: Any) -> Tensor:
            return forward(x, **call)

    return case.run(Described())


@cases
def test_is_torchs_module(case: ModuleCase) -> None:
    own, torchs = case.own(NEAREST), case.torchs()
    assert isinstance(own, getattr(nn, case.name))
    assert own.state_dict().keys() == torchs.state_dict().keys()
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in torchs.named_parameters()]
    own.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(own.state_dict())
    accepted = inspect.signature(getattr(nn, case.name)).parameters
    assert set(case.options) <= set(accepted)
    assert "points" not in accepted


@pytest.mark.sampled(3)
@cases
@pytest.mark.parametrize("points", [None, FivePoint()], ids=["none", "identity"])
def test_without_points_it_is_torchs_bit_for_bit(case: ModuleCase, points: FivePoint | None) -> None:
    assert all(map(same_bits, case.run(case.own(points)), case.run(case.torchs())))


@cases
def test_with_points_it_is_the_functions_bit_for_bit(case: ModuleCase) -> None:
    own, torchs = case.run(case.own(NEAREST)), case.run(case.torchs())
    assert all(map(same_bits, own, by_functions(case, NEAREST, case.own(NEAREST))))
    assert [x.shape for x in own] == [x.shape for x in torchs]
    assert not torch.equal(own[0], torchs[0])
    assert not torch.equal(own[1], torchs[1])


@few
def test_noise_follows_the_seed_alone(case: ModuleCase) -> None:
    first, second = (case.run(case.own(NOISY)) for _ in range(2))
    assert all(map(same_bits, first, second))
    assert all(map(same_bits, first, by_functions(case, NOISY, case.own(NOISY))))
    module, x = case.own(NOISY), case.input()
    torch.manual_seed(1)
    calls = [module(x, **case.call) for _ in range(2)]
    assert same_bits(*calls) == (case.name == "Embedding"), "a weight is rounded alike until it changes, an input again"


@few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_device_and_dtype_are_arguments_too(case: ModuleCase, dtype: torch.dtype) -> None:
    kind = getattr(qsim.nn, case.name)
    module = kind(*case.arguments, **case.options, device="cpu", dtype=dtype, points=kind.own_points(NEAREST))
    x = case.input().detach()
    result = module(x if case.name == "Embedding" else x.to(dtype), **case.call)
    assert {result.dtype, *(parameter.dtype for parameter in module.parameters())} == {dtype}


@few
def test_shapes_follow_on_the_meta_device(case: ModuleCase) -> None:
    module = case.own(NOISY).to("meta")
    expected = case.torchs()(case.input(), **case.call)
    result = module(case.input().to("meta"), **case.call)
    assert (result.device.type, result.shape, result.dtype) == ("meta", expected.shape, expected.dtype)


def test_prints_as_torchs_with_points() -> None:
    points = FivePoint(weight=Quantizer("e4m3", "stochastic"), weight_bwd=None)
    assert repr(qsim.nn.Linear(2, 3, bias=False)) == "Linear(in_features=2, out_features=3, bias=False, points=(identity))"
    expected = "Conv2d(2, 3, kernel_size=(1, 1), stride=(1, 1), points=(weight=e4m3 Stochastic(), weight_bwd=None))"
    assert repr(qsim.nn.Conv2d(2, 3, 1, points=points)) == expected
    assert repr(qsim.nn.Embedding(2, 3, points=points)) == "Embedding(2, 3, points=(weight=e4m3 Stochastic(), weight_bwd=None))"


def test_points_are_given_as_a_configuration_too() -> None:
    given = {"act": "e4m3", "grad": {"format": "e5m2", "rounding": "stochastic"}}
    assert qsim.nn.Linear(2, 2, points=given).points == FivePoint(act="e4m3", grad=Quantizer("e5m2", "stochastic"))


# Errors.


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: qsim.nn.Linear(2, 2, points=3),
            TypeError,
            "points must be a FivePoint, a recipe, .* a dictionary of its points or None, got 3",
        ),
        (lambda: qsim.nn.Linear(2, 2, NEAREST), TypeError, "Linear: points are given by their name, points=FivePoint"),
        (lambda: qsim.nn.Linear(2, 2, "mxfp8"), TypeError, "Linear: points are given by their name, points='mxfp8'"),
        (lambda: qsim.nn.Linear(2, 2, points={"acts": "e4m3"}), ValueError, "FivePoint has no point 'acts'; its points are act, weight,"),
        (lambda: qsim.nn.Linear(2, 2, points={"grad_w": "e4m3"}), ValueError, "grad_w is .* and needs grad"),
        (lambda: qsim.nn.Linear(2, 2, points=NEAREST, stream="weights"), TypeError, "stream must be an int, got 'weights'"),
        (lambda: qsim.nn.Linear(2, 2, points=NEAREST)(torch.ones(1, 3)), ValueError, r"linear: x of shape \(1, 3\) does not fit"),
        (lambda: qsim.nn.Linear(2, 2, points=NEAREST)(torch.ones(1, 2).int()), TypeError, "got an operand of torch.int32"),
        (lambda: qsim.nn.ConvTranspose1d(2, 2, 1, padding_mode="circular", points=NEAREST), ValueError, 'Only "zeros" padding'),
        (lambda: _circular()(torch.ones(1, 2, 3)), ValueError, "transposed convolutions pad with zeros only, got padding_mode='circular'"),
        (lambda: qsim.nn.Embedding(3, 2, points=NEAREST), ValueError, "Embedding has no point 'act'; its points are weight, grad"),
        (lambda: qsim.nn.Embedding(3, 2, points={"weight_bwd": "e4m3"}), ValueError, "Embedding has no point 'weight_bwd'"),
        (lambda: _embedding(max_norm=1.0), ValueError, "Embedding: max_norm and sparse=True cannot be combined with points"),
        (lambda: _embedding(sparse=True), ValueError, "Embedding: max_norm and sparse=True cannot be combined with points"),
        (lambda: _embedding(dtype=torch.int32, _weight=torch.ones(3, 2).int(), _freeze=True), TypeError, "got a table of torch.int32"),
    ],
)
def test_errors_are_clear(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def _circular() -> nn.Module:
    layer = qsim.nn.ConvTranspose1d(2, 2, 1, points=NEAREST)
    layer.padding_mode = "circular"
    return layer


def _embedding(**options: Any) -> Any:
    return qsim.nn.Embedding(3, 2, **options, points=FivePoint(weight="e4m3", weight_bwd=None))(torch.tensor([1]))


def test_without_points_an_embedding_does_all_that_torchs_does() -> None:
    own, torchs = (kind(3, 2, max_norm=0.1, sparse=True) for kind in (qsim.nn.Embedding, nn.Embedding))
    own.load_state_dict(torchs.state_dict())
    values = [module(torch.tensor([1, 1, 0])) for module in (own, torchs)]
    assert same_bits(*values)
    for value in values:
        value.sum().backward()
    assert own.weight.grad is not None
    assert own.weight.grad.is_sparse
