"""Products on a chip: which ones, on what condition, and never with other bits than the emulator's.

A library that is given as a value stands in for the chip's: it adds like the emulator, or in several parts.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor

import qsim
from qsim import FivePoint, accumulators
from qsim.accumulators import Promoted, Rounded
from qsim_kernels.chip.library import ChipProduct, Multiply, ProductLibrary, product_of
from qsim_kernels.chip.verified import CHIP, VerifiedChip
from qsim_kernels.lowered import products
from qsim_kernels.ops import accumulate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2", torch.bfloat16: "bf16", torch.float16: "fp16"}


class FakeLibrary(ProductLibrary):
    """Products on the CPU, of which some are split along the sum.

    Args:
        accumulator: The sum that it computes.
        parts: How many parts of a sum are computed apart, and added in float32.
        whole: Rows of the result that are computed in one part nevertheless.
        rounds_once: Whether results in 16 bits are rounded from the whole sum.
    """

    def __init__(self, accumulator: str, parts: int = 1, whole: int = 0, *, rounds_once: bool = True) -> None:
        self.accumulator, self.parts, self.whole, self.rounds_once = accumulator, parts, whole, rounds_once
        self.is_recording = False
        self.setting = 0
        self.calls: list[tuple[tuple[int, ...], torch.dtype]] = []

    def obstacle(self, device: torch.device) -> str:
        return "" if device.type == "cpu" else f"{device.type} is no fake"

    def is_capturing(self) -> bool:
        return self.is_recording

    def settings(self, product: ChipProduct) -> Hashable:
        return () if product.is_fp8 else (self.setting,)

    def multiplier(self, product: ChipProduct, dtype: torch.dtype, one: Tensor) -> Multiply:
        return partial(self.multiply, product, dtype)

    def multiply(self, product: ChipProduct, dtype: torch.dtype, a: Tensor, b: Tensor, /, *, bias: Tensor | None = None) -> Tensor:
        assert (a.dtype, b.dtype) == (product.a, product.b)
        assert dtype in product.results
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        if product.is_fp8:
            assert (a.stride(), b.stride()) == ((a.shape[1], 1), (1, a.shape[1])), "FP8 operands are read along the sum"
        self.calls.append((tuple(a.shape), dtype))
        pieces = zip(a.chunk(self.parts, 1), b.chunk(self.parts, 0), strict=True)
        result = torch.stack([emulated(x, y, self.accumulator) for x, y in pieces]).sum(0)
        result[: self.whole] = emulated(a[: self.whole], b, self.accumulator)
        if bias is not None:
            assert product.adds_bias(bias.dtype, dtype)
            assert bias.is_contiguous()
            assert bias.data_ptr() % 16 == 0
            result = (result if self.rounds_once else result.to(dtype)) + bias
            return result.to(dtype)
        return (result if self.rounds_once or dtype == torch.float32 else result.to(E5M2)).to(dtype)


def emulated(a: Tensor, b: Tensor, accumulator: str) -> Tensor:
    return qsim.matmul(a, b, accumulator, chip="never")


def operands(rows: int, length: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length).to(dtype), torch.randn(columns, length).to(dtype).mT


def multiplied(
    chip: VerifiedChip, a: Tensor, b: Tensor, accumulator: str, dtype: torch.dtype = torch.float32, bias: Tensor | None = None
) -> Tensor | str:
    how = spelled(a, b, accumulator)
    at_once = chip.at_once(a, b, how, dtype, bias)
    return chip.multiply(a, b, how, dtype, bias, lambda x, y: emulated(x, y, accumulator)) if at_once is None else at_once


def spelled(a: Tensor, b: Tensor, accumulator: str) -> str:
    held = "e4m3" if "fp8" in accumulator else "bf16"
    formats = [qsim.format(held if x.element_size() > 1 and "16" not in accumulator else NAMES[x.dtype]) for x in (a, b)]
    return accumulators.resolve(accumulator).spelled(*formats)


UNITS = [("h100_fp8", E4M3), ("h100_fp8_promoted", E4M3), ("h100_fp8", E5M2), ("h100_bf16", torch.bfloat16), ("h100_fp16", torch.float16)]


def test_the_products_of_units() -> None:
    found = {
        (name, a, b): product_of(accumulators.NAMED[name].sum_of(qsim.format(a), qsim.format(b)))
        for name, a, b in (
            ("h100_fp8", "e4m3", "e5m2"), ("h100_fp8_promoted", "e5m2", "e2m1"), ("h100_bf16", "e4m3", "bf16"),
            ("h100_fp16", "fp16", "fp16"), ("h100_fp8", "e5m2", "e5m2"), ("h100_tf32", "tf32", "tf32"), ("b200_fp8", "e4m3", "e4m3"),
            ("a100_bf16", "bf16", "bf16"),
        )
    }  # fmt: skip
    assert list(found.values()) == [
        ChipProduct(E4M3, E5M2, fast=True),
        ChipProduct(E5M2, E4M3),
        ChipProduct(torch.bfloat16, torch.bfloat16),
        ChipProduct(torch.float16, torch.float16),
        *[None] * 4,
    ]
    bf16, e4m3 = qsim.format("bf16"), qsim.format("e4m3")
    for other in (Rounded("fp16"), Promoted("h100_bf16", 128), Promoted("h100_fp8", 256), Promoted("h100_fp8", 32)):
        assert product_of(other.sum_of(*((bf16,) * 2 if other.taken is None or "bf16" in other.text else (e4m3,) * 2))) is None


@pytest.mark.parametrize(("accumulator", "dtype"), UNITS)
def test_a_product_is_compared_once_and_then_computed_by_the_chip(accumulator: str, dtype: torch.dtype) -> None:
    library = FakeLibrary(accumulator)
    chip = VerifiedChip(library)
    a, b = operands(20, 256, 32, dtype)
    b = b if dtype != E5M2 else b.to(E4M3)
    for _ in range(2):
        found = multiplied(chip, a, b, accumulator)
        assert isinstance(found, Tensor)
        assert torch.equal(found, emulated(a, b, accumulator))
    assert len(library.calls) == 6  # four comparisons, two products
    multiplied(chip, *operands(20, 512, 32, dtype)[:1], b.repeat(2, 1), accumulator)
    assert len(library.calls) == 11, "another shape is compared, too"
    library.setting = 1
    multiplied(chip, a, b, accumulator)
    assert len(library.calls) == (12 if dtype.itemsize == 1 else 16), "other settings may choose another kernel in 16 bits"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("accumulator", "dtype"), UNITS)
@pytest.mark.parametrize(("parts", "whole", "result"), [(2, 0, torch.bfloat16), (4, 112, torch.float32)])
def test_sums_that_the_library_splits_are_noticed(
    accumulator: str, dtype: torch.dtype, parts: int, whole: int, result: torch.dtype
) -> None:
    chip = VerifiedChip(FakeLibrary(accumulator, parts, whole))
    a, b = operands(128, 1024, 64, dtype)
    b = b if dtype != E5M2 else b.to(E4M3)
    result = result if accumulator != "h100_fp16" or result == torch.float32 else torch.float16
    found = multiplied(chip, a, b, accumulator, result)
    assert found == "the library adds a product of 128 × 1024 × 64 otherwise: its bits differ from the emulator's"
    assert multiplied(chip, a, b, accumulator, result) == found


@pytest.mark.parametrize("length", [8, 16, 24, 32, 48])
@pytest.mark.parametrize("other", ["a100_bf16", "Aligned(16, 24)", "Aligned(4, 25)", "Rounded('fp32')"])
def test_short_sums_that_the_library_adds_otherwise_are_noticed(length: int, other: str) -> None:
    """As an H200's library does for 37 × 16 × 29: one sum of 16 products, with other bits than the unit's."""
    chip = VerifiedChip(FakeLibrary(other))
    a, b = operands(37, length, 29, torch.bfloat16)
    found = multiplied(chip, a, b, "h100_bf16")
    assert found == f"the library adds a product of 37 × {length} × 29 otherwise: its bits differ from the emulator's"


def test_operands_are_stored_as_the_library_reads_them() -> None:
    chip = VerifiedChip(FakeLibrary("h100_fp8"))
    a, b = operands(16, 64, 32, E4M3)
    expected = emulated(a, b, "h100_fp8")
    shifted = torch.empty(16 * 64 + 1, dtype=E4M3)[1:].view(16, 64).copy_(a)
    wide = torch.empty(16, 80, dtype=E4M3)[:, :64].copy_(a)
    for left in (a, a.mT.contiguous().mT, shifted, wide, a.to(torch.bfloat16), a.float()):
        for right in (b, b.contiguous(), b.to(torch.bfloat16)):
            found = multiplied(chip, left, right, "h100_fp8")
            assert isinstance(found, Tensor)
            assert torch.equal(found, expected)
    library = FakeLibrary("h100_bf16")
    chip, (x, y) = VerifiedChip(library), operands(1, 48, 5, torch.bfloat16)
    for left in (x, x.mT.contiguous().mT, x.expand(3, 48)):
        found = multiplied(chip, left, y, "h100_bf16")
        assert isinstance(found, Tensor)
        assert torch.equal(found, emulated(left, y, "h100_bf16"))


def test_results_in_sixteen_bits() -> None:
    a, b = operands(16, 128, 16, E4M3)
    expected = emulated(a, b, "h100_fp8").bfloat16()
    # A library that rounds 16-bit results twice is asked for float32 ones.
    for rounds_once, asked in ((True, torch.bfloat16), (False, torch.float32)):
        library = FakeLibrary("h100_fp8", rounds_once=rounds_once)
        found = multiplied(VerifiedChip(library), a, b, "h100_fp8", torch.bfloat16)
        assert isinstance(found, Tensor)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)
        assert library.calls[-1][1] == asked
    found = multiplied(VerifiedChip(FakeLibrary("h100_fp8")), a, b, "h100_fp8", torch.float64)
    assert isinstance(found, Tensor)
    assert torch.equal(found, emulated(a, b, "h100_fp8").double())


@pytest.mark.parametrize(("parts", "rounds_once", "asked"), [
    (1, True, torch.bfloat16), (1, False, torch.float32), (2, True, None),
])  # fmt: skip
def test_the_library_adds_a_bias_if_it_rounds_once(parts: int, rounds_once: bool, asked: torch.dtype | None) -> None:
    library = FakeLibrary("h100_fp8", parts, rounds_once=rounds_once)
    chip, (a, b) = VerifiedChip(library), operands(16, 256, 32, E4M3)
    bias = torch.randn(65)[1::2].bfloat16()
    expected = (emulated(a, b, "h100_fp8") + bias).bfloat16()
    for added in (bias, bias.contiguous(), bias.contiguous(), bias.float()):
        found = multiplied(chip, a, b, "h100_fp8", torch.bfloat16, added)
        assert isinstance(found, str) == (asked is None)
        assert asked is None or torch.equal(found, expected)  # type: ignore[arg-type]
        assert asked is None or library.calls[-1][1] == (asked if added.dtype == torch.bfloat16 else torch.float32)


def test_a_known_product_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary("h100_fp8")
    chip, (a, b), bias = VerifiedChip(library), operands(16, 64, 32, E4M3), torch.randn(32).bfloat16()
    how = spelled(a, b, "h100_fp8")
    given = [(a, b, how, torch.bfloat16, None), (a, b, how, torch.bfloat16, bias), (a, b, how, None, None)]
    assert [chip.at_once(*each) for each in given] == [None] * 3
    expected = [chip.multiply(*each, lambda x, y: emulated(x, y, "h100_fp8")) for each in given]
    monkeypatch.setattr(chip, "_case", None)
    assert all(torch.equal(chip.at_once(*each), due) for each, due in zip(given, expected, strict=True))  # type: ignore[arg-type]
    shifted = torch.empty(16 * 64 + 1, dtype=E4M3)[1:].view(16, 64).copy_(a)
    shifted_b = torch.empty(64 * 32 + 1, dtype=E4M3)[1:].view(32, 64).copy_(b.t()).t()
    assert shifted_b.stride() == b.stride()
    for others in ((shifted, b), (a, shifted_b), (a.to(torch.bfloat16), b), (a, b.contiguous()), (a[:8], b)):
        assert chip.at_once(*others, how, torch.bfloat16, None) is None
    assert chip.at_once(a, b, spelled(a, b, "h100_fp8_promoted"), torch.bfloat16, None) is None
    assert chip.at_once(a, b, how, torch.bfloat16, bias.float()) is None


class TracedLibrary(FakeLibrary):
    """A library whose calls a compiler can trace: the emulator's operator."""

    def multiplier(self, product: ChipProduct, dtype: torch.dtype, one: Tensor) -> Multiply:
        def multiply(a: Tensor, b: Tensor, /, *, bias: Tensor | None = None) -> Tensor:
            how = spelled(a, b, self.accumulator)
            return torch.ops.qsim.accumulate.default(a, b, None, how, 0, 0, dtype, "never", bias)  # type: ignore[no-any-return]

        return multiply


