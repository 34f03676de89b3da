"""The operator that updates parameters by one optimizer step: schema, one implementation per backend."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.autograd.graph import increment_version

from qsim_kernels.ops.backend import library
from qsim_kernels.updates import Step, read_algorithm, read_roundings

library.define(
    "update_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] largest, "
    "Tensor(e!)[] compensations, Tensor(f!)[] steps, Tensor(g!)[] products, Tensor lr, Tensor? grad_scale, Tensor? found_inf, "
    "int seed, int[] streams, int[] places, str algorithm, str grid, str rule, str inner, str inner_rule, str state, str state_rule, "
    "bool in_format) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _implementation(backend: str) -> Any:
    def update_(*arguments: Any) -> None:
        """Update parameters by one step; see `reference.updates.update`."""
        step = Step(*arguments[: len(Step._fields)])
        algorithm, *roundings = arguments[len(Step._fields) :]
        importlib.import_module(backend).update(step, read_algorithm(algorithm), read_roundings(*roundings))
        # Kernels write without torch noticing.
        for changed in step.changed:
            increment_version(changed)

    return update_


library.impl("update_", _implementation("qsim_kernels.reference"), "CompositeExplicitAutograd")
if torch.version.hip is None:
    library.impl("update_", _implementation("qsim_kernels.triton"), "CUDA")
torch.library.register_fake("qsim::update_", lambda *_: None, lib=library)
