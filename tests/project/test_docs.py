"""The site is correct: its code prints the output shown, and its API pages list every public name, each with an example."""

import contextlib
import importlib
import inspect
import io
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qsim import studies
from qsim.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: The handwritten pages; studies write their own reports.
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "studies" not in page.relative_to(DOCS).parts[:-1] and "_build" not in page.parts]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

#: Modules with public names that `qsim` does not import.
FURTHER = ("qsim.control", "qsim.compat.qtorch", "qsim.plot", "qsim.studies")


def fenced(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: the language and the text of each."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def with_python() -> list[Path]:
    return [page for page in PAGES if any(language == "python" for language, _ in fenced(page))]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder to which pages may write, with torch in its initial state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small do not benefit from a second thread
    yield
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)
    torch._dynamo.reset()


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("page", with_python(), ids=name_of)
def test_a_pages_code_prints_the_output_shown(page: Path) -> None:
    blocks = fenced(page)
    held: dict[str, object] = {"__name__": "__main__"}
    for i, (language, code) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{name_of(page)}, block {i + 1}", "exec"), held)
        follows = blocks[i + 1] if i + 1 < len(blocks) else ("", "")
        assert printed.getvalue() == (follows[1] if follows[0] == "text" else ""), code


def test_printed_output_is_shown_below_its_code() -> None:
    for page in PAGES:
        languages = [language for language, _ in fenced(page)]
        for before, language in zip(["", *languages], languages, strict=False):
            # The guide to circuits compares its SystemVerilog with what is emitted.
            assert language in ("python", "text", "console", "sh", "diff", "systemverilog"), (
                f"{name_of(page)}: nothing runs code in {language!r}"
            )
            assert language != "text" or before == "python", f"{name_of(page)}: a text that no code prints"


def test_code_needs_no_scrolling() -> None:
    """On a laptop a line of code has room for 85 characters; output, also as comments below a command, scrolls if it is wider."""
    wide = [
        f"{name_of(page)}: {line}"
        for page in PAGES
        for language, code in fenced(page)
        if language in ("python", "sh", "diff")
        for line in code.splitlines()
        if len(line) > 85 and not (language == "sh" and line.startswith("# "))
    ]
    assert not wide, "\n".join(wide)


def test_diffs_end_in_code_that_runs() -> None:
    for page in PAGES:
        run = {line for language, code in fenced(page) if language == "python" for line in code.splitlines()}
        after = [line[1:] for language, code in fenced(page) if language == "diff" for line in code.splitlines() if line[0] in "+ "]
        assert [line for line in after if line not in run] == [], name_of(page)


def consoles() -> list[tuple[str, str]]:
    return [(name_of(page), text) for page in PAGES for language, text in fenced(page) if language == "console"]


@pytest.mark.parametrize(("page", "session"), consoles(), ids=[f"{page}: {text.splitlines()[0]}" for page, text in consoles()])
def test_a_console_session_prints_what_is_said(page: str, session: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, expected = session.partition("\n")
    assert command.startswith("$ qsim ")
    assert main(command.removeprefix("$ qsim ").split()) == 0
    assert capsys.readouterr().out == expected


def test_files_that_commands_name_exist() -> None:
    named = [
        (name_of(page), path)
        for page in PAGES
        for language, text in fenced(page)
        if language == "sh"
        for path in re.findall(r"[\w/-]+\.py\b", text)
    ]
    assert any(path == "examples/train_gpt.py" for _, path in named)
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def test_tests_and_studies_that_pages_name_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"tests/[\w/]+\.py", text)
        assert [path for path in named if not (ROOT / path).exists()] == [], name_of(page)
        assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests] == [], name_of(page)
        assert set(re.findall(r"[Ss]tudy `([\w-]+)`|qsim study ([a-z][\w-]*)", text)) <= {
            pair for name in (*studies.names(), "sweep") for pair in ((name, ""), ("", name))
        }, name_of(page)


