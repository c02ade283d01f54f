"""Files that others made: only regular ones of limited size are opened, also if they were replaced meanwhile."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.limits import irregular_files, is_own_file, open_regular, read_regular


def test_what_replaces_a_file_before_it_is_opened_is_refused(tmp_path, monkeypatch):
    regular, link, fifo = (tmp_path / name for name in ("regular", "link", "fifo"))
    regular.write_text("text")
    link.symlink_to(regular)
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)  # nothing waits for it
    before = regular.lstat()
    for path, reason in ((link, os.strerror(errno.ELOOP)), (fifo, "it is a FIFO")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "lstat", lambda path: before)
            with pytest.raises(OSError, match=reason):
                open_regular(path)
    with pytest.raises(OSError, match="it is a symbolic link, and only regular files are read"):
        open_regular(link)
    os.close(writer)
    with open_regular(regular) as file:
        assert file.read() == b"text"


def test_a_file_may_have_as_many_bytes_as_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        read_regular(tmp_path / "file", most=4)


def test_the_files_of_a_model_that_no_library_may_open_are_named(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    os.mkfifo(tmp_path / "additional_chat_templates" / "tool.jinja")
    for name in ("config.json", "model.safetensors", "notes.md"):
        with (tmp_path / name).open("wb") as file:
            file.truncate((256 << 20) + 1)
    assert irregular_files(tmp_path) == [
        "tool.jinja: it is a FIFO, and only regular files are read",
        "config.json: it has 268,435,457 bytes, and at most 268,435,456 are read",
    ]


@pytest.mark.parametrize(("owner", "is_own"), [(1000, True), (0, True), (1001, False)])
def test_a_file_of_another_user_is_not_read(tmp_path, monkeypatch, caplog, owner, is_own):
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_uid=owner))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert is_own_file(tmp_path, "it is made again") == is_own
    assert is_own or "belongs to another user (uid 1001), who could change it; it is made again" in caplog.text
    assert not is_own_file(tmp_path / "missing", "it is made again")
