"""Other forms of torch's products: in place, written to `out=`, with diagonals, of several operands, and torch's operators themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim.nn import functional
from support.comparing import same_bits
from support.multiplying import NEAREST, inputs, made, results, rounded

ATEN = torch.ops.aten


def batches(own: Any, x: Tensor) -> Tensor:
    return x.expand(3, *x.shape) * own.bias


def images(x: Tensor) -> Tensor:
    return x.T[None]


def kernels(own: Any) -> Tensor:
    return own.stack[:2].mT  # type: ignore[no-any-return]


def of_each(own: Any, x: Tensor) -> Tensor:
    return torch.stack([rounded(batch, matrix.mT) for batch, matrix in zip(batches(own, x), own.stack, strict=True)])


#: Each way to multiply, and the same written out.
WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "addmm_": (lambda m, x: (x * 2).addmm_(x, m.w, beta=3, alpha=2), lambda m, x: x * 6 + rounded(x, m.w.mT) * 2),
    "addmv_": (lambda m, x: (m.bias * 2).addmv_(m.w, x[0]), lambda m, x: m.bias * 2 + rounded(x[:1], m.w)[0]),
    "baddbmm_": (lambda m, x: torch.zeros(3, 5, 4).baddbmm_(batches(m, x), m.stack), of_each),
    "addbmm": (
        lambda m, x: torch.addbmm(m.bias, batches(m, x), m.stack),
        lambda m, x: m.bias + rounded(batches(m, x).transpose(0, 1).flatten(1), m.stack.flatten(0, 1).mT),
    ),
    "dot": (lambda m, x: m.bias.dot(x[0]), lambda m, x: rounded(x[:1], m.bias[None])[0, 0]),
    "reflected @": (lambda m, x: m.w.__rmatmul__(x), lambda m, x: rounded(x, m.w.mT)),
    "einsum of a diagonal": (
        lambda m, x: torch.einsum("bi,jij->bj", x, m.stack[..., :3]),
        lambda m, x: rounded(x, m.stack[..., :3].diagonal(0, 0, 2).mT),
    ),
    "einsum of three": (lambda m, x: torch.einsum("bi,ci,ij->bcj", x, x * 2, m.w), lambda m, x: rounded(x[:, None] * (x * 2), m.w.mT)),
    "cast to an input's dtype": (lambda m, x: x @ m.w.double().to(x).mul(2).double().type_as(x).mT, lambda m, x: rounded(x, m.w * 2)),
    "views of a cast": (lambda m, x: x @ m.w.double().float().t().T.mT, lambda m, x: rounded(x, m.w)),
    "operator mm": (lambda m, x: ATEN.mm(x, m.w), lambda m, x: rounded(x, m.w.mT)),
    "operator addmm": (lambda m, x: ATEN.addmm.default(self=m.bias, mat1=x, mat2=m.w), lambda m, x: rounded(x, m.w.mT, m.bias)),
    "operator addmm_": (lambda m, x: ATEN.addmm_.default(x * 2, x, m.w), lambda m, x: x * 2 + rounded(x, m.w.mT)),
    "operator linear": (lambda m, x: ATEN.linear.default(x, m.w, m.bias), lambda m, x: rounded(x, m.w, m.bias)),
    "operator einsum": (lambda m, x: ATEN.einsum("bi,ij->bj", [x, m.w], path=None), lambda m, x: rounded(x, m.w.mT)),
    "operator tensordot": (lambda m, x: ATEN.tensordot(x, m.w, [1], [0]), lambda m, x: rounded(x, m.w.mT)),
    "operator conv1d": (
        lambda m, x: ATEN.conv1d.padding(images(x), kernels(m), None, [1], "same"),
        lambda m, x: functional.conv1d(images(x), kernels(m), padding="same", points=NEAREST),
    ),
    "operator convolution": (
        lambda m, x: ATEN.convolution.default(images(x), kernels(m), None, [2], [1], [1], False, [0], 1),
        lambda m, x: functional.conv1d(images(x), kernels(m), stride=2, padding=1, points=NEAREST),
    ),
    "operator convolution, transposed": (
        lambda m, x: torch.convolution(images(x), kernels(m).transpose(0, 1), None, [2], [1], [1], True, [1], 1),
        lambda m, x: functional.conv_transpose1d(images(x), kernels(m).transpose(0, 1), None, 2, 1, 1, points=NEAREST),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_products_with_parameters_are_those_of_layers(way: str) -> None:
    call, written_out = WAYS[way]
    model = made(call)
    own, expected = (results(lambda x, of=of: of(x), model, inputs()) for of in (model, lambda x: written_out(model, x)))  # type: ignore[misc]
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(own, expected, strict=True))
    assert {product.reason for product in qsim.coverage(model, inputs()).products} <= {"", "product of two activations"}
    assert not torch.allclose(own[0], qsim.revert(model)(inputs()), rtol=1e-3)


@pytest.mark.slow
def test_compiled_code_gives_the_same_bits() -> None:
    ways = ("addmm_", "operator addmm_", "operator linear", "reflected @", "cast to an input's dtype", "views of a cast")
    model = made(lambda m, x: sum(WAYS[way][0](m, x) for way in ways))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert all(map(same_bits, results(model, model, inputs()), results(compiled, model, inputs())))


def test_results_are_written_where_the_caller_wants_them() -> None:
    model, x = made(lambda m, out: torch.addmm(m.bias, inputs(), m.w, out=out)), inputs()
    for out in (torch.empty(5, 4), torch.empty(0)):
        with torch.no_grad():
            assert model(out) is out
            assert torch.allclose(out, rounded(x, model.w.mT) + model.bias, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"functions with out=.* don't support automatic differentiation"):
        model(torch.empty(5, 4))


def test_products_may_have_a_wider_dtype() -> None:
    """torch has this on GPUs only."""
    model, x = made(lambda m, x: torch.mm(x.bfloat16(), m.w.bfloat16(), torch.float32)), inputs()
    assert same_bits(model(x), rounded(x.bfloat16().float(), model.w.bfloat16().float().mT))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.12")
def test_a_head_in_its_loss() -> None:
    targets = torch.tensor([0, 2, 1, -100, 2])
    model: Any = qsim.convert(nn.LinearCrossEntropyLoss(4, 3), NEAREST)
    loss, expected = (
        results(lambda x, of=of: of(x), model, inputs())  # type: ignore[misc]
        for of in (lambda x: model(x, targets), lambda x: F.cross_entropy(rounded(x, model.linear.weight, model.linear.bias), targets))
    )
    assert all(map(same_bits, loss, expected))
    found = qsim.coverage(model, (inputs(), targets))
    assert (found.share, found.never_called) == (1, ())
    chunked = nn.LinearCrossEntropyLoss(4, 3, options=nn.LinearCrossEntropyOptions(batch_chunk_size=2))
    chunked.load_state_dict(model.state_dict())
    assert same_bits(qsim.convert(chunked, NEAREST)(inputs(), targets), loss[0])


def test_graphs_do_not_count_what_they_do_not_round() -> None:
    """An exported program multiplies by parameters of modules without code."""
    program = torch.export.export(nn.Sequential(nn.Linear(4, 8)), (inputs(),)).module()
    found = qsim.coverage(qsim.convert(program, NEAREST), inputs())
    assert (found.share, {product.reason for product in found.products}) == (0, {"not a layer: addmm on the parameter 0.weight"})
