"""Emitted code against `qsim.quantize` for very many inputs: too long for every test run.

PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py c --random 24    every named format and rounding, gcc and clang, sanitized
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py systemverilog   five formats, all roundings, all bfloat16 inputs, two simulators
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py javascript      10^6 inputs in Node
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py explorer        10^6 inputs to the format explorer, in Node and Chromium
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py sums            10^6 sums each, in C (two compilers, sanitized) and Node
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py blocks          10^6 scales, elements and Philox's blocks each, likewise
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py modules         modules of these with golden vectors, in two simulators
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py mutations       200 faults in emitted modules, against golden vectors
PYTHONPATH=kernels:tests python tests/silicon/exhaustive.py cost            lookup tables of formats and roundings
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import qsim
from qsim.silicon import BlockCircuit, Circuit, Dot, Philox, cost, emit_circuits, vectors
from qsim.silicon.golden import results
from qsim.silicon.graphs import AnyCircuit, routine
from qsim.silicon.synthesis import fpga
from support import emitted, explorer, mutations
from support.chromium import Chromium
from support.sums_emitted import DOTS, SCALED_UNITS, by_matmul, by_program, compiled_sums, drawn_codes, script_of_sums, times

SEED, STREAM = 5, 7
_COMPARISONS = ("c", "systemverilog", "javascript", "explorer", "sums", "blocks", "modules", "mutations", "cost")
SIMULATED = ("e5m2", "e4m3", "e2m1", "Float(3, 2, specials='fn')", "Float(2, 5, bias=3)")


def quantized(circuit: Circuit, x: Tensor, offset: int) -> Tensor:
    """The bits of what `qsim.quantize` gives for float32 numbers."""
    seed = qsim.random.Noise(SEED, STREAM, offset) if circuit.random_bits else None
    y = qsim.quantize(x, circuit.format, circuit.rounding, overflow=circuit.overflow, seed=seed)
    return y.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def inputs(random: int) -> Iterator[Tensor]:
    """Float32 bits in pieces: all bfloat16 and float16 numbers, and random ones."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    yield torch.cat([torch.arange(1 << 16) << 16, halves.view(torch.int32).to(torch.int64) & 0xFFFFFFFF])
    generator = torch.Generator().manual_seed(1)
    for _ in range(max((1 << random) >> 21, 1)):
        yield torch.randint(0, 1 << 32, (min(1 << random, 1 << 21),), generator=generator)


def check_c(folder: Path, random: int, formats: Sequence[str], compilers: Sequence[str]) -> None:
    """C functions of every rounding and overflow."""
    total = differing = 0
    for fmt in formats:
        circuits = [Circuit(fmt, "round", rule, over) for rule in qsim.rounding.NAMED for over in ("saturate", "nonfinite")]
        for compiler in compilers:
            (folder / compiler).mkdir(exist_ok=True)
            emitted.compile_c(circuits, folder / compiler, compiler, ["-std=c99", "-O1", *emitted.SANITIZED])
        offset = 0
        for x in inputs(random):
            values = x.to(torch.int32).view(torch.float32)
            noise = qsim.random.random_bits(len(x), 32, seed=SEED, stream=STREAM, offset=offset)
            found = [emitted.compiled_results(circuits, x, noise, folder / compiler) for compiler in compilers]
            for k, circuit in enumerate(circuits):
                expected = quantized(circuit, values, offset)
                differing += sum(int((column[k] != expected).sum()) for column in found)
                total += len(x) * len(compilers)
            offset += len(x)
        print(
            f"C, {fmt}: {len(circuits)} functions, {offset} inputs each, {' and '.join(compilers)}; {differing} differ so far", flush=True
        )
    print(f"C: {total} results, {differing} differ", flush=True)


