"""Take what a script gives to `finetune.train`: arguments, and rows and a model that it holds in memory.

Rows are written into the cache, where a run reads them like any file. The name of each file is a digest of its rows. So
a run, its resumed start and later commands on its folder read the same rows, and a changed list is another file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.compose import compose
from finetune.config.config_files import local_path
from finetune.config.key_advice import did_you_mean, did_you_mean_key
from finetune.config.keys import fields, values
from finetune.config.python_values import names_of, overrides_of
from finetune.config.yaml_reader import SCRIPT
from finetune.data.remote import in_cache
from finetune.data.splits import SPLIT_NAMES
from finetune.distributed.device import DTYPES, Precision
from finetune.engine.adapted import hook_reason
from finetune.engine.decoder import bare_model, family_of
from finetune.errors import ConfigError, DataError, ModelError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.limits import is_own_file
from finetune.model.base import is_half_frozen, prepare_base
from finetune.model.given_base import refuse_other_base
from finetune.model.lora import OF_AN_ADAPTER, add_lora, trained_in_fp32
from finetune.model.missing_window import refuse_missing_window
from finetune.runs.durable import replacing
from finetune.training.hooks import GIVEN
from finetune.units import name_first

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config

_ARGUMENTS_OF_TRL = {
    "args": "Give overrides with keys of the configuration, which docs/migrating.md lists by TRL's names.",
    "train_dataset": "Did you mean data?",
    "eval_dataset": 'Give data={"train": rows, "validation": rows}.',
    "peft_config": 'Give overrides={"lora.r": 16}, or a PEFT model in model.',
    "processing_class": 'The tokenizer is of the model. For another one, give overrides={"model.tokenizer": …}.',
    "compute_loss_func": "Did you mean loss?",
}
"""Arguments of TRL's trainers, and what to give to `train` instead. Their names are unlike ours."""
_KEYS = {
    "r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.target_modules",
    "layers_to_transform": "lora.layers",
    "rank_pattern": "lora.rank_pattern",
    "alpha_pattern": "lora.alpha_pattern",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    "modules_to_save": "lora.modules_to_save",
}
"""The keys that describe an adapter, by PEFT's names."""
_SAY_NOTHING = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "fan_in_fan_out", "ensure_weight_tying", "init_lora_weights"),
}
"""Fields of PEFT that change neither the adapter's shape nor its updates. The start of the weights is in the model."""


def refuse_unknown(given: Mapping[str, object], train: Callable[..., object]) -> None:
    """Raise ConfigError for keyword arguments that `train` does not have, with what each means here."""
    arguments = [name for name in inspect.signature(train).parameters if name not in ("config", "unknown")]
    takes, problems = f"It takes {', '.join(arguments)} (docs/python.md).", []
    for name, value in given.items():
        is_key = any(name in (key, key.rpartition(".")[2]) for key in fields()) and name not in _ARGUMENTS_OF_TRL
        hint = (
            _ARGUMENTS_OF_TRL.get(name) or ("" if is_key else did_you_mean(name, arguments)) or did_you_mean_key(name)
        )
        key = hint.removeprefix("Did you mean ").removesuffix("?").partition(" or ")[0]
        if key in fields():
            shown = repr(value) if isinstance(value, (str, int, float)) else "…"
            hint += f' Keys of the configuration go in overrides: overrides={{"{key}": {shown}}}.'
        problems.append(f"train has no argument {name}. {hint.removeprefix(f'Did you mean {name}? ') or takes}")
    raise ConfigError("\n  ".join(problems))


def configure(model: Any, data: Any, task: str, overrides: Sequence[str] | Mapping[str, object]) -> Config:
    """Compose the configuration of a run from the arguments of `train`."""
    arguments = overrides_of(overrides)
    described: dict[str, object] = {}
    if isinstance(model, (str, os.PathLike)):
        arguments.append(f"model={os.fspath(model)}")
    elif model is not None:
        described = describe_given_model(model)
        arguments += overrides_of({"model.path": described["model.path"]})
    has_rows = data is not None and not isinstance(data, (str, os.PathLike))
    if data is not None and not has_rows:
        arguments.append(f"data={os.fspath(data)}")
    config = compose(arguments, defaults=names_of({"task": task}), needs_data=not has_rows, origin=SCRIPT)
    if has_rows:
        if config.data.label:
            raise ConfigError(f"data is given as rows, but the overrides name {config.data.label}. Give one of them.")
        described |= write_given_rows(data, config.data.cache_dir)
    for key, value in described.items():
        chosen = values(config)[key]
        if config.origin(key) == SCRIPT and chosen != value:
            given = "data" if key.startswith("data.") else "model"
            raise ConfigError(f"{key} is {chosen} in overrides, but {value} in the given {given}. Remove the override.")
    if "model.path" in described and config.training.method == "full" and not hasattr(model, "peft_config"):
        _refuse_frozen(model)
    return config.with_values({key: (value, GIVEN) for key, value in described.items()})


