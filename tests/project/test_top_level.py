"""The names of `qsim` itself: what most programs use; the rest is in the module where one looks for it."""

from __future__ import annotations

import pytest

import qsim


def test_few_names() -> None:
    assert len(qsim.__all__) <= 40
    assert sorted(qsim.__all__) == qsim.__all__
    assert all(hasattr(qsim, name) for name in qsim.__all__)


@pytest.mark.parametrize("name", sorted(qsim._MOVED))
def test_names_that_moved_are_named_by_the_error(name: str) -> None:
    module = qsim._MOVED[name]
    with pytest.raises(AttributeError, match=f"module 'qsim' has no attribute '{name}': it is qsim.{module}.{name}"):
        getattr(qsim, name)
    assert hasattr(getattr(qsim, module), name)
    assert name in getattr(qsim, module).__all__