def check_systemverilog(folder: Path, simulators: Sequence[str]) -> None:
    """Modules of all roundings, for all bfloat16 inputs."""
    x = torch.arange(1 << 16)
    random = qsim.random.random_bits(len(x), 32, seed=SEED, stream=STREAM)
    for fmt in SIMULATED:
        circuits = [Circuit(fmt, op, rule, source="bf16") for op in ("round", "encode") for rule in qsim.rounding.NAMED]
        circuits += [Circuit(fmt, "round", rule, "nonfinite", source="bf16") for rule in qsim.rounding.NAMED]
        for circuit in circuits:
            emitted.lint(emitted.systemverilog.module(routine(circuit)), folder, circuit.name)
        values = (x << 16).to(torch.int32).view(torch.float32)
        for simulator in simulators:
            found = emitted.systemverilog_results(circuits, x, random, folder, getattr(emitted, simulator))
            differing = 0
            for circuit, y in zip(circuits, found, strict=True):
                expected = quantized(circuit, values, 0) if circuit.operation == "round" else results(circuit, x, random)
                differing += int((y != expected).sum())
            print(
                f"SystemVerilog, {fmt}, {simulator}: {len(circuits)} modules, {len(x)} inputs each, lint clean, {differing} differ",
                flush=True,
            )


def check_javascript(folder: Path) -> None:
    """JavaScript functions for 10^6 inputs each."""
    generator = torch.Generator().manual_seed(1)
    x, random = torch.randint(0, 1 << 32, (2, 1_000_000), generator=generator)
    for fmt in ("e4m3", "e2m1", "bf16", "e8m0"):
        circuits = [Circuit(fmt, op, rule) for op in ("round", "encode") for rule in qsim.rounding.NAMED]
        found = emitted.javascript_results(circuits, x, random, folder)
        differing = sum(int((y != results(circuit, x, random)).sum()) for circuit, y in zip(circuits, found, strict=True))
        print(f"JavaScript, {fmt}: {len(circuits)} functions, {len(x)} inputs each, {differing} differ", flush=True)


def check_explorer(folder: Path) -> None:
    """The script of the site's explorer for 10^6 inputs, with every rounding."""
    x = torch.randint(0, 1 << 32, (1_000_000,), generator=torch.Generator().manual_seed(1))
    browser = Chromium(folder / "profile")
    for fmt in ("e4m3", "e2m1", "bf16", "e8m0", "int8", "Float(3, 2, bias=4, specials='fn')"):
        hows = [explorer.How(fmt, rule, "saturate") for rule in qsim.rounding.NAMED] + [explorer.How(fmt, "nearest", "nonfinite")]
        expected = [explorer.quantized(how, x) for how in hows]
        for place, found in (
            ("Node", explorer.in_node(hows, x, folder)),
            ("Chromium", explorer.in_chromium(hows, x, browser, folder)),
        ):
            differing = sum(int((y != right).sum()) for y, right in zip(found, expected, strict=True))
            print(f"explorer in {place}, {fmt}: {len(hows)} roundings, {len(x)} inputs each, {differing} differ", flush=True)
    browser.close()