@pytest.mark.parametrize(
    ("setting", "accumulator", "who"),
    [("static", "h100_fp8", "never"), ("static", "h100_fp8_promoted", "auto"), ("measuring", "h100_fp8", "auto")],
)
def test_compilers_call_the_library_themselves(setting: str, accumulator: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CHIP", VerifiedChip(TracedLibrary("h100_fp8")))
    (a, b), bias = operands(16, 256, 32, E4M3), torch.randn(32).bfloat16()
    how, seen = spelled(a, b, accumulator), []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(node.args[7] for node in graph.graph.nodes if "accumulate" in str(node.target))
        return make_boxed_func(graph.forward)

    def multiply(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.qsim.accumulate.default(a, b, None, how, 0, 0, torch.bfloat16, "auto", bias)  # type: ignore[no-any-return]

    with torch._inductor.config.patch(max_autotune_gemm=setting == "measuring"):
        found = aot_function(multiply, fw_compiler=look)(a, b, bias)
    assert seen == [who]
    assert torch.equal(found, (emulated(a, b, accumulator) + bias).bfloat16())


def test_nothing_is_compared_while_a_graph_is_captured() -> None:
    library = FakeLibrary("h100_fp8")
    chip, (a, b) = VerifiedChip(library), operands(16, 64, 16, E4M3)
    library.is_recording = True
    reason = "no product of 16 × 64 × 16 has been compared with the emulator yet, which a CUDA graph cannot record: run it once before"
    assert multiplied(chip, a, b, "h100_fp8") == reason
    library.is_recording = False
    multiplied(chip, a, b, "h100_fp8")
    library.is_recording = True
    assert isinstance(multiplied(chip, a, b, "h100_fp8"), Tensor)


def test_products_that_the_chip_does_not_have() -> None:
    chip, (a, b) = VerifiedChip(FakeLibrary("h100_fp8")), operands(16, 64, 16, E4M3)
    sizes = "its FP8 products need multiples of 16 along the sum and as the number of columns, got"
    for left, right, accumulator, reason in (
        (a, b, "a100_bf16", "no chip is known to add like this accumulator"),
        (a[:, :40], b[:40], "h100_fp8", f"{sizes} 40 and 16"),
        (a, b[:, :9], "h100_fp8", f"{sizes} 64 and 9"),
        (a[None], b[None], "h100_fp8", "products of batches of matrices are emulated"),
        (a.to("meta"), b.to("meta"), "h100_fp8", "meta is no fake"),
    ):
        assert multiplied(chip, left, right, accumulator) == reason
    assert ProductLibrary().obstacle(torch.device("cpu")) == "the operands are on cpu, not on an H100 or H200"


def test_coverage_shows_who_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "CHIP", VerifiedChip(FakeLibrary("h100_fp8")))
    x = torch.ones(16, 32, requires_grad=True)
    for chip, fits, by in (("auto", 32, "chip"), ("never", 32, "emulator"), ("auto", 24, "emulator")):
        points = FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate="h100_fp8", chip=chip)  # type: ignore[arg-type]
        found = qsim.coverage(qsim.nn.Linear(32, fits, points=points), x, backward=False)
        assert [product["by"] for product in found.to_dict()["products"]] == [by]
        assert f"accumulate ({by})" in str(found)


