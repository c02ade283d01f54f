"""A finished run's adapter, or a merged model, to the hub: first what would be sent and where to, then one commit.

The token is the hub's own affair: huggingface_hub takes it from HF_TOKEN or from a login, and it is never shown here.
API: https://huggingface.co/docs/huggingface_hub/package_reference/hf_api
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.errors import CheckpointError, ConfigError, RunFailedError
from finetune.export.exported_folder import refuse_no_model
from finetune.export.model_card import adapter_card, hub_id
from finetune.export.run_to_ship import read_run
from finetune.runs.durable import MANIFEST, find_damage, in_units

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Content = Path | bytes
_CARD = "README.md"
_ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
_OF_EVERY_REPOSITORY = {".gitattributes", _CARD}


@dataclass(frozen=True, kw_only=True)
class Package:
    """What is to be sent.

    Attributes:
        kind: `adapter` or `model`.
        base: the hub id of the base; None for a model whose card names none.
        files: content by name.
        licence: what the card's header names; None: nothing.
    """

    kind: str
    base: str | None
    files: Mapping[str, Content]
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a push will do; nothing has been sent yet.

    Attributes:
        package: the files.
        repository: its id.
        endpoint: the hub's address.
        is_new: the repository is created first.
        private: whether it is, or will be.
        removed: weights there that would be left over beside ours.
        parent: the commit that was looked at; another one in between fails the push.
    """

    package: Package
    repository: str
    endpoint: str
    is_new: bool
    private: bool
    removed: list[str] = field(default_factory=list)
    parent: str | None = None

    def __str__(self) -> str:
        place = f"{'a new' if self.is_new else 'the'} {'private' if self.private else 'PUBLIC'} repository"
        sizes = {name: _size(content) for name, content in sorted(self.package.files.items())}
        base = f", base {self.package.base}" if self.package.base else ""
        lines = [
            f"To {self.endpoint}/{self.repository}, {place}: {self.package.kind}{base}, {in_units(sum(sizes.values()))}"
        ]
        lines += [f"  {name:<32} {in_units(size):>10}" for name, size in sizes.items()]
        lines += [f"  {name:<32} {'removed':>10}" for name in self.removed]
        if self.package.licence is None:
            lines.append("  The card names no licence: that of the base applies, and is for you to look up.")
        return "\n".join(lines)


def pack(source: Path, *, base: str | None = None) -> Package:
    """Gather what a run or a merged folder has to send.

    Args:
        source: a run of an adapter, or a folder that merge wrote.
        base: the hub id of the adapter's base, where the run's own is a folder of this machine.

    Raises:
        CheckpointError: it is neither, or damaged.
        ConfigError: nobody else could find the adapter's base.
    """
    source = source.expanduser().absolute()
    return _pack_adapter(source, base) if (source / "config.yaml").is_file() else _pack_model(source)


def plan_push(package: Package, repository: str, *, private: bool = True, replace: bool = False) -> Plan:
    """Look at the hub, and say what a push would do there.

    Args:
        package: what to send.
        repository: `owner/name`.
        private: what a new repository is to be.
        replace: put it in place of a model of another base or kind.

    Raises:
        ConfigError: no name of a repository, no token, a public repository where a private one is wanted, or another
            model is there.
        RunFailedError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ConfigError(f"{repository} is no name of a repository. Expected OWNER/NAME, for example me/orders.")
    if get_token() is None:
        raise ConfigError("there is no token for the hub. Log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    with _hub_errors(f"looking at {repository}"):
        try:
            info = api.model_info(repository)
        except RepositoryNotFoundError:
            return Plan(package=package, repository=repository, endpoint=api.endpoint, is_new=True, private=private)
        present = [sibling.rfilename for sibling in info.siblings or ()]
        there = _what_is_there(api, repository, present, info.card_data)
    if private and not info.private:
        raise ConfigError(
            f"{repository} is public, and everybody would see what is sent. Say --public if that is meant."
        )
    ours = (package.kind, package.base)
    if there is not None and there != ours and not replace:
        raise ConfigError(
            f"{repository} holds {_in_words(*there)}, but this is {_in_words(*ours)}. Name another repository, or put "
            "it in that one's place with --replace. Nothing was sent."
        )
    stale = [name for name in present if name not in package.files and _is_left_over(name, there != ours)]
    return Plan(
        package=package,
        repository=repository,
        endpoint=api.endpoint,
        is_new=False,
        private=bool(info.private),
        removed=stale,
        parent=info.sha,
    )


def push(plan: Plan, message: str) -> str:
    """Send it, as one commit. Returns the commit's address.

    Raises:
        ConfigError: the hub refuses the token or the name.
        RunFailedError: the hub cannot be reached, or the repository has changed since the plan.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in sorted(plan.package.files.items())
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in plan.removed]
    with _hub_errors(f"sending to {plan.repository}"):
        if plan.is_new:
            api.create_repo(plan.repository, private=plan.private)
        done = api.create_commit(plan.repository, operations, commit_message=message, parent_commit=plan.parent)
    return str(done.commit_url)


