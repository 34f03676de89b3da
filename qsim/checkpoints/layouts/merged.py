"""Layers that servers merge into one, with a single scale of the whole weight for all of them.

vLLM and SGLang compute the projections of queries, keys and values in one product, and so those of a gated network, and those of latent
attention to its two latent vectors. The scales of rows and blocks stay as they are. Of scales of whole weights they take one for all:
weights of NVFP4 with others come out wrong, and weights of FP8 are rounded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qsim.checkpoints.layouts.plans import LayerPlan
from qsim.checkpoints.layouts.weights import CodedWeight
from qsim.formats import E4M3
from qsim.functional.codes import decode, encode
from qsim.text.warning import warn

#: The last parts of the names of layers that are merged.
_PARTNERS = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"), ("w1", "w3"))


def merged(names: Iterable[str]) -> list[list[str]]:
    """The groups of layers that servers merge, by their names.

    Example:
        >>> from qsim.checkpoints.layouts.merged import merged
        >>> merged(["0.q_proj", "0.o_proj", "0.k_proj", "1.q_proj"])
        [['0.q_proj', '0.k_proj']]
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        for i, partners in enumerate(_PARTNERS):
            if last in partners:
                groups.setdefault((parent, i), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def with_common_scales(plans: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
    """Give merged layers of NVFP4 a common scale of the whole weight, where that leaves all their weights unchanged.

    It does if the scales are powers of two, unless scales of blocks become too small. Otherwise a warning names the layers.
    """
    found, wrong, rounded = dict(plans), [], []
    for group in merged(plans):
        kinds = {(plans[name].scheme["format"], plans[name].scheme["weights"]["strategy"]) for name in group}
        if kinds == {("nvfp4-pack-quantized", "tensor_group")}:
            common = _common_outer([plans[name].coded() for name in group])
            found |= {name: replace(plans[name], outer=common) for name in group}
            wrong += [group] if common is None else []
        elif _differ(plans, group) and any(strategy == "tensor" and kind != "int-quantized" for kind, strategy in kinds):
            rounded.append(group)
    for groups, effect, fix in (
        (
            wrong,
            "take one scale of the whole weight for them, which makes weights wrong",
            "scales that are powers of two can be shared, as in nvfp4(outer=PerTensor('e8m0', 'ceil'))",
        ),
        (rounded, "round their weights again, to a common scale", "scales per row are kept, as in fp8_hybrid(PerRow())"),
    ):
        if groups:
            more = f" and {len(groups) - 1} further group{'s' * (len(groups) > 2)}" if len(groups) > 1 else ""
            warn(f"export: servers merge {', '.join(groups[0])}{more}, and {effect}; {fix}")
    return found


def _differ(plans: Mapping[str, LayerPlan], group: Sequence[str]) -> bool:
    """Whether layers have scales of their own; rows of one matrix, as in an expert, do not."""
    return len({id(plans[name].layer) for name in group}) > 1


def _common_outer(weights: Sequence[CodedWeight]) -> Tensor | None:
    """The scale of the whole tensor that all weights can have without a change of any value."""
    outers = [weight.outer for weight in weights if weight.outer is not None]
    if len(outers) < len(weights):
        return None if outers else torch.ones((), dtype=torch.float32, device="cpu")
    common = torch.stack(outers).amax()
    return common if all(_rescaled(weight, common) is not None for weight in weights) else None


def _rescaled(weight: CodedWeight, outer: Tensor) -> Tensor | None:
    """The codes of the scales of blocks under another scale of the whole tensor, if that leaves all values as they are."""
    assert weight.outer is not None
    assert weight.scale_codes is not None
    wanted = decode(weight.scale_codes, E4M3) * (weight.outer / outer)
    codes = encode(wanted, E4M3)
    same = torch.equal(decode(codes, E4M3), wanted) and torch.equal(wanted * outer, decode(weight.scale_codes, E4M3) * weight.outer)
    return codes if same else None


def under_common_scale(weight: CodedWeight, outer: Tensor | None) -> CodedWeight:
    """A weight under the common scale that was found for it."""
    if outer is None or weight.outer is None:
        return weight
    codes = _rescaled(weight, outer)
    assert codes is not None  # with_common_scales saw to it
    return replace(weight, scale_codes=codes, outer=outer)
