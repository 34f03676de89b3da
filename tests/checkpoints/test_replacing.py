"""What is in a folder when a checkpoint is written to it: files of users stay, and a former checkpoint is replaced whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch import nn

import qsim


def filled(value: float) -> nn.Module:
    """A model whose weights are all one number."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return qsim.convert(model, "mxfp8")


def value_in(folder: Path) -> float:
    """The number with which the model in a folder is filled."""
    model = qsim.load(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), folder)
    numbers = {x.item() for parameter in model.parameters() for x in parameter.unique()}
    assert len(numbers) == 1, "the folder mixes two checkpoints"
    return numbers.pop()


@pytest.mark.parametrize("write", [qsim.save, qsim.export], ids=["save", "export"])
@pytest.mark.parametrize("former", [True, False], ids=["beside a checkpoint", "alone"])
def test_files_of_users_stay(write, former: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    if former:
        write(filled(1.0), tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "figures").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    message = rf"^{write.__name__}: .* holds what qsim did not write there, which stays: figures, thesis.tex; give another folder"
    with pytest.raises(FileExistsError, match=message):
        write(filled(2.0), tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_checkpoint_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    """Files with the names of a checkpoint's count as qsim's only if its description lists them."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileExistsError, match=r"which stays: config\.json, model\.safetensors; give another folder"):
        qsim.save(filled(1.0), tmp_path, overwrite=True)


def test_checkpoints_of_versions_that_list_no_files_are_replaced(tmp_path: Path) -> None:
    qsim.save(filled(1.0), tmp_path, max_shard_size=5000)
    path = tmp_path / "qsim.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "files"}))
    qsim.save(filled(2.0), tmp_path, overwrite=True)
    assert value_in(tmp_path) == 2.0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors", "qsim.json"]


def test_descriptions_name_no_files_elsewhere(tmp_path: Path) -> None:
    qsim.save(filled(1.0), tmp_path / "saved")
    (tmp_path / "thesis.tex").write_text("years of work")
    path = tmp_path / "saved" / "qsim.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "files": [*facts["files"], "../thesis.tex"]}))
    with pytest.raises(FileExistsError, match="holds what qsim did not write there"):
        qsim.save(filled(2.0), tmp_path / "saved", overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_the_current_folder_and_links_are_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    place.mkdir()
    link = tmp_path / "link"
    link.symlink_to(place, target_is_directory=True)
    monkeypatch.chdir(place)
    for number, folder in enumerate((".", link, place), 1):
        qsim.save(filled(number), folder, overwrite=True)
        assert link.is_symlink()
        assert os.getcwd() == str(place.resolve())
        assert value_in(Path()) == value_in(link) == number


def test_what_is_no_path_is_an_error() -> None:
    for action in (qsim.save, qsim.export):
        with pytest.raises(TypeError, match=rf"^{action.__name__}: folder must be a path, got None"):
            action(filled(1.0), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("exists", [True, False])
def test_threads_that_save_to_one_folder_leave_one_checkpoint(exists: bool, tmp_path: Path) -> None:
    """One of them wins whole; others get an error that says so, or come later."""
    folder, errors = tmp_path / "saved", []
    if exists:
        qsim.save(filled(9.0), folder)
    models = [filled(number) for number in range(4)]
    start = threading.Barrier(len(models))

    def save(model: nn.Module) -> None:
        start.wait()
        try:
            qsim.save(model, folder, overwrite=True)
        except FileExistsError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=save, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) < len(models)
    assert all("another process has written" in error for error in errors), errors
    assert value_in(folder) in range(4)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "qsim.json"]


#: Saves over a checkpoint in a process of its own, which ends before the step with the number that it is given.
_STOPPED = """
import os, sys
import torch, qsim
from pathlib import Path
from test_replacing import filled, value_in

folder, action = Path(sys.argv[1]), getattr(qsim, sys.argv[2])
filled(3.0), value_in(folder)  # everything is imported before steps are counted
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
for last in range(1, 200):
    child = os.fork()
    if child == 0:
        steps = [0]
        def stop(event, arguments):
            is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or is_write:
                steps[0] += 1
                if steps[0] == last:
                    os._exit(9)
        sys.addaudithook(stop)
        action(filled(2.0), folder, overwrite=True, max_shard_size=5000)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    assert (folder.parent / "thesis.tex").read_text() == "years of work"
    print(last, status, value_in(folder), flush=True)
    if status == 0:
        break
    action(filled(1.0), folder, overwrite=True)  # the former checkpoint again
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
@pytest.mark.parametrize("action", ["save", "export"])
def test_a_process_may_stop_at_any_step(action: str, tmp_path: Path) -> None:
    """Whatever is written, renamed or deleted last, `load` finds the former checkpoint or the new one, and nothing else is lost."""
    folder = tmp_path / "saved"
    getattr(qsim, action)(filled(1.0), folder)
    (tmp_path / "thesis.tex").write_text("years of work")
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _STOPPED, str(folder), action]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    found = [float(value) for _, _, value in rows]
    assert len(rows) > 10
    assert rows[-1][1] == "0"
    assert found[0] == 1.0
    assert found[-1] == 2.0
    assert set(found) == {1.0, 2.0}
    assert found == sorted(found), "the new checkpoint counts from one step on"