def describe_given_model(model: Any) -> dict[str, object]:
    """Return the keys of the configuration that describe a model, with their values.

    The model is a transformers causal language model, or a PEFT model around one with one LoRA adapter that trains.

    Raises:
        ModelError: the configuration cannot describe the model, or its layers hold the adapter of an earlier run.
    """
    from torch.nn import Module
    from transformers import PreTrainedModel

    if hasattr(model, "peft_config") and not hasattr(model, "get_base_model"):
        raise ModelError(
            "the given model already has an adapter in its layers: an earlier run or get_peft_model added it. Load the "
            "model again for each run, or give its name. To train that adapter further, give the PEFT model: the "
            "result's model, or what get_peft_model returned."
        )
    if hasattr(model, "_orig_mod"):
        raise ModelError("the given model is compiled (torch.compile). Give the model itself, which finetune computes.")
    if not isinstance(model, Module) or not isinstance(bare_model(model), PreTrainedModel):
        raise ModelError(
            f"model is {type(model).__name__}; expected a name or a path, a transformers model, or a PEFT model."
        )
    base = bare_model(model)
    if any(weight.is_meta for weight in base.parameters()):
        raise ModelError("the given model is on the meta device and has no weights. Load it with from_pretrained.")
    if base.get_output_embeddings() is None:
        raise ModelError(
            f"the given model is a {type(base).__name__}, which has no head to predict tokens. Load it with "
            "AutoModelForCausalLM."
        )
    name = getattr(base.config, "_name_or_path", None)
    if not name:
        raise ModelError(
            "the given model was not loaded from a folder or the hub, so later commands could not find it. Save it "
            "with model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER), and give "
            "AutoModelForCausalLM.from_pretrained(FOLDER)."
        )
    refuse_missing_window(base.config, str(name))
    if getattr(base, "hf_quantizer", None) is not None:
        raise ModelError("the given model is quantized. Give its name in model, and set lora.quantize=nf4.")
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        raise ModelError("the given model is spread over several devices (device_map). Load it without device_map.")
    return {"model.path": str(name)} | (_describe_adapter(model) if hasattr(model, "peft_config") else {})


def check_given_base(model: Any, config: Config, precision: Precision, fallbacks: Fallbacks) -> None:
    """Compare a given model with the files that `model.path` names. Record weights that are rounded otherwise.

    Raises:
        ModelError: it has another configuration or other weights, see `refuse_other_base`.
    """
    if config.model.init != "pretrained":
        return
    rounded = refuse_other_base(model, config.model)
    if ignored := _forward_of_its_own(bare_model(model)):
        why = "a run calls the layers, and later commands load the base from its files"
        fallbacks.take(Fallback(what="the given model", wanted=ignored, used="the forward of transformers", why=why))
    if rounded is None or (rounded is DTYPES[precision] and config.training.method == "lora"):
        return
    used = f"these weights, rounded to {str(rounded).removeprefix('torch.')}"
    why = "they were loaded or trained in this dtype. Load the model again with dtype=torch.float32 for exact weights"
    fallbacks.take(Fallback(what="the given model", wanted=f"the weights at {config.model.path}", used=used, why=why))


def _forward_of_its_own(base: Any) -> str | None:
    """Name what only a call of the whole model would run: a forward of its own or hooks. None if it has none."""
    from transformers import AutoModelForCausalLM

    if not family_of(base.config.model_type).is_computed:  # then a run calls the model itself
        return None
    of_config = AutoModelForCausalLM._model_mapping.get(type(base.config), type(base))
    if type(base).forward is not getattr(of_config, "forward", type(base).forward):
        return f"the forward of {type(base).__name__}"
    # accelerate replaces the forward by one that computes the same in another type.
    return None if hasattr(base, "_original_forward") else hook_reason(base)


