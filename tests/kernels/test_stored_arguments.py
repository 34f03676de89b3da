"""Every operator, with each of its tensors stored in other ways and in other dtypes: plain torch's results, or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Quantizer
from qsim.formats import E2M1, E4M3
from qsim.functional.arguments import spelling
from qsim.optim import settings
from qsim.scaling import PerBlock, PerRow
from qsim.transforms import Hadamard
from qsim_kernels.numbers.encoding import spell_encoding
from qsim_kernels.numbers.grid import spell
from qsim_kernels.ops import accumulate, quantize, scaled, update
from qsim_kernels.ops.backend import HAS_NUMBA, library
from support.comparing import same_bits
from support.side_by_side import DEVICE
from support.update_cases import ALGORITHMS

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

#: The operators of each file with the modules that implement them: in plain torch, in Triton, and in Numba.
MODULES = {
    quantize: ("torch", "triton", "numba"),
    scaled: ("torch.scaling", "triton.scaled.launch", "numba.scaling"),
    accumulate: ("torch.sums", "triton.accumulate.launch", "numba.sums"),
    update: ("torch.updates", "triton", "numba.updates"),
}
ROWS, COLUMNS = 32, 48
NOISE, NEAREST = ((spelt.grid, spelt.rule) for spelt in (spelling("e4m3", how, "saturate") for how in ("stochastic", "nearest")))
FP4 = spelling("e2m1", "stochastic", "saturate")
CODES = spell_encoding(Quantizer("e4m3").spelt.grid, Quantizer("e4m3").spelt.rule, E4M3.spelling[1]), 4, torch.uint8
BLOCKS = PerBlock(16, -1, "e4m3")
TILES, MAKING = [*BLOCKS.tiles((ROWS, COLUMNS))], BLOCKS.spelling(E2M1)
TURN = Hadamard(16, seed=3).turn((ROWS, COLUMNS))


def values(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that every dtype of 16 bits or more holds, different ones next to each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-255, 256, shape, generator=generator) / 64


def positive(*shape: int) -> Tensor:
    """Scales, or magnitudes, for which the same is true."""
    return (values(*shape, seed=1).abs() + 1) / 8


SEED = torch.tensor(-(3**25))


def rounding(dtype: torch.dtype = torch.float32, restore: int = 1) -> tuple[Any, ...]:
    return SEED, FP4.grid, FP4.rule, 7, 8, dtype, restore


X, CODE = values(ROWS, COLUMNS), (values(ROWS, COLUMNS).abs() * 16).to(torch.uint8)
HELD = torch.tensor([[16, 16], [0, 13], [13, 3], [32, 0]], dtype=torch.int32)
OF_RUNS = [16, COLUMNS, 16, 1, 0]
H100, SCALED = (qsim.accumulators.resolve(name).spelled(E4M3, E4M3) for name in ("h100_fp8", "h100_fp8_promoted"))
WHOLE = positive()
FLIPS = values(16).sign()
ADAM = settings.setting(None, "kahan", None, "nearest", "format", "format", torch.bfloat16)

#: The arguments of each operator, as tensors that are contiguous; more than one where kernels differ.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "quantize": [(X, SEED, *NOISE, 5, 16, torch.float32), (X, None, *NEAREST, 0, 0, torch.bfloat16)],
    "quantize_": [(X, SEED, *NOISE, 5, 16)],
    "quantize_out": [(X, SEED, *NOISE, 5, 16, torch.zeros(ROWS, COLUMNS))],
    "encode": [(X, SEED, *NOISE, spell(E4M3.coding), 5, 16, True)],
    "quantize_and_encode": [(X, SEED, *NOISE, 5, torch.bfloat16, *NOISE, spell(E4M3.coding), 6)],
    "encode_transpose": [(X, SEED, *CODES)],
    "encode_with_transpose": [(X, SEED, *CODES, *CODES)],
    "quantize_and_sum": [(X, SEED, *NOISE, 5, torch.float32)],
    "decode": [(CODE, spell(E4M3.grid), spell(E4M3.coding), torch.float32)],
    "checksum": [(X, 3, 5, 8, 16)],
    "tally": [(X, values(ROWS, COLUMNS, seed=2), -448.0, 448.0)],
    "hadamard": [(X, TURN)],
    "amaxes": [(X, TILES, (), False), (X, TILES, TURN, True)],
    "scales": [(positive(3, 5, 7), None, *MAKING), (positive(3, 5, 7), positive(3, 1, 1), *MAKING), (positive(6, 4), WHOLE, *MAKING)],
    "scales_of_tiles": [(X, WHOLE, TILES, (), False, *MAKING), (X, None, [1, ROWS * COLUMNS, 1, ROWS * COLUMNS, 0], (), True, *MAKING)],
    "quantize_scaled": [(X, positive(ROWS, 1, COLUMNS // 16), WHOLE, TILES, (), *rounding())],
    "quantize_tiles": [(X, WHOLE, TILES, (), *MAKING, *rounding(restore=0)), (X, None, TILES, TURN, *MAKING, *rounding())],
    "quantize_both_ways": [(X, TILES, [ROWS, COLUMNS, 16, 1, 0], *MAKING, FP4.grid, NEAREST[1], torch.float32)],
    "quantize_tiles_and_amaxes": [
        (X.bfloat16(), WHOLE, TILES, [ROWS, COLUMNS, 16, 256, 0], Hadamard(16).turn((ROWS, COLUMNS), 0), *MAKING, *rounding(torch.bfloat16))
    ],
    "hadamard_of_runs": [(X, HELD, 16, Hadamard(16).turn((16, COLUMNS), 0))],
    "amaxes_of_runs": [(X, HELD, [16, COLUMNS, 16, COLUMNS, 0], Hadamard(16).turn((16, COLUMNS), 0), True)],
    "quantize_runs": [(X, HELD, positive(4, 1, 1), OF_RUNS, (), *MAKING, *rounding())],
    "quantize_best": [(X, FLIPS, TILES, TURN, *MAKING, [1.0, 256.0, 6.0, 4.0], *rounding())],
    "quantize_nested": [(X, FLIPS, TILES, TURN, *MAKING, [*PerRow().tiles((ROWS, COLUMNS))], 2688.0, *rounding())],
    "quantize_eden": [(X, FLIPS, TILES, TURN, *MAKING, 48, 2688.0, NOISE[1], SEED, FP4.grid, NEAREST[1], *rounding()[3:])],
    "rescaled": [(X, [positive(ROWS, 1), positive(COLUMNS)], values(COLUMNS), torch.bfloat16), (X, [WHOLE], None, torch.float32)],
    "matmul_rescaled": [(X.bfloat16(), values(COLUMNS, 16).bfloat16(), [WHOLE, WHOLE], values(16).bfloat16(), torch.bfloat16)],
    "accumulate": [(values(2, 6, 40), values(2, 40, 9), None, H100, 0, 0, torch.bfloat16, "never", values(9))],
    "accumulate_scaled": [(values(6, 300), values(300, 9), positive(6, 3), positive(9, 3), [1, 1, 1, 1], None, SCALED, 0, 0, "never")],
    "update_": [
        (
            *([values(3, 24, seed=seed).to(dtype), values(7, seed=seed).to(dtype)] for seed, dtype in enumerate([torch.bfloat16] * 2)),
            *([positive(3, 24).bfloat16(), positive(7).bfloat16()] for _ in range(2)), [],
            [values(3, 24, seed=5).bfloat16() / 4096, values(7, seed=6).bfloat16() / 4096],
            [torch.tensor(2), torch.tensor(3)], [torch.tensor([0.75, 0.875]), torch.tensor([0.5, 0.75])],
            torch.tensor(0.0625), torch.tensor(4.0), torch.tensor(0.0), 11, [8, 12], [0] * 6, spell(ALGORITHMS["AdamW"]), *ADAM.roundings,
        )
    ],
}  # fmt: skip


def transposed(x: Tensor) -> Tensor:
    backwards = [*reversed(range(x.dim()))]
    return x.permute(backwards).contiguous().permute(backwards)


def strided(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape, 2), 77, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def shifted(x: Tensor) -> Tensor:
    return torch.full((x.numel() + 1,), 77, dtype=x.dtype)[1:].copy_(x.flatten()).view(x.shape)


STORED: dict[str, Callable[[Tensor], Tensor]] = {"transposed": transposed, "strided": strided, "shifted": shifted}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def variants(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same numbers, stored in other ways, and in other dtypes."""
    for name, store in STORED.items():
        yield name, store(x)
    dtypes = DTYPES if x.is_floating_point() else INTEGERS if x.dtype in INTEGERS else ()
    yield from ((str(dtype), x.to(dtype)) for dtype in dtypes if dtype != x.dtype)