@pytest.mark.parametrize(("chip", "columns", "by"), [
    ("auto", 32, "chip"), ("never", 32, "emulator"), ("auto", 24, "chip (1 of 3 kinds), emulator"),
])  # fmt: skip
def test_a_layer_says_who_multiplied(chip: Any, columns: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "CHIP", VerifiedChip(FakeLibrary("h100_fp8")))
    points = FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate="h100_fp8", chip=chip)
    layer, same, other = (qsim.nn.Linear(16, size, points=points, bias=False) for size in (columns, columns, 80))
    assert "products of" not in repr(layer)
    layer(torch.ones(48, 16, requires_grad=True)).sum().backward()
    assert f"products of this size by: {by})" in repr(layer)
    assert repr(layer) == repr(same)
    assert ("products of" in repr(other)) == (chip == "never")  # nothing is known of its size
    assert "products of this size by: emulator" in repr(layer.to("meta"))


def test_a_call_can_require_the_chip() -> None:
    a, b = torch.ones(16, 32), torch.ones(32, 16)
    message = "accumulate: chip='require': the operands are on cpu, not on an H100 or H200"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        qsim.matmul(a, b, "h100_bf16", chip="require")
    points = FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate="h100_fp8", chip="require")
    with pytest.raises(RuntimeError, match=re.escape(message)):
        qsim.nn.functional.linear(a, b.t(), points=points)
    with pytest.raises(ValueError, match="matmul: chip must be 'auto', 'never' or 'require', got 'always'"):
        qsim.matmul(a, b, "h100_bf16", chip="always")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="FivePoint: chip must be 'auto', 'never' or 'require', got True"):
        FivePoint(accumulate="h100_bf16", chip=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="FivePoint: chip='require' is for products with an accumulator, and accumulate is None"):
        FivePoint("e4m3", chip="require")


