"""Links from names in the site's code, and previews of its pages."""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sphinx")

DOCS = Path(__file__).parents[2] / "docs"


def extension(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_of_other_projects_exist() -> None:
    addresses = extension("linked_code").elsewhere(DOCS)
    assert len(addresses) > 90
    for name, address in addresses.items():
        assert address.startswith(("https://docs.python.org/3/", "https://docs.pytorch.org/docs/stable/"))
        pkgutil.resolve_name(name if "." in name else f"builtins:{name}")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch, qsim", {}),
        ("from torch import nn", {"nn": "torch.nn"}),
        (">>> from torch.nn import functional as F", {"F": "torch.nn.functional"}),
        ("import torch.distributed as dist", {"dist": "torch.distributed"}),
        ("import torch.nn", {"torch": "torch"}),
        ("from qsim import Block, FivePoint", {"Block": "qsim.Block", "FivePoint": "qsim.FivePoint"}),
    ],
)
def test_imports_give_names_their_meaning(code: str, names: dict[str, str]) -> None:
    assert extension("linked_code").imported(code) == {"qsim": "qsim", "torch": "torch"} | names


def test_the_longest_known_part_of_a_name_becomes_a_link() -> None:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    code = highlight("y = nn.Linear.weight(x.qsim, qsim)", PythonLexer(), HtmlFormatter(nowrap=True))
    addresses = {"torch.nn": "nn", "torch.nn.Linear": "linear", "qsim": "start"}
    linked = extension("linked_code").link(code, {"nn": "torch.nn", "qsim": "qsim"}, addresses)
    assert linked.count("<a ") == 2
    dot = '<span class="o">.</span>'
    assert f'<a class="code-link" href="linear"><span class="n">nn</span>{dot}<span class="n">Linear</span></a>{dot}' in linked
    assert f'<span class="n">x</span>{dot}<span class="n">qsim</span>' in linked
    assert '<a class="code-link" href="start"><span class="n">qsim</span></a>' in linked


def test_previews_have_a_picture_if_the_site_has_an_address() -> None:
    tags = extension("card").tags
    assert "og:image" not in tags("Start", "Ten minutes", "", "start.html")
    written = tags('"Start"', "Ten minutes", "https://example.org/", "start.html")
    assert '<meta property="og:image" content="https://example.org/_static/card.png" />' in written
    assert '<meta property="og:url" content="https://example.org/start.html" />' in written
    assert '<meta property="og:title" content="&quot;Start&quot;" />' in written
