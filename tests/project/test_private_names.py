"""Private names of torch, Triton and Numba: only two modules use them, and qsim works without each of them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from qsim import private as own
from qsim_kernels import private as kernels
from qsim_kernels.private import PrivateName

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "qsim").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
#: The modules that may use private names.
HOMES = {ROOT / "qsim/private.py", ROOT / "kernels/qsim_kernels/private.py"}
PACKAGES = ("torch", "triton", "numba", "llvmlite")
#: Modules that are private without an underscore: their packages do not document them.
UNDOCUMENTED = ("torch.fx.experimental", "numba.core")

#: Private names of others that may be used anywhere, and why. Those of `nn.Module` that qsim overrides or sets, such as `_apply` and
#: `_parameters`, are names of its own, too.
ALLOWED = {
    "TorchDispatchMode": "torch documents it, under this path, in its notes on extending PyTorch",
    "_optimizer_load_state_dict_post_hooks": "dictionaries of every `torch.optim.Optimizer`, which a wrapper shares with what it wraps",
    "_optimizer_load_state_dict_pre_hooks": "the same",
    "_optimizer_state_dict_post_hooks": "the same",
    "_optimizer_state_dict_pre_hooks": "the same",
    "_version": "torch documents it in its notes on autograd",
    "_base": "torch documents it with views",
    "_foreach_add_": "torch documents the operators on lists of tensors under these names",
    "_foreach_copy_": "the same",
    "_foreach_div_": "the same",
    "_foreach_sub": "the same",
    "_make": "Python's named tuples",
    "_replace": "Python's named tuples",
    "_asdict": "Python's named tuples",
    "_getframe": "Python's `sys`",
    "_exit": "Python's `os`",
    "_actions": "Python's `argparse`",
    "_ActionsContainer": "Python's `argparse`",
    "_experts_implementation": "transformers' configurations",
    "_apply_gate": "transformers' experts",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_foreign(path: str) -> bool:
    """Whether a dotted name is private in one of the packages."""
    is_undocumented = any(f"{path}.".startswith(f"{module}.") for module in UNDOCUMENTED)
    return path.partition(".")[0] in PACKAGES and (is_undocumented or any(map(is_private, path.split("."))))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def defined() -> frozenset[str]:
    """The private names that qsim itself defines: functions, classes, variables and attributes."""
    found = set()
    for node in (node for path in SOURCES for node in ast.walk(tree_of(path))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(found)


def used(path: Path) -> Iterator[tuple[int, str]]:
    """The private names of others in a file, each with its line."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if is_foreign(each.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = (f"{node.module}.{each.name}" for each in node.names)
            yield from ((node.lineno, name) for name in names if is_foreign(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            if is_foreign(text) or node.attr not in defined():
                yield node.lineno, text
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)) and name not in defined():
                yield node.lineno, f"{ast.unparse(node.args[0])}.{name}"


def test_only_two_modules_use_private_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        if path not in HOMES
        for line, name in used(path)
        if name.rpartition(".")[2] not in ALLOWED
    ]
    assert found == [], "move them to qsim/private.py or kernels/qsim_kernels/private.py, with what is lost without them"


def test_the_scan_sees_every_way_to_use_one(tmp_path: Path) -> None:
    lines = [
        "import torch._dynamo",
        "from torch._C import _dispatch_keys",
        "from torch.overrides import _pop_mode_temporarily",
        "from numba.core import cgutils",
        "torch._C._dispatch_keys(x)",
        "module._compiled_call_impl",
        "getattr(x, '_local_tensor', None)",
    ]
    for number, line in enumerate(lines):
        file = tmp_path / f"{number}.py"
        file.write_text(line)
        assert list(used(file)), line


def test_every_exception_is_in_use() -> None:
    found = {name.rpartition(".")[2] for path in SOURCES for _, name in used(path)}
    assert set(ALLOWED) - found == set()


TABLES = {**kernels.NAMES, **own.NAMES}


def test_no_name_is_in_both_tables() -> None:
    assert len(TABLES) == len(kernels.NAMES) + len(own.NAMES)
    places = [name.where for name in TABLES.values()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", TABLES)
def test_every_name_is_used_and_says_what_is_lost(name: str) -> None:
    assert len(TABLES[name].lost) > 20
    texts = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES if path not in HOMES)
    assert re.search(rf"\b(private\.{name}\b|from qsim\w*\.private import [^\n]*\b{name}\b)", texts)


def test_a_missing_name_is_reported_and_replaced() -> None:
    gone = PrivateName("torch._C:_gone", "calls take longer", len)
    with pytest.warns(RuntimeWarning, match=rf"^torch {re.escape(torch.__version__)} has no torch._C._gone: calls take longer$"):
        assert gone.find() is len
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gone._replace(is_needed=False).find() is len
    with pytest.raises(ImportError, match=r"has no torch\._gone\.at_all: calls take longer"):
        PrivateName("torch._gone:at_all", "calls take longer", ImportError).find()
    with pytest.raises(RuntimeError, match=r"^coverage raises an error$"):
        kernels.refuses("coverage raises an error")(1, two=2)


def test_a_name_that_varies_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (True, False):
        monkeypatch.setattr(torch.compiler, "_is_exporting_flag", value)
        assert own.is_exporting() is value


def test_other_names_are_errors() -> None:
    for module in (kernels, own):
        with pytest.raises(AttributeError, match=rf"^module '{module.__name__}' has no attribute 'unknown'$"):
            module.unknown  # noqa: B018


def run(names: list[str], *options: str) -> Iterator[dict[str, str]]:
    """Report what happens without each of some names, and first with all of them."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    command = [sys.executable, str(ROOT / "tests/support/without_names.py"), *options, "", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **settings})
    yield from map(json.loads, done.stdout.splitlines())


def check(names: list[str], *options: str) -> None:
    with_all, *without = run(names, *options)
    assert with_all["error"] == ""
    assert with_all["warnings"] == []
    assert [found["name"] for found in without] == names
    for found in without:
        assert found["error"] == "", found["name"]
        assert found["results"] == with_all["results"], found["name"]
        known = TABLES.get(found["name"])  # attributes have no line
        is_due = known is not None and known.is_needed
        assert any(known.lost in text for text in found["warnings"]) == is_due, found["name"]  # type: ignore[union-attr]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_import_and_eager_code_work_without_a_name() -> None:
    check(["FrameAction", "dispatch_keys", "FakeTensor"])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("part", range(4))
def test_eager_and_compiled_code_work_without_any_one_name(part: int) -> None:
    check([*TABLES, "constant"][part::4], "--compiled")
