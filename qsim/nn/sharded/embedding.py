"""Lookups in distributed tables: every process looks up its shard. Noise is as in `qsim.nn.sharded`.

| table | indices | result |
|---|---|---|
| `Shard(0)`: rows | `Replicate()` | `Partial()` |
| `Shard(1)`: columns | `Replicate()` | `Shard(-1)` |
| `Replicate()` | `Replicate()`, or `Shard` of any dimension | as the indices |
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qsim.nn.product.embedding import Lookup
from qsim.nn.sharded.shares import Placements, is_shard, refuse_shard
from qsim.random.shards import span


def of_rows(lookup: Lookup, indices: Tensor, weight: DTensor, *, adds: bool) -> tuple[Lookup, Tensor, Tensor]:
    """A lookup in a process's rows of a table, the indices in these, and where indices are those of other processes' rows.

    Args:
        lookup: The lookup in the whole table.
        indices: The indices there.
        weight: The table.
        adds: Whether an accumulator adds the table's gradient.
    """
    if lookup.scale_grad_by_freq:
        raise ValueError("embedding: scale_grad_by_freq cannot be combined with a table that is distributed by rows")
    start, rows = span(weight, 0)[0], len(weight.to_local())
    elsewhere = (indices < start) | (indices >= start + rows)
    padding = lookup.padding_idx - start if start <= lookup.padding_idx < start + rows else -1
    # For rows of other processes any row will do: it is masked out, and its gradient is zero. An accumulator adds no such zeros.
    return Lookup(padding, skips_negative=adds), (indices - start).masked_fill(elsewhere, -1 if adds else 0), elsewhere


def layout(x: DTensor, weight: DTensor, of_x: Placement, of_weight: Placement, size: int) -> Placements:
    """The placements of `sharded.product` along one dimension of the mesh, which has a size; a lookup has no bias."""
    rows, none = weight.shape[0], Replicate()
    if is_shard(of_weight, 0):
        if (size - 1) * -(-rows // size) >= rows:
            raise ValueError(f"embedding: a table of {rows} rows leaves some of {size} processes none")
        return Replicate(), of_weight, Partial(), Partial(), of_weight, none, none
    if is_shard(of_weight, 1):
        return Replicate(), of_weight, Shard(x.dim()), Shard(x.dim()), of_weight, none, none
    refuse_shard("embedding: a table must be placed Shard(0), Shard(1) or Replicate()", of_weight)
    return (of_x, none, of_x, of_x, Partial(), none, none) if type(of_x) is Shard else (none,) * 7
