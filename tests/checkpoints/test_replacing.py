"""Files in a folder to which a checkpoint is written: those of users stay, and a former checkpoint is replaced whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import safetensors.torch
from torch import Tensor, nn

import qsim
from qsim.checkpoints.folders import whole_folder, write_description


def filled(value: float) -> nn.Module:
    """A model whose weights are all one number."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return qsim.convert(model, "mxfp8")


def value_in(folder: Path) -> float:
    """The number with which the model in a folder is filled; 0 if there is no folder."""
    if not folder.exists():
        return 0.0
    model = qsim.load(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), folder)
    numbers = {x.item() for parameter in model.parameters() for x in parameter.unique()}
    assert len(numbers) == 1, "the folder mixes two checkpoints"
    return numbers.pop()


@pytest.mark.parametrize("write", [qsim.save, qsim.export], ids=["save", "export"])
@pytest.mark.parametrize("former", [True, False], ids=["with a checkpoint", "alone"])
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
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "files"}))
    (tmp_path / "config.json").write_text("{}")  # which export writes, and save does not
    with pytest.raises(FileExistsError, match=r"which stays: config\.json; give another folder"):
        qsim.save(filled(3.0), tmp_path, overwrite=True)


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


def test_a_link_in_a_folder_moves_no_files_of_another(tmp_path: Path) -> None:
    for number, name in enumerate(("mine", "theirs"), 1):
        qsim.save(filled(number), tmp_path / name)
    (tmp_path / "theirs" / ".qsim-committed").symlink_to(tmp_path / "mine", target_is_directory=True)
    assert (value_in(tmp_path / "theirs"), value_in(tmp_path / "mine")) == (2.0, 1.0)
    with pytest.raises(FileExistsError, match=r"which stays: \.qsim-committed; give another folder"):
        qsim.save(filled(3.0), tmp_path / "theirs", overwrite=True)
    assert value_in(tmp_path / "mine") == 1.0


