"""Accumulators as values, their names, and `qsim.matmul`."""

from __future__ import annotations

import json
import pickle
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import qsim
from qsim import Float, Stochastic, accumulators
from qsim.accumulators import EVIDENCE, NAMED, Accumulator, Aligned, BlockScaled, Promoted, Rounded, TwoStep, name_of, resolve
from qsim.cli import main
from qsim.formats import BF16, E4M3, FP16, FP32, TF32
from qsim.random import Noise

VALUES = [
    *NAMED.values(),
    Rounded("fp16"),
    Rounded(Float(4, 3, bias=9), chunk=64, rounding=Stochastic(6, correction=True), order="kahan", overflow="saturate"),
    Rounded("bf16", product="fp16", order="pairwise", rounding="toward_zero"),
    Rounded(qsim.Fixed(16, 8)),
    Aligned(4, 23, out="fp16", rounding="nearest"),
    Aligned(4, 23, operands=(Float(5, 3, specials="ieee"), "e4m3")),
    Promoted(Rounded("fp16", rounding="stochastic"), 64),
    Promoted(Aligned(8, 20), 16),
    TwoStep(4, 20, 30, apart=True),
    BlockScaled(32, 20, 8, "e5m3", operands=("e2m1", "e4m3")),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_from_their_calls_and_pickles(value: Accumulator) -> None:
    calls = {kind.__name__: kind for kind in (Rounded, Aligned, TwoStep, BlockScaled, Promoted)}
    assert eval(repr(value), calls) == value == resolve(repr(value)) == resolve(value) == pickle.loads(pickle.dumps(value))
    assert resolve(name_of(value)) == value
    assert hash(resolve(repr(value))) == hash(value)
    assert resolve(repr(value)).spelled(E4M3, E4M3) == value.spelled(E4M3, E4M3) if value.taken is None or E4M3 in value.taken else True


def test_calls_leave_out_defaults() -> None:
    assert repr(Rounded(torch.float16, rounding=qsim.rounding.NEAREST, overflow="nonfinite")) == "Rounded('fp16')"
    assert repr(Rounded("int16", overflow="saturate")) == "Rounded('Int(16)')"
    assert repr(Aligned(32, 13, "e8m13ieee")) == "Aligned(32, 13, out='e8m13ieee')"
    assert repr(Promoted("H100_FP8", every=128)) == "Promoted('h100_fp8', 128)"


def test_names_are_the_table_of_units() -> None:
    facts = {name: (unit.block, unit.fraction, name_of(unit)) for name, unit in NAMED.items() if isinstance(unit, Aligned)}
    assert all(facts[name][2] == name for name in facts)
    table = {
        "h100_fp8": (32, 13),
        "h100_bf16": (16, 25),
        "h100_fp16": (16, 25),
        "h100_tf32": (8, 25),
        "b200_fp8": (32, 25),
        "b200_fp16": (16, 25),
        "b200_tf32": (8, 25),
        "ada_fp8": (16, 13),
        "ada_fp16": (8, 24),
        "a100_bf16": (8, 24),
        "a100_tf32": (4, 24),
        "t4_fp16": (8, 24),
        "v100_fp16": (4, 23),
    }
    assert {name: facts[name][:2] for name in table} == table
    assert {name for name, unit in NAMED.items() if isinstance(unit, Aligned) and unit.out != FP32} == {"h100_fp8", "ada_fp8"}
    assert set(EVIDENCE) == set(NAMED)
    assert {name for name, (evidence, _) in EVIDENCE.items() if evidence == "checked on the chip"} == {
        "h100_fp8",
        "h100_fp8_promoted",
        "h100_bf16",
        "h100_fp16",
        "h100_tf32",
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve("h100_fp9"), "unknown accumulator 'h100_fp9': did you mean 'h100_fp8'? There are h100_fp8, "),
        (lambda: resolve("bf16"), "unknown accumulator 'bf16': that is a format; Rounded('bf16') rounds every sum to it"),
        (lambda: TwoStep(4, 24, 41), "TwoStep: second must be in 1…40, got 41"),
        (lambda: TwoStep(4, 24, 31, apart=1), "TwoStep: apart must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: BlockScaled(48, 25, 32), "BlockScaled: block must be a multiple of group, got 48 and 32"),
        (lambda: BlockScaled(32, 25, 32, exact=0), "BlockScaled: exact must be True or False, got 0"),  # type: ignore[arg-type]
        (lambda: BlockScaled(32, 25, 32, "int8"), "BlockScaled: scale must be a floating-point format, got int8"),
        (lambda: BlockScaled(32, 25, 32, operands=("int8",)), "BlockScaled: operands must be signed floating-point formats that float32"),
        (lambda: BlockScaled(64, 35, 16, exact=True).sum_of(BF16, BF16), "products of bf16 and bf16 are too wide to be added exactly"),
        (lambda: BlockScaled(64, 40, 16, exact=True).sum_of(E4M3, E4M3), "products of e4m3 and e4m3 are too wide to be added exactly"),
        (lambda: BlockScaled(32, 25, 32, "bf16").sum_of(FP32, FP32), "too wide to be multiplied exactly by scales in bf16"),
        (lambda: resolve("b200_nvfp4").sum_of(E4M3, E4M3), "the unit takes operands in e2m1, got e4m3"),
        (lambda: resolve(Rounded), "an accumulator must be a name or one of qsim.accumulators' values, got <class"),  # type: ignore[arg-type]
        (lambda: Rounded("e9m9"), "unknown format 'e9m9'"),
        (lambda: Rounded("fp16", chunk=24), "chunk must be 1 or a multiple of 16, the products that a matrix unit adds at once, got 24"),
        (lambda: Rounded("fp16", chunk=0), "Rounded: chunk must be in 1…2147483648, got 0"),
        (lambda: Rounded("fp16", chunk=True), "Rounded: chunk must be an int, got True"),
        (lambda: Rounded("fp16", rounding="nearby"), "unknown rounding 'nearby': did you mean 'nearest'?"),
        (lambda: Rounded("fp16", order="tree"), "order must be one of 'sequential', 'pairwise', 'kahan', got 'tree'"),  # type: ignore[arg-type]
        (
            lambda: Rounded("fp16", overflow="wrap"),
            "overflow must be 'saturate', 'saturate_symmetric', 'nonfinite' or 'format', got 'wrap'",
        ),  # type: ignore[arg-type]
        (lambda: Rounded("fp16", 16, product="fp16"), "product= is for chunk=1: within a chunk a matrix unit adds exact products"),
        (lambda: Rounded("e8m0"), "a sum begins at zero, which e8m0 lacks"),
        (
            lambda: Rounded("fp32", rounding="stochastic"),
            "32 random bits below the 23 bits of fp32 are more than are known of a sum: give rounding=Stochastic(bits=28) or fewer",
        ),
        (lambda: Aligned(0, 13), "Aligned: block must be in 1…256, got 0"),
        (lambda: Aligned(4, 41), "Aligned: fraction must be in 1…40, got 41"),
        (lambda: Aligned(4, 13, out="e4m3"), "Aligned: out must be a signed floating-point format with subnormals and infinities"),
        (lambda: Aligned(4, 13, rounding="up"), "Aligned: rounding must be 'toward_zero' or 'nearest', got 'up'"),  # type: ignore[arg-type]
        (lambda: Aligned(4, 13, operands="e4m3"), "Aligned: operands must be a tuple of formats, got 'e4m3'"),
        (lambda: Aligned(4, 13, operands=("int8",)), "operands must be signed floating-point formats that float32 holds, got int8"),
        (lambda: Promoted("h100_fp8", 100), "Promoted: every must be a multiple of 32, the products that Aligned(32, 13, "),
        (lambda: Promoted("h100_fp8_promoted", 256), "inner sums must be Rounded(…), Aligned(…) or one of h100_fp8, "),
        (lambda: Promoted(Promoted("h100_fp8", 64), 128), "inner sums must be Rounded(…), Aligned(…) or one of h100_fp8, "),  # type: ignore[arg-type]
        (lambda: Promoted(Rounded("int32"), 4), "inner sums are added in float32, which does not hold every value of Int(32)"),
    ],
)
def test_values_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert message in str(error.value)


