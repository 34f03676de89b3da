"""Kernels compile for GPUs that are not there, in all their kinds: Triton's interpreter accepts more than its compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from support.compiled_offline import TARGETS, Form

#: The registers that a thread can have, and the accumulators whose kernels use all of them on some chip.
MOST_REGISTERS = 255
FULL = {
    "b200_nvfp4 of e2m1",
    "Aligned(8, 24, 'fp16', rounding='nearest') of fp16",
    "Rounded('fp16', chunk=64, order='kahan', rounding='stochastic') of bf16",
    "Promoted(Rounded('fp16', chunk=16, order='kahan', rounding='stochastic'), 64) of tf32",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NEEDS_TOOLS = pytest.mark.skipif(not os.access(TOOLS / "cuobjdump", os.X_OK), reason="this Triton cannot compile for NVIDIA's GPUs")

#: The least number of compiled forms and of calls of texts whose placement was compared, by target.
COUNTS = {80: (210, 0), 90: (205, 30), 100: (210, 30), 120: (210, 30)}
ON_ALL = {
    "quantize_kernel",
    "encode_kernel",
    "decode_kernel",
    "tiles_kernel",
    "best_kernel",
    "both_ways_kernel",
    "codes_both_ways_kernel",
    "whole_scale_kernel",
    "turned_scale_kernel",
    "turned_amaxes_kernel",
    "hadamard_kernel",
    "quantize_and_sum_kernel",
    "rescale_kernel",
    "update_kernel",
    "prepare_kernel",
    "planes_kernel",
    "aligned_kernel",
    "exact_groups_kernel",
    "rounded_kernel",
}
#: Kernels of chips with packed arithmetic of 16 bits, and the one that uses the matrix unit of an H100.
IN_PAIRS = {"column_pairs_kernel", "pairs_kernel", "turned_kernel"}
ON_HOPPER = {"chunked_kernel"}


def forms_for(target: int) -> dict[str, dict[str, list[Form]]]:
    """All forms, compiled in a process of its own, where Triton does not interpret."""
    settings = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "support.compiled_offline", "--json", "--target", str(target)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, list[Any]]] = json.loads(done.stdout)
    return {name: {kernel: [Form(*form) for form in forms] for kernel, forms in kernels.items()} for name, kernels in found.items()}


@pytest.mark.slow
@NEEDS_TOOLS
@pytest.mark.parametrize("target", TARGETS)
def test_all_kinds_of_kernels_compile(target: int) -> None:
    """Each within a thread's registers and a program's shared memory, with elements where its texts in PTX expect them."""
    found = forms_for(target)
    names = {kernel for kernels in found.values() for kernel in kernels}
    assert names >= ON_ALL
    assert names & (IN_PAIRS | ON_HOPPER) == (IN_PAIRS if target >= 90 else set()) | (ON_HOPPER if target == 90 else set())
    by_work = {name: [form for forms in kernels.values() for form in forms] for name, kernels in found.items() if kernels}
    forms = [form for each in by_work.values() for form in each]
    least, placed = COUNTS[target]
    assert len(forms) >= least
    assert sum(form.placed for form in forms) >= placed
    assert max(form.shared for form in forms) <= TARGETS[target].shared_memory_per_block_optin
    assert {name for name, each in by_work.items() if not 0 < max(form.registers for form in each) < MOST_REGISTERS} <= FULL


#: Instructions in pairs, each of which gives `c` from `a`, `b` and `c`.
PACKED = (
    "max.s16x2 c, a, b;",
    "min.u16x2 c, a, b;",
    "add.s16x2 c, a, b;",
    "add.bf16x2 c, a, b;",
    "mul.bf16x2 c, a, b;",
    "fma.rn.relu.bf16x2 c, a, b, c;",
    "min.xorsign.abs.bf16x2 c, a, b;",
    "max.NaN.xorsign.abs.bf16x2 c, a, b;",
)


@NEEDS_TOOLS
@pytest.mark.parametrize("instruction", PACKED)
def test_which_chips_have_packed_instructions(instruction: str, tmp_path: Path) -> None:
    """Those with which `supports_packed_16_bit` chooses kernels, have all of them as one instruction; an A100 is refused most."""
    counts = {target: instructions_of(instruction, target, tmp_path) for target in TARGETS}
    assert counts[90] == counts[100] == counts[120] == 1
    assert counts[80] == (1 if "fma" in instruction else None)


def instructions_of(body: str, target: int, folder: Path) -> int | None:
    """The number of a chip's instructions for a piece of PTX, loads and stores not counted, or None if the chip does not have it."""
    loads = " ".join(f"ld.global.b32 {name}, [at+{4 * i}];" for i, name in enumerate("abc"))
    registers = ".reg .b64 at; .reg .b32 a, b, c;"
    kernel = f".visible .entry k(.param .u64 p) {{ {registers} ld.param.u64 at, [p]; {loads} {body} st.global.b32 [at], c; ret; }}"
    (folder / "k.ptx").write_text(f".version 8.7\n.target sm_{target}\n.address_size 64\n{kernel}\n")
    newer = TOOLS / "ptxas-blackwell"
    tool = newer if target >= 100 and newer.exists() else TOOLS / "ptxas"
    if subprocess.run([tool, f"-arch=sm_{target}", "k.ptx", "-o", "k.cubin"], cwd=folder, capture_output=True, check=False).returncode:
        return None
    listing = subprocess.run([TOOLS / "cuobjdump", "-sass", "k.cubin"], cwd=folder, capture_output=True, text=True, check=True).stdout
    operations = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d+ )?([\w.]+)", listing)
    return sum(
        re.match(r"HFMA2|HADD2|HMUL2|HMNMX2|VI|IMAD|LOP|PRMT|SEL|SHF|FSETP|ISETP", name) is not None and "MOV" not in name
        for name in operations
    )
