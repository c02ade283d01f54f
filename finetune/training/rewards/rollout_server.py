"""Let a vLLM server generate the answers of a rollout, and compare its log-probabilities with the run's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.batches import derived_seed
from finetune.errors import PreemptedError, RunFailedError
from finetune.inference.decoding import Decoding, SampledAnswer
from finetune.inference.vllm_answers import Limits
from finetune.inference.vllm_server import ServerError, VllmServer
from finetune.runs.checkpoints import commit_files
from finetune.runs.durable import disk_failures_end_the_run, remove_folder
from finetune.runs.model_files import encode_model
from finetune.training.rewards.prompt_rows import PromptRows

if TYPE_CHECKING:
    import torch

    from finetune.config.schema import RolloutSection
    from finetune.runs.folder import RunFolder
    from finetune.training.objective import Setup

SERVER_DIFFERENCE = "server_difference"
"""The mean of |log p of the server − log p of the run| over the tokens of a rollout, in nats."""


class RolloutServer:
    """The server that `rollout.server` names. Every rank makes one; only the main process asks the server."""

    def __init__(self, setup: Setup, section: RolloutSection) -> None:
        self._setup = setup
        self._runtime = setup.runtime
        self._section = section
        self._most_tokens = 0
        """Of a prompt with its answer. The server was asked whether it has room for them."""

    @cached_property
    def _server(self) -> VllmServer:
        assert self._section.server is not None
        seconds, stops = 60 * self._section.server_timeout_minutes, lambda: self._runtime.stop_requests.is_on_this_rank
        return VllmServer(self._section.server, patience_seconds=seconds, is_to_stop=stops)

    def check(self, prompts: PromptRows) -> None:
        """Wait for the server, and check that it reads the prompts as the run does. Collective.

        Raises:
            ConfigError: the server's model reads text differently, or has no room for the answers.
            ServerError: it does not answer in time, or its answer is wrong.
            PreemptedError: the run was asked to stop meanwhile.
        """
        self._runtime.liveness.enter_phase("waiting for the server", timed=False)
        with self._runtime.collectives.failing_together("asking the server"):
            if self._runtime.is_main_process:
                longest = max(prompts.prompts, key=len)
                self._most_tokens = len(longest) + self._section.max_completion_length
                try:
                    self._server.check(self._setup.tokenizer, prompts.text(longest), most_tokens=self._most_tokens)
                except ServerError as error:
                    raise (PreemptedError(str(error)) if error.is_preempted else error) from None

    def sample(self, step: int, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[SampledAnswer]:
        """Give the adapter to the server, and return its answer to each prompt on every rank. Collective.

        Equal prompts that follow each other, at most `rollout.num_generations`, are one request for several answers.

        Raises:
            ServerError: the server cannot be used, or the run was asked to stop meanwhile.
        """
        runtime, section = self._runtime, self._section
        runtime.liveness.enter_phase("rollout by the server", step, timed=False)
        requests = list(_together(prompts, section.num_generations))
        answers: Any = None
        with runtime.collectives.failing_together("asking the server for answers"):
            if self._setup.journal is not None:
                assert decoding.sampling is not None
                try:
                    with adapter_for_server(self._setup.journal.folder, self._setup.model) as adapter:
                        answers = self._server.answer(
                            [prompt for prompt, _ in requests],
                            decoding,
                            adapter=adapter,
                            limits=[self._limits(*request, decoding.max_new_tokens) for request in requests],
                            seeds=[derived_seed(decoding.sampling.seed, "prompt", n) for n in range(len(requests))],
                            at_once=max(1, section.batch_size * len(requests) // len(prompts)),
                        )
                except ServerError as error:
                    answers = error
        answers = runtime.collectives.broadcast_from_main(answers)
        if isinstance(answers, ServerError):
            answers.is_reported_elsewhere = not runtime.is_main_process
            raise answers
        return [SampledAnswer(*answer) for answer in answers]

    def _limits(self, prompt: Sequence[int], count: int, max_new_tokens: int) -> Limits:
        """Return the limits of a request. Conversations differ in length, and the longest ones have the least room."""
        most = min(max_new_tokens, self._most_tokens - len(prompt))
        return Limits(count, most, self._setup.model.config.vocab_size, num_likely=0)

    def compare(
        self, step: int, own_nats: Sequence[float], server_nats: Sequence[float], cause: str
    ) -> dict[str, float]:
        """Return the mean difference of -log p of tokens, as the run and the server compute it before temperature.

        A mean above `rollout.max_difference` is a RunFailedError, which ends with `cause`.
        """
        differences = [
            abs(own_value - server_value) for own_value, server_value in zip(own_nats, server_nats, strict=True)
        ]
        if not differences:
            return {}
        mean = math.fsum(differences) / len(differences)
        if not mean <= self._section.max_difference:
            raise RunFailedError(
                f"step {step}: the log-probabilities of {self._section.server} differ from the run's own by {mean:.3g} "
                f"nats per token on average, and by {max(differences):.3g} at most; rollout.max_difference is "
                f"{self._section.max_difference:g}. Serve the base model that this run trains, in the same precision "
                f"and with --enable-lora. If the server rounds more than that, raise rollout.max_difference. {cause}"
            )
        return {SERVER_DIFFERENCE: mean}


def _together(prompts: Sequence[Sequence[int]], most: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yield each run of equal prompts as a prompt and its count, which is at most `most`."""
    for prompt, equal in groupby(prompts):
        count = len(list(equal))
        yield from ((prompt, min(most, count - place)) for place in range(0, count, most))


@contextmanager
def adapter_for_server(folder: RunFolder, model: torch.nn.Module) -> Iterator[Path]:
    """Write the adapter of a PeftModel as PEFT reads it, for a server that loads it, and remove it after the block.

    Raises:
        RunFailedError: the disk is full or failing.
    """
    path = folder.served_adapter
    with disk_failures_end_the_run("Writing", path):
        path.parent.mkdir(exist_ok=True)
    commit_files(path, encode_model(model, folder.base if folder.base.is_dir() else None), doing="Writing the adapter")
    try:
        yield path
    finally:
        with disk_failures_end_the_run("Removing", path):
            remove_folder(path)
