"""A hub on loopback: the part of its HTTP API that a push talks to, with repositories in memory.

Real requests of the real client (huggingface_hub) arrive here. Small files come within the commit, weights through the
large file storage that the commit then names by digest, as at the hub.
API: https://huggingface.co/spaces/huggingface/openapi and https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import yaml

from tests.readable_hub import serving


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((sorted(self.files), self.messages)).encode()).hexdigest()


@dataclass
class Hub:
    token: str
    may_write: bool = True
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    address: str = ""


@contextmanager
def running_hub(token: str) -> Iterator[Hub]:
    hub = Hub(token)

    class Handler(_Handler):
        state = hub

    with serving(Handler) as hub.address:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(
            {r"/api/models/([\w.-]+/[\w.-]+)": self._info, r"/([\w.-]+/[\w.-]+)/resolve/main/(.+)": self._file}
        )

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self._answer({r"/storage/(\w+)": self._store})

    def do_POST(self) -> None:
        self._answer(
            {
                r"/api/repos/create": self._create,
                r"/api/validate-yaml": self._validate,
                r"/api/models/([\w.-]+/[\w.-]+)/preupload/main": self._preupload,
                r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch": self._batch,
                r"/api/models/([\w.-]+/[\w.-]+)/commit/main": self._commit,
            }
        )

    def _answer(self, routes: dict[str, Any]) -> None:
        path = self.path.partition("?")[0]
        self.state.requests.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_storage = path.startswith("/storage/")
        if not is_storage and self.headers.get("Authorization") != f"Bearer {self.state.token}":
            return self._send(401, {"error": "Invalid credentials"})
        if self.command == "POST" and not self.state.may_write and "validate" not in path:
            return self._send(403, {"error": "You have read-only access"})
        for pattern, answer in routes.items():
            if found := re.fullmatch(pattern, path):
                return answer(*found.groups())
        return self._send(404, {"error": f"no {self.command} {path} in the stand-in"})

    def _send(self, status: int, record: Any = None, data: bytes | None = None, **headers: str) -> None:
        body = json.dumps(record).encode() if data is None else data
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repository(self, name: str) -> Repository | None:
        found = self.state.repositories.get(name)
        if found is None:
            self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return found

    def _info(self, name: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        card = repository.files.get("README.md", b"").decode()
        header = yaml.safe_load(card.split("---\n")[1]) if card.startswith("---\n") else None
        siblings = [{"rfilename": file} for file in repository.files]
        record = {"id": name, "private": repository.private, "sha": repository.sha, "siblings": siblings}
        self._send(200, {**record, "cardData": header, "tags": []})

    def _file(self, name: str, file: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        data = repository.files[file]
        tag = f'"{hashlib.sha1(data).hexdigest()}"'
        self._send(200, data=data, ETag=tag, X_Repo_Commit=repository.sha)

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
        self.state.repositories[name] = Repository(
            private=asked.get("visibility") == "private" or asked.get("private") is True
        )
        self._send(200, {"url": f"{self.state.address}/{name}", "name": name})

    def _validate(self) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def _preupload(self, name: str) -> None:
        files = json.loads(self.body)["files"]
        modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
        answers = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        self._send(200, {"files": answers})

    def _batch(self, name: str) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.state.address}/storage/{one['oid']}", "header": {}}}}
            for one in json.loads(self.body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _store(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._send(400, {"error": "other bytes than were announced"})
        self.state.stored[oid] = self.body
        return self._send(200, {})

    def _commit(self, name: str) -> None:
        if (repository := self._repository(name)) is None:
            return None
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.sha):
            return self._send(412, {"error": "A commit has happened since. Please refresh and try again."})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.state.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        repository.messages.append(header["summary"])
        url = f"{self.state.address}/{name}/commit/{repository.sha}"
        return self._send(200, {"success": True, "commitUrl": url, "commitOid": repository.sha})