def _pack_adapter(source: Path, base: str | None) -> Package:
    run = read_run(source)
    if run.is_full:
        raise CheckpointError(f"{source} trained every weight. Write its model first: finetune merge {source} OUT.")
    found = base or hub_id(run.config.model.path if run.config.model.init == "pretrained" else None)
    if found is None:
        raise ConfigError(
            "the adapter's base is a folder of this machine, which nobody else could load. Name the base's hub id with "
            f"--base, or push the whole model: finetune merge {source} OUT."
        )
    files: dict[str, Content] = {
        path.name: path for path in run.weights.iterdir() if path.is_file() and path.name != MANIFEST
    }
    config = json.loads((run.weights / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = found
    files[_ADAPTER_CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    files[_CARD] = adapter_card(run, found).encode()
    return Package(kind="adapter", base=found, files=files)


def _pack_model(source: Path) -> Package:
    refuse_no_model(source)
    # The card is there to be edited, so that its bytes may have changed.
    damage = [line for line in find_damage(source) if not line.startswith(f"{_CARD}:")]
    if damage and (source / MANIFEST).is_file():
        raise CheckpointError(f"{source} is damaged: {'; '.join(damage)}. Merge again into a new folder.")
    card = source / _CARD
    header = _header(card.read_text(encoding="utf-8")) if card.is_file() else {}
    files: dict[str, Content] = {
        path.name: path for path in source.iterdir() if path.is_file() and path.name not in (MANIFEST, "manifest.json")
    }
    return Package(kind="model", base=_one(header.get("base_model")), files=files, licence=header.get("license"))


def _what_is_there(api: HfApi, repository: str, present: list[str], card: Any) -> tuple[str, str | None] | None:
    """Kind and base of what a repository holds; None where it holds no weights yet."""
    if not any(name.endswith(_WEIGHTS) for name in present):
        return None
    if _ADAPTER_CONFIG in present:
        path = api.hf_hub_download(repository, _ADAPTER_CONFIG)
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        return "adapter", config.get("base_model_name_or_path")
    return "model", _one(getattr(card, "base_model", None))


def _is_left_over(name: str, is_other: bool) -> bool:
    """Weights of an earlier push would be loaded with ours; of another model nothing stays."""
    return name not in _OF_EVERY_REPOSITORY if is_other else name.endswith(_WEIGHTS)


def _header(card: str) -> dict[str, Any]:
    """The YAML between the first two lines of dashes."""
    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        header = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise CheckpointError(
            f"the header of {_CARD} is no YAML: {error}. Mend it; the hub refuses such a card."
        ) from error
    return header if isinstance(header, dict) else {}


def _one(base: object) -> str | None:
    return _one(base[0]) if isinstance(base, list) and base else base if isinstance(base, str) else None


def _in_words(kind: str, base: str | None) -> str:
    return f"{'an adapter' if kind == 'adapter' else 'a model'} of {base or 'a base that it does not name'}"


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


@contextmanager
def _hub_errors(doing: str) -> Iterator[None]:
    """Say in a line what the hub or the network says, without what a message must not show."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:  # of the hub's library and of those below it
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        said = " ".join(str(error).split()).replace(get_token() or "\n", "(token)") or type(error).__name__
        if status in (401, 403):
            raise ConfigError(
                f"{doing}: the hub refuses it ({said}). The token needs the right to write there: `hf auth login`."
            ) from error
        raise RunFailedError(f"{doing} failed: {said}. Nothing was put in place; try again.") from error
