"""Which share of real models is rounded. For the table of all models: `PYTHONPATH=tests python tests/nn/calls/test_models.py`.

Names of models as arguments give their rows only.
"""

from __future__ import annotations

import sys

import pytest
import torch

import qsim
from qsim import FivePoint
from qsim.nn import Coverage
from qsim.text.columns import aligned
from qsim.text.percentages import percent
from support.covered_models import MODELS

ALL = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")


def covered(name: str, calls: str) -> Coverage:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    qsim.convert(model, ALL, calls=calls)  # type: ignore[arg-type]
    return qsim.coverage(model, tuple(inputs.values()) if len(inputs) == 1 else inputs)


def reasons(found: Coverage) -> set[str]:
    """Why products are not rounded. Releases of transformers before 5.18 multiply the frequencies of rotary embeddings by positions."""
    return {product.reason for product in found.products if not product.reason.endswith("inv_freq")}


def share_with_a_parameter(found: Coverage) -> float:
    """The rounded share of the multiply-adds that are not products of activations, nor of constants."""
    own = [product for product in found.products if "two activations" not in product.reason and "on the buffer" not in product.reason]
    return sum(product.multiply_adds for product in own if not product.reason) / sum(product.multiply_adds for product in own)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mamba", "CLIP", "T5", "DeepSeek-V3", "Mamba-2"])
def test_every_product_is_rounded_and_every_layer_that_is_listed_runs(name: str) -> None:
    pytest.importorskip("transformers")
    found = covered(name, "parameters")
    assert (share_with_a_parameter(found), found.never_called) == (1.0, ())
    # Releases before 5.18 write Mamba-2 without a product of activations.
    assert reasons(found) == {"", "product of two activations"} or (name == "Mamba-2" and reasons(found) == {""})
    found = covered(name, "all")
    assert (found.never_called, reasons(found)) == ((), {""})


if __name__ == "__main__":
    rows = [("model", "multiply-adds", 'calls="none"', "by default", "of those with a parameter", 'calls="all"', "never called")]
    for name in sys.argv[1:] or MODELS:
        none, default, everything = (covered(name, calls) for calls in ("none", "parameters", "all"))
        shares = (none.share, default.share, share_with_a_parameter(default), everything.share)
        rows.append((name, f"{default.multiply_adds:,}", *map(percent, shares), str(len(default.never_called))))
        print(aligned(rows[-1:]), flush=True)
    print(aligned(rows))
