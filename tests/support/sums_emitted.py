"""Sums of products in emitted programs, and those that `qsim.matmul` gives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import qsim
from qsim.accumulators import Aligned, BlockScaled, Rounded
from qsim.formats import Format
from qsim.functional import encode
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
    Dot(BlockScaled(2, 25, 2), "e4m3", "e5m2"),
    Dot(BlockScaled(8, 35, 4, "e4m3", exact=True), "e2m1"),
    Dot(BlockScaled(4, 9, 2, "e5m2", exact=True), "e4m3", length=7),
]
#: The units of a chip that multiply by scales: too long for every test run.
SCALED_UNITS = [
    Dot("b200_mxfp8", "e4m3"),
    Dot("b200_mxfp8", "e5m2", "e4m3", length=17),
    Dot("b200_mxfp6", "e3m2", "e2m1"),
    Dot("b200_mxfp4", "e2m1"),
    Dot("b200_nvfp4", "e2m1"),
    Dot("b200_nvfp4", "e2m1", length=100),
]

_MAIN = """
#include <stdio.h>
int main(void)
{{
    uint32_t w[{words}];
    while (fread(w, 4, {words}, stdin) == {words}) {{
        uint32_t sum = 0u;
        {calls}
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
  const part = (start, count) => Array.from(words.subarray({words} * i + start, {words} * i + start + count));
  let sum = 0;
  {calls}
  sums[i] = sum;
}}
writeFileSync(process.argv[3], sums);
"""


def times(dot: Dot) -> int:
    """The number of additions of a program: two, unless the sum ends in a short step."""
    return 1 if dot.length % dot.accumulator.step else 2


def sizes(dot: Dot) -> list[int]:
    """The numbers of codes in a sum: of the left operand, of the right one, and of their scales if there are some."""
    return [count * times(dot) for _, count in dot.factors.values()]


def formats(dot: Dot) -> list[Format]:
    """The formats of these."""
    return [fmt for fmt, _ in dot.factors.values()]


def drawn_codes(dot: Dot, count: int) -> Tensor:
    """The codes of a sum: those of one operand, those of the other, and those of their scales."""
    generator = torch.Generator().manual_seed(1)
    pairs = list(zip(sizes(dot), formats(dot), strict=True))
    codes = torch.cat([torch.randint(0, 1 << fmt.bits, (count, size), generator=generator) for size, fmt in pairs], 1)
    if dot.scale is not None:
        return _tamed(dot, codes, generator)
    if dot.a.bits < 16:
        return codes
    # Most have exponents that are near each other.
    near = codes & 0x807F | (codes >> 7 & 15) + 120 << 7
    return torch.where(torch.rand(codes.shape, generator=generator) < 0.9, near, codes)


def _tamed(dot: Dot, codes: Tensor, generator: torch.Generator) -> Tensor:
    """Sums most of which have scales near 1, and no NaN: a quarter has any codes."""
    assert dot.scale is not None
    (one,), kept = encode(torch.ones(1), dot.scale).long().tolist(), torch.rand(len(codes), 1, generator=generator) < 0.25
    near = one + torch.randint(-6, 7, codes.shape, generator=generator)
    is_scale = torch.arange(codes.shape[1]) >= sum(sizes(dot)[:2])
    is_missing = torch.cat([values_of(part, fmt).isnan() for part, fmt in zip(codes.split(sizes(dot), 1), formats(dot), strict=True)], 1)
    return torch.where(kept, codes, torch.where(is_scale, near, torch.where(is_missing, 0, codes)))


def by_matmul(dot: Dot, codes: Tensor) -> Tensor:
    """The sums that `qsim.matmul` gives, or the operator behind it where operands have scales."""
    a, b, *scales = (values_of(part, fmt) for part, fmt in zip(codes.split(sizes(dot), 1), formats(dot), strict=True))
    if not scales:
        return qsim.matmul(a[:, None], b[:, :, None], dot.accumulator).view(-1)
    p, q = (x[:, None] for x in scales)
    how = dot.accumulator.spelled(dot.a, dot.b)
    return torch.ops.qsim.accumulate_scaled(a[:, None], b[:, :, None], p, q, (1, 1, 1, 1), None, how, 0, 0).view(-1)


def by_program(dot: Dot, codes: Tensor, folder: Path, command: str) -> Tensor:
    """The sums that a program gives, which reads codes from a file and writes those of sums."""
    codes.numpy().astype(np.uint32).tofile(folder / "in.bin")
    emitted.run("sh", "-c", command)
    return values_of(torch.from_numpy(np.fromfile(folder / "out.bin", dtype=np.uint32).astype(np.int64)), dot.total)


def _parts(dot: Dot) -> list[list[tuple[int, int]]]:
    """Where the codes of each addition start, and how many there are of each operand."""
    counts = [size // times(dot) for size in sizes(dot)]
    starts = list(itertools.accumulate(sizes(dot)[:-1], initial=0))
    return [[(start + k * count, count) for start, count in zip(starts, counts, strict=True)] for k in range(times(dot))]


def compiled_sums(dot: Dot, folder: Path, compiler: str, flags: Sequence[str]) -> str:
    """Compile a program that adds, and give the command that runs it."""
    calls = "\n        ".join(f"sum = {dot.name}({', '.join(f'w + {start}' for start, _ in each)}, sum);" for each in _parts(dot))
    (folder / "dot.c").write_text(emit_circuits("c", [dot]) + _MAIN.format(words=sum(sizes(dot)), calls=calls))
    emitted.run(emitted.tool(compiler), *emitted.WARNINGS, *flags, "-o", folder / "dot", folder / "dot.c")
    return f"{folder}/dot < {folder}/in.bin > {folder}/out.bin"


def script_of_sums(dot: Dot, folder: Path) -> str:
    """The same in JavaScript."""
    calls = "\n  ".join(f"sum = {dot.name}({', '.join(f'part({start}, {count})' for start, count in each)}, sum);" for each in _parts(dot))
    script = _SCRIPT.format(words=sum(sizes(dot)), calls=calls)
    (folder / "dot.mjs").write_text(emit_circuits("javascript", [dot]) + script)
    return f"{emitted.tool('node')} {folder}/dot.mjs {folder}/in.bin {folder}/out.bin"
