"""Try an installed qsim from outside its repository: `make dist` runs this with the wheel in a separate environment."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from torch import nn

import qsim
from qsim.cli import main


def is_installed() -> None:
    """Check that the package comes from the wheel, with its type hints, and only installs what it needs."""
    folder = Path(qsim.__file__).parent
    assert folder.parent.name == "site-packages", folder
    assert (folder / "py.typed").exists()
    assert distribution("qsim-torch").version == qsim.__version__
    required = [name for name in distribution("qsim-torch").requires or [] if "extra ==" not in name]
    assert {re.split(r"\W", name)[0] for name in required} == {"torch", "triton"}, required


def rounds() -> None:
    """Check that a tensor and a layer round, and the layer trains."""
    assert qsim.quantize(torch.tensor([0.3, -17.0, 1e5]), "e4m3").tolist() == [0.3125, -16.0, 448.0]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    qsim.convert(model, "mxfp4")
    optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-2, format="bf16", update="stochastic")
    parameters = [*model.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4).backward()
    optimizer.step()
    assert all(
        parameter.isfinite().all() and not torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True)
    )


def has_a_command() -> None:
    """Check that the command works, and names missing packages."""
    command = Path(sys.executable).with_name("qsim")
    listed = subprocess.run([command, "formats"], capture_output=True, text=True, check=True).stdout
    assert "e4m3" in listed
    refused = io.StringIO()
    with contextlib.redirect_stderr(refused):
        assert main(["study", "batch-size"]) != 0
    assert "qsim-torch[study]" in refused.getvalue(), refused.getvalue()


if __name__ == "__main__":
    is_installed()
    rounds()
    has_a_command()
    print(f"qsim-torch {qsim.__version__} works as installed in {Path(qsim.__file__).parent}")
