"""Ask the Hugging Face hub once whether it gives what a run names, and read its cache alone if it does not answer.

transformers and datasets ask for many files, and repeat each question for a minute where there is no network. So a run
sends one request before them. If it fails, they work with the hub's cache alone, or the run ends and says what to do.
A download is not limited: only this request is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune.deadlines import DeadlineExceededError, call_within
from finetune.errors import first_line
from finetune.logs import waiting
from finetune.terminal import without_passwords

LIMIT_SECONDS = 15.0
"""The longest that a run waits for the hub to answer."""
LIMIT_BESIDE_CACHE_SECONDS = 5.0
"""The longest that a run waits for the hub if the hub's cache has all that is needed."""

_REMEMBERED_SECONDS = 60.0
"""An answer holds for this long: a command asks once, and a notebook may try again later."""

Reason = Literal["offline", "unreachable", "gated", "missing", "revision", "refused"]


class Repository(NamedTuple):
    """A model or data set on the hub that a run names."""

    name: str
    """Its hub id."""
    revision: str | None
    repository_type: Literal["model", "dataset"]


class HubFault(NamedTuple):
    """Why the hub does not give a repository."""

    reason: Reason
    text: str
    """A clause that continues a sentence after "and"."""


def find_fault(repository: Repository, *, is_cached: bool = False) -> HubFault | None:
    """Ask the hub for a repository, once a minute at most; None if it answers.

    A hub that cannot be reached is not asked for a second repository either, unless that question may wait longer. If
    `is_cached`, all that is needed is in the hub's cache, so that little time is spent.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return HubFault("offline", "HF_HUB_OFFLINE is set")
    now, here, limit = time.monotonic(), (_endpoint(), *repository), _limit(is_cached=is_cached)
    for asked, (when, waited, fault) in answers_heard.items():
        is_unreachable = fault is not None and fault.reason == "unreachable"
        counts_here = (waited >= limit and asked[0] == here[0]) if is_unreachable else asked == here
        if now - when < _REMEMBERED_SECONDS and counts_here:
            return fault
    fault = _ask(repository, limit)
    answers_heard[here] = time.monotonic(), limit, fault
    return fault


def fault_of(error: BaseException) -> HubFault | None:
    """Return the fault of the hub or the network that caused a library's error; None if neither of them caused it."""
    from huggingface_hub import errors

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, errors.OfflineModeIsEnabled):
            return HubFault("offline", "HF_HUB_OFFLINE is set")
        if isinstance(seen, errors.GatedRepoError):
            return HubFault("gated", f"it is gated: {_about_token()}")
        if isinstance(seen, errors.RepositoryNotFoundError):
            return _missing()
        if isinstance(seen, errors.RevisionNotFoundError):
            return HubFault("revision", f"{_endpoint()} does not have this revision")
        if isinstance(seen, errors.HfHubHTTPError) and not isinstance(seen, errors.EntryNotFoundError):
            return _refusal(seen)
        if type(seen).__module__.startswith("httpx") or isinstance(seen, (ConnectionError, TimeoutError)):
            return _unreachable(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def explain_hub_fault(fault: HubFault, repository: Repository, key: str, state: str) -> str:
    """Write what is wrong and what helps against it, and nothing that does not.

    `key` is the key that names the repository, for example ``model.path``. `state` says after "which" what of it is
    here.
    """
    return f"{key} is {repository.name}, which {state}, and {fault.text}. {what_to_do(fault, repository, key)}"


def what_to_do(fault: HubFault, repository: Repository, key: str) -> str:
    """Write what helps against a fault; see `explain_hub_fault`."""
    is_dataset = repository.repository_type == "dataset"
    noun = "data set" if is_dataset else "model"
    if fault.reason == "gated":
        page = f"{_endpoint()}/{'datasets/' if is_dataset else ''}{repository.name}"
        return (
            f"Ask for access at {page}, then run `hf auth login` or set HF_TOKEN, with a token of the "
            "account that has access."
        )
    if fault.reason == "missing":
        return f"Correct {key}; if it is a private {noun}, run `hf auth login` or set HF_TOKEN."
    if fault.reason == "revision":
        return f"Correct {key.partition('.')[0]}.revision, or drop it."
    folder = repository.name.rpartition("/")[2]
    options = " --repo-type dataset" if is_dataset else ""
    options += f" --revision {repository.revision}" if repository.revision else ""
    copy = (
        f"run `hf download {repository.name}{options} --local-dir {folder}` on a machine that reaches the hub, "
        f"copy the folder here and give {key}={folder}; or set HF_HOME to a cache that has the {noun}"
    )
    if fault.reason == "offline":
        return f"Unset HF_HUB_OFFLINE; or {copy}."
    if fault.reason == "refused":
        return f"Try again later; or {copy}."
    if os.environ.get("HF_ENDPOINT"):
        return f"Check HF_ENDPOINT; or {copy}."
    return f"{copy[0].upper()}{copy[1:]}; or name a mirror in HF_ENDPOINT."


@contextmanager
def cache_only() -> Iterator[None]:
    """Within the block, huggingface_hub, transformers and datasets read only their cache and never ask the hub."""
    from huggingface_hub import constants

    was = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was


def cached_file(repository: Repository, name: str) -> Path | None:
    """Return a file of a repository in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    hub_id, revision, repository_type = repository
    path = try_to_load_from_cache(hub_id, name, revision=revision, repo_type=repository_type)
    return Path(path) if isinstance(path, str) else None


answers_heard: dict[tuple[Any, ...], tuple[float, float, HubFault | None]] = {}
"""The time, the limit in seconds and the result of each question, by the hub's address and the repository."""


def _limit(*, is_cached: bool) -> float:
    from huggingface_hub import constants

    if os.environ.get("HF_HUB_ETAG_TIMEOUT"):  # a mirror that fetches a file before it answers may need it
        return float(constants.HF_HUB_ETAG_TIMEOUT)
    return LIMIT_BESIDE_CACHE_SECONDS if is_cached else LIMIT_SECONDS


def _ask(repository: Repository, limit: float) -> HubFault | None:
    """Send one request, and wait for its answer up to a limit in seconds.

    A thread waits, because a limit of the client holds for each address of the hub and for each phase of a request.
    """
    try:
        with waiting(f"asking {_endpoint()} for {repository.name}"):
            return call_within(limit, lambda: _request(repository, limit), name="hub")
    except DeadlineExceededError:
        return HubFault("unreachable", f"{_endpoint()} does not answer within {limit:g} s")


def _request(repository: Repository, limit: float) -> HubFault | None:
    """Ask for the metadata of a small file, whether there is such a file or not."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    try:
        hub_id, revision, repository_type = repository
        name = "config.json" if repository_type == "model" else ".gitattributes"
        url = hf_hub_url(hub_id, name, repo_type=repository_type, revision=revision, endpoint=constants.ENDPOINT)
        metadata = get_hf_file_metadata(url, timeout=2 * limit)  # `_ask` counts
    except errors.EntryNotFoundError:
        return None
    except Exception as error:  # the client's own errors differ from version to version
        return fault_of(error) or _unreachable(error)
    if metadata.commit_hash is None:
        return HubFault("unreachable", f"what answers at {_endpoint()} is no hub: a proxy, or the page of a login")
    return None


def _refusal(error: Any) -> HubFault:
    """Describe an answer other than those that the hub gives about a repository."""
    status = getattr(error.response, "status_code", None)
    if status in (401, 403):
        return HubFault("gated", f"{_endpoint()} does not give it ({status}): {_about_token()}")
    if status == 404:
        return _missing()
    phrase = getattr(error.response, "reason_phrase", "")
    return HubFault("refused", f"{_endpoint()} answers {status} {phrase}".rstrip())


def _unreachable(error: BaseException) -> HubFault:
    return HubFault("unreachable", f"{_endpoint()} cannot be reached ({without_passwords(first_line(error))})")


def _missing() -> HubFault:
    return HubFault("missing", f"{_endpoint()} has none of that name that you may read")


def _about_token() -> str:
    from huggingface_hub import get_token

    return "your token may not read it" if get_token() else "no token is set"


def _endpoint() -> str:
    from huggingface_hub import constants

    return without_passwords(constants.ENDPOINT) or "an empty HF_ENDPOINT"
