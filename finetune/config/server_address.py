"""Check the address of a vLLM server before anything repeats it."""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import SplitResult, urlsplit


def split_server_address(url: str) -> SplitResult:
    """Split the address of a server. Messages, logs and run.json repeat it, so it may hold no credentials.

    Raises:
        ValueError: the text is not the address of a server. The message does not repeat the text.
    """
    with suppress(ValueError):  # urlsplit, the port and IDNA raise it
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
        is_plain = url.isascii() and url.isprintable() and not set(url) & set(" ?#@")
        if is_plain and host and parts.scheme in ("http", "https"):
            return parts
    raise ValueError(
        "not the address of a vLLM server. Expected something like http://localhost:8000, without a user name, a "
        "password or anything after a ? or #. If the server needs a key, set VLLM_API_KEY."
    )