def copied(argument: Any, to: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(argument, list):
        return [copied(each, to) for each in argument]
    return to(argument) if isinstance(argument, Tensor) else argument


def cases(arguments: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The arguments with one tensor stored otherwise; of lists, all tensors."""
    for number, argument in enumerate(arguments):
        first = argument[0] if isinstance(argument, list) and argument and isinstance(argument[0], Tensor) else argument
        if not isinstance(first, Tensor):
            continue
        for name, _ in variants(first):
            changed = copied(argument, lambda x, name=name: dict(variants(x))[name])
            yield f"argument {number} {name}", (*arguments[:number], changed, *arguments[number + 1 :])


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor] | str:
    """The results and all arguments after a call, as the CPU has them, or the kind of its error."""
    device = DEVICE if "triton" in function.__self__._name else torch.device("cpu")  # type: ignore[attr-defined]
    # `Tensor.clone` keeps the strides of dense tensors only, and no alignment.
    given = tuple(copied(argument, lambda x: alike_on(x, device)) for argument in arguments)
    try:
        results = function(*given)
    except (TypeError, ValueError) as error:
        return type(error).__name__
    found: list[Tensor] = []
    copied([*(results if isinstance(results, (tuple, list)) else [results]), *given], lambda x: found.append(x.cpu()))
    return found


def alike_on(x: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, and the same alignment."""
    memory = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


def implementations(name: str) -> list[Any]:
    """The methods that compute an operator: in plain torch, in Triton, and in Numba."""
    (file,) = [file for file in MODULES if hasattr(file.Implementation, name)]
    modules = [module for module in MODULES[file] if HAS_NUMBA or "numba" not in module]
    if name == "matmul_rescaled" and DEVICE.type == "cpu":
        modules.remove("triton.scaled.launch")  # cuBLAS multiplies
    return [getattr(file.Implementation(f"qsim_kernels.{module}"), name) for module in modules]


def test_every_operator_is_here() -> None:
    assert {*library.on_backends} == {*CALLS}


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_how_tensors_are_stored(name: str) -> None:
    plain, *others = implementations(name)
    for arguments in CALLS[name]:
        wanted = outcome(plain, arguments)
        assert isinstance(wanted, list)
        for case, changed in [("as they are", arguments), *cases(arguments)]:
            # Other dtypes may give other results, or an error; other places in memory may not.
            due = outcome(plain, changed)
            if "torch." not in case:
                assert same(due, wanted), f"{name}: plain torch, {case}"
            for other in others:
                assert same(outcome(other, changed), due), f"{name}: {other.__self__._name}, {case}"


def same(found: list[Tensor] | str, due: list[Tensor] | str) -> bool:
    if isinstance(found, str) or isinstance(due, str):
        return found == due
    return len(found) == len(due) and all(map(same_bits, found, due))
