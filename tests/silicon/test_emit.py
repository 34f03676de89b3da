"""Emitted C, SystemVerilog and JavaScript: they compile without warnings and give the library's bits."""

from __future__ import annotations

import gc
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qsim
from qsim.cli import main
from qsim.silicon import BlockCircuit, Circuit, Dot, Philox, cost, emit, emit_circuits, synthesis, vectors
from qsim.silicon.emission import Language
from qsim.silicon.golden import results
from qsim.silicon.graphs import AnyCircuit, routine
from qsim.silicon.inputs import corners, weighted
from qsim.silicon.printers import systemverilog
from qsim_kernels.meanings import simplification
from support import emitted

FORMATS = ["e4m3", "e2m1", "e8m0", "int8", "Float(3, 2, specials='fn')"]
CIRCUITS = [Circuit(fmt, op, rule) for fmt in FORMATS for op in ("round", "encode") for rule in ("nearest", "stochastic", "odd")]
CIRCUITS += [Circuit("e4m3", "round", rule, "nonfinite") for rule in qsim.rounding.NAMED if rule not in ("nearest", "stochastic", "odd")]
CIRCUITS += [
    Circuit("int8", "encode", "up", "saturate_symmetric"),
    Circuit("e5m2", "encode", qsim.Stochastic(8, correction=True), "nonfinite"),
    Circuit("e4m3", "round", qsim.Stochastic(3, correction="even")),
]


def drawn_inputs(count: int) -> tuple[Tensor, Tensor]:
    """Corners of E4M3 and weighted numbers, with random integers."""
    generator = torch.Generator().manual_seed(3)
    points = corners(qsim.format("e4m3"))
    x = torch.cat([points[torch.randperm(len(points), generator=generator)[:count]], weighted(count, generator)])
    return x, torch.randint(0, 1 << 32, x.shape, generator=generator)


