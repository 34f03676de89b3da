"""All-reduce with rounding: processes and virtual ranks agree in every bit, and errors grow as theory says."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import qsim
from qsim.distributed import AllReduce, WireState, all_reduce, comm_hook, simulate_all_reduce
from qsim.distributed.hooks import bucket_seed
from qsim.distributed.messages import ALGORITHMS, exchange
from support.comparing import same_bits
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

four = ranks_of(4)
COUNT, STEPS = 101, 3

HOWS = [
    AllReduce(algorithm, wire=wire, sums=sums, error_feedback=feedback)
    for algorithm, (wire, sums, feedback) in itertools.product(
        ALGORITHMS,
        [
            (None, None, False),
            ("bf16", None, False),
            (qsim.Quantizer("e5m2", "stochastic"), qsim.Quantizer("bf16", "stochastic"), False),
            (qsim.Quantizer("mxfp8"), "bf16", True),
            (qsim.Quantizer("e4m3", "stochastic", scale="tensor"), None, True),
        ],
    )
]


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(10 * step + rank))


class Scaled(nn.Module):
    """Two parameters whose gradients are the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(60)), nn.Parameter(torch.zeros(COUNT - 60))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat([self.first, self.second]) * x).sum()


def _reduced(device: torch.device) -> list[list[Tensor]]:
    """The sums of all kinds in some steps, and averages by the hook."""
    rank, results = distributed.get_rank(), []
    for how in HOWS:
        residual = torch.zeros(COUNT, device=device) if how.error_feedback else None
        results.append([all_reduce(gradient(rank, step).to(device), how, seed=step, residual=residual) for step in range(STEPS)])
        model = nn.parallel.DistributedDataParallel(Scaled().to(device))
        state: Any = WireState(how, seed=5)
        model.register_comm_hook(state, comm_hook)
        for step in range(STEPS):
            if step == 1:  # resumed
                saved = state.state_dict()
                state.load_state_dict(saved)
            model.zero_grad()
            model(gradient(rank, step).to(device)).backward()
            results[-1].append(torch.cat([own.grad for own in (model.module.first, model.module.second) if own.grad is not None]))
        assert state.step == STEPS
    return results


@NEEDS_GLOO
def test_four_processes_and_four_virtual_ranks_agree_in_every_bit(four: Ranks) -> None:
    found = four(_reduced)
    for index, how in enumerate(HOWS):
        residuals = [torch.zeros(COUNT) for _ in range(4)] if how.error_feedback else None
        for step in range(STEPS):
            expected = simulate_all_reduce([gradient(rank, step) for rank in range(4)], how, seed=step, residuals=residuals)
            assert all(same_bits(ranks[index][step].cpu(), expected) for ranks in found), (how, step)
        # The hook's bucket has the parameters in the order in which their gradients arrive.
        hooked = [torch.zeros(COUNT) for _ in range(4)] if how.error_feedback else None
        for step in range(STEPS):
            averages = [ranks[index][STEPS + step].cpu() for ranks in found]
            assert all(same_bits(averages[0], other) for other in averages)
            orders = [torch.arange(COUNT), torch.cat([torch.arange(60, COUNT), torch.arange(60)])]
            candidates = []
            for order in orders:
                kept = None if hooked is None else [each[order].clone() for each in hooked]
                parts = [gradient(rank, step)[order] / 4 for rank in range(4)]
                value = torch.empty(COUNT)
                value[order] = simulate_all_reduce(parts, how, seed=bucket_seed(5, step, 0), residuals=kept)
                candidates.append((value, order, kept))
            value, order, kept = next((c for c in candidates if same_bits(c[0], averages[0])), (None, None, None))
            assert value is not None, (how, step)
            if hooked is not None and kept is not None:
                for each, new in zip(hooked, kept, strict=True):
                    each[order] = new


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_is_added_once_and_every_rank_gets_every_sum(algorithm: str, size: int) -> None:
    plan = exchange(algorithm, size)
    held = [[{rank} for _ in plan.owners] for rank in range(size)]
    for messages in plan.adding:
        assert len({m.sender for m in messages}) == len({m.receiver for m in messages}) == len(messages)
        sent = [set(held[m.sender][m.chunk]) for m in messages]
        for m, ranks in zip(messages, sent, strict=True):
            assert not held[m.receiver][m.chunk] & ranks
            held[m.receiver][m.chunk] |= ranks
    assert all(held[owner][chunk] == set(range(size)) for chunk, owner in enumerate(plan.owners))
    has = [{chunk for chunk, owner in enumerate(plan.owners) if owner == rank} for rank in range(size)]
    for messages in plan.spreading:
        assert all(m.chunk in has[m.sender] for m in messages)
        for m in messages:
            has[m.receiver].add(m.chunk)
    assert has == [set(range(len(plan.owners)))] * size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_rounding_it_is_the_sum(algorithm: Any) -> None:
    tensors = [torch.randint(-8, 8, (3, 7)).float() for _ in range(5)]
    assert torch.equal(simulate_all_reduce(tensors, AllReduce(algorithm)), sum(tensors, torch.zeros(())))


