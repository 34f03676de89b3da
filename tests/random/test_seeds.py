"""The source of the seed: torch's generators, a given generator, or the caller; also under checkpointing and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.random import Noise, random_bits, sources, streams

STOCHASTIC: dict[str, Any] = {"rounding": "stochastic"}


def noisy(x: Tensor, **options: Any) -> Tensor:
    """Stochastic rounding to a format so coarse that two draws of a few dozen elements never agree by chance."""
    return qsim.quantize(x, "e2m1", rounding="stochastic", **options)


@pytest.fixture
def x() -> Tensor:
    """512 values half-way between two of E2M1's."""
    return torch.full((512,), 1.25)


def test_manual_seed_governs_every_operation(x: Tensor) -> None:
    def draws() -> list[Tensor]:
        torch.manual_seed(11)
        in_place = qsim.quantize_(x.clone(), "e2m1", **STOCHASTIC)
        return [noisy(x), noisy(x, out=torch.empty_like(x)), in_place, qsim.encode(x, "e2m1", **STOCHASTIC), noisy(x)]

    first, second = draws(), draws()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    values = [first[0], first[1], first[2], qsim.decode(first[3], "e2m1"), first[4]]
    assert all(not torch.equal(values[i], values[j]) for i in range(5) for j in range(i))


def test_seed_stream_and_offset_reach_every_call(x: Tensor) -> None:
    whole, noise = torch.cat([x[:16], x]), Noise(3, 5, 16)
    expected = noisy(whole, seed=noise._replace(offset=0))[16:]
    codes = qsim.encode(x, "e2m1", **STOCHASTIC, seed=noise)
    in_place, out = qsim.quantize_(x.clone(), "e2m1", **STOCHASTIC, seed=noise), noisy(x, seed=noise, out=torch.empty_like(x))
    under_scale = noisy(x, seed=noise, scale=qsim.scaling.Given(1.0))
    torch.manual_seed(0)
    without_seed = noisy(whole, seed=Noise(stream=5))[16:]
    torch.manual_seed(0)
    assert torch.equal(noisy(x, seed=Noise(stream=5, offset=16)), without_seed)
    for found in (noisy(x, seed=noise), in_place, out, under_scale, qsim.decode(codes, "e2m1")):
        assert torch.equal(found, expected)


def test_a_default_device_changes_no_draw(x: Tensor) -> None:
    def draws() -> list[Tensor]:
        torch.manual_seed(11)
        return [noisy(x), noisy(x, seed=5)]

    expected = draws()
    with torch.device("meta"):
        found = draws()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_streams_of_a_layer_follow_from_source_and_name_also_in_graphs() -> None:
    layers = [streams.Drawn.of(1), streams.Drawn.of(2), streams.Drawn(1, 0, "encoder"), 7]
    for source in layers:
        number, summand = sources.numbers_of(source)
        assert int(summand) == streams.stream_of(source, False)
        assert sources.found(number, False, "scores", 6) == streams.stream_of(source, False, "scores") ^ 6
    found = [streams.stream_of(source, False, name) for source in layers[:3] for name in ("", "scores", "mixed")]
    assert len(set(found)) == len(found)


def test_ranks_share_streams_inside_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "own_rank", lambda: 3)
    apart = streams.rank_stream(5)
    with streams.shared_streams():
        assert streams.rank_stream(5) == 5
    assert streams.rank_stream(5) == apart == streams.rank_stream(5, 3) != 5


def test_the_shared_seed_follows_from_torchs() -> None:
    seeds = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        seeds.append(qsim.random.shared_seed())
    assert seeds[0] == seeds[2] != seeds[1]


