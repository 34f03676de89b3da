"""Emitted sums of products and Philox give the library's bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import qsim
from qsim.accumulators import Aligned, BlockScaled, Rounded
from qsim.silicon import Dot, Philox, emit_circuits
from qsim.silicon.golden import values_of
from qsim_kernels.torch.philox import block_words
from support import emitted

DOTS = [
    Dot("Rounded('fp16')", "e4m3"),
    Dot("Rounded('fp32')", "bf16"),
    Dot(Rounded("e5m2", rounding="up", overflow="saturate"), "e5m2"),
    Dot(Rounded("fp16", product="bf16"), "e4m3", length=2),
    Dot("TwoStep(2, 24, 31)", "bf16"),
    Dot(Aligned(3, 13, "e5m2", operands=("e4m3",)), "e4m3"),
]

_MAIN = """
#include <stdio.h>
int main(void)
{{
    uint32_t w[{words}];
    while (fread(w, 4, {words}, stdin) == {words}) {{
        uint32_t sum = {name}(w, w + 2 * {length}, 0u);
        sum = {name}(w + {length}, w + 3 * {length}, sum);
        fwrite(&sum, 4, 1, stdout);
    }}
    return 0;
}}
"""


_SCRIPT = """
import {{ readFileSync, writeFileSync }} from "node:fs";
const bytes = readFileSync(process.argv[2]);
const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
const sums = new Uint32Array(words.length / {words});
for (let i = 0; i < sums.length; i += 1) {{
  const part = (k) => Array.from(words.subarray({words} * i + k * {length}, {words} * i + (k + 1) * {length}));
  sums[i] = {name}(part(1), part(3), {name}(part(0), part(2), 0));
}}
writeFileSync(process.argv[3], sums);
"""


def drawn_codes(dot: Dot, count: int) -> Tensor:
    """The codes of two steps: those of one operand, then those of the other."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.cat([torch.randint(0, 1 << fmt.bits, (count, 2 * dot.length), generator=generator) for fmt in (dot.a, dot.b)], 1)
    if dot.a.bits < 16:
        return codes
    # Most have exponents that are near each other.
    near = codes & 0x807F | (codes >> 7 & 15) + 120 << 7
    return torch.where(torch.rand(codes.shape, generator=generator) < 0.9, near, codes)


def by_matmul(dot: Dot, codes: Tensor) -> Tensor:
    """The sums that `qsim.matmul` gives."""
    a, b = values_of(codes[:, : 2 * dot.length], dot.a), values_of(codes[:, 2 * dot.length :], dot.b)
    return qsim.matmul(a[:, None], b[:, :, None], dot.accumulator).view(-1)


def by_program(dot: Dot, codes: Tensor, folder: Path, command: str) -> Tensor:
    """The sums that a program gives, which reads codes from a file and writes those of sums."""
    codes.numpy().astype(np.uint32).tofile(folder / "in.bin")
    emitted.run("sh", "-c", command)
    return values_of(torch.from_numpy(np.fromfile(folder / "out.bin", dtype=np.uint32).astype(np.int64)), dot.total)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: dot.name)
def test_c_adds_as_matmul_does(dot: Dot, compiler: str, tmp_path: Path) -> None:
    codes = drawn_codes(dot, 1000)
    (tmp_path / "dot.c").write_text(emit_circuits("c", [dot]) + _MAIN.format(words=4 * dot.length, name=dot.name, length=dot.length))
    flags = ["-std=c99", *(emitted.SANITIZED if compiler == "gcc" else [])]
    emitted.run(emitted.tool(compiler), *emitted.WARNINGS, *flags, "-o", tmp_path / "dot", tmp_path / "dot.c")
    found = by_program(dot, codes, tmp_path, f"{tmp_path}/dot < {tmp_path}/in.bin > {tmp_path}/out.bin")
    assert same_bits(found, by_matmul(dot, codes))


@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: dot.name)
def test_javascript_adds_as_matmul_does(dot: Dot, tmp_path: Path) -> None:
    codes = drawn_codes(dot, 300)
    script = _SCRIPT.format(words=4 * dot.length, name=dot.name, length=dot.length)
    (tmp_path / "dot.mjs").write_text(emit_circuits("javascript", [dot]) + script)
    command = f"{emitted.tool('node')} {tmp_path}/dot.mjs {tmp_path}/in.bin {tmp_path}/out.bin"
    assert same_bits(by_program(dot, codes, tmp_path, command), by_matmul(dot, codes))


def test_philox_in_c_and_javascript(tmp_path: Path) -> None:
    code = emit_circuits("c", [Philox()])
    main = (
        "#include <stdio.h>\nint main(void)\n{\n    const uint32_t counter[4] = {5u, 6u, 7u, 8u}, key[2] = {0xFFFFFFFFu, 9u};\n"
        '    uint32_t y[4];\n    qsim_philox(counter, key, y);\n    printf("%u %u %u %u", y[0], y[1], y[2], y[3]);\n    return 0;\n}\n'
    )
    expected = block_words(5 | 6 << 32, 0xFFFFFFFF | 9 << 32, 7 | 8 << 32)
    (tmp_path / "philox.c").write_text(code + main)
    emitted.run(emitted.tool("gcc"), "-std=c99", *emitted.WARNINGS, *emitted.SANITIZED, "-o", tmp_path / "philox", tmp_path / "philox.c")
    assert tuple(map(int, emitted.run(tmp_path / "philox").split())) == expected
    script = emit_circuits("javascript", [Philox()]) + "console.log(qsim_philox([5, 6, 7, 8], [0xFFFFFFFF, 9]).join(' '));\n"
    (tmp_path / "philox.mjs").write_text(script)
    assert tuple(map(int, emitted.run(emitted.tool("node"), tmp_path / "philox.mjs").split())) == expected


def test_modules_pass_lint(tmp_path: Path) -> None:
    for circuit in (Philox(), DOTS[0]):
        emitted.lint(emit_circuits("systemverilog", [circuit], stages=2), tmp_path, circuit.name)


def test_sums_that_are_no_circuits() -> None:
    with pytest.raises(ValueError, match="whose products have scales"):
        Dot(BlockScaled(32, 25, 32), "e4m3")
    with pytest.raises(ValueError, match="sequential order"):
        Dot("Rounded('fp16', order='kahan')", "e4m3")
    with pytest.raises(ValueError, match="reads 2"):
        emit_circuits("systemverilog", [Dot("Rounded('fp16', rounding='stochastic')", "e4m3", length=2)], generator=True)