def expected(circuit: Circuit, x: Tensor, random: Tensor) -> Tensor:
    """The results for as many bits as the circuit reads."""
    return results(circuit, x & (1 << circuit.input.bits) - 1, random & (1 << circuit.random_bits) - 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compiler", ["gcc", "clang", "g++"])
def test_c_gives_golden_results(compiler: str, tmp_path: Path) -> None:
    x, random = drawn_inputs(1500)
    flags = ["-std=c++11"] if compiler == "g++" else ["-std=c99", *(emitted.SANITIZED if compiler == "gcc" else [])]
    for circuit, y in zip(CIRCUITS, emitted.c_results(CIRCUITS, x, random, tmp_path, compiler, flags), strict=True):
        assert y.tolist() == expected(circuit, x, random).tolist(), circuit.name


def test_c_rounds_as_quantize_does_with_its_random_bits(tmp_path: Path) -> None:
    x, _ = drawn_inputs(1500)
    values = x.to(torch.int32).view(torch.float32)
    random = qsim.random.random_bits(len(x), 32, seed=5, stream=7)
    circuits = [Circuit(fmt, "round", "stochastic") for fmt in ("e4m3", "bf16", "e8m0")]
    for circuit, y in zip(circuits, emitted.c_results(circuits, x, random, tmp_path, "gcc", ["-std=c99"]), strict=True):
        rounded = qsim.quantize(values, circuit.format, "stochastic", seed=qsim.random.Noise(5, 7))
        assert y.tolist() == (rounded.view(torch.int32).long() & 0xFFFFFFFF).tolist(), circuit.name


def test_headers_are_code_for_cuda_devices(tmp_path: Path) -> None:
    emitted.tool("clang")
    attributes = (
        "#define __host__ __attribute__((host))\n#define __device__ __attribute__((device))\n#define __global__ __attribute__((global))\n"
    )
    kernel = "__global__ void kernel(uint32_t *x) { x[0] = qsim_encode_e4m3_nearest(qsim_round_e2m1_nearest(x[0])); }\n"
    headers = emit("c", "e4m3", operations=["encode"], name="one") + emit("c", "e2m1", name="other")
    (tmp_path / "circuit.cu").write_text(attributes + headers + kernel)
    flags = [
        "-x",
        "cuda",
        "--cuda-device-only",
        "-nocudainc",
        "-nocudalib",
        "-fsyntax-only",
        "-Wno-unknown-cuda-version",
        *emitted.WARNINGS[:3],
    ]
    emitted.run("clang", *flags, tmp_path / "circuit.cu")


def test_javascript_gives_golden_results(tmp_path: Path) -> None:
    x, random = drawn_inputs(1500)
    for circuit, y in zip(CIRCUITS, emitted.javascript_results(CIRCUITS, x, random, tmp_path), strict=True):
        assert y.tolist() == expected(circuit, x, random).tolist(), circuit.name


@pytest.mark.parametrize("stages", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_systemverilog_gives_golden_results_in_icarus(stages: int, tmp_path: Path) -> None:
    x, random = drawn_inputs(300)
    circuits = [*CIRCUITS[::2], Circuit("e4m3", "decode"), Circuit("int8", "decode"), Circuit("e3m2", "encode", source="fp16")]
    for circuit, y in zip(circuits, emitted.systemverilog_results(circuits, x, random, tmp_path, emitted.icarus, stages), strict=True):
        assert y.tolist() == expected(circuit, x, random).tolist(), circuit.name


@pytest.mark.slow
def test_systemverilog_gives_golden_results_in_verilator(tmp_path: Path) -> None:
    x, random = drawn_inputs(300)
    circuits = [Circuit("e4m3"), Circuit("e2m1", "encode", "stochastic"), Circuit("e4m3", "decode")]
    for circuit, y in zip(circuits, emitted.systemverilog_results(circuits, x, random, tmp_path, emitted.verilator, 1), strict=True):
        assert y.tolist() == expected(circuit, x, random).tolist(), circuit.name


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fmt", FORMATS)
def test_modules_are_lint_clean(fmt: str, tmp_path: Path) -> None:
    emitted.tool("verilator")
    for circuit in (Circuit(fmt, "round", "stochastic"), Circuit(fmt, "encode", source="bf16"), Circuit(fmt, "decode")):
        for stages, generator in ((0, False), (2, circuit.random_bits > 0)):
            emitted.lint(systemverilog.module(routine(circuit), stages, generator), tmp_path, circuit.name)


def test_decoders_give_the_values_of_all_codes(tmp_path: Path) -> None:
    circuits = [Circuit(fmt, "decode") for fmt in (*FORMATS, "e5m2", "e4m3fnuz", "e3m4", "fp16")]
    x = torch.arange(1 << 16)
    for circuit, y in zip(circuits, emitted.c_results(circuits, x, x, tmp_path, "gcc", ["-std=c99"]), strict=True):
        assert y.tolist() == expected(circuit, x, x).tolist(), circuit.name


@pytest.mark.parametrize("name", ["bf16", "tf32", "fp32", "Float(8, 5, specials='ieee')"])
def test_decoders_of_the_first_bits_of_float32_give_one_nan(name: str, tmp_path: Path) -> None:
    """Emitted C, golden vectors and `qsim.decode` agree on all codes, or on those of NaN and many others."""
    circuit = Circuit(name, "decode")
    golden = vectors(circuit)
    bits = circuit.format.bits
    nans = [sign << bits - 1 | 0xFF << bits - 9 | payload for sign in (0, 1) for payload in (1, (1 << bits - 9) - 1)]
    x = torch.cat([golden.x, torch.tensor(nans)])
    decoded = qsim.decode(x.to(torch.int16 if bits <= 16 else torch.int32), circuit.format).view(torch.int32).long() & 0xFFFFFFFF
    assert decoded[-4:].tolist() == [0x7FFFFFFF] * 4
    assert torch.equal(golden.y, decoded[:-4])
    assert torch.equal(results(circuit, x, torch.zeros_like(x)), decoded)
    (y,) = emitted.c_results([circuit], x, torch.zeros_like(x), tmp_path)
    assert torch.equal(y, decoded)


def test_generators_draw_new_bits_at_each_clock(tmp_path: Path) -> None:
    """A hundred clocks of the generator are Marsaglia's, and the module rounds with them."""
    circuit = Circuit("bf16", "encode", qsim.Stochastic(12))
    bench = f"""
module bench;
  logic clk = 0, reset = 1;
  wire [15:0] y;
  integer i;
  {circuit.name} #(.SEED(32'd2463534242)) circuit (.clk(clk), .reset(reset), .x(32'h3f808000), .y(y));
  initial begin
    #1 clk = 1; #1 clk = 0; reset = 0;
    for (i = 0; i < 100; i = i + 1) begin #1; $display("%h", y); clk = 1; #1 clk = 0; end
    $finish;
  end
endmodule
"""
    (tmp_path / "bench.sv").write_text(systemverilog.module(routine(circuit), generator=True) + bench)
    emitted.run(emitted.tool("iverilog"), "-g2012", "-o", tmp_path / "bench.vvp", tmp_path / "bench.sv")
    lines = emitted.run("vvp", tmp_path / "bench.vvp").split()[:100]
    state, words = 2463534242, []
    for _ in range(100):
        words.append(state >> 20)
        state ^= state << 13 & 0xFFFFFFFF
        state ^= state >> 17
        state ^= state << 5 & 0xFFFFFFFF
    x = torch.full((100,), 0x3F808000)
    assert [int(line, 16) for line in lines] == results(circuit, x, torch.tensor(words)).tolist()
    assert len(set(lines)) == 2


@pytest.mark.slow
def test_code_does_not_depend_on_what_was_emitted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs share symbols: those that another graph made first must not be printed first."""

    def emitted_after(*others: Circuit) -> str:
        """A module, emitted when only the graphs of some other circuits have been made."""
        routine.cache_clear()
        monkeypatch.setattr(simplification, "_RESULTS", {})
        gc.collect()
        for other in others:
            routine(other)
        return emit("systemverilog", "e4m3", operations=["encode"])

    others = [Circuit("e3m2", operation, rule) for operation in ("decode", "encode") for rule in ("odd", "nearest")]
    assert emitted_after() == emitted_after(*others)


def test_comments_specify_the_unit() -> None:
    text = emit("c", "e4m3", ["nearest", "Stochastic(bits=8)"], operations=["encode"], name="qsim_e4m3")
    assert "uint32_t qsim_encode_e4m3_nearest(uint32_t x)" in text
    assert "uint32_t qsim_encode_e4m3_stochastic8(uint32_t x, uint32_t random)" in text
    assert "random: an integer of 8 bits" in text
    assert "Codes have 8 bits, sign and magnitude: 4 exponent bits with bias 7, 3 mantissa bits; NaN 0x7F." in text
    assert text.count("#ifndef QSIM_E4M3_H") == 1


@pytest.mark.parametrize(
    ("circuit", "stages"),
    [
        (Circuit("e4m3", "encode", "Stochastic(bits=8)", source="bf16"), 2),
        (Circuit("Float(2, 2, bias=0)", overflow="saturate_symmetric"), 0),
        (Circuit("int8", "decode"), 0),
        (BlockCircuit("mxfp4", "scale", source="bf16"), 0),
        (Dot("Rounded('e2m1', rounding='up')", "e2m1", "e3m2"), 0),
        (Philox(), 0),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_modules_name_the_command_that_emits_them(circuit: AnyCircuit, stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = emit_circuits("systemverilog", [circuit], stages=stages)
    assert text.startswith(f"// {circuit.name}.sv\n// Written by qsim {qsim.__version__}: ")
    assert "// SPDX-License-Identifier: BSD-3-Clause\n" in text
    (line,) = re.findall("^// Command: qsim (.*)$", text, flags=re.MULTILINE)
    assert main(shlex.split(line)) == 0
    assert capsys.readouterr().out == text


def test_a_folder_gets_a_file_for_each_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emit", "systemverilog", "--format", "e2m1", "--operation", "encode,decode", "-o", str(tmp_path)]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["qsim_decode_e2m1.sv", "qsim_encode_e2m1_nearest.sv"]
    for file in tmp_path.iterdir():
        assert file.read_text().startswith(f"// {file.name}\n")
        assert re.findall(r"^module (\w+)", file.read_text(), flags=re.MULTILINE) == [file.stem]
    assert main(["emit", "c", "--format", "e2m1", "-o", str(tmp_path)]) == 2
    assert f"--output {tmp_path} is a folder: only SystemVerilog is written into several files" in capsys.readouterr().err


NAMES = ("q-e4m3", "q.e4m3", "q e4m3", "q_e4m3", "Q_e4m3", "q\n#define x", "8bit", "_q", "q__e4m3", "q_", "", "größe", "\udc80")


def test_headers_of_any_name_have_guards_of_their_own() -> None:
    guards = []
    for name in NAMES:
        text = emit("c", "e2m1", name=name)
        (line,) = [line for line in text.splitlines() if line.startswith("#ifndef") and line != "#ifndef QSIM_FUNCTION"]
        guard = line.removeprefix("#ifndef ")
        assert re.fullmatch("[A-Z](_?[A-Z0-9])*_H", guard), f"not an identifier, or one that C++ reserves: {guard}"
        assert text.count(guard) == 3
        assert f"#define {guard}\n" in text
        guards.append(guard)
    assert len(set(guards)) == len(NAMES)
    assert guards[3] == "Q_E4M3_H"


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_headers_whose_names_begin_alike_are_included_together(tmp_path: Path) -> None:
    for name, fmt in (("q-e4m3", "e4m3"), ("q-e2m1", "e2m1")):
        (tmp_path / f"{name}.h").write_text(emit("c", fmt, name=name))
    source = tmp_path / "both.c"
    source.write_text('#include "q-e4m3.h"\n#include "q-e2m1.h"\nint main(void) { return 0 * (int)(qsim_round_e4m3_nearest(0) + '
                      "qsim_round_e2m1_nearest(0)); }\n")  # fmt: skip
    emitted.run("gcc", "-Wall", "-Wextra", "-Werror", source, "-o", tmp_path / "both")


@pytest.mark.parametrize("language", ["c", "systemverilog", "javascript"])
@pytest.mark.parametrize("name", ["e2m1", "int8", "uint4", "e4m0", "mxfp4"])
def test_comments_name_the_code_of_nan_where_the_format_has_none(language: Language, name: str) -> None:
    circuit = BlockCircuit(name, "encode") if name == "mxfp4" else Circuit(name, "encode")
    nan = torch.tensor([[0x7FC00000, 0xFF]] if name == "mxfp4" else [0x7FC00000])
    code = results(circuit, nan, torch.zeros(1, dtype=torch.int64)).item()
    digits = -(-circuit.output.bits // 4)
    line = f"NaN has no code and gets that of the largest value, 0x{code:0{digits}X}."
    assert line in emit_circuits(language, [circuit])


def test_overflow_of_the_format_is_one_of_the_others() -> None:
    """As in `quantize`: infinities where the format has them, else saturation. The name says which."""
    for fmt, overflow in (("e5m2", "nonfinite"), ("e4m3", "saturate"), ("int8", "saturate")):
        assert Circuit(fmt, overflow="format") == Circuit(fmt, overflow=overflow)
        assert emit("c", fmt, overflow="format") == emit("c", fmt, overflow=overflow)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"language": "vhdl"}, r"language must be one of 'c', 'systemverilog', 'javascript', got 'vhdl'"),
        ({"language": "c", "stages": 2}, r"stages and generator are for SystemVerilog, got language='c'"),
        ({"language": "systemverilog", "stages": -1}, r"stages must be in 0…64, got -1"),
        ({"language": "c", "operations": []}, r"operations must name at least one of 'round', 'encode', 'decode'"),
        ({"language": "c", "operations": ["add"]}, r"operation must be one of 'round', 'encode', 'decode', got 'add'"),
        ({"language": "c", "format": "int32"}, r"Int\(32\) has values that float32 lacks: circuits compute with float32's bits"),
        ({"language": "c", "overflow": "wrap"}, r"overflow must be 'saturate', 'saturate_symmetric', 'nonfinite' or 'format', got 'wrap'"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        emit(**{"format": "e4m3", **arguments})  # type: ignore[arg-type]


def test_cost_counts_the_cells_of_yosys_report(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"LUT2": 3, "LUT6": 40, "INV": 2, "CARRY4": 5, "FDRE": 7, "FDSE": 1, "$_AND_": 11, "$_MUX_": 2, "$_NOT_": 1, "$_DFF_P_": 9}
    cells = "".join(f"     {name:<10} {count:>5}\n" for name, count in counts.items())
    monkeypatch.setattr(synthesis, "_synthesized", lambda *_: (cells, 6))
    assert cost(Circuit("e4m3")) == (synthesis.Fpga(45, 5, 8, 6), synthesis.Gates(14, 6))


def test_cost_without_yosys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="qsim cost and qsim prove need Yosys, which is not installed: `apt install yosys`"):
        cost(Circuit("e4m3"))
