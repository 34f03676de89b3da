"""Setup of every test: a seed, poisoned memory, and GPU tests that are left out without a GPU."""

from __future__ import annotations

import gc
import getpass
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Without a GPU the Triton kernels run through Triton's interpreter, which must be selected before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    # Inductor compiles C++ in this process: the processes that it starts in advance are for Triton, and import torch for nothing.
    os.environ.setdefault("TORCH_WARM_POOL", "0")

# The compiler supports every instruction set that torch lists for this processor; compiling a program to be sure takes several seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# One thread computes: tensors of tests are small, pytest-xdist already has a process for every core, and threads of competing processes
# mostly wait for each other. OMP_NUM_THREADS sets another number, also for the processes that tests start.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# Inductor's cache key lacks ATEN_CPU_CAPABILITY, and code cached for one kind does not compile for another.
if kernels := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_{kernels}")

# Compilers make millions of objects, few of them garbage in cycles: Python's own thresholds spend a sixth of their time looking for it.
gc.set_threshold(50_000, 20, 20)

hypothesis.settings.register_profile("qsim", deadline=None, max_examples=60, print_blob=True)
hypothesis.settings.load_profile("qsim")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of torch's generators in every test (default 0)")
    parser.addoption("--no-missing", action="store_true", help="fail tests that are skipped for a missing package or program")


#: The reasons of tests that are skipped for a missing package or program.
MISSING = re.compile(r"could not import|is not installed|needs (numba|triton|dask)")


def _failed_if_missing(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """Turn a skip for a missing package or program into a failure, with `--no-missing`."""
    if report.skipped and config.getoption("--no-missing") and isinstance(report.longrepr, tuple) and MISSING.search(report.longrepr[2]):
        report.outcome, report.longrepr = "failed", f"--no-missing: {report.longrepr[2]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _failed_if_missing(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _failed_if_missing(report, collector.config)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores, because tests of ranks and of programs mostly wait for others; two more are slower."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device: tests marked gpu are left out"
    kernels = f"{torch.backends.cpu.get_cpu_capability()} kernels, {torch.get_num_threads()} thread(s)"
    return f"qsim: --seed={config.getoption('--seed')}, torch {torch.__version__}, {kernels}, {device}"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        sampled = item.get_closest_marker("sampled")
        # The first case, and others by their names: by their positions, all might have the same value of a parameter.
        left_out = sampled and cases[name] and zlib.crc32(item.nodeid.encode()) % sampled.args[0]
        if left_out or "quick_study" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        cases[name] += 1
    # Thousands of skipped tests would take longer to report than many take to run; the header says that they are left out.
    if not torch.cuda.is_available() and (left_out := [item for item in items if item.get_closest_marker("gpu")]):
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Exclude what imports and the collection made, a million objects, from every later pass of the garbage collector."""
    gc.freeze()


@pytest.fixture(scope="session")
def session_seed(request: pytest.FixtureRequest) -> int:
    """The seed given on the command line."""
    return int(request.config.getoption("--seed"))


@pytest.fixture(params=["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device for tests: each has its own implementation of the operators."""
    return torch.device(request.param)


@pytest.fixture
def hopper() -> torch.device:
    """The GPU, if its matrix units are those that qsim knows to the bit."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the units are those of an H100 and an H200")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _seeded(session_seed: int) -> None:
    """Seed torch's generators; without a GPU `torch.manual_seed` would format the stack three times, which takes longer than most tests."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(session_seed)
    torch.default_generator.manual_seed(session_seed)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill memory that `torch.empty` returns with NaN (the largest number, for integers), so that no result is right by accident."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def plain_arithmetic() -> Iterator[None]:
    """GPUs convolve float32 in TF32 by default; tensors of tests are too small for a second thread."""
    before = torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_num_threads(before[1])


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let Dynamo forget what it has compiled: after a graph break inside a loop it skips `nn.Sequential` for the rest of the process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have empty files as figures: drawing one takes longer than most tests' studies."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **options: Path(file).write_text("<svg/>"))


@pytest.fixture(scope="session")
def quick_study(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run the quick form of a study with given settings, and return its plan.

    All processes of pytest-xdist share the results of the first: every test file has one study with one choice of settings.
    """
    from filelock import FileLock

    from qsim import studies

    own = tmp_path_factory.getbasetemp()
    folder = own.parent if hasattr(request.config, "workerinput") else own

    def carried_out(name: str, **settings: Any) -> studies.Plan:
        plan = studies.plan(name, form="quick", out=folder / name, settings=settings)
        with FileLock(folder / f"{name}.lock"):
            if plan.missing():
                plan.carry_out()
                assert all(path.stat().st_size > 1000 for path in plan.write())
        return plan

    return carried_out