def check_sums(folder: Path, compilers: Sequence[str]) -> None:
    """Sums of two steps against `qsim.matmul`, and those of operands with scales against the operator behind it."""
    for dot in (*DOTS, *SCALED_UNITS):
        codes = drawn_codes(dot, 1_000_000 // (1 if dot.length < 8 else 10))
        expected = by_matmul(dot, codes)
        for compiler in compilers:
            command = compiled_sums(dot, folder, compiler, ["-std=c99", "-O1", *emitted.SANITIZED])
            print_sums(dot, f"C, {compiler}", by_program(dot, codes, folder, command), expected)
        print_sums(dot, "Node", by_program(dot, codes, folder, script_of_sums(dot, folder)), expected)


def print_sums(dot: Dot, where: str, found: Tensor, expected: Tensor) -> None:
    """Print how many sums differ."""
    differing = int((found.view(torch.int32) != expected.view(torch.int32)).sum())
    print(f"{where}, {dot.name}: {len(found)} sums of {times(dot) * dot.length} products, {differing} differ", flush=True)


def check_blocks(folder: Path, compilers: Sequence[str]) -> None:
    """Scales of blocks, elements under them, and Philox."""
    circuits: list[AnyCircuit] = [Philox()]
    for name in ("mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp8_e5m2"):
        circuits += [BlockCircuit(name, "scale"), *(BlockCircuit(name, rounding=rule) for rule in qsim.rounding.NAMED)]
    for circuit in circuits:
        golden = vectors(circuit, 1_000_000)
        counts = {f"C, {each}": emitted.rows_in_c(golden, folder, each, ["-std=c99", "-O1", *emitted.SANITIZED]) for each in compilers}
        counts["Node"] = emitted.rows_in_node(golden, folder)
        for where, found in counts.items():
            print(f"{where}, {circuit.name}: {len(golden)} inputs, {int((found != golden.y).sum())} results differ", flush=True)


def check_modules(folder: Path, simulators: Sequence[str]) -> None:
    """Modules with several inputs, and their testbenches; of long sums two products, as Verilator needs tens of gigabytes for 32."""
    short = dict.fromkeys(replace(dot, length=2) for dot in SCALED_UNITS)
    circuits: list[AnyCircuit] = [*mutations.SEVERAL_INPUTS, *DOTS, *short, *(BlockCircuit(name) for name in ("mxfp8", "nvfp4"))]
    circuits += [BlockCircuit(name, "scale") for name in ("mxfp8", "mxfp4", "nvfp4")]
    for circuit in circuits:
        emitted.lint(emit_circuits("systemverilog", [circuit]), folder, circuit.name)
        for simulator in simulators:
            printed = emitted.simulated(vectors(circuit), folder, simulator)
            print(f"SystemVerilog, {simulator}, {circuit.name}: lint clean, {printed}", flush=True)


def check_mutations(count: int) -> None:
    """Faults of one operator each; those that change a result must be found by golden vectors."""
    for circuits in (mutations.ROUNDINGS, mutations.SEVERAL_INPUTS):
        print(f"mutations in {len(circuits)} modules: {mutations.survey(count, 3, circuits)}", flush=True)


def print_costs() -> None:
    """Lookup tables of formats and roundings, and those of a module that is written by hand."""
    by_hand = fpga((Path(__file__).parent / "by_hand" / "round_e4m3.sv").read_text(), "round_e4m3")
    print(f"e4m3 rounded by hand: {by_hand}")
    for circuit in (Dot("Rounded('e4m3')", "e4m3"), Dot("Rounded('fp16')", "e4m3"), BlockCircuit("mxfp4"), BlockCircuit("nvfp4", "scale")):
        for stages in (0, 3):
            print(f"{circuit.name}, {stages} stages: {cost(circuit, stages)}", flush=True)
    for fmt in ("e5m2", "e4m3", "e2m1", "bf16"):
        for rule in ("nearest", "toward_zero", "Stochastic(8)", "stochastic"):
            for source in ("fp32", "bf16"):
                if fmt != source:
                    print(
                        f"{Circuit(fmt, 'encode', rule, source=source).name}: {cost(Circuit(fmt, 'encode', rule, source=source))}",
                        flush=True,
                    )


def main() -> None:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=_COMPARISONS)
    parser.add_argument("--random", type=int, default=24, help="log2 of the number of random inputs")
    parser.add_argument("--formats", default=",".join(qsim.formats.NAMED))
    parser.add_argument("--compilers", default="gcc,clang")
    parser.add_argument("--simulators", default="icarus,verilator")
    args, start = parser.parse_args(), time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.what == "c":
            check_c(folder, args.random, args.formats.split(","), args.compilers.split(","))
        elif args.what == "systemverilog":
            check_systemverilog(folder, args.simulators.split(","))
        elif args.what == "javascript":
            check_javascript(folder)
        elif args.what == "explorer":
            check_explorer(folder)
        elif args.what == "sums":
            check_sums(folder, args.compilers.split(","))
        elif args.what == "blocks":
            check_blocks(folder, args.compilers.split(","))
        elif args.what == "modules":
            check_modules(folder, args.simulators.split(","))
        elif args.what == "mutations":
            check_mutations(200)
        else:
            print_costs()
    print(f"{time.time() - start:.0f} seconds")


if __name__ == "__main__":
    main()
