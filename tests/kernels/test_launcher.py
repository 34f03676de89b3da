"""Launches of compiled kernels: by way of Triton once per form, directly from then on. The kernel here only notes its calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from qsim_kernels import private
from qsim_kernels.triton.host import launcher as host
from support.side_by_side import DEVICE
from support.triton_code import compiled_code

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the other tests launch directly")


class Kernel:
    """A kernel whose compiled forms note the arguments of direct launches."""

    fn = SimpleNamespace(__name__="noting_kernel")

    def __init__(self) -> None:
        self.code = ""
        self.by_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, programs: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: int) -> Any:
            self.by_triton.append((programs[0], *arguments[2:], options))
            run = SimpleNamespace(launch=self._note, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=0, launch_pdl=0)
            return SimpleNamespace(run=run, function=17, packed_metadata="metadata")

        return launch

    def warmup(self, *arguments: Any, grid: Any, **options: int) -> Any:
        return SimpleNamespace(asm={"ttgir": self.code})

    def _note(self, *arguments: Any) -> None:
        self.direct.append(arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel to launch as on a GPU."""
    monkeypatch.setattr(host, "_INTERPRETED", False)
    monkeypatch.setattr(host, "_current_device", lambda: -1)
    monkeypatch.setattr(host, "_current_stream", lambda device: 23)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return Kernel()


def test_each_form_goes_through_triton_once(kernel: Kernel) -> None:
    x, launch = torch.zeros(64), host.Launch(host.launcher(kernel, (), 5, "constant", num_warps=2), 3, (7,))
    odd = x[1:]
    for source in (x, odd, x, x, odd):
        launch(source, x, None)
    assert kernel.by_triton == [(3, None, 7, 5, "constant", {"num_warps": 2})] * 2
    head = (3, 1, 1, 23, 17, 0, 0, None, None, "metadata", None, None, None)
    tail = (x.data_ptr(), None, 7, 5, "constant")
    assert kernel.direct == [(*head, source.data_ptr(), *tail) for source in (x, x, odd)]


def test_the_form_depends_on_every_tensor(kernel: Kernel) -> None:
    """On the dtype and the alignment of those between `x` and `out` and the numbers, too: compiled code would misread others."""
    x, launch = torch.zeros(64), host.Launch(host.launcher(kernel, ()), 1)
    given = [torch.ones(()), torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bfloat16), None, x[1:2]]
    for _ in range(2):
        for other in given:
            launch(x, x, 5, other)
    launch(x.bfloat16(), x, 5, given[0])
    launch(x, x.double(), 5, given[0])
    assert [arguments[2] for arguments in kernel.by_triton] == [*given, given[0], given[0]]
    assert [arguments[-1] for arguments in kernel.direct] == given


def test_tensors_that_are_not_contiguous_raise_an_error(kernel: Kernel) -> None:
    """Except those that are stored as `x` is, for whose strides a launch is prepared."""
    x, launch = torch.zeros(8, 4).t(), host.Launch(host.launcher(kernel, ()), 1)
    launch(x, x, torch.zeros(8, 4).t())
    with pytest.raises(ValueError, match=r"takes tensors that are contiguous, got shape \(4,\) with strides \(2,\)"):
        launch(x, x, torch.zeros(8)[::2])
    assert len(kernel.by_triton) == 1


def test_a_kernel_is_not_launched_where_its_texts_get_other_elements_than_they_expect(kernel: Kernel) -> None:
    """As after a release of Triton that places elements otherwise: an error, before anything is written."""
    kernel.code = compiled_code(
        "thread", "#ttg.blocked<{sizePerThread = [1, 2], threadsPerWarp = [1, 32], warpsPerCTA = [1, 1], order = [1, 0]}>"
    )
    x = torch.zeros(64)
    with pytest.raises(RuntimeError, match=r"Triton 3\.6\.0 compiles noting_kernel with elements on other lanes than its PTX expects"):
        host.Launch(host.launcher(kernel, ()), 1)(x, x)
    assert not kernel.by_triton


def test_hooks_see_every_launch(kernel: Kernel) -> None:
    x, launch = torch.zeros(64), host.Launch(host.launcher(kernel, ()), 1)
    launch(x, x)
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        launch(x, x)
    finally:
        hook.remove(print)
    launch(x, x)
    assert (len(kernel.by_triton), len(kernel.direct)) == (2, 1)


def test_a_triton_whose_kernels_cannot_be_launched_directly_launches_them(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, launch, name = torch.zeros(64), host.Launch(host.launcher(kernel, ()), 1), "packed_metadata"
    monkeypatch.setattr(private, "_LAUNCH", ("run", "function", f"{name}_gone"))
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=f"Triton's compiled kernels lack one of run, function, {name}_gone: launches take longer"):
            launch(x, x)
    assert (len(kernel.by_triton), len(kernel.direct)) == (2, 0)


def test_nothing_is_launched_for_no_programs(kernel: Kernel) -> None:
    x = torch.zeros(0)
    host.Launch(host.launcher(kernel, ()), 0)(x, x)
    assert not kernel.by_triton


def test_one_launcher_for_equal_arguments(kernel: Kernel) -> None:
    assert host.launcher(kernel, (torch.float32,), 1) is host.launcher(kernel, (torch.float32,), 1)
    assert host.launcher(kernel, (torch.float32,), 1) is not host.launcher(kernel, (torch.float16,), 1)
