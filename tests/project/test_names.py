"""A class name means one thing in the whole project, so that a search for it has one answer."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

STUDY = "every study has its own, under the same name: `Study` is generic in them"
TRAINER = "one for each trainer, in the module that is named after it"
#: Names that several classes may have, and why.
SHARED = {
    "Implementation": "every module of operators has its own, under the same name, on a backend that is imported when it first runs",
    "Quantizer": "the module of QPyTorch, in `qsim.compat.qtorch`, has QPyTorch's name",
    "Noise": "the random bits of a call, for users and in Triton kernels, which draw them; and a point, which adds noise",
    "ControlCallback": TRAINER,
    "ScheduleCallback": TRAINER,
    "Settings": STUDY,
    "Written": STUDY,
}


@cache
def classes(root: Path) -> dict[str, list[str]]:
    """Where each class of the packages below a folder is defined, by its name without leading underscores."""
    found = defaultdict(list)
    for path in sorted([*root.glob("qsim/**/*.py"), *root.glob("kernels/**/*.py")]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if defined := re.match(r"\s*class _*(\w+)[(:\[]", line):
                found[defined[1]].append(f"{path.relative_to(root).as_posix()}:{number}")
    return found


def test_no_two_classes_share_a_name() -> None:
    shared = {name: places for name, places in classes(ROOT).items() if len(places) > 1 and name not in SHARED}
    assert not shared, "rename all but one of:\n" + "\n".join(f"{name}: {', '.join(places)}" for name, places in shared.items())


def test_names_that_may_be_shared_are() -> None:
    found = classes(ROOT)
    assert [name for name in SHARED if len(found[name]) < 2] == []


def test_names_of_studies_are_shared_by_studies_only() -> None:
    found = classes(ROOT)
    assert [place for name, why in SHARED.items() if why == STUDY for place in found[name] if not place.startswith("qsim/studies/")] == []