def public_modules() -> dict[str, types.ModuleType]:
    """The modules with public names: qsim's, those that it names, and those that they name."""
    found: dict[str, types.ModuleType] = {}

    def add(module: types.ModuleType) -> None:
        if module.__name__ not in found:
            found[module.__name__] = module
            for name in module.__all__:
                if isinstance(getattr(module, name), types.ModuleType):
                    add(getattr(module, name))

    for name in ("qsim", *FURTHER):
        add(importlib.import_module(name))
    return found


def public_names() -> dict[str, object]:
    """All public names, in full."""
    return {
        f"{title}.{name}": getattr(module, name)
        for title, module in public_modules().items()
        for name in module.__all__
        if not isinstance(getattr(module, name), types.ModuleType)
    }


def documented() -> set[str]:
    """The names that the API pages describe."""
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    return set(re.findall(r"^\.\. (?:auto(?:class|function|data|module)|py:data):: (\S+)$", pages, flags=re.MULTILINE))


def is_documented(name: str, value: object, described: set[str]) -> bool:
    """Whether the API pages describe a name, or the same object under another public name."""
    others = (
        other
        for other, thing in public_names().items()
        if thing is value and (callable(value) or other.split(".")[-1] == name.split(".")[-1])
    )
    return name in described or any(other in described for other in others)


def test_every_public_name_is_on_an_api_page() -> None:
    described, names = documented(), public_names()
    assert len(names) > 150
    assert [name for name, value in names.items() if not is_documented(name, value, described)] == []
    assert [name for name in public_modules() if name not in described] == []


def test_values_that_stand_on_api_pages_are_those_of_the_code() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    written = dict(re.findall(r"^\.\. py:data:: (\S+)\n +:value: (.*)$", pages, flags=re.MULTILINE))
    names = public_names()
    assert len(written) > 15
    assert written == {name: repr(names[name]).removeprefix("typing.") for name in written}


def test_the_api_pages_describe_nothing_that_is_not_public() -> None:
    promised = public_names().keys() | public_modules().keys()
    assert documented() - promised == set()


def test_every_public_name_has_an_example_that_runs() -> None:
    """A class or a function has an example in its docstring; a constant or a type is used in one, or on a page."""
    names = public_names()
    called = {name: value for name, value in names.items() if inspect.isclass(value) or inspect.isroutine(value)}
    assert [name for name, value in called.items() if ">>> " not in (inspect.getdoc(value) or "")] == []
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "qsim").rglob("*.py"))
    run = "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", sources, flags=re.MULTILINE))
    run += "\n".join(code for page in PAGES for language, code in fenced(page) if language == "python")
    used = set(re.findall(r"\w+", run))
    assert [name for name in names if name not in called and name.split(".")[-1] not in used] == []


def test_every_figure_is_drawn_and_every_drawing_shown() -> None:
    lines = [line for page in PAGES for line in re.findall(r"^```\{drawn\} (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)]
    shown = [name.partition(".")[0] for name in " ".join(lines).split()]
    assert sorted(set(shown)) == sorted(script.stem for script in (DOCS / "figures").glob("*.py"))


def test_the_figure_of_start_trains_as_the_page_does() -> None:
    (training,) = [code.partition("def train")[2] for _, code in fenced(DOCS / "start.md") if "def train" in code]
    assert training.strip() in (DOCS / "figures" / "first_runs.py").read_text(encoding="utf-8")


def test_questions_of_the_cookbook_have_code_and_a_link() -> None:
    recipes = [part for page in (DOCS / "cookbook").glob("*.md") for part in page.read_text(encoding="utf-8").split("\n## ")[1:]]
    assert len(recipes) >= 40
    assert [part for part in recipes if not part.partition("\n")[0].endswith("?")] == []
    assert [part for part in recipes if "\n```" not in part or ".md" not in part] == []
    codes = [code.splitlines() for part in recipes for language, code in FENCE.findall(part) if language == "python"]
    assert max(map(len, codes)) <= 12
