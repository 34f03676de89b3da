"""`qsim.diagnostics.backends`: which implementation runs, and what happens if Numba is installed but cannot be imported."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

import qsim
from qsim.functional import backends
from qsim_kernels.ops import backend
from qsim_kernels.ops.backend import library
from qsim_kernels.ops.quantize import Implementation

WITHOUT_NUMBA = "plain torch rounds CPU tensors, several times slower than Numba, because: no compiler"


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba and the loops that need it cannot be imported, as where it does not support the version of Python."""
    own = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == "numba" or name.startswith("qsim_kernels.numba"):
            raise ImportError("no compiler")
        return own(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)


def test_a_cpu_has_numba_if_it_is_installed() -> None:
    has_numba = importlib.util.find_spec("numba") is not None
    assert qsim.diagnostics.backends()["cpu"].runs == ("numba" if has_numba else "torch")


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "HAS_NUMBA", False)
    assert qsim.diagnostics.backends()["cpu"].runs == "torch"
    assert "pip install 'qsim-torch[cpu]'" in qsim.diagnostics.backends()["cpu"].why


@pytest.mark.usefixtures("no_numba")
def test_numba_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "HAS_NUMBA", True)
    assert qsim.diagnostics.backends()["cpu"] == ("torch", "Numba is installed, but cannot be used: no compiler")
    x = torch.linspace(-3, 3, 100)
    grid, _, rule = *qsim.format("e2m1").spelling, qsim.rounding.resolve("nearest").spelling["saturate"]
    broken = Implementation("qsim_kernels.numba", otherwise="qsim_kernels.torch")
    with pytest.warns(RuntimeWarning, match=WITHOUT_NUMBA):
        found = broken.quantize(x, None, grid, rule, 0, 0, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        broken.quantize(x, None, grid, rule, 0, 0, torch.float32)
    assert torch.equal(found, qsim.quantize(x, "e2m1"))


@pytest.mark.skipif(not backends.HAS_NUMBA, reason="needs numba")
def test_every_operator_runs_where_numba_cannot_be_imported() -> None:
    on_cpus = {name: function.__self__ for (name, key), function in library._functions.items() if key == "CPU"}
    assert {"quantize", "accumulate", "accumulate_scaled", "update_"} <= {*on_cpus}
    assert [name for name, own in on_cpus.items() if own._otherwise is None] == []


@pytest.mark.usefixtures("no_numba")
def test_a_backend_without_a_substitute_raises_the_error() -> None:
    with pytest.raises(ImportError, match="no compiler"):
        Implementation("qsim_kernels.numba").decode(torch.zeros(1, dtype=torch.uint8), *qsim.format("e2m1").spelling, torch.float32)


def test_amds_gpus_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    runs, why = qsim.diagnostics.backends()["cuda"]
    assert runs == "torch"
    assert why == "this is torch for AMD's GPUs, for which there are no kernels: plain torch rounds, several times slower"


def test_intels_gpus_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert qsim.diagnostics.backends()["xpu"] == (None, "there is no XPU device here")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    expected = "there are no kernels for Intel's GPUs: plain torch rounds, several times slower"
    assert qsim.diagnostics.backends()["xpu"] == ("torch", expected)


@pytest.mark.parametrize(("key", "gpus"), [("CUDA", "AMD's GPUs"), ("XPU", "Intel's GPUs")])
def test_one_warning_says_that_plain_torch_rounds_on_other_vendors_gpus(key: str, gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever operator runs first, and however many follow."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    backend._warn_of_plain_torch.cache_clear()
    modules = "torch", "numba", "triton.quantize.launch"
    first, second = (Implementation.by_dispatch_key(*modules)[key] for _ in range(2))
    x = torch.linspace(-3, 3, 100)
    given = *qsim.format("e2m1").spelling[:1], qsim.rounding.resolve("nearest").spelling["saturate"], 0, 0, torch.float32
    with pytest.warns(
        RuntimeWarning, match=f"plain torch rounds tensors on {gpus}, for which qsim has no kernels: the same bits"
    ) as caught:
        found = [each.quantize(x, None, *given) for each in (first, second, first)]
    assert len(caught) == 1
    assert all(torch.equal(each, qsim.quantize(x, "e2m1")) for each in found)
    backend._warn_of_plain_torch.cache_clear()


def test_nvidias_gpus_have_kernels_without_a_warning() -> None:
    assert Implementation.by_dispatch_key("torch", "numba", "triton.quantize.launch")["CUDA"]._warns_of is None
    assert library._functions["quantize", "XPU"].__self__._warns_of == "Intel's GPUs"


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_capabilities_of_other_vendors_choose_no_ptx(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 has capability 9.4, above an H100's 9.0."""
    pytest.importorskip("triton")
    from qsim_kernels.triton.host import capabilities

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(capabilities, "INTERPRETED", False)
    assert capabilities.supports_packed_16_bit.__wrapped__() == (hip is None)
    assert capabilities.compute_capability(0) == ((9, 4) if hip is None else (0, 0))


def test_compilers_get_no_ptx_for_amds_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from qsim_kernels.lowered import inductor

    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert inductor.is_tested("cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not inductor.is_tested("cuda")


def test_a_gpu_is_named_if_there_is_one() -> None:
    runs, why = qsim.diagnostics.backends()["cuda"]
    if torch.cuda.is_available():
        assert runs == "triton"
        assert torch.cuda.get_device_name() in why
    else:
        assert (runs, why) == (None, "there is no CUDA device here")
