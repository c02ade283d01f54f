from __future__ import annotations

import pytest

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Stand in an empty folder, and write files there."""
    monkeypatch.chdir(tmp_path)

    def write(name, text=ROW):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write
