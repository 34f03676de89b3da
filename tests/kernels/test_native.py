"""Tests that machine code is loaded without Numba, compiled by one process at a time, and never taken from a broken file."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

native: Any = pytest.importorskip("qsim_kernels.numba.native", reason="needs numba")
NAME = "scales", "fit", "qsim_scales_fit"
FORKS = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")


@pytest.fixture(scope="module")
def code() -> bytes:
    """The machine code of a loop."""
    return native._machine_code(*NAME)  # type: ignore[no-any-return]


@pytest.fixture
def compiled(code: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """An empty cache folder, and the names of what is compiled, which takes no time."""
    from qsim_kernels.numba import building

    names: list[str] = []
    monkeypatch.setattr(building, "machine_code", lambda module, name, *_: names.append(name) or code)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.folder.cache_clear()
    yield names
    native.folder.cache_clear()


CALLS = """
import torch, qsim
x = torch.randn(40, 32)
for format in ("e4m3", "int8", "nvfp4"):
    qsim.quantize(x, format), qsim.quantize(x, format, "stochastic", seed=1)
qsim.decode(qsim.encode(x, "e4m3"), "e4m3")
y = qsim.quantize(x, "e4m3")
qsim.matmul(y, y.T, "h100_fp8"), qsim.matmul(y, y.T, qsim.accumulators.Rounded("fp16", rounding="stochastic"), seed=1)
"""


@pytest.mark.slow
def test_a_fresh_process_needs_no_numba() -> None:
    exec(CALLS, {})  # compiles what is missing
    subprocess.run([sys.executable, "-c", f'import sys; sys.modules["numba"] = None{CALLS}'], check=True)


def test_what_was_compiled_is_kept(compiled: list[str], code: bytes) -> None:
    assert [native._machine_code(*NAME) for _ in range(2)] == [code, code]
    assert compiled == ["fit"]
    assert sorted(file.name for file in native.folder().iterdir()) == ["scales.fit.lock", "scales.fit.o"]


@pytest.mark.parametrize("content", [b"", b"short", b"0" * 5000])
def test_a_broken_file_is_compiled_again(compiled: list[str], code: bytes, content: bytes) -> None:
    native._machine_code(*NAME)
    file = native.folder() / "scales.fit.o"
    file.write_bytes(content)
    assert native._machine_code(*NAME) == code
    assert compiled == ["fit", "fit"]
    assert file.read_bytes().endswith(code)


@pytest.mark.parametrize("changed", ["NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"])
def test_processors_do_not_share_code(compiled: list[str], monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    before = native.folder()
    monkeypatch.setenv(changed, "other")
    native.folder.cache_clear()
    assert native.folder() != before


def test_an_old_numba_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "version", lambda package: "0.61.2")
    with pytest.raises(ImportError, match=r"loops need Numba 0\.65 or later, and 0\.61\.2 is installed"):
        native.check_numba()


DISABLED = """
import warnings
import torch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import qsim
    x = torch.linspace(-3, 3, 100).view(4, 25)
    results = qsim.quantize(x, "e4m3"), qsim.quantize(x, "mxfp4"), qsim.matmul(x.sign(), x.sign().T, "h100_bf16")
    w = torch.nn.Parameter(x.bfloat16())
    w.grad = w.detach().clone()
    qsim.optim.SGD([w], 0.1, update="stochastic", seed=1).step()
print({str(each.message) for each in seen if issubclass(each.category, RuntimeWarning)})
print(sum(map(hash, [x for result in (*results, w) for x in result.flatten().tolist()])))
"""


def test_without_numbas_compiler_plain_torch_rounds_and_a_warning_says_so() -> None:
    run = [
        subprocess.run([sys.executable, "-c", DISABLED], env=os.environ | {"NUMBA_DISABLE_JIT": flag}, capture_output=True, text=True)
        for flag in ("1", "0")
    ]
    assert [each.returncode for each in run] == [0, 0], run[0].stderr
    (warned, found), (silent, due) = (each.stdout.splitlines() for each in run)
    assert "plain torch rounds CPU tensors, several times slower than Numba, because" in warned
    assert "NUMBA_DISABLE_JIT is set" in warned
    assert silent == "set()"
    assert found == due


def test_a_numba_that_cannot_be_imported_is_refused_before_anything_is_compiled(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError):
        native.check_numba()
    native._machine_code(*NAME)
    native.check_numba()  # later processes need no Numba


def _compile(begun: Any, seconds: float) -> None:
    """Compile slowly, in a process of its own."""
    from qsim_kernels.numba import building

    fast = building.machine_code

    def slow(*arguments: Any) -> bytes:
        begun.put(os.getpid())
        time.sleep(seconds)
        return fast(*arguments)

    building.machine_code = slow
    native._machine_code(*NAME)


@FORKS
def test_processes_wait_for_one_that_compiles(compiled: list[str], code: bytes) -> None:
    context = multiprocessing.get_context("fork")
    begun = context.Queue()
    processes = [context.Process(target=_compile, args=(begun, 0.2)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    begun.get(timeout=5)
    assert begun.empty()
    assert native._machine_code(*NAME) == code
    assert compiled == []


@FORKS
def test_a_process_that_dies_while_it_compiles_keeps_nobody_waiting(
    compiled: list[str], code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    begun = context.Queue()
    process = context.Process(target=_compile, args=(begun, 60.0))
    process.start()
    begun.get(timeout=30)
    process.kill()
    process.join()
    waits: list[float] = []
    monkeypatch.setattr("qsim_kernels.numba.cache.time", SimpleNamespace(monotonic=time.monotonic, sleep=waits.append))
    assert native._machine_code(*NAME) == code
    assert (waits, compiled) == ([], ["fit"])


@FORKS
def test_a_process_that_hangs_is_not_waited_for_forever(compiled: list[str], code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsim_kernels.numba.cache.PATIENCE", 0.1)
    context = multiprocessing.get_context("fork")
    begun = context.Queue()
    process = context.Process(target=_compile, args=(begun, 60.0))
    process.start()
    try:
        begun.get(timeout=30)
        assert native._machine_code(*NAME) == code
        assert compiled == ["fit"]
    finally:
        process.kill()
        process.join()
