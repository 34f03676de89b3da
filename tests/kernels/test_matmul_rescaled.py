"""Products times scales of whole tensors: those of the float32 product, without a float32 product in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product as every

import pytest
import torch
from torch import Tensor

import qsim
from qsim.recipes import fp8_hybrid
from support.comparing import same_bits

WITH_BITS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]
multiplied = torch.ops.qsim.matmul_rescaled.default


def integers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Small ones, whose products any order of float32 sums adds without error."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(device, dtype)


def written_out(a: Tensor, b: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    result = (a.double() @ b.double()).float()
    for factor in factors:
        result = result * factor
    return (result if bias is None else result + bias).to(dtype)


@pytest.mark.parametrize("stored", [*every((False, True), repeat=2)], ids=str)
@pytest.mark.parametrize(("dtype", "target"), WITH_BITS, ids=str)
def test_has_the_bits_of_a_product_written_out(
    dtype: torch.dtype, target: torch.dtype, stored: tuple[bool, bool], device: torch.device
) -> None:
    a, b = integers(96, 128, dtype=dtype, device=device), integers(128, 80, dtype=dtype, device=device, seed=1)
    a, b = (x.t().contiguous().t() if turned else x for x, turned in zip((a, b), stored, strict=True))
    odd, power = torch.tensor(0.0371, device=device), torch.tensor([[2.0**-3]], device=device)
    for factors in ([odd], [odd, power]):
        assert same_bits(multiplied(a, b, factors, None, target), written_out(a, b, factors, None, target))
    # With powers of two a bias is added without error, too.
    bias = torch.arange(80, device=device, dtype=target)
    assert same_bits(multiplied(a, b, [power], bias, target), written_out(a, b, [power], bias, target))


@pytest.mark.parametrize("cut", ["rows of a larger matrix", "an address of its own", "every second column", "one row", "no rows"])
def test_any_layout(cut: str, device: torch.device) -> None:
    whole, b = integers(64, 130, dtype=torch.bfloat16, device=device), integers(64, 48, dtype=torch.bfloat16, device=device, seed=1)
    a = {
        "rows of a larger matrix": whole[:, :64],
        "an address of its own": whole[:, 1:65],
        "every second column": whole[:, :128:2],
        "one row": whole[:1, :64],
        "no rows": whole[:0, :64],
    }[cut]
    factors = [torch.tensor(0.3, device=device)]
    assert same_bits(multiplied(a, b, factors, None, torch.bfloat16), written_out(a, b, factors, None, torch.bfloat16))


def test_scales_of_rows_and_columns(device: torch.device) -> None:
    a, b = integers(16, 32, dtype=torch.bfloat16, device=device), integers(32, 24, dtype=torch.bfloat16, device=device, seed=1)
    factors = [torch.rand(16, 1, device=device), torch.rand(1, 24, device=device)]
    assert same_bits(multiplied(a, b, factors, None, torch.bfloat16), written_out(a, b, factors, None, torch.bfloat16))


def test_torch_accepts_the_operator(device: torch.device) -> None:
    a, b = (integers(16, 16, dtype=torch.bfloat16, device=device, seed=seed) for seed in (0, 1))
    torch.library.opcheck(multiplied, (a, b, [torch.ones((), device=device)], None, torch.float32))


def test_coverage_counts_it(device: torch.device) -> None:
    layer = qsim.convert(torch.nn.Linear(32, 48, device=device, dtype=torch.bfloat16), "fp8_hybrid")
    report = qsim.coverage(layer, torch.randn(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True))
    assert report.multiply_adds == 3 * 16 * 32 * 48
    assert report.share == 1


@pytest.mark.gpu
def test_no_float32_product_lies_in_memory() -> None:
    layer = qsim.nn.Linear(256, 4096, points=fp8_hybrid().points, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)  # cuBLAS's own memory
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = layer(x)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * result.nbytes + 2 * 2 * x.nbytes + 2 * layer.weight.nbytes
    assert result.nbytes == 2**25


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    device = torch.device("cuda")
    a, b = (integers(128, 128, dtype=torch.bfloat16, device=device, seed=seed) for seed in (0, 1))
    factors = [torch.tensor(0.25, device=device), torch.tensor(0.3, device=device)]
    multiplied(a, b, factors, None, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = multiplied(a, b, factors, None, torch.bfloat16)
    factors[1].fill_(0.7)
    a.copy_(integers(128, 128, dtype=torch.bfloat16, device=device, seed=2))
    graph.replay()
    assert same_bits(found, written_out(a, b, factors, None, torch.bfloat16))


@pytest.mark.gpu
def test_threads_have_their_own_biases() -> None:
    device = torch.device("cuda")
    a, b = (integers(64, 64, dtype=torch.bfloat16, device=device, seed=seed) for seed in (0, 1))
    factor = [torch.ones((), device=device)]
    biases = [torch.full((64,), 2.0**i, device=device, dtype=torch.bfloat16) for i in range(8)]

    def several(bias: Tensor) -> list[Tensor]:
        return [multiplied(a, b, factor, bias, torch.bfloat16) for _ in range(50)]

    with ThreadPoolExecutor(8) as threads:
        for bias, found in zip(biases, threads.map(several, biases), strict=True):
            due = written_out(a, b, factor, bias, torch.bfloat16)
            assert all(same_bits(one, due) for one in found)
