"""The machine code of the kernels for a GPU, on any machine: instructions, registers and shared memory, by operator and kernel.

`PYTHONPATH=kernels:tests python tests/support/compiled_offline.py` prints a table for an H200, with which commits can be compared without
a GPU: equal numbers nearly always mean the same machine code. `--target 120` compiles for another one of `TARGETS`; other words choose the
rows that contain one of them. It runs in a process of its own, because it takes the place of the driver. A form whose texts in PTX do not
get elements where they expect them is an error; see `qsim_kernels.triton.placement`.

Releases of Triton accept different code: `pip install --no-deps --target DIR triton==3.6.0` installs another one next to torch's own, which
`PYTHONPATH=DIR:kernels:tests python tests/support/compiled_offline.py` then uses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import qsim
from qsim_kernels.numbers.encoding import spell_encoding
from qsim_kernels.ops.backend import library
from qsim_kernels.triton.host.launcher import Launch
from qsim_kernels.triton.placement import expect_placement, placement_of

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_compile = JITFunction.run


class GPU(NamedTuple):
    """The properties of a GPU that launches depend on, named as in torch."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    total_memory: int

    # The parts of a driver that a compiler needs.

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.major + self.minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


#: GPUs by the number in the names of their architectures, with NVIDIA's figures.
TARGETS = {
    80: GPU("A100", 8, 0, 108, 166912, 40 << 20, 80 << 30),
    90: GPU("H200", 9, 0, 132, 232448, 50 << 20, 141 << 30),
    100: GPU("B200", 10, 0, 148, 232448, 126 << 20, 180 << 30),
    120: GPU("RTX 5090", 12, 0, 170, 101376, 96 << 20, 32 << 30),
}


class Form(NamedTuple):
    """A compiled form of a kernel.

    Attributes:
        registers: Those of a thread.
        shared: Bytes of shared memory that a program uses.
        placed: Texts in PTX that say where they expect elements, and get them there.
        instructions: Their number, 0 if they were not counted.
    """

    registers: int
    shared: int
    placed: int
    instructions: int = 0