def relative_error(how: AllReduce, size: int, elements: int = 1 << 15) -> float:
    generator = torch.Generator().manual_seed(size)
    ranks = [torch.randn(elements, generator=generator) for _ in range(size)]
    exact = sum((x.double() for x in ranks), torch.zeros((), dtype=torch.float64))
    return float((simulate_all_reduce(ranks, how) - exact).norm() / exact.norm())


#: Relative variance of the error of a sum over N ranks, in units of that of one rounding. A message of a ring rounds partial sums of 1, …,
#: N - 1 and N terms, which are random walks: variances 1 + 2 + … + N, over that of the result, N. In a tree each level rounds sums of half
#: of all terms, and the last rounding all of them; all-to-all rounds N - 1 single terms, and the sum.
THEORY = {
    "ring": lambda size: (size + 1) / 2,
    "tree": lambda size: math.log2(size) / 2 + 1,
    "all_to_all": lambda size: (2 * size - 1) / size,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_errors_grow_as_theory_says(algorithm: Any, rounding: str) -> None:
    """The error of a ring in BF16 is proportional to √N.

    One rounding has an error that depends a little on where the numbers are between powers of two, at most by 5 % of the norm for normal
    numbers; over 2^15 elements, the standard deviation of a measured norm is 0.4 %.
    """
    point = qsim.Quantizer("bf16", rounding)
    how = AllReduce(algorithm, wire=point)
    one = relative_error(AllReduce(algorithm, wire=point), 1)
    for size in (4, 16, 64):
        assert relative_error(how, size) == pytest.approx(one * math.sqrt(THEORY[algorithm](size)), rel=0.07), size


def test_every_bucket_of_every_step_has_a_seed_of_its_own() -> None:
    assert len({bucket_seed(seed, step, bucket) for seed in range(3) for step in range(3) for bucket in range(3)}) == 27


def test_hops_of_a_ring_draw_independent_noise() -> None:
    """Were the bits of all hops the same, errors would add up in proportion to N."""
    how = AllReduce("ring", wire=qsim.Quantizer(qsim.Int(16), "stochastic"))
    ranks = [torch.full((4096,), 0.5) for _ in range(32)]
    errors = simulate_all_reduce(ranks, how) - 16.0
    # Each hop adds 1/2 to an integer: 32 roundings with a variance of 1/4. The bounds are five standard deviations wide.
    assert abs(float(errors.mean())) < 5 * math.sqrt(8 / 4096)
    assert abs(float(errors.var()) - 8) < 5 * 8 * math.sqrt(2 / 4096)
    assert not torch.equal(simulate_all_reduce(ranks, how, seed=1), simulate_all_reduce(ranks, how, seed=2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_feedback_loses_nothing(algorithm: Any) -> None:
    """Sums and residuals together are what was given, up to float32's roundings."""
    how = AllReduce(algorithm, wire="e4m3", sums="bf16", error_feedback=True)
    residuals = [torch.zeros(COUNT) for _ in range(4)]
    given, summed = torch.zeros(COUNT), torch.zeros(COUNT)
    for step in range(20):
        gradients = [gradient(rank, step) for rank in range(4)]
        given += sum(gradients, torch.zeros(()))
        summed += simulate_all_reduce(gradients, how, residuals=residuals)
    kept = sum(residuals, torch.zeros(()))
    assert float(kept.norm()) > 0.1
    torch.testing.assert_close(summed + kept, given, atol=1e-4, rtol=0)
    without = AllReduce(algorithm, wire="e4m3", sums="bf16")
    lost = sum((simulate_all_reduce([gradient(rank, step) for rank in range(4)], without) for step in range(20)), torch.zeros(()))
    assert float((lost - given).norm()) > 1.5 * float((summed - given).norm())


ONE = [torch.ones(2)]
FED = AllReduce(error_feedback=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: AllReduce("star"), ValueError, "AllReduce: algorithm must be 'ring', 'tree', 'all_to_all', got 'star'"),
        (lambda: AllReduce(error_feedback=1), TypeError, "AllReduce: error_feedback must be True or False, got 1"),
        (lambda: simulate_all_reduce([], AllReduce()), ValueError, "there must be a tensor for each rank, got none"),
        (lambda: simulate_all_reduce([torch.ones(1), torch.ones(2)], AllReduce()), ValueError, "tensors of one shape, got"),
        (lambda: simulate_all_reduce(ONE, "ring"), TypeError, "how must be a qsim.distributed.AllReduce, got 'ring'"),
        (lambda: simulate_all_reduce(ONE, FED), ValueError, "error_feedback=True, and no residual is given"),
        (
            lambda: simulate_all_reduce(ONE, AllReduce(), residuals=[torch.zeros(2)]),
            ValueError,
            "error_feedback=False, and a residual is given",
        ),
        (lambda: simulate_all_reduce(ONE, FED, residuals=[]), ValueError, "a residual for each of the 1 ranks, got 0"),
        (
            lambda: simulate_all_reduce(ONE, FED, residuals=[torch.zeros(3)]),
            ValueError,
            "residual must be flat, of float32 and of 2 elements",
        ),
        (lambda: all_reduce(ONE[0], AllReduce()), RuntimeError, "all_reduce: torch.distributed is not initialized; simulate_all"),
        (lambda: WireState("ring"), TypeError, "WireState: how must be a qsim.distributed.AllReduce, got 'ring'"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
