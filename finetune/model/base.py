"""Build a base model and its tokenizer from a hub id, a local folder, or a configuration with random weights."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil
import torch

from finetune.config.hub import fault_of
from finetune.config.shipped_files import resolve_shipped
from finetune.engine.decoder import OFFLOADS, bare_model
from finetune.engine.four_bits import full_shape
from finetune.errors import ModelError, first_line
from finetune.logs import hear_libraries, waiting
from finetune.model.from_hub import Part, hub_error, reading, repository_of, stored_weights
from finetune.model.sizes import estimate_parameters, refuse_oversized, refuse_oversized_folder
from finetune.model.tokens import choose_pad_token
from finetune.model.training_mode import route_by_score
from finetune.model.variants import describe_split_copy, explain_missing, refuse_unsupported
from finetune.units import format_bytes

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune.config.schema import ModelSection

Loaded = TypeVar("Loaded")

_log = logging.getLogger(__name__)


def build_base_model(section: ModelSection, **arguments: Any) -> PreTrainedModel:
    """Load the base model on the CPU in the dtype of its weights on disk; `Placement.place` moves it.

    Random weights come from torch's global generator, which `launch` seeds: every rank builds the same model. Further
    arguments are those of `from_pretrained`.

    Raises:
        ModelError: no such model, not a causal language model, or weights that do not belong to it.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = read_model_config(section)
    if "quantization_config" not in arguments:
        _refuse_what_cannot_fit(section, config)
    # config.json may name a kernel of the hub, which is code.
    asks_for_kernel = "/" in str(getattr(config, "_attn_implementation", None))
    if section.attention != "auto" or asks_for_kernel:
        arguments["attn_implementation"] = "sdpa" if section.attention == "auto" else section.attention
    if section.init == "random":
        arguments["trust_remote_code"] = section.trust_remote_code  # None would ask on a terminal
        model = _or_model_error(section, lambda: auto.from_config(config, **arguments))
    else:
        where = locate_model(section)
        arguments = {"dtype": _type_to_load(where, section.revision, config), **arguments}
        model, info = _or_model_error(
            section,
            lambda: auto.from_pretrained(
                where,
                revision=section.revision,
                config=config,
                trust_remote_code=section.trust_remote_code,
                use_safetensors=True,  # never a pickled checkpoint
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **arguments,
            ),
            where=where,
            part="weights",
        )
        _refuse_missing_weights(where, info)
    model.config.use_cache = False
    # A padding index would stop the gradient of its row, which for Phi is a token that ends text.
    model.get_input_embeddings().padding_idx = None
    if route_by_score(model):
        _log.info("experts are chosen by score in training too: the curve does not depend on how batches are cut")
    # The commit that was read, for the adapter's config; transformers loses it here.
    model.config._commit_hash = getattr(config, "_commit_hash", None) or section.revision
    built: PreTrainedModel = model
    return built


def build_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and give it `model.chat_template` if it has no template of its own.

    Raises:
        ModelError: there is no tokenizer, or the template cannot be read.
    """
    from transformers import AutoTokenizer

    where = locate_model(section) if section.tokenizer is None else locate(section.tokenizer, "model.tokenizer")
    refuse_oversized_folder(where)  # transformers may look for the tokenizer's class in this config.json
    if section.tokenizer is None:
        _num_rows(section)  # refuses the config.json of the hub
    tokenizer: PreTrainedTokenizerBase = _or_model_error(
        section,
        lambda: AutoTokenizer.from_pretrained(
            where, revision=section.revision, trust_remote_code=section.trust_remote_code
        ),
        where=where,
        part="tokenizer",
    )
    if not tokenizer.vocab_size:  # transformers makes an empty one if there are no files
        raise ModelError(f"{where} holds no tokenizer. Name a folder or a hub id that has one in model.tokenizer.")
    if tokenizer.chat_template is None and section.chat_template is not None:
        tokenizer.chat_template = _read_template(section.chat_template)
    choose_pad_token(tokenizer, _num_rows(section))
    return tokenizer


def read_model_config(section: ModelSection) -> PretrainedConfig:
    """Read the architecture from `model.config`, or from the model itself.

    Raises:
        ModelError: not a causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if section.config is not None:
        keys = dict(section.config)
        refuse_unsupported(keys, str(section.path or keys.get("model_type")))
        refuse_oversized(keys, str(section.path or "model.config"))
        model_type = keys.pop("model_type", None)
        if model_type is None:
            raise ModelError("model.config has no model_type. Add one, for example model_type: phi3.")
        config = _or_model_error(section, lambda: AutoConfig.for_model(model_type, **keys))
    else:
        where = locate_model(section)
        keys = _read_keys(section, where)
        refuse_unsupported(keys, section.path or where)
        copy = describe_split_copy(keys, section.path or where)
        if copy is not None:
            _log.warning("%s", copy)
        config = _or_model_error(
            section,
            lambda: AutoConfig.from_pretrained(
                where, revision=section.revision, trust_remote_code=section.trust_remote_code
            ),
            where=where,
        )
    if type(config) not in AutoModelForCausalLM._model_mapping and not section.trust_remote_code:
        raise ModelError(
            f"{section.path or model_type} is a {config.model_type} model, which transformers does not know as a "
            "causal language model. Name one in model.path, for example microsoft/phi-4."
        )
    return config


