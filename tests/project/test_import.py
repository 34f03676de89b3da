"""Modules that `import qsim` imports."""

import configparser
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
before = set(sys.modules)
import qsim
assert not torch.cuda.is_initialized()
print(*sorted(set(sys.modules) - before))
later = [f"qsim.{name}" for name in ("checkpoints", "compat", "diagnostics", "functional.fpu", "optim", "plot", "studies")]
print([name for name in later if name in sys.modules])
print({*(name.partition(".")[2] for name in later if name.count(".") == 1), "export", "fpu", "load", "save"} <= set(dir(qsim)))
import qsim.cli
import qsim.compat.qtorch
qsim.plot.number_line, qsim.studies.named
qsim.convert(torch.nn.Linear(2, 2), qsim.FivePoint(act="e4m3"))
print([name for name in ("matplotlib", "scipy", "sklearn", "transformers", "triton") if name in sys.modules])
qsim.save, qsim.diagnostics.Monitor, qsim.optim.AdamW, qsim.fpu
print([name for name in later if name not in sys.modules], hasattr(qsim, "plots"))
import qsim.studies.cluster
print("distributed" in sys.modules)
"""


def test_import_brings_only_qsim_itself_and_the_rest_once_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    first, *then = done.stdout.splitlines()
    brought = first.split()
    assert "qsim" in brought
    assert "qsim_kernels.ops.quantize" in brought
    # torch has already imported everything else that it may need.
    heavy = [name for name in brought if name.split(".")[0] not in ("qsim", "qsim_kernels", *sys.stdlib_module_names)]
    assert heavy == []
    later = (
        "qsim.cli",
        "qsim.checkpoints",
        "qsim.compat",
        "qsim.diagnostics",
        "qsim.functional.fpu",
        "qsim.optim",
        "qsim.plot",
        "qsim.studies",
    )
    assert [name for name in brought if name.startswith((*later, "qsim_kernels.numba", "qsim_kernels.triton"))] == []
    # No part of it exists before it is requested, and other packages are only imported to draw, to run a study or to compile.
    assert then == ["[]", "True", "[]", "[] False", "False"]


def test_every_package_is_installed() -> None:
    root = Path(__file__).parents[2]
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    files = [*(root / "qsim").rglob("*.py"), *(root / "kernels" / "qsim_kernels").rglob("*.py")]
    folders = {file.parent.relative_to(root / "kernels" if "kernels" in file.relative_to(root).parts[:1] else root) for file in files}
    assert set(config["options"]["packages"].split()) == {".".join(folder.parts) for folder in folders}
