"""Sums of rows that have the same index: the operator against exact arithmetic, and the gradients of lookups."""

from __future__ import annotations

import pytest
import torch

import qsim
from qsim import FivePoint, Stochastic
from qsim.accumulators import NAMED, Accumulator, Aligned, Promoted, Rounded
from qsim.formats import E4M3, FP32
from support.sum_oracle import Draw, exact_sum, indices

SEED, STREAM, OFFSET, ROWS, COLUMNS = 7, 3, 16, 9, 3
SUMS: dict[str, Accumulator] = {
    "rounded": Rounded("bf16"),
    "chunks": Rounded("fp16", chunk=16),
    "pairwise": Rounded("e5m2", order="pairwise"),
    "toward zero": Rounded("e4m3", rounding="toward_zero"),
    "stochastic": Rounded("bf16", rounding=Stochastic(3)),
    "aligned": Aligned(4, 5),
    "promoted": NAMED["h100_fp8_promoted"],
    "promoted, stochastic": Promoted(Rounded("e5m2", rounding=Stochastic(4)), 3),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: Rows that occur 150, 21, 5 times, twice, once and not at all, some of them equally often; and positions that are in no sum.
COUNTS = {0: 5, 2: 1, 3: 150, 5: 21, 6: 1, 7: 2, 8: 5, -1: 4}
INDEX = torch.tensor([row for row, count in COUNTS.items() for _ in range(count)])[
    torch.randperm(189, generator=torch.Generator().manual_seed(1))
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SUMS)
def test_rows_are_summed_in_order_of_position(name: str, device: str) -> None:
    how = SUMS[name]
    x = qsim.quantize(torch.randn(len(INDEX), COLUMNS, generator=torch.Generator().manual_seed(2)) * 8, E4M3)
    seed = torch.tensor(SEED, device=device)
    given = (ROWS, seed, how.spelled(E4M3, E4M3), STREAM, OFFSET, torch.float32)
    found = torch.ops.qsim.accumulate_rows(x.to(device), INDEX.to(device), *given).cpu()
    first = OFFSET
    for count in sorted(set(COUNTS.values())):
        rows = [row for row in range(ROWS) if COUNTS.get(row) == count]
        for i, row in enumerate(rows):
            for j, terms in enumerate(x[row == INDEX].T.tolist()):
                draw = Draw(SEED, STREAM, first + (i * COLUMNS + j) * indices(how, count))
                assert found[row, j].item() == exact_sum(how, [1.0] * count, terms, (-6, -6), draw), (row, j)
        first += len(rows) * COLUMNS * indices(how, count)
    assert not found[[row for row in range(ROWS) if row not in COUNTS]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_lookup(device: str) -> None:
    index, g = INDEX.clamp(min=0).view(9, 21).to(device), torch.randn(9, 21, COLUMNS).to(device)
    for accumulate, dtype in (("h100_fp8", torch.bfloat16), ((None, None, Rounded("bf16")), torch.float32)):
        points = FivePoint(grad="e4m3", accumulate=accumulate)  # type: ignore[arg-type]
        layer = qsim.nn.Embedding(ROWS, COLUMNS, 5, device=device, dtype=dtype, points=points)
        layer(index).backward(g.to(dtype))
        rounded, expected = qsim.quantize(g.to(dtype), E4M3).float().view(-1, COLUMNS), torch.zeros(ROWS, COLUMNS, device=device)
        for row in set(index.flatten().tolist()) - {5}:  # that of the padding gets no gradient
            terms = rounded[index.flatten() == row]
            expected[row] = qsim.matmul(terms.new_ones(1, len(terms)), terms, points.sums[2], formats=E4M3)[0]  # type: ignore[arg-type]
        assert layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, expected.to(dtype))
    # Sums draw random bits of their own, replayed from the seed.
    points, weight = (
        FivePoint(accumulate=Rounded("bf16", rounding="stochastic")),
        torch.zeros(ROWS, COLUMNS, device=device, requires_grad=True),
    )

    def gradient(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        (found,) = torch.autograd.grad(qsim.nn.functional.embedding(index, weight, points=points), weight, g)
        return found

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))


def test_what_lookups_with_accumulators_refuse() -> None:
    index, weight = torch.tensor([0, 1]), torch.randn(2, 4)

    def lookup(points: FivePoint, **options: bool) -> None:
        qsim.nn.functional.embedding(index, weight, points=points, **options)

    with pytest.raises(
        ValueError, match="h100_fp8 in the sum for the table's gradient: grad: the unit takes operands in e4m3 or e5m2, got fp32"
    ):
        lookup(FivePoint(accumulate="h100_fp8"))
    with pytest.raises(ValueError, match=r"embedding: an accumulator adds gradients without scales, got .* at grad"):
        lookup(FivePoint(grad="mxfp8", accumulate="h100_fp8"))
    with pytest.raises(ValueError, match=r"convert: .*h100_fp8 in the sum for the table's gradient: grad: the unit takes operands"):
        qsim.convert(torch.nn.Embedding(2, 4), FivePoint("e4m3", accumulate=(None, None, "h100_fp8"), act_bwd=None), embeddings=True)
    converted = qsim.convert(torch.nn.Embedding(2, 4), "deepseek_v3.with_(last=0)", embeddings=True)
    assert converted.points.accumulate is None, "gradients with scales are summed by torch"
    with pytest.raises(ValueError, match="embedding: scale_grad_by_freq cannot be combined with an accumulator"):
        lookup(FivePoint(accumulate=Rounded("bf16")), scale_grad_by_freq=True)
    with pytest.raises(ValueError, match=r"x must be a matrix with a row for each index, got \(2, 4\) and \(3,\)"):
        torch.ops.qsim.accumulate_rows(weight, torch.zeros(3, dtype=torch.long), 2, None, "", 0, 0, torch.float32)
    given = (weight, index, 3, torch.tensor(1), Rounded("bf16", rounding="stochastic").spelled(FP32, FP32), 0, 0, torch.bfloat16)
    torch.library.opcheck(torch.ops.qsim.accumulate_rows.default, given)
