"""A hub on loopback from which models can be read, and what else may answer at its address.

Real requests of the real clients arrive here: huggingface_hub, transformers, datasets.
API: https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api
from transformers.utils import hub as transformers_hub

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_of_someone_with_access"
_FILE = re.compile(r"/((?:datasets/)?[\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)")
_RECORD = re.compile(r"/api/((?:models|datasets)/[\w.-]+/[\w.-]+)(?:/(?:revision|tree)/([^/]+))?(/.*)?")


@dataclass
class ReadableHub:
    """Repositories by name (`someone/model`, `datasets/someone/chats`), each a folder of files.

    Attributes:
        gated: repositories that only `TOKEN` may read.
        status: the answer to everything, if it is not 200.
        commit: what it says that it has; empty for something that is no hub.
        delay_seconds: how long each block of a slow file takes.
        slow_files: the names of these files.
        requests: every request as it came: `HEAD /someone/model/resolve/main/config.json`.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    status: int = 200
    commit: str = COMMIT
    delay_seconds: float = 0.0
    slow_files: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    address: str = ""


def point_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let huggingface_hub and what is built on it find the hub at an address, as HF_ENDPOINT would at their import."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(hf_api.api, "endpoint", address)  # what the first import of the module found there, otherwise
    monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)  # the client of the first hub it asked (5.23)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def running_hub() -> Iterator[ReadableHub]:
    hub = ReadableHub()

    class Handler(_Handler):
        state = hub

    with serving(Handler) as hub.address:
        yield hub


@contextmanager
def black_hole() -> Iterator[str]:
    """The address of a socket that accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ReadableHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.state.requests.append(f"{self.command} {path}")
        if self.state.status != 200:
            return self._send(self.state.status)
        asked = _FILE.fullmatch(path) or _RECORD.fullmatch(path)
        if asked is None:
            return self._send(404)
        name, revision, file = asked.groups()
        name = name.removeprefix("models/")
        if name not in self.state.folders:
            return self._send(401, code="RepoNotFound")
        if name in self.state.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(403 if self.headers.get("Authorization") else 401, code="GatedRepo")
        if revision not in (None, "main", COMMIT, self.state.commit):
            return self._send(404, code="RevisionNotFound")
        folder = self.state.folders[name]
        if path.startswith("/api/"):
            return self._describe(name, folder, (file or "").strip("/") if "/tree/" in path else None)
        if not (folder / file).is_file():
            return self._send(404, code="EntryNotFound")
        return self._send(200, (folder / file).read_bytes())

    def do_POST(self) -> None:
        """Answer with the records of the files that are asked for by name."""
        asked = _RECORD.fullmatch(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if asked is None or asked[1] not in self.state.folders:
            return self._send(404)
        folder = self.state.folders[asked[1]]
        found = [name for name in json.loads(body)["paths"] if (folder / name).exists()]
        return self._send(200, json.dumps([self._entry(folder, name) for name in found]).encode())

    @staticmethod
    def _entry(folder: Path, name: str) -> dict[str, str | int]:
        path = folder / name
        return {"type": "directory" if path.is_dir() else "file", "path": name, "size": path.stat().st_size, "oid": "0"}

    def _describe(self, name: str, folder: Path, tree: str | None) -> None:
        """Answer with the record of a repository, or with the files in a folder of it."""
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if tree is not None:
            if not (folder / tree).is_dir():
                return self._send(404, code="EntryNotFound")
            inside = sorted(str(path.relative_to(folder)) for path in (folder / tree).rglob("*"))
            return self._send(200, json.dumps([self._entry(folder, name) for name in inside]).encode())
        siblings = [{"rfilename": file} for file in files]
        record = {
            "id": name,
            "sha": self.state.commit,
            "private": False,
            "gated": False,
            "siblings": siblings,
            "tags": [],
        }
        return self._send(200, json.dumps(record).encode())

    def _send(self, status: int, body: bytes = b"{}", *, code: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        if self.state.commit:
            self.send_header("X-Repo-Commit", self.state.commit)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(body), 1 + len(body) // 8):
            time.sleep(self.state.delay_seconds if Path(self.path).name in self.state.slow_files else 0)
            self.wfile.write(body[start : start + 1 + len(body) // 8])
