"""Commands on a finished run: measure it again, ask it something."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.checkpoint import verify_published
from finetune.config.compose import load_config
from finetune.errors import CheckpointError, ConfigError, DataError
from finetune.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config

_log = logging.getLogger(__name__)


def evaluate_run(path: Path, words: Sequence[str]) -> None:
    """Measure a run's published weights on its test split and print the table; nothing in the folder changes."""
    folder, config = _read_run(path, words)

    from finetune.data.batches import EvaluationLoader
    from finetune.data.encode import encode_examples
    from finetune.data.examples import load_examples
    from finetune.distributed.launch import launch
    from finetune.model.base import build_tokenizer, longrope_boundary
    from finetune.progress import show_comparison
    from finetune.training.compare import compare_models
    from finetune.training.forward import choose_collation

    with launch(config, trains=False) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        if splits.test is None:
            raise ConfigError("this run has no test split. Give one with data.test=FILE_OR_SPLIT.")
        model = _load_tuned(folder, config)
        runtime.place(model)
        runtime.agree_set_up()
        collate = choose_collation(runtime, config.training, model)
        if runtime.is_main_process:
            loader = EvaluationLoader(splits.test, config.testing, boundary=longrope_boundary(model), collate=collate)
            show_comparison(compare_models(runtime, model, tokenizer, loader, config.testing))


def answer_prompts(path: Path, prompts: Sequence[str], *, system: str | None, max_new_tokens: int) -> list[str]:
    """One greedy answer per prompt from a run's published weights.

    Args:
        path: the run's folder.
        prompts: what the user says, each in a conversation of its own.
        system: the system turn; None: the one of the run's first training row, where it has one.
        max_new_tokens: the longest answer.
    """
    folder, config = _read_run(path, [])

    from finetune.data.templates import stop_ids
    from finetune.distributed.launch import launch
    from finetune.generate import generate_answers
    from finetune.model.base import build_tokenizer

    with launch(config, trains=False) as runtime:
        tokenizer = build_tokenizer(config.model)
        model = _load_tuned(folder, config)
        runtime.place(model)
        runtime.agree_set_up()
        opening = _system_turn(config) if system is None else system
        answers = generate_answers(
            model,
            [_prompt_ids(tokenizer, prompt, opening) for prompt in prompts],
            stop_ids=stop_ids(tokenizer, model.generation_config.eos_token_id),
            max_new_tokens=max_new_tokens,
            batch_size=config.testing.batch_size,
        )
        return [str(tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in answers]


def _read_run(path: Path, words: Sequence[str]) -> tuple[RunFolder, Config]:
    folder = RunFolder(path)
    if not folder.config_file.is_file():
        raise CheckpointError(
            f"{path} is not the folder of a run: it has no {folder.config_file.name}. "
            "Give one, for example runs/quickstart."
        )
    if not folder.adapter.is_dir():
        raise CheckpointError(f"{path} has no adapter/ yet: the run did not end. Go on with it by resume=auto.")
    problems = verify_published(folder.adapter)
    if problems:
        raise CheckpointError(
            f"{folder.adapter} is damaged: {'; '.join(problems)}. Run the training again with resume=auto to repair it."
        )
    return folder, load_config(words, run=str(folder.config_file))


def _load_tuned(folder: RunFolder, config: Config) -> Any:
    """The base with the run's adapter on it, or the fully tuned model."""
    from finetune.model.base import build_base_model
    from finetune.model.lora import load_adapter

    if config.training.method == "full":
        return build_base_model(
            config.model.model_copy(update={"path": str(folder.adapter), "init": "pretrained", "config": None})
        )
    section = config.model
    if section.init == "random":
        section = section.model_copy(update={"path": str(folder.base), "init": "pretrained", "config": None})
    return load_adapter(build_base_model(section), folder.adapter)


def _system_turn(config: Config) -> str | None:
    """What the first training row opens with: answers are best where a prompt looks like the training rows."""
    from finetune.data.examples import load_examples

    try:
        first = load_examples(config.data.model_copy(update={"max_rows": 1})).train[0]
    except DataError as error:
        _log.warning("the training rows cannot be read, so no system turn is used (give one with --system): %s", error)
        return None
    is_system = bool(first.messages) and first.messages[0]["role"] == "system"
    if is_system:
        _log.info("system turn, as in the first training row: %s", first.messages[0]["content"])
    return first.messages[0]["content"] if is_system else None


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    opening = [{"role": "system", "content": system}] if system else []
    turns = [*opening, {"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
