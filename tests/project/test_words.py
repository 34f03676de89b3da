"""Phrases that are never right in this project do not come back: in docstrings, comments, messages, documentation and reports.

CONTRIBUTING.md asks for plain English. Each pattern was in use once, and each failure names the usual wording.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Patterns, and what to write instead.
PHRASES = {
    r"\bbeside\b": "compared with, relative to, next to",
    r"\banew\b": "again, or a verb with re-",
    r"\b(hangs?|hung) on\b": "depends on",
    r"\bmend(s|ed|ing)?\b": "fix, correct",
    r"\b(is|are|was|were) told\b(?! apart)": "is reported, raises an error, is given an option",
    r"\bt(ells?|old) [\w ]{0,20}(right|wrong)\b": "classifies correctly, misclassifies",
    r"\bto be had\b|\bcome by\b": "is available, is obtained",
    r"\bin the place of\b": "instead of",
    r"\b(refuse[sd]?|said) in words\b": "raises a clear error",
    r"\bas (it lies|they lie|it stands|they stand)\b": "unchanged, in place",
    r"\bof which there (is|are)\b": "a relative clause with has or have",
    r"\bof nothing there\b": "an empty tensor has no",
    r"\bsays? (itself|themselves)\b": "has its own, determines",
    r"\bfor want of\b": "for lack of",
    r"\b(is|are) of another kind\b": "has the wrong type",
    r"\b(has|have) not (the|an?)\b": "does not have, lacks",
    r"\bknows? no\b": "does not have, does not support",
    r"\b(is|are) no (numbers?|formats?|optimizers?|models?|evidence)\b": "is not a",
    r"\b(tokens|images|bytes|bits|sequences|samples|steps|ms) an? (second|step|update|batch)\b": "per second, per step, per update",
    r"\b[Ii]ntervals hold\b": "intervals are",
    r"\bmultiplied with\b": "multiplied by",
    r"\bbesides\b": "in addition to, apart from",
    r"\bbut for (?!it\b)": "except for, apart from",
    r"\bnext to nothing\b": "almost nothing",
    r"\b(somebody|nobody|whoever)\b": "users who, code that, nothing",
    r"\b(gradients?|weights?|inputs?|end) alone\b": "only",
    r", to nearest\b(?! (even|value|with ties))": "with round-to-nearest, rounded to nearest",
    r"\bgo(es)? on (with|from)\b": "continues, resumes",
}

#: The first words of a docstring: it starts with a verb, or with a noun that names the thing.
OPENINGS = r"(What|Of|How (far|fast|long|many|much|often))\b"

#: A string, whose text is the last group, or a comment, whose text is the first.
STRING_OR_COMMENT = re.compile(r"""#[#: ]*([^\n]*)|(?P<quotes>"{3}|'{3}|"|')(?P<string>(?:\\.|(?!(?P=quotes)).)*)(?P=quotes)""", re.DOTALL)

#: A name in an f-string.
EXPRESSION = re.compile(r"{[^{}]*}")


def files(*endings: str) -> Iterator[Path]:
    """Everything in the repository that people read or write, without what the documentation's build leaves, and without this file."""
    for top in ("qsim", "kernels", "tests", "docs", "examples"):
        yield from (path for ending in endings for path in (ROOT / top).rglob(f"*{ending}") if not {"_build", "_drawn"} & {*path.parts})
    yield from (path for ending in endings for path in ROOT.glob(f"*{ending}"))


def prose(source: str) -> str:
    """The comments and strings of Python code, in which names and keywords do not count."""
    return "\n".join(EXPRESSION.sub("", found["string"] or found[1] or "") for found in STRING_OR_COMMENT.finditer(source))


def texts() -> dict[str, str]:
    """The words of every file, with line breaks as blanks."""
    found = {path: path.read_text(encoding="utf-8") for path in files(".py", ".md", ".ipynb") if path != Path(__file__)}
    return {str(path.relative_to(ROOT)): " ".join((prose(text) if path.suffix == ".py" else text).split()) for path, text in found.items()}


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the files in which any string opens in a way to avoid, with its file."""
    for path in files(".py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if re.search(r"""["']\s*""" + OPENINGS, source) else ():
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield str(path.relative_to(ROOT)), ast.get_docstring(node) or ""


def test_phrases_do_not_come_back() -> None:
    found = [
        f"{name}: …{text[max(0, at.start() - 40) : at.end() + 40]}…: write {better!r} instead"
        for name, text in texts().items()
        for pattern, better in PHRASES.items()
        for at in re.finditer(pattern, text)
    ]
    assert not found, "\n".join(found)


def test_docstrings_open_with_a_verb_or_the_thing() -> None:
    found = [f"{name}: {text.splitlines()[0]}" for name, text in docstrings() if re.match(OPENINGS, text)]
    assert not found, "open with an imperative, or with a noun phrase that names the thing:\n" + "\n".join(found)


def test_names_in_code_are_not_prose() -> None:
    assert prose('beside = f"{beside} a"  # told\n') == " a\ntold"


def test_a_string_contains_no_comment_and_a_comment_no_string() -> None:
    strings = [r'"#a"', r"'#\"b'", r"'#\'c'", '"""#"d\n#"""', "'''#'e'''", r"'\\'", 'r"#f"', 'f"#{g}"']
    assert prose(f"[\n{', '.join(strings)},  # it's \"i\n]\n#: j").splitlines()[-2:] == ["it's \"i", "j"]
