"""Tables in a device's memory, where they stay: prepared launches and loops keep their addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.numbers.buckets import buckets_of
from qsim_kernels.numbers.carrier import Carrier, GridBits
from qsim_kernels.numbers.grid import Rule
from qsim_kernels.numbers.places import memory_of, values_by_code
from qsim_kernels.torch.persistent import persistent

# No cache of a function: where two threads ask first, that frees the memory which one of them got.
_kept: dict[tuple[object, ...], Tensor] = {}


def rounding_table(how: GridBits, rule: Rule, device: torch.device) -> Tensor:
    """The places of a rounding onto a table in memory; see `memory_of`."""
    # Only modes, overflows and whether random bits are drawn differ between places.
    key = (how.table, rule.mode, rule.overflow, how.carrier, how.writes_codes, device)
    if key not in _kept:
        _kept.setdefault(key, persistent(memory_of(how.table, rule, how.carrier, how.writes_codes), torch.int64, device))
    return _kept[key]


def code_table(text: str, bits: int, carrier: Carrier, device: torch.device) -> Tensor:
    """The bits of the value of each code in memory; see `values_by_code`."""
    key = (text, bits, carrier, device)
    if key not in _kept:
        _kept.setdefault(key, persistent(values_by_code(text, bits, carrier), torch.int64, device))
    return _kept[key]


def loop_table(text: str, rule: Rule) -> Tensor:
    """The memory of a rounding onto a table for loops on a CPU; see `Buckets`."""
    key = ("loop", text, rule.mode, rule.overflow)
    if key not in _kept:
        _kept.setdefault(key, torch.tensor(buckets_of(text, rule).loop_memory(rule), dtype=torch.int32))
    return _kept[key]


def kernel_table(how: GridBits, rule: Rule, device: torch.device) -> Tensor:
    """The memory of a rounding onto a table for kernels; see `Buckets`."""
    key = ("kernel", how.table, rule.mode, rule.overflow, how.writes_codes, device)
    if key not in _kept:
        _kept.setdefault(key, persistent(buckets_of(how.table, rule, how.writes_codes).kernel_memory(rule), torch.int64, device))
    return _kept[key]