def test_formats_without_nan_saturate_unless_told_otherwise() -> None:
    assert [Rounded(fmt).overflow for fmt in ("fp16", "e4m3", "e2m1", "int8")] == ["nonfinite", "saturate", "saturate", "saturate"]
    a, b = torch.full((1, 4), 200.0), torch.full((4, 1), 200.0)
    # Equal values give equal results, whether the default was written out or not.
    assert Rounded("fp16", product="int8").spelled(BF16, BF16) == Rounded("fp16", product="int8", overflow="nonfinite").spelled(BF16, BF16)
    found = [qsim.matmul(a, b, Rounded(fmt, overflow=how)).item() for fmt in ("fp16", "int16") for how in ("saturate", "nonfinite")]
    assert found[:3] == [65504.0, float("inf"), 32767.0]
    assert found[3] != found[3]


def test_a_format_of_two_values_is_one_for_sums() -> None:
    a, b = torch.tensor([[1.5, 0.9], [0.4, -3.0]]), torch.ones(2, 1)
    assert qsim.matmul(a, b, Rounded(Float(1, 0))).tolist() == [[2.0], [-2.0]]


# qsim.matmul


def test_a_product_is_batched_and_broadcast() -> None:
    a, b = torch.randn(2, 1, 5, 33), torch.randn(3, 33, 4)
    found = qsim.matmul(a, b, "Rounded('fp16')")
    assert found.shape == (2, 3, 5, 4)
    for i in range(2):
        for j in range(3):
            assert torch.equal(found[i, j], qsim.matmul(a[i, 0], b[j], Rounded("fp16")))
    assert torch.equal(qsim.matmul(a, b[0], "Rounded('fp16')")[1, 0], found[1, 0])


