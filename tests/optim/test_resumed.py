"""Runs with low-precision optimizers that are saved and resumed: by as many processes, by more, by one, under other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.distributed_optimizers import MAKERS, SEED, alone, differing, net_of, optimizer_of, steps
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two, four = ranks_of(2), ranks_of(4)

HALF, FULL = range(10), range(20)
REST = FULL[10:]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer, options=options), strict=True))


def _saved(device: torch.device, folder: str, layout: str, kind: str, flat: bool = False) -> dict[str, Tensor]:
    """A run that is saved half-way and continues."""
    from torch.distributed import checkpoint

    net = net_of(device, layout)
    optimizer = optimizer_of(kind, net)
    steps(net, optimizer, HALF)
    checkpoint.save(state_of(net, optimizer, flat), checkpoint_id=folder)
    return steps(net, optimizer, REST)


def _resumed(device: torch.device, folder: str, layout: str, kind: str, flat: bool = False) -> dict[str, Tensor]:
    """A run that starts from another's checkpoint: with other weights, which would imply another seed."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    net = net_of(device, layout)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    optimizer = optimizer_of(kind, net)
    state = state_of(net, optimizer, flat)
    checkpoint.load(state, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    return steps(net, optimizer, REST)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", MAKERS)
def test_one_process_resumes_a_run_of_two_ranks(two: Ranks, tmp_path: Path, kind: str) -> None:
    for unbroken in two(_saved, str(tmp_path), "fsdp", kind):
        assert not differing(unbroken, alone(kind, 20))
    torch.manual_seed(99)
    assert not differing(_resumed(torch.device("cpu"), str(tmp_path), "whole", kind), alone(kind, 20))


@pytest.mark.parametrize("flat", [False, True])
def test_two_ranks_resume_what_they_saved(two: Ranks, tmp_path: Path, flat: bool) -> None:
    two(_saved, str(tmp_path), "tp", "groups", flat)
    for resumed in two(_resumed, str(tmp_path), "fsdp", "groups", flat):
        assert not differing(resumed, alone("groups", 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("fsdp", "fsdp", "AdamW"),
        ("fsdp", "hsdp", "Kahan"),
        ("fsdp", "fsdp over tp", "E4M3"),
        ("tp", "fsdp over tp", "rounded states"),
        ("tp", "fsdp", "SGD"),
    ],
)
def test_four_ranks_resume_a_run_of_two(two: Ranks, four: Ranks, tmp_path: Path, before: str, after: str, kind: str) -> None:
    two(_saved, str(tmp_path), before, kind)
    for resumed in four(_resumed, str(tmp_path), after, kind):
        assert not differing(resumed, alone(kind, 20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "SGD, Kahan"])
def test_two_ranks_resume_a_run_of_four(two: Ranks, four: Ranks, tmp_path: Path, kind: str) -> None:
    four(_saved, str(tmp_path), "fsdp over tp", kind)
    for resumed in two(_resumed, str(tmp_path), "fsdp", kind):
        assert not differing(resumed, alone(kind, 20))


class Renamed(nn.Module):
    """The parameters of another module, in the same order, under other names."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        for number, p in enumerate(net.parameters()):
            self.register_parameter(f"other{number}", nn.Parameter(p.detach().clone()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_states_survive_a_rename(kind: str, named: bool) -> None:
    def made(net: nn.Module) -> torch.optim.Optimizer:
        return MAKERS[kind](net.named_parameters() if named else net.parameters())

    net = net_of(torch.device("cpu"))
    torch.manual_seed(SEED)
    optimizer = made(net)
    steps(net, optimizer, HALF)
    renamed = Renamed(net)
    torch.manual_seed(99)
    other = made(renamed)
    other.load_state_dict(optimizer.state_dict())
    names = {f"other{number}": name for number, (name, _) in enumerate(net.named_parameters())}
    found = {" ".join(names.get(word, word) for word in name.split()): x for name, x in steps(renamed, other, REST).items()}
    assert not differing(found, alone(kind, 20))
