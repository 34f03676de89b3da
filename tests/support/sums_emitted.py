"""Sums of products in emitted programs, and those that `qsim.matmul` gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import qsim
from qsim.accumulators import Aligned, Rounded
from qsim.silicon import Dot, emit_circuits
from qsim.silicon.golden import values_of
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


def compiled_sums(dot: Dot, folder: Path, compiler: str, flags: Sequence[str]) -> str:
    """Compile a program that adds, and give the command that runs it."""
    (folder / "dot.c").write_text(emit_circuits("c", [dot]) + _MAIN.format(words=4 * dot.length, name=dot.name, length=dot.length))
    emitted.run(emitted.tool(compiler), *emitted.WARNINGS, *flags, "-o", folder / "dot", folder / "dot.c")
    return f"{folder}/dot < {folder}/in.bin > {folder}/out.bin"


def script_of_sums(dot: Dot, folder: Path) -> str:
    """The same in JavaScript."""
    script = _SCRIPT.format(words=4 * dot.length, name=dot.name, length=dot.length)
    (folder / "dot.mjs").write_text(emit_circuits("javascript", [dot]) + script)
    return f"{emitted.tool('node')} {folder}/dot.mjs {folder}/in.bin {folder}/out.bin"