def test_points_carry_the_choice() -> None:
    points = FivePoint("e4m3", "e4m3", accumulate=("h100_fp8", None, None), chip="never")
    assert FivePoint.from_json(points.to_json()) == points
    assert str(points) == "act=e4m3, weight=e4m3, accumulate=(h100_fp8, None, None), chip=never"
    layer = qsim.convert(torch.nn.Linear(4, 4), points.to_dict())
    assert layer.points == points
    assert "chip=never" in repr(layer)
    assert "chip" not in FivePoint("e4m3").to_dict()


@pytest.mark.gpu
@pytest.mark.parametrize(("accumulator", "of_a", "of_b"), [
    ("h100_fp8", E4M3, E4M3), ("h100_fp8", E5M2, E4M3), ("h100_fp8_promoted", E4M3, E5M2), ("h100_bf16", torch.bfloat16, torch.bfloat16),
    ("h100_fp16", torch.float16, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chip_has_the_bits_of_the_emulator(
    accumulator: str, of_a: torch.dtype, of_b: torch.dtype, dtype: torch.dtype, hopper: torch.device
) -> None:
    refused = []
    for rows, length, columns in ((4096, 768, 3072), (128, 16384, 128), (16, 8192, 4096), (64, 4096, 64), (1, 64, 16), (2048, 256, 1024)):
        a, b = (torch.randn(shape, device=hopper).to(own) for shape, own in (((rows, length), of_a), ((length, columns), of_b)))
        how = accumulators.NAMED[accumulator].spelled(qsim.format(NAMES[of_a]), qsim.format(NAMES[of_b]))
        one, other = (torch.ops.qsim.accumulate(a, b, None, how, 0, 0, dtype, chip) for chip in ("auto", "never"))
        assert torch.equal(one, other), (rows, length, columns)
        refused.append(CHIP.obstacle(a, b, how, dtype, None))
    assert refused[0] == ""
    assert all(re.fullmatch("(the library adds a product of .*)?", reason) for reason in refused)


@pytest.mark.gpu
def test_infinities_nan_and_zeros_on_the_chip(hopper: torch.device) -> None:
    a = torch.randn(256, 512, device=hopper)
    a[0], a[1], a[2, ::2], a[3, 7], a[4, 8], a[5, 9] = 0.0, -0.0, 0.0, torch.nan, torch.inf, -torch.inf
    a[6, :2] = torch.tensor([torch.inf, -torch.inf], device=hopper)
    b = torch.randn(512, 128, device=hopper)
    b[:, 0], b[:, 1] = 1.0, -0.0
    for accumulator, dtype in (
        ("h100_fp8", E5M2),
        ("h100_fp8_promoted", E5M2),
        ("h100_bf16", torch.bfloat16),
        ("h100_fp16", torch.float16),
    ):
        left, right = a.to(dtype), b.to(dtype if dtype.itemsize == 2 else E4M3)
        one, other = (qsim.matmul(left, right, accumulator, chip=chip) for chip in ("require", "never"))  # type: ignore[arg-type]
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), accumulator
