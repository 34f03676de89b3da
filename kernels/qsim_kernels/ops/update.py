"""The operator that updates parameters by one optimizer step: schema, one implementation per backend."""

from __future__ import annotations

from typing import Any

from torch.autograd.graph import increment_version

from qsim_kernels.numbers.updates import Step, read_algorithm, read_roundings
from qsim_kernels.ops.backend import OnBackend, operator


class Implementation(OnBackend):
    """The operator on one backend."""

    @operator(
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] largest, "
        "Tensor(e!)[] compensations, Tensor(f!)[] steps, Tensor(g!)[] products, Tensor lr, Tensor? grad_scale, Tensor? found_inf, "
        "int seed, int[] streams, int[] places, str algorithm, str grid, str rule, str inner, str inner_rule, str state, str state_rule, "
        "bool in_format) -> ()",
        lambda *_: None,
    )
    def update_(self, *arguments: Any) -> None:
        """Update parameters by one step; see `torch.updates.update`."""
        step = Step(*arguments[: len(Step._fields)])
        algorithm, *roundings = arguments[len(Step._fields) :]
        self._backend.update(step, read_algorithm(algorithm), read_roundings(*roundings))
        # Kernels write without torch noticing.
        for changed in step.changed:
            increment_version(changed)


Implementation.register(reference="torch.updates", compiled="numba.updates", triton="triton")