def adopt_given_model(model: Any, config: Config, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Prepare a given model for training. Without an adapter of its own, it gets one if the run trains an adapter.

    Raises:
        ModelError: see `add_lora`.
    """
    prepare_base(bare_model(model))
    if hasattr(model, "peft_config"):
        trained_in_fp32(model)
        return model
    return add_lora(model, config.lora, tokenizer) if config.training.method == "lora" else model


def remove_adapter(model: Any, trained: Sequence[torch.nn.Parameter]) -> None:
    """Take the adapter of a run that never began off its base. The script can give the base again.

    `trained` are the weights of the base that had a gradient before the adapter was added.
    """
    model.unload()
    for weight in trained:
        weight.requires_grad_(True)


def _refuse_frozen(model: Any) -> None:
    """Raise ModelError for a model with frozen weights, if all of them are to train."""
    weights = dict(model.named_parameters())
    if frozen := [name for name, weight in weights.items() if not weight.requires_grad]:
        raise ModelError(
            f"{len(frozen)} of {len(weights)} tensors of the given model are frozen ({name_first(frozen, 3)}), but "
            "training.method=full trains all of them. PEFT's merge_and_unload() leaves them frozen. Call "
            "model.requires_grad_(True) before."
        )


def _describe_adapter(model: Any) -> dict[str, object]:
    from peft import LoraConfig

    adapters = model.peft_config
    if list(adapters) != ["default"] or not isinstance(adapters["default"], LoraConfig):
        kinds = ", ".join(f"{name} ({type(config).__name__})" for name, config in adapters.items())
        raise ModelError(f"the given model has the adapters {kinds}; expected one LoRA adapter named default.")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ModelError(
            "the adapter of the given model is frozen. Load it with PeftModel.from_pretrained(…, is_trainable=True)."
        )
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ModelError("the adapter of the given model is merged into its base. Call model.unmerge_adapter() before.")
    _refuse_partly_frozen(model)
    adapter = adapters["default"]
    unknown = [field.name for field in dataclasses.fields(LoraConfig) if field.name not in _SAY_NOTHING | _KEYS.keys()]
    plain = LoraConfig()
    others = [name for name in unknown if getattr(adapter, name, None) != getattr(plain, name, None)]
    if any(is_half_frozen(weight) for weight in model.parameters()):
        raise ModelError(
            "the adapter of the given model began with lora.init=pissa, and half of it is frozen, which no key of a "
            "further run describes. Load it from its folder, which trains all of it: "
            "PeftModel.from_pretrained(BASE, 'RUN/adapter', is_trainable=True)."
        )
    if adapter.init_lora_weights not in (True, False, "gaussian"):
        others.append("init_lora_weights")
    if others:
        shown = ", ".join(f"{name}={getattr(adapter, name)!r}" for name in others)
        raise ModelError(
            f"the adapter of the given model has {shown}, which no key of the configuration describes. Leave it out, "
            "or describe the adapter with lora.* keys and give only the base."
        )
    return {key: _value(adapter, name) for name, key in _KEYS.items()}


def _refuse_partly_frozen(model: Any) -> None:
    """Refuse a PEFT model if tensors of its adapter are frozen, or if tensors of its base are not.

    PEFT unfreezes all of an adapter whenever the adapter is switched off and on again, as to measure the base, and an
    adapter's file holds no weight of the base.
    """
    weights = list(model.named_parameters())
    of_adapter = [(name, weight) for name, weight in weights if any(part in name for part in OF_AN_ADAPTER)]
    if frozen := [name for name, weight in of_adapter if not weight.requires_grad]:
        raise ModelError(
            f"{len(frozen)} of {len(of_adapter)} tensors of the given adapter are frozen ({name_first(frozen, 3)}), "
            "but a run trains all of an adapter. Set requires_grad=True for them, or leave their layers out of the "
            "adapter's target_modules."
        )
    names = {name for name, _ in of_adapter}
    if trained := [name for name, weight in weights if weight.requires_grad and name not in names]:
        raise ModelError(
            f"{len(trained)} tensors of the given adapter's base have requires_grad=True ({name_first(trained, 3)}), "
            "but a run trains the adapter alone, and its files hold nothing else. Set requires_grad=False for them, or "
            "train whole layers with modules_to_save in the adapter's LoraConfig."
        )


def _value(adapter: LoraConfig, name: str) -> object:
    value = getattr(adapter, name)
    if name in ("target_modules", "modules_to_save"):
        return sorted([value] if isinstance(value, str) else value or [])
    if name == "layers_to_transform":
        return [value] if isinstance(value, int) else value
    return float(value) if name in ("lora_alpha", "lora_dropout") else value


def write_given_rows(data: object, cache_dir: str) -> dict[str, str]:
    """Write rows to files. Return the keys that name them: `data.path`, or for several splits `data.train` and so on.

    `data` are dicts, for example a list or a `datasets.Dataset`; or a mapping of such rows by the name of their split,
    for example a `datasets.DatasetDict`. Rows may be a DataFrame of pandas or polars. Every process may call this at
    the same time.

    Raises:
        DataError: a row is no dict or holds values that JSON does not have, or a file cannot be written.
    """
    folder = local_path(cache_dir) / "given"
    if not isinstance(data, Mapping):
        return {"data.path": _write("data", data, folder)}
    names = {name: split for split, usual in SPLIT_NAMES.items() for name in usual}
    unknown = [name for name in data if name not in names]
    if data and not unknown and "train" not in map(names.get, data):
        raise DataError(f'data has the splits {", ".join(data)}, but no train. Give data={{"train": rows, …}}.')
    if unknown or not data:
        known = ", ".join(SPLIT_NAMES)
        raise DataError(
            f"data is a mapping with the keys {list(data)}; expected the names of splits ({known}) with rows. "
            "For columns, give datasets.Dataset.from_dict(columns)."
        )
    return {f"data.{names[name]}": _write(f'data["{name}"]', rows, folder) for name, rows in data.items()}


def _write(name: str, rows: object, folder: Path) -> str:
    """Write the rows of a split, unless they are there already, and return the path."""
    if type(rows).__name__ == "DataFrame":
        rows = _rows_of_frame(name, rows)
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        raise DataError(
            f"{name} is {type(rows).__name__}; expected a path, rows as dicts, a DataFrame, or a datasets.Dataset."
        )
    repeatable = rows if hasattr(rows, "__len__") else list(rows)
    digest, count = hashlib.sha256(), 0
    for line in _lines(name, repeatable):
        digest.update(line)
        count += 1
    if not count:
        raise DataError(f"{name} has no rows.")
    file = folder / f"{digest.hexdigest()[:32]}.jsonl"
    with in_cache(file.with_suffix(".lock"), f"the rows of {name}"):
        if not is_own_file(file, "the rows are written again"):
            with replacing(file) as stream:
                stream.writelines(_lines_again(name, repeatable, digest.digest()))
    return str(file)


def _rows_of_frame(name: str, frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame of pandas or polars. A missing cell of pandas (NaN, NA, NaT) is None."""
    if hasattr(frame, "to_dicts"):
        return list(frame.to_dicts())
    if not frame.columns.is_unique:  # a dict would keep the last column of a name
        twice = list(frame.columns[frame.columns.duplicated()])
        raise DataError(f"{name} has several columns called {twice[0]!r}. Rename or drop all but one of them.")
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{column: _without_arrays(value) for column, value in row.items()} for row in records]


