"""The operator that updates parameters by one optimizer step: schema, one implementation per backend."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from qsim_kernels.ops.backend import HAS_NUMBA, OnBackend, library
from qsim_kernels.updates import Step, read_algorithm, read_roundings

library.define(
    "update_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] largest, "
    "Tensor(e!)[] compensations, Tensor(f!)[] steps, Tensor(g!)[] products, Tensor lr, Tensor? grad_scale, Tensor? found_inf, "
    "int seed, int[] streams, int[] places, str algorithm, str grid, str rule, str inner, str inner_rule, str state, str state_rule, "
    "bool in_format) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Implementation(OnBackend):
    """The operator on one backend."""

    def update_(self, *arguments: Any) -> None:
        """Update parameters by one step; see `reference.updates.update`."""
        step = Step(*arguments[: len(Step._fields)])
        algorithm, *roundings = arguments[len(Step._fields) :]
        self._backend.update(step, read_algorithm(algorithm), read_roundings(*roundings))
        # Kernels write without torch noticing.
        for changed in step.changed:
            increment_version(changed)


library.impl("update_", Implementation("qsim_kernels.reference.updates").update_, "CompositeExplicitAutograd")
if HAS_NUMBA:
    library.impl("update_", Implementation("qsim_kernels.compiled.updates", otherwise="qsim_kernels.reference.updates").update_, "CPU")
if torch.version.hip is None:
    library.impl("update_", Implementation("qsim_kernels.triton").update_, "CUDA")
torch.library.register_fake("qsim::update_", lambda *_: None, lib=library)
