"""Products times scales of whole tensors: those of the float32 product, without a float32 product in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product as every

import pytest
import torch
from torch import Tensor

import qsim
from qsim.recipes import fp8_hybrid
from qsim_kernels.chip import cublas, factored
from support.comparing import same_bits
from support.cublas_library import CublasLibrary
from support.cuda_graphs import captured

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


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[CublasLibrary]:
    """Let the CPU be a GPU with cuBLAS, and plain torch its kernels."""
    library = CublasLibrary()
    with use(library, monkeypatch):
        yield library


@contextmanager
def use(library: CublasLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in ("_current_device", "_current_stream"):
            patch.setattr(factored, name, lambda *_: -1)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(cublas, "_handle", lambda: 1)
        patch.setattr(cublas, "_library", lambda: library)
        cublas.is_loaded.cache_clear()
        factored._product.cache_clear()
        yield
        factored._product.cache_clear()
        cublas.is_loaded.cache_clear()
        factored._zeros.clear()


def by_cublas(a: Tensor, b: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The product by cuBLAS, if it takes it."""
    out = torch.full((a.shape[0], b.shape[1]), math.nan, dtype=dtype)
    return out if factored.multiplied_into(out, a, b, factors, bias) else None


@pytest.mark.parametrize("workspace", [0, 1 << 20])
@pytest.mark.parametrize("stored", [*every((False, True), repeat=2)], ids=str)
@pytest.mark.parametrize(("dtype", "target"), WITH_BITS, ids=str)
def test_cublas_is_told_what_to_multiply(
    dtype: torch.dtype, target: torch.dtype, stored: tuple[bool, bool], workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, library = torch.device("cpu"), CublasLibrary(workspace)
    a, b = integers(24, 40, dtype=dtype, device=device)[:, :32], integers(32, 16, dtype=dtype, device=device, seed=1)
    a, b = (x.t().contiguous().t() if turned else x for x, turned in zip((a, b), stored, strict=True))
    factors, bias = [torch.tensor(2.0**-3), torch.tensor([[0.5]])], torch.arange(16, dtype=target)
    with use(library, monkeypatch):
        for given, added in ((factors[:1], None), (factors, None), (factors, bias), (factors, bias + 1)):
            found = by_cublas(a, b, given, added, target)
            assert found is not None
            assert same_bits(found, written_out(a, b, given, added, target))
        assert library.launches == 4
    assert not library.made  # no product is left, so none of its descriptions is


def test_what_cublas_does_not_take(library: CublasLibrary) -> None:
    a, b, factor = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16), [torch.tensor(0.5)]
    assert by_cublas(a, b, factor, None, torch.bfloat16) is not None
    whole = torch.ones(16, 33, dtype=torch.bfloat16)
    for one, other, factors, bias, dtype in (
        (a, b, [], None, torch.bfloat16),
        (a, b, [torch.ones(16, 1)], None, torch.bfloat16),
        (a, b, [torch.ones((), dtype=torch.float64)], None, torch.bfloat16),
        (a, b, factor, None, torch.float16),
        (a, b, factor, torch.ones(16), torch.bfloat16),
        (a.float(), b.float(), factor, None, torch.float32),
        (a.half(), b, factor, None, torch.float32),
        (a[:0], b, factor, None, torch.bfloat16),
        (whole[:, 1:17], b, factor, None, torch.bfloat16),  # its address is not a multiple of 16
        (whole[:, :32:2], b, factor, None, torch.bfloat16),
        (a[:1].expand(16, 16), b, factor, None, torch.bfloat16),
    ):
        assert by_cublas(one, other, factors, bias, dtype) is None
    assert library.launches == 1


def test_products_without_an_algorithm_and_an_unknown_zero_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, factor = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16), [torch.tensor(0.5)]
    with use(CublasLibrary(has_algorithms=False), monkeypatch):
        assert by_cublas(a, b, factor, None, torch.bfloat16) is None
    with use(CublasLibrary(), monkeypatch), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert by_cublas(a, b, factor, None, torch.bfloat16) is None
        patch.undo()
        assert by_cublas(a, b, factor, None, torch.bfloat16) is not None
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert by_cublas(a, b, factor, None, torch.bfloat16) is not None


def test_failures_are_named(library: CublasLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cublasLtMatmul", lambda *_: 13)
    with pytest.raises(RuntimeError, match="cuBLAS: Matmul returned status 13"):
        by_cublas(torch.ones(16, 16).half(), torch.ones(16, 16).half(), [torch.ones(())], None, torch.float16)


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
    graph, found = captured(lambda: multiplied(a, b, factors, None, torch.bfloat16))
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
