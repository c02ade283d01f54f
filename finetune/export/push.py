"""Push a run's adapter or a merged model to the hub: show what would be sent and where, then make one commit.

huggingface_hub takes the token from HF_TOKEN or from a login; finetune never shows it. The commit consists of single
operations: `upload_folder` sends files of a folder, and the card and the adapter's configuration exist only in memory.
API: https://huggingface.co/docs/huggingface_hub/package_reference/hf_api
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from finetune.errors import CheckpointError, ConfigError, RunFailedError
from finetune.export.certificate import CERTIFICATE_HEAD, read_certificates
from finetune.export.converters import refuse_no_model
from finetune.export.model_card import HUB_ID, fill_card, hub_base
from finetune.export.system_turn import usual_system
from finetune.inference.finished_run import find_run
from finetune.model.saved_adapter import ADAPTER_CONFIG
from finetune.runs.durable import MANIFEST, find_damage
from finetune.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_CARD = "README.md"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
_OF_A_MODEL = (*_WEIGHTS, ".onnx", ".onnx.data", ".pt", ".pth", ".h5", ".msgpack")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Package:
    """The files to send, by name, with the base (a hub id) and the licence that the card names."""

    form: Literal["adapter", "model"]
    base: str | None
    files: Mapping[str, Path | bytes]
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A package and the repository it goes to. Nothing has been sent yet."""

    package: Package
    repository: str
    endpoint: str
    is_new: bool
    """The repository must be created first."""
    private: bool
    removed: tuple[str, ...] = ()
    """Files in the repository that must not stay beside ours."""
    parent: str | None = None
    """The commit that was looked at. If another one comes in between, the push fails."""

    def __str__(self) -> str:
        place = f"{'a new' if self.is_new else 'the'} {'private' if self.private else 'PUBLIC'} repository"
        sizes = {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in sorted(self.package.files.items())
        }
        base = f", base {self.package.base}" if self.package.base else ""
        size_of_all = format_bytes(sum(sizes.values()))
        lines = [f"To {self.endpoint}/{self.repository}, {place}: {self.package.form}{base}, {size_of_all}"]
        lines += [f"  {name:<32} {format_bytes(size):>10}" for name, size in sizes.items()]
        lines += [f"  {name:<32} {'removed':>10}" for name in self.removed]
        if self.package.licence is None:
            lines.append("  The card names no licence. The base's licence applies; please look it up.")
        return "\n".join(lines)


def build_package(source: Path, *, base: str | None = None) -> Package:
    """Gather the files of an adapter's run, or of a folder that `finetune merge` wrote.

    `base` is the hub id of the adapter's base. It is needed if the run loaded the base from a local folder.

    Raises:
        CheckpointError: it is neither, or it is damaged.
        ConfigError: the adapter's base is not on the hub, so nobody else could load it.
    """
    source = source.expanduser().absolute()
    return _pack_adapter(source, base) if (source / "config.yaml").exists() else _pack_model(source)


def plan_upload(package: Package, repository: str, *, private: bool = True, replace: bool = False) -> Upload:
    """Look at the hub, and plan what a push to a repository (`owner/name`) would do there.

    With `replace`, it may replace a model of another base, or an adapter by a model.

    Raises:
        ConfigError: the name is not a repository's, there is no token, the repository is public but a private one is
            wanted, or it holds another model.
        RunFailedError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"{repository} is not the name of a repository. Expected OWNER/NAME, for example me/orders.")
    if get_token() is None:
        raise ConfigError("there is no token for the hub. Log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    upload = Upload(package=package, repository=repository, endpoint=api.endpoint, is_new=True, private=private)
    with _hub_errors(f"looking at {repository}"):
        try:
            info = api.model_info(repository)
        except RepositoryNotFoundError:
            return upload
        present = [sibling.rfilename for sibling in info.siblings or ()]
        there = _find_model(api, repository, present, info.card_data)
    if private and not info.private:
        raise ConfigError(f"{repository} is public: everybody could see what you send. If you want that, add --public.")
    own_model = (package.form, package.base)
    is_other = there not in (None, own_model)
    if there is not None and is_other and not replace:
        raise ConfigError(
            f"{repository} holds {_describe(*there)}, but this is {_describe(*own_model)}. Name another repository, or "
            "replace the model there with --replace. Nothing was sent."
        )
    # Loaders would mix other weights with the new ones. Of another model, every file goes.
    leftovers = [name for name in present if name not in (*package.files, ".gitattributes", _CARD)]
    removed = tuple(name for name in leftovers if is_other or name.endswith(_WEIGHTS))
    return dataclasses.replace(upload, is_new=False, private=bool(info.private), removed=removed, parent=info.sha)


def upload_package(upload: Upload, message: str) -> str:
    """Send the files as one commit. Returns the commit's address.

    Raises:
        ConfigError: the hub refuses the token or the name.
        RunFailedError: the hub cannot be reached, or the repository has changed since the plan.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in sorted(upload.package.files.items())
    ]
    operations += [CommitOperationDelete(path_in_repo=name) for name in upload.removed]
    with _hub_errors(f"sending to {upload.repository}"):
        if upload.is_new:
            api.create_repo(upload.repository, private=upload.private)
        commit = api.create_commit(upload.repository, operations, commit_message=message, parent_commit=upload.parent)
    return str(commit.commit_url)


