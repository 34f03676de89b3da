"""Reading files that others may have written: whatever is wrong with one is the same kind of error, which names the file."""

from __future__ import annotations

import gzip
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

#: Bytes that the names of files have at most, on all systems.
_LONGEST_NAME = 255


class FileError(ValueError):
    """A file that qsim reads is malformed, or holds what qsim does not read.

    Example:
        >>> import pathlib, tempfile, torch, qsim
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "qsim.json").write_text("[]")
        >>> try:
        ...     qsim.load(torch.nn.Linear(2, 2), folder)
        ... except qsim.FileError as error:
        ...     print(str(error).replace(str(folder), "folder"))
        load: folder/qsim.json is malformed: it must be an object, got []
    """


#: What Python's parsers raise, and code that takes their results for what they should be. Missing files are other errors.
_ANYTHING = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
    *(gzip.BadGzipFile, re.error, zlib.error),
)


@contextmanager
def reading(action: str, file: Path | str) -> Iterator[None]:
    """Turn whatever goes wrong while the content of a file is interpreted into a `FileError`.

    Args:
        action: The function that reads, for the error.
        file: The file.
    """
    try:
        yield
    except FileError:
        raise
    except KeyError as error:
        raise FileError(f"{action}: {file} is malformed: it lacks {error}") from error
    except _ANYTHING as error:
        raise FileError(f"{action}: {file} is malformed: {str(error) or type(error).__name__}") from error


def read_json(action: str, path: Path, shape: Any) -> Any:
    """The content of a JSON file of a given shape; see `check_shape`."""
    with reading(action, path):
        content = json.loads(path.read_text(encoding="utf-8"))
        check_shape(content, shape, "it")
    return content


def name_in_folder(action: str, file: Path, name: str) -> str:
    """A name that a file gives, which must be that of a file in the same folder.

    Args:
        action: The function that reads, for the error.
        file: The file that names it.
        name: The name.
    """
    is_plain = PurePosixPath(name).name == PureWindowsPath(name).name == name not in ("", "..")
    if not is_plain or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        shown = name if len(name) <= 60 else f"{name[:57]}…"
        raise FileError(f"{action}: {file} is malformed: it names {shown!r}, which is not a file in its folder")
    return name


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file that appears whole or not at all: to a draft next to it, which then takes its place.

    Args:
        path: The file. A link is replaced, and the file that it names stays as it is. What is no file, such as a pipe, is written directly.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    draft = target.with_name(f".{target.name[:64]}.{uuid.uuid4().hex[:8]}.part")
    try:
        draft.open("x").close()  # a new file: never what a link of that name leads to
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as `whole_file` does."""
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise an error for a value of JSON with another structure than it should have.

    Args:
        value: The value.
        shape: A type; several in a tuple; `[shape]` for a list; `{str: shape}` for an object with any names, or `{"name": shape}` for one
            with these, of which those that end in `?` may be absent; `object` for anything.
        where: What the value is, for the error.
    """
    if isinstance(shape, tuple):
        if not any(_fits(value, each) for each in shape):
            raise ValueError(f"{where} must be {' or '.join(map(_named, shape))}, got {_shown(value)}")
        shape = next(each for each in shape if _fits(value, each))
    if not _fits(value, shape):
        raise ValueError(f"{where} must be {_named(shape)}, got {_shown(value)}")
    if isinstance(shape, list):
        for i, each in enumerate(value):
            check_shape(each, shape[0], f"{where}[{i}]")
    elif isinstance(shape, dict) and str in shape:
        for name, each in value.items():
            check_shape(each, shape[str], f"{where}[{name!r}]")
    elif isinstance(shape, dict):
        for name, each in shape.items():
            if name.rstrip("?") in value:
                check_shape(value[name.rstrip("?")], each, f"{where}[{name.rstrip('?')!r}]")
            elif not name.endswith("?"):
                raise ValueError(f"{where} lacks {name!r}")


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value is of the outermost type of a shape; True and False do not count as numbers."""
    kind = type(shape) if isinstance(shape, (dict, list)) else type(None) if shape is None else shape
    return isinstance(value, kind) and (not isinstance(value, bool) or kind in (bool, object))


def _named(shape: Any) -> str:
    if isinstance(shape, (dict, list)):
        return "an object" if isinstance(shape, dict) else "a list"
    return {str: "text", int: "an integer", float: "a number", bool: "true or false", None: "null"}[shape]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
