import errno
import hashlib
import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from finetune.errors import RunFailedError
from finetune.runs import durable
from finetune.runs.durable import (
    MANIFEST,
    clear_leftovers,
    committed_folder,
    disk_failures_end_the_run,
    find_damage,
    read_manifest,
    remove_folder,
    replace_file,
)

REPOSITORY = Path(__file__).resolve().parents[2]
OLD = {"a.bin": b"old" * 50, "b.json": b"{}"}
NEW = {"a.bin": b"new" * 70, "b.json": b'{"x": 1}', "empty": b""}


def write(target: Path, files: dict[str, bytes]) -> None:
    with committed_folder(target) as writer:
        for name, data in files.items():
            writer.write(name, [data[:10], memoryview(data[10:])])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def in_child(action) -> int:
    """Run in a forked process. Returns its exit status, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            status = action() or 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_operation(number: int, act) -> list[str]:
    """Count operations on files and call `act` at the given one. Only for child processes, because the hooks stay."""
    seen: list[str] = []

    def count(name: str) -> None:
        seen.append(name)
        if len(seen) == number:
            act()

    watched = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
    sys.addaudithook(lambda event, args: count(event) if event in watched else None)
    really_sync, really_hash = os.fsync, hashlib.sha256

    class Hash:
        """Its updates come after each written piece, in the middle of a file."""

        def __init__(self) -> None:
            self._hash = really_hash()
            self.hexdigest = self._hash.hexdigest

        def update(self, data: bytes) -> None:
            self._hash.update(data)
            count("piece written")

    def sync(descriptor: int) -> None:
        count("before fsync")
        really_sync(descriptor)
        count("after fsync")

    os.fsync, durable.hashlib.sha256 = sync, Hash
    return seen


def test_a_folder_is_written_with_a_manifest_of_sizes_and_digests(tmp_path):
    write(tmp_path / "x", NEW)
    assert content(tmp_path / "x") == NEW
    assert read_manifest(tmp_path / "x") == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in NEW.items()
    }
    assert find_damage(tmp_path / "x") == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("name", ["../up", "/abs", "a/b", "..", ".hidden", "", MANIFEST, "new\nline"])
def test_only_plain_names_are_written(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be the name"):
        write(tmp_path / "x", {name: b"1"})
    assert list(tmp_path.iterdir()) == []


KILL = signal.SIGKILL
FAULTS = [(False, KILL), (True, KILL), (False, errno.ENOSPC), (True, errno.EIO)]


@pytest.mark.process
@pytest.mark.few(2)
@pytest.mark.parametrize(("exists", "fault"), FAULTS)
def test_a_fault_at_any_operation_leaves_the_old_or_the_new_folder(tmp_path, exists, fault):
    """In an interpreter without torch: it forks dozens of times, a tenth of a second each in a large process."""
    call = f"from tests.runs.test_durable import *; strike_everywhere({str(tmp_path)!r}, {exists}, {int(fault)})"
    done = subprocess.run([sys.executable, "-c", call], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "struck everywhere\n"), done.stderr


def strike_everywhere(folder: str, exists: bool, fault: int) -> None:
    """A kill, or an error of the disk. Only a kill may leave temporary files, and any start clears them away."""
    tmp_path = Path(folder)
    for points in itertools.count(1):
        place = tmp_path / f"{points}"
        place.mkdir()
        if exists:
            write(place / "x", OLD)

        def save(number=points, place=place):
            def strike() -> None:
                if fault == KILL:
                    os.kill(os.getpid(), KILL)
                raise OSError(fault, os.strerror(fault), str(place))

            seen = at_operation(number, strike)
            try:
                with disk_failures_end_the_run("Saving", place / "x"):
                    write(place / "x", NEW)
            except RunFailedError as error:
                return 3 if os.strerror(fault) in str(error) and "bytes are free" in str(error) else 4
            return 0 if len(seen) < number else 5

        status = in_child(save)
        is_new = (place / "x").is_dir() and content(place / "x") == NEW
        is_old_left_over = status == 5 and is_new  # only what was replaced could not be removed, which is a warning
        assert is_old_left_over or status in ((0, -KILL) if fault == KILL else (0, 3))
        if status == 3 and not is_new:
            assert sorted(path.name for path in place.iterdir()) == ["x"] * exists
        clear_leftovers(place, {"x"}.__contains__)
        left = [path.name for path in place.iterdir()]
        assert left == ["x"] or (left == [] and not exists)
        assert not left or find_damage(place / "x") == []
        assert not left or is_new or content(place / "x") == OLD
        if status == 0:
            break
    assert points > (28 if exists else 20)
    assert is_new
    print("struck everywhere")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.json"
    replace_file(path, b"old")
    points = 0
    while True:

        def replace_and_die(number=points + 1, path=path):
            at_operation(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            replace_file(path, b"newer")

        status = in_child(replace_and_die)
        assert path.read_bytes() in (b"old", b"newer")
        clear_leftovers(tmp_path, {"run.json"}.__contains__)
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
        if status == 0:
            break
        replace_file(path, b"old")
        points += 1
    assert points >= 7
    assert path.read_bytes() == b"newer"


def test_a_flip_of_any_byte_is_found(tmp_path):
    folder = tmp_path / "x"
    write(folder, NEW)
    for name in (*NEW, MANIFEST):
        path = folder / name
        whole = path.read_bytes()
        for position in range(len(whole)):
            flipped = whole[position] ^ 1 << position % 8
            path.write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1 :])
            assert find_damage(folder), (name, position)
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert find_damage(folder), (name, length)
        path.write_bytes(whole + b"\n")
        assert find_damage(folder)
        path.unlink()
        assert find_damage(folder)
        path.write_bytes(whole)
    assert find_damage(folder) == []


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "a/../../secret", ".lock", "sub/file"])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path, name):
    folder = tmp_path / "x"
    write(folder, {})
    entry = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    (folder / MANIFEST).write_bytes(durable._manifest_bytes({name: entry}))
    (tmp_path / "secret").write_bytes(b"secret")
    assert find_damage(folder) == [f"{MANIFEST}: {name!r} is not a plain file name"]


def test_links_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(OLD["a.bin"])
    folder = tmp_path / "x"
    write(folder, OLD)
    (folder / "a.bin").unlink()
    (folder / "a.bin").symlink_to(secret)
    assert find_damage(folder) == ["a.bin: it is a symbolic link, and only regular files are read"]
    (tmp_path / "y").symlink_to(folder)
    assert "symbolic link" in find_damage(tmp_path / "y")[0]
    (tmp_path / ".tmp-run.json").symlink_to(secret)
    replace_file(tmp_path / "run.json", b"1")
    (tmp_path / ".tmp-x").symlink_to(tmp_path)
    write(tmp_path / "x", NEW)
    (tmp_path / ".tmp-z").symlink_to(tmp_path)
    clear_leftovers(tmp_path, lambda name: True)
    assert secret.read_bytes() == OLD["a.bin"]
    assert content(folder) == NEW


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"a": {}}}', "[" * 100_000]
)
def test_what_is_no_manifest_is_said_to_be_none(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    assert len(find_damage(tmp_path)) == 1


def test_a_folder_is_removed_by_way_of_a_leftover(tmp_path):
    write(tmp_path / "x", OLD)
    status = in_child(
        lambda: (at_operation(4, lambda: os.kill(os.getpid(), signal.SIGKILL)), remove_folder(tmp_path / "x"))[1]
    )
    assert status == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-x"]
    assert clear_leftovers(tmp_path, {"y"}.__contains__) == []
    assert clear_leftovers(tmp_path, {"x"}.__contains__) == [".tmp-x"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_old_files_are_open_on_nfs_is_replaced_all_the_same(tmp_path, monkeypatch, caplog):
    """NFS keeps a deleted file that is open as `.nfs...` in its folder, which therefore is not empty."""
    really_remove = shutil.rmtree

    def remove_as_nfs(path):
        if (path / "a.bin").exists():
            (path / "a.bin").rename(path / ".nfs0001")
        if (path / ".nfs0001").exists():
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        really_remove(path)

    write(tmp_path / "x", OLD)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", remove_as_nfs)
        for _ in range(3):  # each has a reader of its own
            write(tmp_path / "x", NEW)
            assert find_damage(tmp_path / "x") == []
            assert content(tmp_path / "x") == NEW
        assert f"{tmp_path / '.old-x'} is left over and cannot be removed now: Directory not empty" in caplog.text
        assert clear_leftovers(tmp_path, {"x"}.__contains__) == []
    assert len(clear_leftovers(tmp_path, {"x"}.__contains__)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_success(tmp_path, monkeypatch):
    order: list[str] = []
    really_sync, really_rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        order.append(f"sync {Path(f'/proc/self/fd/{descriptor}').resolve().relative_to(tmp_path)}")
        really_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        order.append(f"rename {path.name}")
        return really_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    write(tmp_path / "x", OLD)
    assert order == [
        "sync .tmp-x/a.bin", "sync .tmp-x/b.json", f"sync .tmp-x/{MANIFEST}", "sync .tmp-x", "rename .tmp-x", "sync .",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_need_not_be_able_to_sync_a_folder(tmp_path, monkeypatch, error):
    really_sync = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(error, os.strerror(error))
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    if error == errno.EIO:  # that is a disk that fails
        with pytest.raises(OSError, match=os.strerror(error)):
            write(tmp_path / "x", NEW)
    else:
        write(tmp_path / "x", NEW)
        assert content(tmp_path / "x") == NEW
