"""Matrix products and convolutions of distributed tensors, and the errors of placements that are not supported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import qsim
from qsim import FivePoint
from support.comparing import same_bits
from support.distributed_models import NEAREST, coarse, mesh_of, noisy, place, whole
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO

two = ranks_of(2)


def _other_products(device: torch.device) -> list[tuple[list[Tensor], list[Tensor], str]]:
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(device)
    heads = [coarse(2, 4, 5, 6, seed=0), coarse(2, 4, 6, 5, seed=1)]
    image = [coarse(4, 3, 6, 6, seed=2), coarse(4, 3, 3, 3, seed=3), coarse(4, seed=4)]

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return qsim.nn.functional.matmul(a, b, NEAREST)

    def conv2d(*given: Tensor) -> Tensor:
        return qsim.nn.functional.conv2d(*given, points=NEAREST)

    cases: list[tuple[Callable[..., Tensor], list[Tensor], tuple[str, ...]]] = [
        (matmul, heads, ("1", "1")),
        (matmul, heads, ("0", "0")),
        (matmul, heads, ("2", "1")),
        (matmul, [heads[0], heads[1][0]], ("1", "0")),
        (matmul, [heads[0], heads[1][0, 0]], ("0", "all")),
        (conv2d, image, ("0", "all", "all")),
        (conv2d, image, ("1", "all", "all")),
    ]
    results = []
    for function, operands, places in cases:
        shares = [distribute_tensor(t.to(device), mesh, [place(how)]).requires_grad_() for t, how in zip(operands, places, strict=True)]
        alone = [t.to(device, copy=True).requires_grad_() for t in operands]
        y, expected = function(*shares), function(*alone)
        g = coarse(*expected.shape, seed=9).to(device)
        y.full_tensor().backward(g)  # type: ignore[attr-defined]
        expected.backward(g)
        found = [[whole(t) for t in (y, *(x.grad for x in given))] for y, given in ((y, shares), (expected, alone))]
        results.append((*found, str(y.placements)))  # type: ignore[attr-defined]
    return results


def test_other_products_of_shares(two: Ranks) -> None:
    for results in two(_other_products):
        assert len(results) == 7
        for found, expected, _ in results:
            # Convolutions may be computed by algorithms that are not exact.
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert [placed.count("Shard") for _, _, placed in results] == [1, 1, 0, 1, 0, 1, 0]


def _heads(device: torch.device, second: bool) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    operands = [torch.full((4, 8, 8), 1.25), torch.eye(8).expand(4, 8, 8).contiguous()]
    shares = [distribute_tensor(t.to(device), mesh_of(device), [place("0")]) for t in (reversed(operands) if second else operands)]
    torch.manual_seed(0)
    return whole(qsim.nn.functional.matmul(*shares, points=FivePoint(act=noisy("e2m1"), act_bwd=None)))


@pytest.mark.parametrize("second", [False, True])
def test_heads_have_noise_of_their_own(two: Ranks, second: bool) -> None:
    first, other = two(_heads, second)
    assert same_bits(first, other)
    assert set(first.unique().tolist()) == {1.0, 1.5}
    assert not same_bits(*first.chunk(2))


def _refused(device: torch.device) -> list[str]:
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(device)
    x, w, kernel = coarse(4, 4, 6, seed=0).to(device), coarse(5, 6, seed=1).to(device), coarse(2, 4, 3, seed=2).to(device)
    shared_x, shared_w = distribute_tensor(x, mesh, [place("all")]), distribute_tensor(w, mesh, [place("0")])
    shared_kernel = distribute_tensor(kernel, mesh, [place("0")])
    indices = torch.zeros(3, dtype=torch.int64, device=device)
    shared_indices = distribute_tensor(indices, mesh, [place("all")])
    few = distribute_tensor(w[:1].clone(), mesh, [place("0")])
    calls: list[Callable[[], Tensor]] = [
        lambda: qsim.nn.functional.linear(x, shared_w, None, NEAREST),
        lambda: qsim.nn.functional.linear(shared_x, w, None, NEAREST),
        lambda: qsim.nn.functional.linear(shared_x, shared_w, w[:, 0], NEAREST),
        lambda: qsim.nn.functional.conv1d(shared_x, shared_kernel, points=NEAREST),
        lambda: qsim.nn.functional.embedding(indices, shared_w, points=NEAREST),
        lambda: qsim.nn.functional.embedding(shared_indices, shared_w, points=NEAREST, scale_grad_by_freq=True),
        lambda: qsim.nn.functional.embedding(shared_indices, few, points=NEAREST),
    ]
    said = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        said.append(f"{type(error.value).__name__}: {error.value}")
    return said


def test_unsupported_placements_raise_clear_errors(two: Ranks) -> None:
    for said in two(_refused):
        mixed = "TypeError: the operands of a product must be all distributed tensors or none, got "
        assert said[:3] == [mixed + "Tensor, DTensor", mixed + "DTensor, Tensor", mixed + "DTensor, DTensor, Tensor"]
        assert said[3].startswith("ValueError: convolution: a weight must be placed Replicate(), got S")
        assert said[4] == "TypeError: embedding: the indices and the table must be all distributed tensors or none, got Tensor, DTensor"
        assert said[5] == "ValueError: embedding: scale_grad_by_freq cannot be combined with a table that is distributed by rows"
        assert said[6] == "ValueError: embedding: a table of 1 rows leaves some of 2 processes none"
