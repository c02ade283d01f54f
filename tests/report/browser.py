"""Control a headless Chromium over its pipe (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60.0


def find_chromium() -> str | None:
    """Find the path of an installed browser; CHROMIUM names another."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. Console messages, script errors and requests are kept in `events`."""

    def __init__(self, executable: str, profile: Path) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()

        def wire() -> None:
            # Chromium reads from descriptor 3 and writes to 4; aside first, since these may be among our four.
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            spare_commands, spare_answers = (os.dup2(fd, n) for fd, n in ((commands, 100), (answers, 101)))
            os.dup2(spare_commands, 3)
            os.dup2(spare_answers, 4)

        self._process = subprocess.Popen(
            [
                executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "--disable-extensions",
                "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "about:blank",
            ],
            close_fds=False, preexec_fn=wire, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._commands)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer.get("result", {})
            self.events.append(answer)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Open a file, and wait until its charts are drawn."""
        self.events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.send("Page.navigate", url=path.as_uri())
        self.evaluate(
            "new Promise(done => { const look = () => document.readyState === 'complete' && window.finetuneReady "
            "? window.finetuneReady.then(() => done(true)) : setTimeout(look, 20); look(); })"
        )

    def evaluate(self, expression: str) -> Any:
        """Evaluate an expression in the page, and wait if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Return the addresses that the page requested, including its own."""
        self.evaluate("new Promise(done => setTimeout(done, 100))")
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[Any]:
        """Return the messages on the console, and the errors of scripts."""
        kinds = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def pdf(self) -> bytes:
        """Print the page to PDF, on A4."""
        answer = self.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)
        return base64.b64decode(answer["data"])

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser was silent for {_SECONDS:.0f} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