def _without_arrays(value: Any) -> Any:
    """Return a cell with lists in place of NumPy's arrays, as which pandas reads lists from Parquet."""
    if isinstance(value, Mapping):
        return {key: _without_arrays(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_without_arrays(inner) for inner in value] if isinstance(value, list) else value


def _lines_again(name: str, rows: Iterable[Any], digest: bytes) -> Iterator[bytes]:
    """Yield the lines of rows that were read before, and refuse other rows than at the first time."""
    again = hashlib.sha256()
    for line in _lines(name, rows):
        again.update(line)
        yield line
    if again.digest() != digest:
        raise DataError(f"{name} gave other rows when it was read a second time. Give them as a list: list(rows).")


def _lines(name: str, rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield each row as a line of JSON."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of {name} is {type(row).__name__}; expected a dict with the row's columns.")
        try:
            yield (json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
        except (TypeError, ValueError, RecursionError) as error:
            bad = next((column for column, value in row.items() if not _is_json(value)), None)
            if bad is None and (others := [column for column in row if not isinstance(column, str)]):
                raise DataError(f"row {number} of {name} has a column named {others[0]!r}; expected text.") from error
            raise DataError(
                f"row {number} of {name} holds a value that JSON does not have, in the column {bad!r}: {error}. "
                "Convert the value to text, a number, a list or a dict, or remove the column."
            ) from error


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True