class _OnGPU(TorchDispatchMode):
    """Operators on CPU tensors: those for CUDA compile their kernels, and those for CPUs compute, because callers look at results."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = function.name().partition("::")
        if space == "qsim":
            with contextlib.suppress(KeyError):
                library.implementation(name.partition(".")[0], "CUDA")(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


#: Makes a form of a compiled kernel.
Measure = Callable[[Any], Form]


def resources_of(kernel: Any) -> Form:
    """The resources of a form, after a check that its texts get elements where they expect them."""
    expect_placement(kernel, kernel.metadata.name)
    placed = sum(placement_of(line) is not None for line in kernel.asm["ttgir"].splitlines())
    registers = re.findall(r"REG:(\d+)", _dumped(kernel, "-res-usage"))[0]
    return Form(int(registers), kernel.metadata.shared, placed)


def with_instructions(kernel: Any) -> Form:
    """The same with the number of instructions, which takes as long as compiling."""
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)", _dumped(kernel, "-sass"), re.MULTILINE)
    return resources_of(kernel)._replace(instructions=len(instructions))


def _dumped(kernel: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([_TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout


def compiled(works: dict[str, Callable[[], object]], gpu: GPU, measure: Measure) -> dict[str, dict[str, list[Form]]]:
    """The forms of the kernels that some works would launch on a GPU, by the works' names and the kernels'."""
    found: dict[str, dict[str, list[Form]]] = {}

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = _compile(self, *arguments, grid=grid, warmup=True, **options)
        if kernel is not None:
            found[name].setdefault(self.fn.__name__, []).append(measure(kernel))
        return kernel

    def launch(self: Launch, *arguments: Any) -> None:
        self.launcher.kernel.run(*arguments, *self.tail(arguments[0].device), grid=(self.programs, 1, 1), **self.launcher.options)

    driver.set_active(gpu)
    JITFunction.run, Launch.__call__ = run, launch  # type: ignore[method-assign]
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[misc, assignment]
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda *_: gpu  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda *_: (gpu.major, gpu.minor)
    for name, work in works.items():
        found[name] = {}
        with _OnGPU():
            work()
    return found


def _step(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], object]:
    """A step of an optimizer, which is made now: it checks its arguments with operators, whose results a compiler does not compute."""
    parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optimizer([parameter], **options).step


def _layer() -> None:
    layer = qsim.convert(
        torch.nn.Linear(512, 256), qsim.FivePoint("e4m3", "e4m3", grad=qsim.Quantizer("e5m2", "stochastic"), act_bwd=None, weight_bwd=None)
    ).bfloat16()
    layer(torch.ones(256, 512, dtype=torch.bfloat16, requires_grad=True)).sum().backward()


def _values_and_codes(x: torch.Tensor) -> None:
    fmt = qsim.format("e4m3")
    for rounding in ("nearest", "stochastic"):
        how = qsim.rounding.resolve(rounding).spelling["saturate"]
        numbers = fmt.spelling[0], how, 1, torch.bfloat16, fmt.spelling[0], how, fmt.spelling[1], 2
        torch.ops.qsim.quantize_and_encode.default(x, torch.tensor(1), *numbers)


def _transformed_blocks(x: torch.Tensor) -> None:
    spelt = qsim.Quantizer("e2m1", "stochastic").spelt
    for dim in (-1, 0):
        scaling, turning = qsim.scaling.PerBlock(32, dim), qsim.transforms.Hadamard(32, seed=1)
        numbers = scaling.tiles(x.shape), turning.turn(x.shape, dim), *scaling.spelling(spelt.format)
        torch.ops.qsim.quantize_tiles.default(x, None, *numbers, torch.tensor(1), spelt.grid, spelt.rule, 0, 0, x.dtype, 1)
    whole = qsim.scaling.PerTensor()
    turn = qsim.transforms.Hadamard(16, seed=1).turn(x.shape, 0)
    torch.ops.qsim.scales_of_tiles.default(x, None, whole.tiles(x.shape), turn, True, *whole.spelling(spelt.format))


def _both_ways(x: torch.Tensor) -> None:
    """Round in blocks along rows and along columns, in one read and in two."""
    spelt, block = qsim.Quantizer("e4m3").spelt, qsim.scaling.NAMED["mxfp8"]
    both, making = [block.along(dim).tiles(x.shape) for dim in (-1, 0)], block.along(0).spelling(spelt.format)
    torch.ops.qsim.quantize_both_ways.default(x, *both, *making, spelt.grid, spelt.rule, x.dtype)
    for tiles in both:
        torch.ops.qsim.quantize_tiles.default(x, None, tiles, (), *making, None, spelt.grid, spelt.rule, 0, 0, x.dtype, 1)


def _codes_both_ways(x: torch.Tensor) -> None:
    """Round to codes that the GPU converts to, and to others."""
    points = [qsim.Quantizer("e4m3", overflow=overflow) for overflow in ("saturate", "nonfinite")]
    for point in (*points, qsim.Quantizer("e5m2", "stochastic")):
        given = spell_encoding(point.spelt.grid, point.spelt.rule, point.spelt.coding), 1, torch.uint8
        torch.ops.qsim.encode_with_transpose.default(x, torch.tensor(1), *given, *given)


def _and_amaxes(x: torch.Tensor) -> None:
    """Round in blocks along rows and find magnitudes of the transform along columns, in pairs and one by one."""
    scaling, turn = qsim.scaling.PerBlock(16, -1, "e4m3"), qsim.transforms.Hadamard(16, seed=1).turn(x.shape, 0)
    others = [*x.shape, 16, 256, 0]
    for rounding in ("stochastic", "nearest"):
        spelt = qsim.Quantizer("e2m1", rounding).spelt
        making = scaling.spelling(spelt.format)
        numbers = scaling.tiles(x.shape), others, turn, *making, torch.tensor(1), spelt.grid, spelt.rule, 0, 0, x.dtype, 1
        torch.ops.qsim.quantize_tiles_and_amaxes.default(x, torch.tensor(1.0), *numbers)


def _runs(x: torch.Tensor) -> None:
    """Round runs of rows in blocks, in pairs and one by one, with a transform and without."""
    held = torch.tensor([[0, 16], [16, 5]], dtype=torch.int32)
    scaling, turn = qsim.scaling.PerBlock(16, 0, "e4m3"), qsim.transforms.Hadamard(16, seed=1).turn((2, 16, x.shape[1]), 1)
    x, under = x[:21], torch.ones(2, 1, 1)
    for rounding in ("stochastic", "nearest"):
        spelt = qsim.Quantizer("e2m1", rounding).spelt
        for turned in ((), turn):
            numbers = [16, x.shape[1], 16, 1, 0], turned, *scaling.spelling(spelt.format)
            torch.ops.qsim.quantize_runs.default(x, held, under, *numbers, torch.tensor(1), spelt.grid, spelt.rule, 0, 0, x.dtype, 1)
    torch.ops.qsim.amaxes_of_runs.default(x, held, [16, x.shape[1], 16, x.shape[1], 0], turn, True)


def _in_basis(x: torch.Tensor, point: qsim.points.PointModule, size: int) -> None:
    """Round a matrix, and one that is stored transposed."""
    for stored in (x.bfloat16(), x.bfloat16().t()):
        qsim.points.Rotated(point, qsim.transforms.Hadamard(size, seed=1), redraw="call")(stored, seed=1)


def _nested() -> qsim.points.PointModule:
    fmt = qsim.scaling.block_formats.Block("e2m1", 16, scale="e4m3", rule="ceil")
    return qsim.points.OuterScale(qsim.Quantizer(fmt, "stochastic"), qsim.scaling.PerBlock(128))


#: Accumulators and formats of their operands: every kernel of sums, and every way through it.
ACCUMULATORS = (
    ("h100_fp8", "e4m3"),
    ("h100_bf16", "bf16"),
    ("Promoted('h100_fp8', 128)", "e4m3"),
    ("Aligned(8, 24, 'fp16', rounding='nearest')", "fp16"),
    ("cdna3_bf16", "bf16"),
    ("cdna3_fp8", "e4m3fnuz"),
    ("b200_mxfp8", "e4m3"),
    ("b200_nvfp4", "e2m1"),
    ("Rounded('fp32')", "bf16"),
    ("Rounded('fp16')", "bf16"),
    ("Rounded('e5m12', rounding='toward_zero')", "bf16"),
    ("Rounded('fp16', rounding='stochastic')", "bf16"),
    ("Rounded('fp16', rounding='Stochastic(8, correction=True)')", "bf16"),
    ("Rounded('fp16', product='fp16')", "bf16"),
    ("Rounded('fp16', order='kahan')", "bf16"),
    ("Rounded('fp16', order='kahan', rounding='stochastic')", "bf16"),
    ("Promoted(Rounded('bf16', rounding='stochastic'), 64)", "bf16"),
    ("Rounded('fp16', chunk=32)", "e4m3"),
    ("Rounded('fp16', chunk=64, order='kahan', rounding='stochastic')", "bf16"),
    ("Promoted(Rounded('bf16', chunk=32), 128)", "bf16"),
    ("Rounded('fp16', chunk=16)", "tf32"),
    ("Promoted(Rounded('fp16', chunk=16, order='kahan', rounding='stochastic'), 64)", "tf32"),
)


def _product(accumulator: str, operand: str) -> object:
    a, b = qsim.quantize(torch.randn(256, 512), operand), qsim.quantize(torch.randn(512, 256), operand)
    if operand not in ("tf32", "e2m1"):
        a, b = a.bfloat16() if operand != "fp16" else a.half(), b.bfloat16() if operand != "fp16" else b.half()
    how = qsim.accumulators.resolve(accumulator)
    return qsim.matmul(a, b, how, formats=(operand, operand), check=False, seed=1 if how.is_stochastic else None)


def works() -> dict[str, Callable[[], object]]:
    """Calls of the operators whose kernels are compiled."""
    x = torch.randn(256, 512)
    found: dict[str, Callable[[], object]] = {
        "decode": lambda: qsim.decode(torch.zeros(512, dtype=torch.uint8), "e4m3"),
        "table": lambda: qsim.quantize(x, "nf4"),
        "table stochastic": lambda: qsim.quantize(x, "nf4", rounding="stochastic", seed=1),
        "table float64": lambda: qsim.quantize(x.double(), "nf4", rounding="stochastic", seed=1),
        "table codes": lambda: qsim.encode(x.bfloat16(), "nf4", rounding="stochastic", seed=1),
        "table blocks": lambda: qsim.quantize(x, "nf4", scale=qsim.scaling.PerBlock(32)),
        "float64": lambda: qsim.quantize(x.double(), "e4m3", rounding="stochastic", seed=1),
        "transposed": lambda: qsim.quantize(x.t(), "e4m3", rounding="stochastic", seed=1),
        "transposed codes": lambda: qsim.encode(x.bfloat16().t(), "e4m3", rounding="stochastic", seed=1),
        "codes in pairs": lambda: [qsim.encode(x.bfloat16(), name, rounding="stochastic", seed=1) for name in ("e4m3", "e2m1")],
        "columns in pairs": lambda: [
            qsim.quantize(x.bfloat16().t(), "e4m3", rounding="stochastic", overflow=overflow, seed=1)
            for overflow in ("saturate", "nonfinite")
        ],
        "codes of a matrix and its transpose": lambda: _codes_both_ways(x.bfloat16()),
        "blocks in pairs": lambda: [qsim.quantize(x.bfloat16(), "mxfp8", rounding="stochastic", seed=1, dim=dim) for dim in (-1, 0)],
        "transformed blocks in pairs": lambda: _transformed_blocks(x.bfloat16()),
        "blocks both ways": lambda: [_both_ways(y) for y in (x, x.bfloat16())],
        "blocks and magnitudes of a transform": lambda: _and_amaxes(x.bfloat16()),
        "runs of rows": lambda: _runs(x.bfloat16()),
        "four over six": lambda: qsim.points.FourOverSix()(x.bfloat16()),
        "four over six stochastic": lambda: qsim.points.FourOverSix(rounding="stochastic")(x.bfloat16(), seed=1),
        "four over six in another basis": lambda: _in_basis(x, qsim.points.FourOverSix(rounding="stochastic"), 16),
        "nested scales": lambda: _in_basis(x, _nested(), 16),
        "corrected scales": lambda: _in_basis(x, qsim.points.MSEden(), 32),
        "values and codes": lambda: _values_and_codes(x),
        "values and codes of a transposed matrix": lambda: _values_and_codes(x.t()),
        "transform": lambda: qsim.transforms.Hadamard(16, seed=1)(x.bfloat16()),
        "layer": _layer,
        "checksum": lambda: torch.ops.qsim.checksum.default(x, 1, 3, 16, 32),
        "checksum of float64": lambda: torch.ops.qsim.checksum.default(x.double(), 1, 3, 0, 0),
        "tally": lambda: torch.ops.qsim.tally.default(x, x, -448.0, 448.0),
    }
    for dtype, rounding, overflow in ((torch.float32, "nearest", "saturate"), (torch.bfloat16, "stochastic", "nonfinite")):
        y, seed = x.to(dtype), 1 if rounding == "stochastic" else None
        given = {"rounding": rounding, "overflow": overflow, "seed": seed}
        found[f"quantize {rounding} {overflow}"] = lambda y=y, given=given: qsim.quantize(y, "e4m3", **given)  # type: ignore[misc]
        found[f"up {overflow}"] = lambda y=y, overflow=overflow: qsim.quantize(y, "e4m3", rounding="up", overflow=overflow)  # type: ignore[misc]
        found[f"encode {rounding}"] = lambda y=y, given=given: qsim.encode(y, "e4m3", **given)  # type: ignore[misc]
        found[f"nvfp4 {rounding}"] = lambda y=y, rounding=rounding, seed=seed: qsim.quantize(y, "nvfp4", rounding=rounding, seed=seed)  # type: ignore[misc]
    for accumulator, operand in ACCUMULATORS:
        found[f"{accumulator} of {operand}"] = lambda accumulator=accumulator, operand=operand: _product(accumulator, operand)  # type: ignore[misc]
    return found | {
        "AdamW stochastic": _step(qsim.optim.AdamW, update="stochastic"),
        "AdamW kahan": _step(qsim.optim.AdamW, update="kahan"),
        "AdamW kahan, stochastic": _step(qsim.optim.AdamW, update=qsim.optim.Kahan("stochastic")),
        "AdamW in the format": _step(qsim.optim.AdamW, betas=(0.9, 0.997), update="stochastic", arithmetic="format"),
        "SGD with momentum": _step(qsim.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "SGD kahan": _step(qsim.optim.SGD, lr=0.1, update="kahan"),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description="Compile kernels for a GPU that is not there.")
    parser.add_argument("words", nargs="*", help="words that choose rows")
    parser.add_argument("--target", type=int, choices=TARGETS, default=90)
    parser.add_argument("--json", action="store_true", help="registers, shared memory and placed texts, without instructions")
    options = parser.parse_args()
    chosen = {name: work for name, work in works().items() if not options.words or any(word in name for word in options.words)}
    results = compiled(chosen, TARGETS[options.target], resources_of if options.json else with_instructions)
    if options.json:
        print(json.dumps(results))
        return
    for name, kernels in results.items():
        for kernel, forms in kernels.items():
            texts = (f"{form.instructions:5} instructions, {form.registers:3} registers, {form.shared:6} bytes" for form in forms)
            print(f"{name:32} {kernel:26}", *texts)


if __name__ == "__main__":
    _main()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's end would ask the driver
