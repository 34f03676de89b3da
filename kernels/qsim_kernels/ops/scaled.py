"""The operators that round under scales: schema, fake implementation, plain torch for every device.

`tiles` are the numbers of `scales.TileSizes`; `turn` those of `scales.Turn`, or none; `restore` is a `scales.Restore`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from qsim_kernels.numbers.scales import (
    ElementRounding,
    Restore,
    ScaleChoice,
    ScaleCorrection,
    ScaledRounding,
    ScaleGroups,
    TileSizes,
    Turn,
    read_scales,
)
from qsim_kernels.ops.backend import OnBackend, one_by_one, operator, read_rounding

_ROUNDING = "Tensor? seed, str grid, str rule, SymInt stream, SymInt offset, ScalarType dtype, int restore"
_TILES, _MAKING = "SymInt[] tiles, SymInt[] turn", "str making, str scale_grid"
_IN_BASIS = f"Tensor x, Tensor? flips, {_TILES}, {_MAKING}"
_FACTORS = "Tensor[] factors, Tensor? bias, ScalarType dtype"


@lru_cache(maxsize=4096)
def _read_tiles(tiles: tuple[int, ...], turn: tuple[int, ...], shape: torch.Size) -> tuple[TileSizes, Turn | None, tuple[int, int, int]]:
    """Which elements share a scale, the transform, and the number of scales of a tensor."""
    where = TileSizes.of(tiles)
    return where, Turn(*turn) if turn else None, where.counts(shape.numel())


@lru_cache(maxsize=4096)
def _read_elements(grid: str, rule: str, restore: int, is_seeded: bool) -> ElementRounding:
    return ElementRounding(*read_rounding(grid, rule, is_seeded), Restore(restore))


def _rounding(
    x: Tensor, tiles: Sequence[int], turn: Sequence[int], seed: Tensor | None, grid: str, rule: str, *places: Any
) -> tuple[ScaledRounding, tuple[int, int, int]]:
    """The rounding of a tensor under scales, and their number."""
    stream, offset, _, restore = places
    where, turned, counts = _read_tiles(tuple(tiles), tuple(turn), x.shape)
    elements = _read_elements(grid, rule, restore, seed is not None)
    return ScaledRounding(where, turned, elements, (seed, stream, offset)), counts


def _prepared(x: Tensor, *rounding: Any) -> tuple[ScaledRounding, Tensor, tuple[int, int, int]]:
    """The rounding of a tensor under scales, an empty result, and the number of scales."""
    scaled, counts = _rounding(x, *rounding)
    return scaled, torch.empty_like(x, dtype=rounding[-2], memory_format=torch.contiguous_format), counts


def _parts(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of an operator in the basis of a transform: those of `_IN_BASIS` behind the tensor, its own, those of `_ROUNDING`."""
    return given[:5], given[5:-7], given[-7:]


