"""The tables of faults fit the sources, and what plants them tells faults that tests see from others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support import mutants


def test_every_fault_fits_its_file() -> None:
    faults, wrong = mutants.faults(), []
    for fault in faults:
        try:
            text = fault.planted(mutants.ROOT)
            compile(text, fault.file, "exec", dont_inherit=True)
            assert text != (mutants.ROOT / fault.file).read_text(), f"{fault.file}: it changes nothing: {fault.meaning}"
            assert fault.meaning.endswith("."), f"{fault.file}: a fault is described by a sentence, got {fault.meaning!r}"
        except (AssertionError, SyntaxError, ValueError) as error:
            wrong.append(str(error))
        wrong += [f"{fault.file}: there is no {path}" for path in fault.tests if not (mutants.ROOT / path.split("::")[0]).exists()]
    assert not wrong, "\n".join(wrong)
    assert len(faults) >= 150
    assert Counter((fault.file, fault.meaning) for fault in faults).most_common(1)[0][1] == 1


def test_tests_are_those_of_the_mirrored_folder_unless_others_are_given() -> None:
    table = "Words.\n\n== qsim/nn/product/sites.py\n\nIt is\nwrong.\n-a - b\n-    c\n+a + b\n\n"
    first, second = mutants._read(table + "== kernels/qsim_kernels/chip/x.py tests/a.py tests/b\n\nSo.\n-d\n+e\n")
    assert first == ("It is wrong.", "qsim/nn/product/sites.py", "a - b\n    c", "a + b", ("tests/nn/product", "qsim/nn/product/sites.py"))
    assert second == ("So.", "kernels/qsim_kernels/chip/x.py", "d", "e", ("tests/a.py", "tests/b"))
    assert mutants._mirror("kernels/qsim_kernels/chip/x.py") == "tests/kernels"
    assert mutants._mirror("qsim/rounding.py") == "tests"


@pytest.mark.slow
def test_faults_are_seen_survive_or_do_not_end(tmp_path: Path) -> None:
    for folder in ("qsim", "kernels", "tests/support", "tests/mutants"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(mutants.__file__, tmp_path / "tests" / "support")
    (tmp_path / "qsim" / "__init__.py").touch()
    (tmp_path / "qsim" / "sums.py").write_text('def double(x):\n    """Add it.\n\n    >>> double(1)\n    2\n    """\n    return x + x\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --doctest-modules\nmarkers = slow: left out\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "import pytest, qsim.sums\ndef test_double(): assert qsim.sums.double(2) == 4\n"
        "@pytest.mark.slow\ndef test_zero(): assert qsim.sums.double(0) == 0\n"
    )
    (tmp_path / "tests" / "mutants" / "sums.txt").write_text(
        "== qsim/sums.py tests/test_sums.py\n\nIt is a square.\n-x + x\n+x * x\n\nZero is one.\n-x + x\n+x + x or 1\n\n"
        "It is tripled.\n-x + x\n+3 * x\n\nIt waits.\n-    return\n+    while x: pass\n+    return\n"
    )
    command = [sys.executable, tmp_path / "tests" / "support" / "mutants.py", "-n", "2", "--limit", "20"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "3 of 4 faults seen, 75.0%" in found.stdout
    assert found.stdout.endswith("no test saw:\n  qsim/sums.py: Zero is one.\n")
    for line in ("It is a square.\n      qsim/sums.py::qsim.sums.double", "no end within 20 s"):
        assert line in found.stdout
    assert "return x + x" in (tmp_path / "qsim" / "sums.py").read_text()

    (tmp_path / "qsim" / "sums.py").write_text('"""Sums.\n\n>>> 1\n1\n"""\n\n\ndef double(x):\n    return x + x + 1\n')
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "tests/test_sums.py::test_double fails without a fault" in found.stderr
