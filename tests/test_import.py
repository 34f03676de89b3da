"""What `import qsim` brings along."""

import subprocess
import sys

SCRIPT = """
import sys
import torch
before = set(sys.modules)
import qsim
assert not torch.cuda.is_initialized()
print("\\n".join(sorted(set(sys.modules) - before)))
"""


def test_import_brings_only_qsim_itself() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    brought = done.stdout.split()
    assert "qsim" in brought
    assert "qsim_kernels.ops" in brought
    # Everything else that it may need, torch has imported already.
    heavy = [name for name in brought if name.split(".")[0] not in ("qsim", "qsim_kernels", *sys.stdlib_module_names)]
    assert heavy == []
    assert [name for name in brought if name.startswith(("qsim.cli", "qsim.bench", "qsim_kernels.triton"))] == []


def test_triton_is_not_imported_even_with_torch() -> None:
    script = "import sys, qsim; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