def read_generation_config(section: ModelSection) -> GenerationConfig | None:
    """Read the model's generation_config.json. Return None if there is none or it is not JSON, as transformers does.

    Raises:
        ModelError: the file cannot be read for another reason, so the model could not be loaded either.
    """
    from transformers import GenerationConfig

    where = locate_model(section)

    def load() -> GenerationConfig | None:
        with suppress(OSError):  # many models have no such file
            return GenerationConfig.from_pretrained(where, revision=section.revision or "main")
        return None

    return _or_model_error(section, load, where=where)


def locate_model(section: ModelSection) -> str:
    """Return the hub id in `model.path`, or the absolute path of the folder."""
    if section.path is None:
        raise ModelError("model.path is not set. Choose model=phi4_mini or give model.path=HUB_ID_OR_FOLDER.")
    return locate(section.path, "model.path")


def locate(path: str, key: str) -> str:
    """Resolve `shipped:NAME`, a folder, or a hub id (returned as it is).

    Raises:
        ModelError: the folder does not exist or holds no model.
    """
    if path.startswith("shipped:"):
        return str(resolve_shipped(path))
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if not looks_local:
        return path
    if not folder.is_dir():
        gone = (
            " If a run used it, it was moved or deleted since: name its new place with --base." * folder.is_absolute()
        )
        raise ModelError(
            f"{key} is {path}, but there is no such folder.{gone} Give a folder that holds a model, or a hub id "
            "like microsoft/phi-4."
        )
    if key == "model.path" and not (folder / "config.json").is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        is_adapter = (folder / "adapter_config.json").is_file()
        hint = " This is an adapter: name its base model in model.path." if is_adapter else ""
        raise ModelError(f"{key} is {path}, which is not a model folder: it has no config.json (found: {found}).{hint}")
    return str(folder.resolve())