def _fake_scales(x: Tensor, tiles: Sequence[int], restore: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.new_empty((0,) if restore else TileSizes.of(tiles).counts(x.numel()), dtype=dtype)


def _counts(tiles: Sequence[int], held: Tensor) -> tuple[int, int, int]:
    """The number of scales of matrices that are runs of rows."""
    rows, columns, height, width, _ = tiles
    return held.shape[0], -(-rows // height), -(-columns // width)


def _factors(name: str, x: Tensor | None) -> Tensor | None:
    """Scales as every implementation reads them: float32, and contiguous."""
    if x is None:
        return None
    if torch.promote_types(x.dtype, torch.float32) != torch.float32:
        raise TypeError(f"{name} must be float32 or a narrower float, got {x.dtype}")
    return x.to(torch.float32).contiguous()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fake_singles(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _fake_like(x: Tensor, *rest: Any) -> Tensor:
    """A result that is stored as the tensor is, which may be transposed."""
    return torch.empty_like(x, dtype=rest[-2])


class Implementation(OnBackend):
    """The operators on one backend. Those that rescale products are only for layers, which are not batched."""

    @operator("(Tensor x, SymInt[] turn) -> Tensor", lambda x, turn: x.new_empty(x.shape, dtype=_wide(x)), vmap=one_by_one)
    def hadamard(self, x: Tensor, turn: Sequence[int]) -> Tensor:
        """Hadamard-transform a tensor, in float32, or in float64 for float64 input."""
        return self._backend.hadamard(x, Turn(*turn))  # type: ignore[no-any-return]

    @operator(f"(Tensor x, {_TILES}, bool finite) -> Tensor", lambda x, tiles, *_: _fake_scales(x, tiles, dtype=_wide(x)), vmap=one_by_one)
    def amaxes(self, x: Tensor, tiles: Sequence[int], turn: Sequence[int], finite: bool) -> Tensor:
        """The largest magnitude of each tile, in float32, or in float64 for float64 input."""
        where, turned, counts = _read_tiles(tuple(tiles), tuple(turn), x.shape)
        out = x.new_empty(counts, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        self._backend.amaxes_into(out, x, where, turned, finite)
        return out

    @operator(
        f"(Tensor amaxes, Tensor? under, {_MAKING}) -> Tensor", lambda x, *_: x.new_empty(x.shape, dtype=torch.float32), vmap=one_by_one
    )
    def scales(self, amaxes: Tensor, under: Tensor | None, making: str, scale_grid: str) -> Tensor:
        """The scales that result from the largest magnitudes, in float32."""
        amaxes = amaxes.to(_wide(amaxes)).contiguous()
        out = torch.empty_like(amaxes, dtype=torch.float32)
        self._backend.scales_into(out, amaxes, _factors("under", under), read_scales(making, scale_grid))
        return out

    @operator(
        f"(Tensor x, Tensor? under, {_TILES}, bool finite, {_MAKING}) -> Tensor",
        lambda x, under, tiles, *_: _fake_scales(x, tiles),
        vmap=one_by_one,
    )
    def scales_of_tiles(
        self, x: Tensor, under: Tensor | None, tiles: Sequence[int], turn: Sequence[int], finite: bool, making: str, scale_grid: str
    ) -> Tensor:
        """The scales of a tensor's tiles, `amaxes` and `scales` in one, in float32."""
        where, turned, counts = _read_tiles(tuple(tiles), tuple(turn), x.shape)
        out = x.new_empty(counts, dtype=torch.float32)
        self._backend.scales_of_tiles_into(out, x, _factors("under", under), where, turned, finite, read_scales(making, scale_grid))
        return out

    @operator(
        f"(Tensor x, Tensor scales, Tensor? under, {_TILES}, {_ROUNDING}) -> Tensor",
        lambda x, *rest: x.new_empty(x.shape, dtype=rest[-2]),
        vmap=one_by_one,
    )
    def quantize_scaled(
        self, x: Tensor, scales: Tensor, under: Tensor | None, tiles: Sequence[int], turn: Sequence[int], *rounding: Any
    ) -> Tensor:
        """Round a tensor under given scales."""
        scaled, out, counts = _prepared(x, tiles, turn, *rounding)
        if x.numel() and scales.shape != counts:
            raise ValueError(f"quantize_scaled: tiles have scales of shape {counts}, got {tuple(scales.shape)}")
        self._backend.quantize_scaled_into(out, x, _factors("scales", scales), _factors("under", under), scaled)
        return out

    @operator(
        f"(Tensor x, Tensor? under, {_TILES}, {_MAKING}, {_ROUNDING}) -> (Tensor, Tensor)",
        lambda x, under, tiles, *rest: (x.new_empty(x.shape, dtype=rest[-2]), _fake_scales(x, tiles, rest[-1])),
        vmap=one_by_one,
    )
    def quantize_tiles(
        self, x: Tensor, under: Tensor | None, tiles: Sequence[int], turn: Sequence[int], making: str, scale_grid: str, *rounding: Any
    ) -> tuple[Tensor, Tensor]:
        """Round a tensor under the scales of its own tiles; also return the scales if the result was not multiplied by them again."""
        scaled, out, counts = _prepared(x, tiles, turn, *rounding)
        restores = scaled.elements.restore != Restore.NOTHING
        scales = _nothing(x.device) if restores else x.new_empty(counts, dtype=torch.float32)
        made, making_of_scales = None if restores else scales, read_scales(making, scale_grid)
        self._backend.quantize_tiles_into(out, made, x, _factors("under", under), making_of_scales, scaled)
        return out, scales

    @operator(
        f"(Tensor x, SymInt[] tiles, SymInt[] others, {_MAKING}, str grid, str rule, ScalarType dtype) -> (Tensor, Tensor)",
        lambda x, *rest: (x.new_empty(x.shape, dtype=rest[-1]), x.new_empty(x.shape, dtype=rest[-1])),
        vmap=one_by_one,
    )
    def quantize_both_ways(
        self, x: Tensor, tiles: Sequence[int], others: Sequence[int], making: str, scale_grid: str, grid: str, rule: str, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Round a tensor under the scales of two kinds of tiles, by which elements are multiplied again, without random bits."""
        rounding = None, grid, rule, 0, 0, dtype, int(Restore.SCALE)
        (first, out, _), (second, other, _) = (_prepared(x, where, (), *rounding) for where in (tiles, others))
        self._backend.quantize_both_ways_into((out, other), x, read_scales(making, scale_grid), (first, second))
        return out, other

    @operator(
        f"(Tensor x, Tensor? under, SymInt[] tiles, SymInt[] others, SymInt[] turn, {_MAKING}, {_ROUNDING}) -> (Tensor, Tensor)",
        lambda x, under, tiles, others, *rest: (x.new_empty(x.shape, dtype=rest[-2]), _fake_scales(x, others, dtype=_wide(x))),
        vmap=one_by_one,
    )
    def quantize_tiles_and_amaxes(
        self,
        x: Tensor,
        under: Tensor | None,
        tiles: Sequence[int],
        others: Sequence[int],
        turn: Sequence[int],
        making: str,
        scale_grid: str,
        *rounding: Any,
    ) -> tuple[Tensor, Tensor]:
        """Round a tensor under the scales of its tiles, by which elements are multiplied again, and find `amaxes` of other ones.

        These are the finite ones of the tensor's transform, for its second rounding.
        """
        scaled, out, _ = _prepared(x, tiles, (), *rounding)
        where = TileSizes.of(others)
        amaxes = x.new_empty(where.counts(x.numel()), dtype=_wide(x))
        making_of_scales = read_scales(making, scale_grid)
        under = _factors("under", under)
        self._backend.quantize_tiles_and_amaxes_into(out, amaxes, x, under, making_of_scales, scaled, where, Turn(*turn))
        return out, amaxes

    @operator(
        "(Tensor x, Tensor held, SymInt size, SymInt[] turn) -> Tensor",
        lambda x, held, size, turn: x.new_empty((held.shape[0], size, x.shape[1]), dtype=_wide(x)),
    )
    def hadamard_of_runs(self, x: Tensor, held: Tensor, size: int, turn: Sequence[int]) -> Tensor:
        """The transform of matrices that are runs of a tensor's rows, in float32 or float64; see `torch.runs`."""
        return self._backend.hadamard_of_runs(x, held.contiguous(), size, Turn(*turn))  # type: ignore[no-any-return]

    @operator(
        f"(Tensor x, Tensor held, {_TILES}, bool finite) -> Tensor",
        lambda x, held, tiles, *_: x.new_empty(_counts(tiles, held), dtype=_wide(x)),
    )
    def amaxes_of_runs(self, x: Tensor, held: Tensor, tiles: Sequence[int], turn: Sequence[int], finite: bool) -> Tensor:
        """`amaxes` of matrices that are runs of a tensor's rows."""
        where = TileSizes.of(tiles)
        out = x.new_empty(_counts(where, held), dtype=_wide(x))
        self._backend.amaxes_of_runs_into(out, x, held.contiguous(), where, Turn(*turn) if turn else None, finite)
        return out

    @operator(
        f"(Tensor x, Tensor held, Tensor? under, {_TILES}, {_MAKING}, {_ROUNDING}) -> Tensor",
        lambda x, *rest: x.new_empty(x.shape, dtype=rest[-2]),
    )
    def quantize_runs(
        self,
        x: Tensor,
        held: Tensor,
        under: Tensor | None,
        tiles: Sequence[int],
        turn: Sequence[int],
        making: str,
        scale_grid: str,
        *rounding: Any,
    ) -> Tensor:
        """Round matrices that are runs of a tensor's rows under the scales of their tiles, by which elements are multiplied again."""
        scaled, out, _ = _prepared(x, tiles, turn, *rounding)
        under, making_of_scales = _factors("under", under), read_scales(making, scale_grid)
        self._backend.quantize_runs_into(out, x, held.contiguous(), under, making_of_scales, scaled)
        return out

    @operator(f"({_IN_BASIS}, float[] choice, {_ROUNDING}) -> Tensor", _fake_like, vmap=one_by_one)
    def quantize_best(self, x: Tensor, *given: Any) -> Tensor:
        """Round a tensor under the better scale of each tile; the numbers of a choice are its candidates, behind the others."""
        basis, (choice,), rounding = _parts(given)
        squares, reach, *candidates = choice
        return self._in_basis("quantize_best_into", x, ScaleChoice(tuple(candidates), squares != 0, reach), *basis, *rounding)

    @operator(f"({_IN_BASIS}, SymInt[] groups, float reach, {_ROUNDING}) -> Tensor", _fake_like, vmap=one_by_one)
    def quantize_nested(self, x: Tensor, *given: Any) -> Tensor:
        """Round a tensor under the scales of its tiles, which are under those of groups."""
        basis, (groups, reach), rounding = _parts(given)
        return self._in_basis("quantize_nested_into", x, ScaleGroups(TileSizes.of(groups), reach), *basis, *rounding)

    @operator(f"({_IN_BASIS}, SymInt size, float reach, str correction, {_ROUNDING}) -> Tensor", _fake_like, vmap=one_by_one)
    def quantize_eden(self, x: Tensor, *given: Any) -> Tensor:
        """Round a tensor under scales that are corrected in groups, and rounded again by the rule `correction`."""
        basis, (size, reach, correction), (seed, *rounding) = _parts(given)
        corrected = ScaleCorrection(size, reach, read_rounding(basis[-1], correction, seed is not None).rule)
        return self._in_basis("quantize_eden_into", x, corrected, *basis, seed, *rounding)

    def _in_basis(
        self, into: str, x: Tensor, how: Any, flips: Tensor | None, tiles: Sequence[int], turn: Sequence[int], *numbers: Any
    ) -> Tensor:
        """Round a tensor in the basis of a transform, by a function of the backend, into a tensor that is stored as it is."""
        making, scale_grid, *rounding = numbers
        scaled, _ = _rounding(x, tiles, turn, *rounding)
        out, flips = torch.empty_like(x, dtype=rounding[-2]), None if flips is None else flips.contiguous()
        getattr(self._backend, into)(out, x, flips, read_scales(making, scale_grid), how, scaled)
        return out

    @operator(f"(Tensor product, {_FACTORS}) -> Tensor", lambda x, *rest: torch.empty_like(x, dtype=rest[-1]))
    def rescaled(self, product: Tensor, factors: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply a float32 or float64 product by the scales left out of its operands, if any, add a bias, and round once."""
        out = torch.empty_like(product, dtype=dtype)
        self._backend.rescaled_into(out, product, factors, bias)
        return out

    @operator(f"(Tensor a, Tensor b, {_FACTORS}) -> Tensor", lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[1]), dtype=rest[-1]))
    def matmul_rescaled(self, a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`rescaled` of the float32 product of two 16-bit matrices; two scales of whole tensors may become one first."""
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
        self._backend.matmul_rescaled_into(out, a, b, factors, bias)
        return out


@cache
def _nothing(device: torch.device) -> Tensor:
    """An empty tensor, in place of scales that are not returned."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.float32, device=device)


Implementation.register(reference="torch.scaling", compiled="numba.scaling", triton="triton.scaled.launch")
