"""The tensors to round for each of torch's operators: results, and arguments that it writes to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qsim.private import schema_of

#: Namespaces of operators that compute nothing, have their own roundings, or run next to the others.
_NOT_ARITHMETIC = frozenset({"qsim", "prim", "profiler", "c10d", "_c10d_functional", "c10d_functional", "symm_mem", "debugprims"})

#: Operators that move numbers without computing new ones.
_COPIES = frozenset((
    "_foreach_copy", "_foreach_zero", "_pin_memory", "_reshape_copy", "_to_copy", "_unsafe_index", "_unsafe_view", "amax", "amin",
    "as_strided_scatter", "cat", "channel_shuffle", "clone", "complex", "copy", "cummax", "cummin", "diag_embed", "diagonal_scatter",
    "embedding", "empty", "empty_like", "empty_permuted", "empty_strided", "fill.Tensor", "fill_.Tensor", "flip", "gather", "im2col",
    "index", "index_select", "kthvalue", "lift", "lift_fresh_copy", "masked_scatter", "masked_select", "max", "maximum",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "median", "min", "minimum", "mode", "nanmedian", "new_empty",
    "new_empty_strided", "new_zeros", "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "repeat", "replication_pad1d", "replication_pad2d", "replication_pad3d", "resize", "resize_as", "roll", "rot90", "scatter.src",
    "scatter_.src", "select_scatter", "set", "slice_scatter", "sort", "stack", "take", "topk", "tril", "triu", "unsafe_split",
    "unsafe_split_with_sizes", "where", "zero", "zeros", "zeros_like",
))  # fmt: skip

#: Operators whose results after the first are only for the backward pass: statistics, sums of logits, work space. Fused operators keep
#: these as wide as they compute them.
_KEEP_ALL_BUT_FIRST = frozenset((
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "_ctc_loss", "_cudnn_ctc_loss", "_efficient_attention_forward",
    "_flash_attention_forward", "_fused_rms_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "_thnn_fused_gru_cell", "batch_norm_no_update", "cudnn_batch_norm",
    "log_sigmoid_forward", "miopen_batch_norm", "multilabel_margin_loss_forward", "native_batch_norm", "native_group_norm",
    "native_layer_norm", "nll_loss2d_forward", "nll_loss_forward",
))  # fmt: skip
#: Batch normalization writes to these, which its schema does not declare.
_RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True)
class RoundedTensors:
    """The rounded tensors of one operator.

    Attributes:
        results: Its own results, by position; `None` if there are none.
        written: The arguments that it writes to, by position and name.
        running: The running statistics that it writes to in training, as for `written`.
        training: The argument that enables training.
    """

    results: frozenset[int]
    written: tuple[tuple[int, str], ...]
    running: tuple[tuple[int, str], ...] = ()
    training: tuple[int, str] | None = None

    def tensors_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that a call writes to."""
        found = [_argument(place, args, kwargs) for place in self.written]
        if self.training is not None and _argument(self.training, args, kwargs):
            # Do not bump their versions: other users of the same memory must not notice.
            found += [_argument(place, args, kwargs) for place in self.running]
        flat = [x for one in found for x in (one if isinstance(one, (list, tuple)) else [one])]
        return [x for x in flat if isinstance(x, Tensor)]


def _argument(place: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index, name = place
    return args[index] if index < len(args) else kwargs.get(name)


@cache
def rounded_of(operator: Any) -> RoundedTensors | None:
    """The tensors of an operator to round; `None` if it is left alone."""
    schema = schema_of(operator)
    namespace, _, name = schema.name.partition("::")
    if namespace in _NOT_ARITHMETIC or _copies(operator, name):
        return None
    arguments = list(enumerate(schema.arguments))
    written = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    returned = schema.returns[:1] if name in _KEEP_ALL_BUT_FIRST else schema.returns
    results = frozenset(i for i, result in enumerate(returned) if result.alias_info is None)
    known = {name for _, name in written}
    running = tuple((i, a.name) for i, a in arguments if a.name in _RUNNING and a.name not in known and "backward" not in name)
    training = next(((i, a.name) for i, a in arguments if a.name in ("training", "train")), None)
    return RoundedTensors(results, written, running, training) if results or written else None


def _copies(operator: Any, name: str) -> bool:
    """Whether an operator only returns views or copies of existing numbers, whatever its arguments."""
    if torch.Tag.view_copy in operator.tags or str(operator).partition(".")[2] in _COPIES or name.removesuffix("_") in _COPIES:
        return True
    returns = schema_of(operator).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def makes_none(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether this call of an operator computes no new numbers: it fills in constants, or counts.

    Counters are 0-d tensors to which 1 is added in place, like the steps of optimizers. In a narrow format such a counter would
    stop where steps become wider than 1, in bfloat16 at 256.
    """
    name = schema_of(operator).name
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::put", "aten::put_"):
        return len(args) < 4 or not args[3]  # otherwise it accumulates
    if name not in ("aten::add_", "aten::_foreach_add_") or len(args) < 2:
        return False
    counters, step = args[0] if isinstance(args[0], (list, tuple)) else [args[0]], args[1]
    if isinstance(step, Tensor):
        step = step.item() if step.dim() == 0 and step.device.type == "cpu" else None
    return isinstance(step, (int, float)) and step == 1 and all(x.dim() == 0 for x in counters)
