"""Blocks that raise an error in one line, before anything is drawn or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from support.inputs import BITS


@contextmanager
def refused(error: type[Exception], *words: str, untouched: tuple[Tensor, ...] = ()) -> Iterator[None]:
    """Assert that the block raises a one-line error with all the words, without writing a tensor or drawing from torch's generator."""
    before = [tensor.clone() for tensor in untouched]
    state = torch.get_rng_state()
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message
    for tensor, old in zip(untouched, before, strict=True):
        assert torch.equal(tensor.view(BITS[tensor.dtype]), old.view(BITS[old.dtype])), "written before the error"
    assert torch.equal(torch.get_rng_state(), state), "drawn before the error"