def count_parameters(model: Any) -> tuple[int, int]:
    """Count the trainable parameters and all parameters; tied weights count once."""
    sizes = [(full_shape(weight).numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off for a block, then restore the model's mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def checkpoint_gradients(model: Any, *, offloads: bool = False) -> None:
    """Recompute activations in the backward pass.

    The reentrant form leaves layers behind a frozen embedding untrained (peft#1142), so it is never used. `offloads`
    keeps the inputs of the layers in main memory meanwhile. Only the engine does so.
    """
    setattr(bare_model(model).get_decoder(), OFFLOADS, offloads)
    with warnings.catch_warnings():
        # transformers 5.23 deprecates this name, but the older versions that we allow have no other.
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable", category=FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()


def max_context(model: Any) -> int | None:
    """Return the number of positions that the model computes correctly; None if its configuration has no limit.

    transformers 5.23 never uses the long LongRoPE factors of Phi-3.5-MoE, so it is correct only up to the boundary.
    """
    if model.config.model_type == "phimoe" and (boundary := longrope_boundary(model)) is not None:
        return boundary
    return getattr(model.config, "max_position_embeddings", None)


def longrope_boundary(model: Any) -> int | None:
    """Return the length up to which a LongRoPE model uses its short factors; None for other models.

    The factors of a batch depend on its longest row, so shorter rows must not be in a batch with longer ones.
    """
    config = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(original) if original else None


def _type_to_load(where: str, revision: str | None, config: PretrainedConfig) -> torch.dtype | Literal["auto"]:
    """Return the dtype of the weights on disk if it is narrower than the dtype in config.json, else `auto`.

    With `auto`, transformers would convert all weights to the dtype in config.json at once. `Placement.place` converts
    them one by one later, with the same result. Return `auto` also if the files have several dtypes or are not
    downloaded yet.
    """
    if config.dtype is not torch.float32:
        return "auto"
    names = {frozenset({"BF16"}): torch.bfloat16, frozenset({"F16"}): torch.float16}
    return names.get(frozenset(weight.get_dtype() for weight in stored_weights(where, revision).values()), "auto")


def _refuse_what_cannot_fit(section: ModelSection, config: PretrainedConfig) -> None:
    """Refuse a model with more weights than this machine has memory for, by its sizes alone."""
    from transformers import AutoModelForCausalLM

    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if torch.get_default_device().type == "meta" or estimate_parameters(config.to_dict()) < memory // 8:
        return  # in fp32 and with twice as many parameters it would still fit
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = _or_model_error(section, lambda: auto.from_config(config, trust_remote_code=section.trust_remote_code))
    needed = sum(weight.nbytes for weight in model.parameters())
    if needed > memory:
        raise ModelError(
            f"the weights of {section.path or config.model_type} take {format_bytes(needed)} "
            f"({count_parameters(model)[1]:,} parameters), but this machine has {format_bytes(memory)} of main memory, "
            "swap included. Use a machine with more memory or a smaller model. `finetune plan` says what a run needs."
        )


def _refuse_missing_weights(where: str, info: dict[str, Any]) -> None:
    """Refuse weights that transformers would replace with random numbers and only a warning."""
    wrong = {name: sorted(info.get(f"{name}_keys", ())) for name in ("missing", "mismatched")}
    found = [f"{len(keys)} {name} ({', '.join(map(str, keys[:3]))}…)" for name, keys in wrong.items() if keys]
    if found:
        raise ModelError(
            f"the weights at {where} do not fit its config.json: {'; '.join(found)}."
            + (explain_missing(wrong["missing"], info.get("unexpected_keys", ())) or " Is the folder complete?")
        )
    if info.get("unexpected_keys"):
        _log.warning("%s holds %d weights that its architecture does not use", where, len(info["unexpected_keys"]))


def _read_keys(section: ModelSection, where: str) -> dict[str, Any]:
    """Return the content of config.json as a dict: transformers may have no class for it."""
    from transformers import PreTrainedConfig

    keys, _ = _or_model_error(
        section, lambda: PreTrainedConfig.get_config_dict(where, revision=section.revision), where=where
    )
    refuse_oversized(keys, section.path or where)
    return keys


def _num_rows(section: ModelSection) -> int | None:
    """Return the rows of the model's embedding; None if no model is named or its configuration lacks the number."""
    if section.config is not None:
        refuse_oversized(section.config, str(section.path or "model.config"))
        return section.config.get("vocab_size")
    return None if section.path is None else _read_keys(section, locate_model(section)).get("vocab_size")


def _read_template(template: str) -> str:
    if not template.endswith((".jinja", ".j2")):
        if "{" not in template:  # the tokenizer would render every row as this word
            raise ModelError(
                f"model.chat_template is {template}, which is neither a template in Jinja nor the path of a .jinja "
                "file. The names of shipped templates are values of data.chat_template."
            )
        return template
    path = Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ModelError(f"model.chat_template is {template}, which cannot be read: {why}.") from error


def _or_model_error(
    section: ModelSection, load: Callable[[], Loaded], *, where: str | None = None, part: Part = "config"
) -> Loaded:
    """Load a part of a model without progress bars, and turn exceptions into a ModelError of one line.

    `where` is the folder or the hub id that is read; None if none is.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # also the hub's
    hear_libraries()
    repository = None if where is None else repository_of(where, section.revision)
    own = section.tokenizer if part == "tokenizer" else None
    key = "model.path" if own is None else "model.tokenizer"
    what = "tokenizer" if part == "tokenizer" else "model"
    name = own or section.path or (section.config or {}).get("model_type")
    with nullcontext() if repository is None else reading(repository, part, key):
        try:
            with waiting(f"loading the {what} {name}"):
                return load()
        except Exception as error:  # a damaged file alone raises a dozen types, from many libraries
            fault = None if repository is None else fault_of(error)
            if repository is not None and fault is not None:
                raise hub_error(fault, repository, key) from error
            raise ModelError(f"the {what} {name} cannot be loaded: {first_line(error)}") from error