@pytest.mark.parametrize("shapes", [((5, 33), (33, 4)), ((2, 1, 5, 33), (3, 33, 4)), ((2, 5, 33), (33, 4))])
def test_its_gradient_is_that_of_the_exact_product(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    y = qsim.matmul(a, b, Rounded("e5m2"))
    g = torch.randn_like(y)
    expected = torch.autograd.grad(torch.matmul(a, b), (a, b), g)
    for one, other in zip(torch.autograd.grad(y, (a, b), g), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    half = a.detach().bfloat16().requires_grad_()
    qsim.matmul(half, b, Rounded("fp16")).sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_torch_func_takes_its_gradient() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)

    def loss(a: torch.Tensor) -> torch.Tensor:
        return qsim.matmul(a, b, Rounded("e5m2")).square().sum()

    assert torch.equal(torch.func.grad(loss)(a.detach()), torch.autograd.grad(loss(a), a)[0])


@pytest.mark.parametrize("how", ["Rounded('fp16')", "Rounded('bf16', chunk=16, order='kahan')", "Rounded('bf16', rounding='stochastic')"])
def test_under_vmap_a_sample_gets_what_it_gets_alone(how: str) -> None:
    a, b, seeds = torch.randn(4, 3, 20), torch.randn(4, 20, 5), torch.arange(4)

    def product(a: torch.Tensor, b: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return qsim.matmul(a, b, how, seed=seed)

    alone = torch.stack([product(*given) for given in zip(a, b, seeds, strict=True)])
    assert torch.equal(torch.vmap(product)(a, b, seeds), alone)
    one_right = torch.vmap(product, (1, None, None), 1)(a.transpose(0, 1), b[0], seeds[1])
    assert torch.equal(one_right, torch.stack([product(x, b[0], seeds[1]) for x in a], 1))
    assert torch.vmap(product)(a[:0], b[:0], seeds[:0]).shape == (0, 3, 5)
    gradient = torch.func.grad(lambda *given: product(*given).square().sum())
    for sample, due in zip(torch.vmap(gradient)(a, b, seeds), map(gradient, a, b, seeds), strict=True):
        assert torch.allclose(sample, due, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [*NAMED, "Rounded('fp16')", "Rounded('Fixed(32, 16)')"])
def test_fake_tensors_and_the_meta_device(how: str) -> None:
    fmt = (resolve(how).taken or (BF16,))[0]
    real = torch.zeros(2, 1, 3, 20), torch.zeros(4, 20, 5)
    wanted = qsim.matmul(*real, how, formats=fmt)
    with FakeTensorMode():
        fake = qsim.matmul(torch.zeros(2, 1, 3, 20), torch.zeros(4, 20, 5), how, formats=fmt)
    for found in (fake, qsim.matmul(*(x.to("meta") for x in real), how, formats=fmt)):
        assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


def test_values_that_cannot_be_read_have_a_format() -> None:
    x = torch.ones(2, 16, 16)
    message = "a is torch.float32: in compiled code, under CUDA graphs or vmap, and on the meta device formats= must say which of these"
    with pytest.raises(ValueError, match=re.escape(message)):
        qsim.matmul(x.to("meta"), x.to("meta"), "h100_fp8")
    with pytest.raises(ValueError, match=re.escape(message)):
        torch.vmap(lambda x: qsim.matmul(x, x, "h100_fp8"))(x)
    compiled = torch.compile(lambda x: qsim.matmul(x, x, "h100_fp8"), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(message)):
        compiled(x[0])
    batched = torch.vmap(lambda x: qsim.matmul(x, x, "h100_fp8", formats="e4m3"))(x)
    assert torch.equal(batched, qsim.matmul(x, x, "h100_fp8"))


def test_results_are_float32_unless_the_format_needs_more() -> None:
    a, b = torch.full((1, 2), 3.0**10), torch.full((2, 1), 3.0**10)
    assert qsim.matmul(a.bfloat16(), b.bfloat16(), "Rounded('bf16')").dtype == torch.float32
    wide = qsim.matmul(a / 2**15, b / 2**15, Rounded(qsim.Fixed(32, 24)))
    assert wide.dtype == torch.float64
    product = Fraction(3**20, 2**6)  # in steps of 2**-24
    assert wide.item() == round(round(product) + product) / 2**24


def test_operands_of_a_unit() -> None:
    x = torch.tensor([[1.0625, 1.0]])  # needs five significant bits
    with pytest.raises(ValueError, match=r"h100_fp8 takes e4m3 or e5m2, and a is torch\.bfloat16 with other values: quantize it first"):
        qsim.matmul(x.bfloat16(), torch.ones(2, 1), "h100_fp8")
    with pytest.raises(ValueError, match=r"h100_fp8_promoted takes e4m3 or e5m2, and b is torch\.float32 with other values"):
        qsim.matmul(torch.ones(1, 2), x.mT, "h100_fp8_promoted")
    with pytest.raises(ValueError, match="matmul: a has values that are not in e5m2: quantize it first"):
        qsim.matmul(torch.full((1, 1), 1.125), torch.ones(1, 1), "h100_fp8", formats="e5m2")
    with pytest.raises(ValueError, match="h100_fp16: the unit takes operands in fp16, got bf16"):
        qsim.matmul(torch.ones(1, 1), torch.ones(1, 1), "h100_fp16", formats="bf16")
    with pytest.raises(ValueError, match=r"and a is torch\.float32: with check=False formats= must say which of these its values are"):
        qsim.matmul(torch.ones(1, 1), torch.ones(1, 1), "h100_fp8", check=False)
    with pytest.raises(ValueError, match=r"matmul: formats must be one format or a pair, got \('e4m3', 'e4m3', 'e5m2'\)"):
        qsim.matmul(torch.ones(1, 1), torch.ones(1, 1), "h100_fp8", formats=("e4m3", "e4m3", "e5m2"))
    eights = torch.full((1, 1), 448.0).to(torch.float8_e4m3fn), torch.full((1, 1), 57344.0).to(torch.float8_e5m2)
    assert qsim.matmul(*eights, "h100_fp8").item() == 448.0 * 57344.0


def test_formats_say_what_wider_operands_hold() -> None:
    # 2**-9 is E4M3's smallest number; as such it counts with the exponent -6, and with 2 fraction bits nothing of its square is left.
    x, unit = torch.full((1, 1), 2.0**-9), Aligned(4, 2)
    assert qsim.matmul(x, x, unit).item() == 2.0**-18
    assert qsim.matmul(x, x, unit, formats="e4m3").item() == 0.0
    assert qsim.matmul(x.to(torch.float8_e4m3fn), x, unit, formats=(E4M3, "e5m2")).item() == 0.0
    assert qsim.matmul(x, x, unit, formats=("e5m2", "e5m2")).item() == 2.0**-18
    # As a number of E5M2 it counts with its own exponent, -9: 3 fraction bits below -15 hold the product.
    assert qsim.matmul(x, x, Aligned(4, 3), formats=("e4m3", "e5m2")).item() == 2.0**-18
    assert qsim.matmul(x, x, Aligned(4, 3), formats="e4m3").item() == 0.0


def test_subnormal_operands_count_as_float32_has_them() -> None:
    assert Aligned(4, 8).sum_of(Float(8, 7, bias=130), BF16)[-2:] == (-126, -126)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (torch.ones(2), torch.ones(2, 2)),
            "matmul: a and b must have at least two dimensions, got (2,) and (2, 2); for a dot product give a[None], b[:, None]",
        ),
        ((torch.ones(2, 3), torch.ones(2, 3)), "matmul: shapes (2, 3) and (2, 3) do not fit"),
        ((torch.ones(2, 2).double(), torch.ones(2, 2)), "matmul: a must be one of float32, bfloat16, float16, float8_e4m3fn, "),
        ((torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64)), "got torch.int64"),
        ((torch.ones(2, 2), [1.0]), "matmul: b must be a tensor, got list"),
        ((torch.ones(2, 2), torch.ones(2, 2).to_sparse()), "matmul: b must be dense, got layout torch.sparse_coo"),
        ((torch.ones(2, 2), torch.ones(2, 2, device="meta")), "matmul: a is on cpu and b on meta: they must be on the same device"),
    ],
)
def test_operands_that_do_not_fit(given: tuple[Any, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        qsim.matmul(*given, "Rounded('fp16')")
    assert message in str(error.value)


@pytest.mark.parametrize(("given", "error"), [(None, TypeError), ("h100", ValueError)])
def test_accumulators_that_do_not_exist(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^matmul: accumulate: (an|unknown) accumulator"):
        qsim.matmul(torch.ones(2, 2), torch.ones(2, 2), given)


def test_random_bits_follow_from_the_seed_or_the_generator() -> None:
    a, b, how = torch.rand(4, 300), torch.rand(300, 4), Rounded("bf16", rounding="stochastic")
    one, same, other = (qsim.matmul(a, b, how, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, qsim.matmul(a, b, how, seed=Noise(1, 1)))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(*(qsim.matmul(a, b, how, generator=generator) for generator in generators))
    torch.manual_seed(5)
    drawn = qsim.matmul(a, b, how)
    torch.manual_seed(5)
    assert torch.equal(drawn, qsim.matmul(a, b, how))
    assert not torch.equal(drawn, qsim.matmul(a, b, how))


def test_compiled_code_has_the_same_bits() -> None:
    how, text = Rounded("bf16"), "Rounded('fp16', chunk=64)"

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return qsim.matmul(a, b, how) + qsim.matmul(a, b, "h100_fp8", formats="e4m3") + qsim.matmul(a, b, text)

    a = qsim.quantize(torch.randn(4, 70), "e4m3").requires_grad_()
    b = qsim.quantize(torch.randn(70, 3), "e4m3")
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    results = [f(a, b) for f in (product, compiled)]
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad(y.sum(), a)[0] for y in results))


# The command line


def test_the_command_lists_every_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accumulators"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "accumulator", "model"]
    assert [line.split()[0] for line in lines[1:]] == list(NAMED)
    assert main(["accumulators", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: resolve(facts["accumulator"]) for name, facts in found.items()} == NAMED
    assert {name: (facts["evidence"], facts["source"]) for name, facts in found.items()} == EVIDENCE


def test_the_command_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accumulators", "h100_fp8_promoted"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == resolve("h100_fp8_promoted").describe().splitlines()
    assert lines[-1].startswith("  model            checked on the chip: against torch._scaled_mm with use_fast_accum=False")
    assert main(["accumulators", "Rounded('bf16', product='bf16')"]) == 0
    text = capsys.readouterr().out
    assert "one product, rounded to bf16 before" in text
    assert "model" not in text
    assert main(["accumulators", "Rounded('fp16', 64)", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"accumulator": "Rounded('fp16', chunk=64)", "evidence": None, "source": None}
    assert main(["accumulators", "mi300"]) == 2
    assert "unknown accumulator 'mi300'" in capsys.readouterr().err


def test_units_take_formats_that_theirs_contain() -> None:
    assert NAMED["h100_bf16"].spelled(E4M3, BF16) == NAMED["h100_bf16"].spelled(BF16, BF16)
    assert NAMED["h100_tf32"].spelled(FP16, BF16) == NAMED["h100_tf32"].spelled(TF32, TF32)
    assert accumulators.base.brief(Float(8, 13, specials="ieee")) == "e8m13ieee"