def test_what_is_no_path_is_an_error() -> None:
    for action in (qsim.save, qsim.export, qsim.load):
        with pytest.raises(TypeError, match=rf"^{action.__name__}: folder must be a path, got None"):
            action(filled(1.0), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^points: folder must be a path, got None"):
        qsim.checkpoints.points(None)  # type: ignore[arg-type]


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


def run(script: str, *arguments: str) -> list[str]:
    """The lines that a script prints, in a process of its own whose forks may end at any step."""
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def exit_before(last: int, action: Callable[[], object]) -> bool:
    """Run an action in a fork that exits, as if it were killed, before the step with a number; report whether it exited there.

    A step changes a file or a folder. Tensors are written by code in Rust, which reports none: each of their files is left half written
    first, and then completed.
    """
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), status
        return status == 9
    steps = count(1)

    def step() -> None:
        if next(steps) == last:
            os._exit(9)

    def observe(event: str, arguments: tuple[object, ...]) -> None:
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            step()

    save_file = safetensors.torch.save_file

    def in_two_steps(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        step()
        save_file(tensors, file, metadata)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        step()
        file.write_bytes(content)

    safetensors.torch.save_file = in_two_steps
    sys.addaudithook(observe)
    try:
        action()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


#: Saves to a folder and stops at each step, then loads; where files are half moved for the first time, loads also stop at each step.
_STOPPED = """
    import shutil, sys
    import qsim
    from itertools import count
    from pathlib import Path
    from test_replacing import exit_before, filled, value_in

    root, action, first, second = Path(sys.argv[1]), getattr(qsim, sys.argv[2]), filled(1.0), filled(2.0)

    def stops():
        was_half_moved = False
        for last in count(1):
            shutil.copytree(root / "before", root / "stopped")
            is_stopped = exit_before(last, lambda: action(second, root / "stopped" / "saved", overwrite=True, max_shard_size=5000))
            is_half_moved = (root / "stopped" / "saved" / ".qsim-committed").exists()
            for inner in count(1):
                shutil.copytree(root / "stopped", root / "again")
                folder = root / "again" / "saved"
                is_stopped_again = is_half_moved and not was_half_moved and exit_before(inner, lambda: value_in(folder))
                yield value_in(folder)
                assert (folder.parent / "thesis.tex").read_text() == "years of work"
                qsim.save(first, folder, overwrite=True)  # nothing that is left over hinders the next one
                names = sorted(path.name for path in (*folder.iterdir(), *folder.parent.iterdir()) if path.is_file() or any(path.iterdir()))
                assert names == ["model.safetensors", "qsim.json", "saved", "thesis.tex"], names
                shutil.rmtree(root / "again")
                if not is_stopped_again:
                    break
            was_half_moved = was_half_moved or is_half_moved
            shutil.rmtree(root / "stopped")
            if not is_stopped:
                assert was_half_moved == (root / "before" / "saved").exists()
                return

    (root / "before").mkdir()
    (root / "before" / "thesis.tex").write_text("years of work")
    for exists in (False, True):
        if exists:
            action(first, root / "before" / "saved")
        value_in(root / "before" / "saved")  # everything is imported before steps are counted
        print(*stops())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
@pytest.mark.parametrize("action", ["save", pytest.param("export", marks=pytest.mark.slow)])
def test_a_process_may_stop_at_any_step(action: str, tmp_path: Path) -> None:
    """Whatever is written, renamed or deleted last, `load` finds the former checkpoint or the new one, also after it stopped itself."""
    new, replaced = ([float(value) for value in line.split()] for line in run(_STOPPED, str(tmp_path), action))
    for found, former in ((new, 0.0), (replaced, 1.0)):
        assert len(found) > 10
        assert set(found) == {former, 2.0}
        assert found == sorted(found), "the new checkpoint counts from one step on"


#: Saves in several processes to one folder.
_AT_ONCE = """
    import os, sys, time
    import qsim
    from pathlib import Path
    from test_replacing import filled, value_in

    folder = Path(sys.argv[1])
    models, start = [filled(float(number)) for number in range(1, 5)], time.monotonic() + 0.5
    children = []
    for model in models:
        child = os.fork()
        if child == 0:
            time.sleep(max(0, start - time.monotonic()))
            try:
                for _ in range(5):
                    qsim.save(model, folder, overwrite=True, max_shard_size=5000)
            except FileExistsError as error:
                os._exit(3 if "another process" in str(error) else 4)
            except BaseException:
                os._exit(5)
            os._exit(0)
        children.append(child)
    print({os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children} <= {0, 3})
    print(value_in(folder))
    print(sorted(path.name for path in (*folder.iterdir(), *folder.parent.iterdir())))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
def test_processes_that_save_to_one_folder_leave_one_checkpoint(tmp_path: Path) -> None:
    is_clear, value, names = run(_AT_ONCE, str(tmp_path / "saved"))
    assert is_clear == "True"
    assert float(value) in range(1, 5)
    parts = [f"model-{part:05}-of-00002.safetensors" for part in (1, 2)]
    assert names == str([*parts, "model.safetensors.index.json", "qsim.json", "saved"])


def test_drafts_of_killed_processes_are_deleted_and_those_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    qsim.save(filled(1.0), folder)
    left, mine = folder / f".qsim-{0:032x}.incomplete", folder / ".qsim-mine.incomplete"
    left.mkdir()
    (left / "part-0").write_text("half of it")
    with whole_folder("save", folder, overwrite=True) as draft:
        (draft / "part-0").write_text("half of it")
        assert not left.exists()
        with whole_folder("save", folder, overwrite=True) as other:
            write_description(other, {"conversion": {}})
        assert (draft / "part-0").exists()
        write_description(draft, {"conversion": {}})
    assert sorted(path.name for path in folder.iterdir()) == ["part-0", "qsim.json"]
    mine.mkdir()
    with pytest.raises(FileExistsError, match=r"which stays: \.qsim-mine\.incomplete; give another folder"):
        qsim.save(filled(1.0), folder, overwrite=True)


def test_a_folder_with_the_name_of_a_file_stays(tmp_path: Path) -> None:
    qsim.save(filled(1.0), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "model.safetensors" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"which stays: model\.safetensors; give another folder"):
        qsim.save(filled(2.0), tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors" / "thesis.tex").exists()