def test_fork_rng_isolates(x: Tensor) -> None:
    torch.manual_seed(11)
    undisturbed = [noisy(x), noisy(x)]
    torch.manual_seed(11)
    first = noisy(x)
    with torch.random.fork_rng(devices=[]):
        noisy(x)
        torch.manual_seed(99)
        noisy(x)
    assert torch.equal(first, undisturbed[0])
    assert torch.equal(noisy(x), undisturbed[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_same_noise(x: Tensor, use_reentrant: bool) -> None:
    seen: list[Tensor] = []

    def block(values: Tensor) -> Tensor:
        rounded = noisy(values)
        seen.append(rounded.detach().clone())
        return rounded.square()

    leaf = x.clone().requires_grad_()
    checkpoint(block, leaf, use_reentrant=use_reentrant).sum().backward()
    forward, recomputed = seen
    assert torch.equal(forward, recomputed)
    # The gradient is that of the values in the forward pass, and the next call draws again.
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2 * forward)
    assert not torch.equal(noisy(x), forward)


def test_generator_advances_and_replays(x: Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    a, b = noisy(x, generator=generator), noisy(x, generator=generator)
    assert not torch.equal(a, b)
    generator.set_state(state)
    assert torch.equal(noisy(x, generator=generator), a)
    assert torch.equal(noisy(x, generator=generator), b)
    # Torch's own generator is treated like any other.
    torch.manual_seed(5)
    assert torch.equal(noisy(x), a)


def test_nothing_else_draws_from_torchs_generator(x: Tensor) -> None:
    before = torch.get_rng_state()
    noisy(x, generator=torch.Generator().manual_seed(1))
    noisy(x, seed=1)
    noisy(x, seed=torch.tensor(1))
    for rounding in ("nearest", "nearest_away", "nearest_up", "nearest_down", "toward_zero", "up", "down", "odd"):
        qsim.quantize(x, "e2m1", rounding=rounding)
        qsim.encode(x, "e2m1", rounding=rounding)
    assert torch.equal(torch.get_rng_state(), before)
    noisy(x)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_generator_does_not_advance_without_random_bits(x: Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    qsim.quantize(x, "e2m1", generator=generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63)])
def test_seed_may_be_a_tensor(x: Tensor, device: torch.device, seed: int) -> None:
    x = x.to(device)
    number = noisy(x, seed=seed)
    for place in {"cpu", device.type}:
        given = torch.tensor(seed, device=place)
        assert torch.equal(noisy(x, seed=given), number)
        assert given.item() == seed
    bits = random_bits(x.numel(), 32, seed=seed)
    # Half-way: the values whose R has its top bit set go up.
    assert torch.equal(number.cpu() == 1.5, bits >= 2**31)


@pytest.mark.parametrize(("name", "number"), [("stream", 1), ("stream", -1), ("stream", 2**62), ("seed", 8), ("seed", 7 - 2**63)])
def test_seed_and_stream_tell_draws_apart(x: Tensor, name: str, number: int) -> None:
    noise = Noise(**{"seed": 7, "stream": 0, name: number})
    assert not torch.equal(noisy(x, seed=noise), noisy(x, seed=7))
    assert torch.equal(noisy(x, seed=noise), noisy(x, seed=noise))


@pytest.mark.gpu
def test_manual_seed_governs_the_gpu_alike(x: Tensor) -> None:
    torch.manual_seed(3)
    here = [noisy(x), noisy(x)]
    torch.manual_seed(3)
    there = [noisy(x.cuda()), noisy(x.cuda())]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.gpu
def test_generator_may_live_on_either_device(x: Tensor) -> None:
    for place in ("cpu", "cuda"):
        generator = torch.Generator(place).manual_seed(5)
        a, b = noisy(x.cuda(), generator=generator), noisy(x.cuda(), generator=generator)
        assert not torch.equal(a, b)
        generator.manual_seed(5)
        assert torch.equal(noisy(x.cuda(), generator=generator), a)
    with pytest.raises(ValueError, match="generator is on cuda"):
        noisy(x, generator=torch.Generator("cuda"))
    with pytest.raises(ValueError, match="seed is on cuda"):
        noisy(x, seed=torch.tensor(1, device="cuda"))


@pytest.mark.gpu
def test_drawing_a_seed_does_not_wait_for_the_gpu(x: Tensor) -> None:
    x = x.cuda()
    noisy(x)  # compiles
    seed = torch.tensor(1, device="cuda")
    for generator in (torch.Generator(), torch.Generator("cuda")):
        noisy(x, generator=generator)
        torch.cuda.set_sync_debug_mode("error")
        try:
            noisy(x)
            noisy(x, seed=3)
            noisy(x, seed=seed)
            noisy(x, generator=generator)
            qsim.encode(x, "e4m3", **STOCHASTIC)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("fresh_compiler")
def test_names_of_streams_are_constants_of_compiled_code_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    compiled = torch.compile(lambda x: x + qsim.random.stream("a", 1) % 7, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == qsim.random.stream("a", 1) % 7
    assert not recwarn.list