def _pack_adapter(source: Path, base: str | None) -> Package:
    run = find_run(source, ["model.trust_remote_code=false"], is_alone=True)  # no model is loaded
    target = shlex.join([str(source), "OUT"])
    if run.is_full:
        raise CheckpointError(f"{source} trained every weight. Write its model first: finetune merge {target}.")
    base = base or hub_base(run)
    if base is None:
        raise ConfigError(
            "the adapter's base is a local folder, which nobody else could load. Name the base's hub id with --base, "
            f"or push the whole model: finetune merge {target}."
        )
    files = _files_of(run.weights)
    config = json.loads((run.weights / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if base != config.get("base_model_name_or_path"):
        config["revision"] = None  # it is a commit of another repository
    config["base_model_name_or_path"] = base
    files[ADAPTER_CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    files[_CARD] = _with_certificate(fill_card(run, base, system=usual_system(run)), run.weights).encode()
    return Package(form="adapter", base=base, files=files)


def _pack_model(source: Path) -> Package:
    refuse_no_model(source)
    # You may edit the card, so its bytes may have changed.
    damage = [line for line in find_damage(source) if not line.startswith(f"{_CARD}:")]
    if damage and (source / MANIFEST).is_file():
        raise CheckpointError(f"{source} is damaged: {'; '.join(damage)}. Merge again into a new folder.")
    header = _card_header(source / _CARD)
    files = _files_of(source)
    if (source / _CARD).is_file():
        files[_CARD] = _with_certificate((source / _CARD).read_text(encoding="utf-8"), source).encode()
    return Package(form="model", base=_first_base(header.get("base_model")), files=files, licence=header.get("license"))


def _files_of(folder: Path) -> dict[str, Path | bytes]:
    """Return the files to send. A link could name a file of this machine that is not part of the model."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.name != MANIFEST}
    for path in files.values():
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {path.readlink()}. Only files of the folder itself are sent: put the file in the "
                "place of the link, or remove the link. Nothing was sent."
            )
    return dict(files)


def _with_certificate(card: str, folder: Path) -> str:
    """Put the folder's certificates at the end of a card in place of earlier ones, which are removed in any case."""
    section = read_certificates(folder)
    before, earlier, after = card.partition(CERTIFICATE_HEAD)
    _, head, rest = after.partition("\n## ")
    if section is not None:
        return f"{before.rstrip()}\n\n{section}{head}{rest}"
    if not earlier:
        return card
    _log.warning(
        "%s has a section about a certificate that the folder does not have, so the section is not sent. Make a "
        "certificate with finetune verify %s",
        folder / _CARD,
        folder,
    )
    return f"{before.rstrip()}\n{head}{rest}"


def _card_header(card: Path) -> dict[str, Any]:
    from huggingface_hub import metadata_load

    try:
        return (metadata_load(card) or {}) if card.is_file() else {}
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(
            f"the header of {_CARD} is not valid YAML: {error}. Correct it; the hub refuses such a card."
        ) from error


def _find_model(api: HfApi, repository: str, present: list[str], card: Any) -> tuple[str, str | None] | None:
    """Return the form and the base of the model in a repository; None if it has no weights yet."""
    if not any(name.endswith(_OF_A_MODEL) for name in present):
        return None
    if ADAPTER_CONFIG in present:
        path = api.hf_hub_download(repository, ADAPTER_CONFIG)
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        return "adapter", config.get("base_model_name_or_path")
    return "model", _first_base(getattr(card, "base_model", None))


def _first_base(base: object) -> str | None:
    """Return the base that a card names, or the first of several; None if it names none."""
    if isinstance(base, list) and base:
        return _first_base(base[0])
    return base if isinstance(base, str) else None


def _describe(form: str, base: str | None) -> str:
    return f"{'an adapter' if form == 'adapter' else 'a model'} of {base or 'a base that it does not name'}"


@contextmanager
def _hub_errors(doing: str) -> Iterator[None]:
    """Repeat in one line what the hub or the network says, without the token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:  # of the hub's library and of those below it
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        reason = " ".join(str(error).split()).replace(get_token() or "\n", "(token)") or type(error).__name__
        if status in (401, 403):
            raise ConfigError(
                f"{doing}: the hub refuses it ({reason}). The token needs write access: `hf auth login`."
            ) from error
        raise RunFailedError(f"{doing} failed: {reason}. No commit was made; try again.") from error
