"""Compare a model that a script has loaded with the files that its configuration names.

Later commands load the base from these files. So an adapter that was trained on another model does not fit it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.decoder import bare_model
from finetune.errors import ModelError
from finetune.model.from_hub import locate_model, repository_of
from finetune.model.local_files import stored_weights
from finetune.runs.tensors import is_sharded
from finetune.units import name_first

if TYPE_CHECKING:
    from finetune.config.schema import ModelSection

_log = logging.getLogger(__name__)
_WITHOUT_EFFECT = {
    *("architectures", "auto_map", "dtype", "id2label", "label2id", "model_type", "problem_type", "return_dict"),
    *("torch_dtype", "transformers_version", "use_cache"),
}
"""Keys of a model's configuration that change neither its loss nor its weights."""
_WITHOUT_EFFECT_ENDS = ("_token_id", "_token_ids")
"""Ends of such keys. A run sets these ids itself, and no embedding of a run has a padding index."""
_WITHOUT_EFFECT_STARTS = ("_", "output_")
_SAVE_IT = (
    "Later commands load the base from there. Save the model with model.save_pretrained(FOLDER) and "
    "tokenizer.save_pretrained(FOLDER), and give AutoModelForCausalLM.from_pretrained(FOLDER)"
)
_OF_PEFT = ("base_model.model.", "original_module.", "base_layer.")
"""What PEFT adds to the names of a base's weights."""
_ROWS_AT_ONCE = 4096
"""Rows of an embedding that are read at once."""


def refuse_other_base(model: Any, section: ModelSection) -> torch.dtype | None:
    """Refuse a model that differs from the files at `model.path`. Return the dtype to which its weights are rounded.

    Compared are the configuration, and rows of each weight that both have by one name, see `_parts`. None: these are
    not rounded, or the files are not on this machine.

    Raises:
        ModelError: names what differs.
    """
    base, where = bare_model(model), locate_model(section)
    repository = repository_of(where, section.revision)
    name = where if repository is None else f"{where} at revision {section.revision or 'main'}"
    or_revision = "" if repository is None else " If it was loaded from another revision, set model.revision to that."
    changed = [] if section.config is not None else list(_changed_keys(base.config, section, where))
    if changed:
        raise ModelError(
            f"the given model has another configuration than {name}: {name_first(changed, 4)}. {_SAVE_IT}, or load it "
            f"without these changes.{or_revision}"
        )
    stored = stored_weights(where, repository)
    changed, rounded, num_compared = [], None, 0
    for weight_name, weight in _named_weights(model):
        saved = stored.get(weight_name)
        is_comparable = weight.is_floating_point() and not is_sharded(weight)
        if saved is None or list(saved.get_shape()) != list(weight.shape) or not is_comparable:
            continue
        num_compared += 1
        for own, other in _parts(weight, saved, len(base.get_input_embeddings().weight)):
            dtypes = (own.dtype, torch.bfloat16, torch.float16)
            dtype = next((each for each in dtypes if torch.equal(other.to(each).to(own.dtype), own)), None)
            if dtype is None:
                changed.append(weight_name)
                break
            if not torch.equal(own.to(other.dtype), other):
                rounded = dtype
    if changed:
        raise ModelError(
            f"the given model has other weights than {name}: {name_first(changed, 4)}. {_SAVE_IT}.{or_revision}"
        )
    if not num_compared:
        why = "the files name their weights otherwise, or are not on this machine"
        _log.warning("the weights of the given model could not be compared with %s: %s", name, why)
    return rounded


def _changed_keys(config: Any, section: ModelSection, where: str) -> Iterator[str]:
    """Yield each key of a model's configuration that differs from its files, with both values."""
    try:
        saved = type(config).from_pretrained(where, revision=section.revision, local_files_only=True)
    except (OSError, ValueError, TypeError):
        return  # `check_inputs` has looked for the files
    own, other = (dict(_flat(each.to_dict())) for each in (config, saved))
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            yield f"{key}={_short(own.get(key))}, there {_short(other.get(key))}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in _WITHOUT_EFFECT or key.startswith(_WITHOUT_EFFECT_STARTS) or key.endswith(_WITHOUT_EFFECT_ENDS):
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the base by their names on disk. The names of an adapter's weights are in no file."""
    for name, weight in model.named_parameters():
        for part in _OF_PEFT:
            name = name.replace(part, "")
        yield name, weight.detach()


def _parts(weight: torch.Tensor, saved: Any, num_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield rows of a weight in memory and on disk, on the CPU: all of an embedding, else the first and the last.

    Scripts set single rows of an embedding, for example those of reserved tokens. Other changes, such as a merge,
    change all rows.
    """
    if weight.dim() > 1 and len(weight) == num_tokens:
        blocks = range(0, num_tokens, _ROWS_AT_ONCE)
        places: list[tuple[slice, ...]] = [(slice(start, start + _ROWS_AT_ONCE),) for start in blocks]
    else:
        places = [tuple(slice(0, 1) for _ in weight.shape[:-1])]
        places += [tuple(slice(size - 1, size) for size in weight.shape[:-1])]
    for place in places:
        rows = (*place, slice(None))
        yield weight[rows].cpu(), saved[rows]
