"""Roundings and codes with scales in compiled code, under vmap, in forward mode and on fake tensors: the same bits and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import qsim
from qsim import Block
from qsim.functional import ScaledCodes
from qsim.scaling import PerAxis, PerTensor, PerTile
from support.comparing import same_bits
from support.scaled_cases import hard

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "mxfp4": lambda x: qsim.quantize(x, "mxfp4", rounding="stochastic", seed=3),
    "nvfp4": lambda x: qsim.quantize(x, "nvfp4", dim=0),
    "tiles": lambda x: qsim.quantize(x, "e4m3", scale=PerTile(4, 4)),
    "tensor": lambda x: qsim.quantize(x, "e4m3", scale=PerTensor(), dtype=torch.bfloat16),
    "in place": lambda x: qsim.quantize_(x.clone(), "mxfp4"),
    "out": lambda x: qsim.quantize(x, "mxfp4", out=torch.full_like(x, 7.0)),
    "encode": lambda x: qsim.encode(x, "nvfp4", rounding="stochastic", seed=3),
    "packed": lambda x: qsim.encode(x, "mxfp6", packed=True).codes,
    "decode tiles": lambda x: qsim.decode(qsim.encode(x, "e4m3", scale=PerTile(4, 4)), "e4m3", scale=PerTile(4, 4)),
    "decode rows": lambda x: qsim.decode(qsim.encode(x, "e4m3", scale=PerAxis(0)), "e4m3", scale=PerAxis(0)),
    "decode": lambda x: qsim.decode(qsim.encode(x, "mxfp4", packed=True), "mxfp4", packed=True, dtype=torch.bfloat16),
}


#: Calls that Inductor compiles for one size. Those whose lowered parts do not differ are left out: "packed" adds plain torch to "encode",
#: "decode rows" is "decode tiles" with other tiles.
OF_ONE_SIZE = ("nvfp4", "tiles", "tensor", "in place", "encode", "decode tiles")
#: Calls that it compiles for any size, which takes longer.
OF_ANY_SIZE = ("mxfp4", "out", "encode", "decode")
SIZES = [hard(20, 64)[5:9], hard(20, 36)[6:9], hard(40, 48)[8:20]]


def parts(result: Any) -> tuple[Tensor, ...]:
    """The results of a call, one tensor or several."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    """The same bits and gradients, also for later sizes."""

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in CALLS if name not in OF_ANY_SIZE])
    def test_gives_the_same_bits(self, name: str) -> None:
        call = CALLS[name]
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for x in SIZES:
            assert all(same_bits(a, b) for a, b in zip(parts(compiled(x)), parts(call(x)), strict=True))

    # One graph compiles in the time of one call.
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("names", "sizes", "dynamic"), [(OF_ONE_SIZE, SIZES[:1], False), (OF_ANY_SIZE, SIZES, True)], ids=["one size", "any size"]
    )
    def test_one_graph_gives_the_same_bits(self, names: tuple[str, ...], sizes: list[Tensor], dynamic: bool) -> None:
        def call(x: Tensor) -> dict[str, Any]:
            return {name: CALLS[name](x) for name in names}

        compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="inductor")
        for x in sizes:
            found = compiled(x)
            for name, due in call(x).items():
                assert all(same_bits(a, b) for a, b in zip(parts(found[name]), parts(due), strict=True)), name

    @pytest.mark.slow
    @pytest.mark.parametrize("format", ["nvfp4", Block("e4m3", (4, 4), scale="e4m3", rule="ceil")], ids=str)
    def test_sizes_seldom_recompile(self, format: Any) -> None:
        counter = CompileCounterWithBackend("aot_eager")

        def call(x: Tensor) -> Tensor:
            return qsim.decode(qsim.encode(x, format), format)

        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
        for rows, columns in ((5, 48), (7, 30), (100, 64), (12, 33), (9, 41), (64, 96), (50, 77), (33, 128)):
            x = torch.randn(rows, columns)
            assert same_bits(compiled(x), call(x))
        # Again if there is only one block, or if all blocks are full.
        assert counter.frame_count <= 3

    @pytest.mark.slow
    def test_gradients(self) -> None:
        x = torch.randn(4, 64, requires_grad=True)
        weights = torch.randn(4, 64)
        compiled = torch.compile(lambda x: (qsim.quantize(x, "mxfp4") * weights).sum(), fullgraph=True, backend="aot_eager")
        compiled(x).backward()
        assert x.grad is not None
        assert torch.equal(x.grad, weights)


class TestVmap:
    """Every sample gets the same result as on its own, including its scales."""

    @pytest.mark.parametrize("name", ["mxfp4", "tensor", "packed", "decode"])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_samples(self, name: str, dim: int) -> None:
        x = hard(24, 36)[4:16, 4:16].contiguous()
        batched = torch.vmap(CALLS[name], in_dims=dim)(x)
        assert same_bits(batched, torch.stack([CALLS[name](part) for part in x.unbind(dim)]))

    def test_seeds(self) -> None:
        x, seeds = torch.randn(4, 48), torch.arange(4)

        def encode(x: Tensor, seed: Tensor) -> ScaledCodes:
            return qsim.encode(x, "nvfp4", rounding="stochastic", seed=seed)

        batched = torch.vmap(encode)(x, seeds)
        alone = [encode(x[i], seeds[i]) for i in range(4)]
        assert all(same_bits(a, torch.stack(b)) for a, b in zip(batched, zip(*alone, strict=True), strict=True))
        assert torch.vmap(encode)(x[:0], seeds[:0]).codes.shape == (0, 48)

    def test_gradients(self) -> None:
        x = torch.randn(4, 48)
        gradients = torch.vmap(torch.func.grad(lambda x: qsim.quantize(x, "nvfp4").square().sum()))(x)
        assert torch.equal(gradients, torch.stack([2 * qsim.quantize(row, "nvfp4") for row in x]))

    def test_forward_mode(self) -> None:
        x, direction = torch.randn(48), torch.randn(48)
        values, tangent = torch.func.jvp(lambda x: qsim.quantize(x, "mxfp4"), (x,), (direction,))
        assert torch.equal(values, qsim.quantize(x, "mxfp4"))
        assert torch.equal(tangent, direction)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_and_meta(name: str) -> None:
    x = hard(12, 36)
    expected = parts(CALLS[name](x))
    with FakeTensorMode():
        fake = parts(CALLS[name](torch.empty(12, 36)))
    meta = parts(CALLS[name](x.to("meta")))
    for a, b, c in zip(expected, fake, meta, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) == (c.shape, c.dtype, c.stride())
