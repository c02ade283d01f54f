"""Generate the answers that a run learns from, reward them, and cut them into micro-batches.

Answers and rewards are a function of the weights, the seed and the step. All ranks know the answers to all prompts of a
global batch, so that neither the number of ranks nor the cut into micro-batches changes the loss.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.batches import BatchRule, derived_seed
from finetune.data.encoded import EncodedExample
from finetune.data.templates import stop_ids
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.engine.prefixes import RowGroup, assign_to_ranks
from finetune.errors import CheckpointError
from finetune.inference.decoding import Decoding, sample_answers
from finetune.inference.sampling import Sampling
from finetune.model.base import evaluation_mode, longrope_boundary
from finetune.own_calls import saving_first
from finetune.runs.folder import RunFolder
from finetune.runs.rollouts import read_rollout, unusable_rollout, write_rollout
from finetune.training.rewards.conversations import Draw, GeneratedConversation, SingleAnswers, is_generated
from finetune.training.rewards.drawn import LARGEST_DIFFERENCES, DrawnAnswer, drawn_metrics, explain_difference
from finetune.training.rewards.functions import Rewards
from finetune.training.rewards.groups import (
    GroupMicrobatch,
    ScoredAnswer,
    advantages_of,
    group_loss_of,
    nats_of_tokens,
    put_answers_together,
)
from finetune.training.rewards.prompt_rows import PromptRows
from finetune.training.rewards.rollout_server import SERVER_DIFFERENCE, RolloutServer
from finetune.training.rewards.warnings import RewardWarnings
from finetune.units import ceil_div, counted

if TYPE_CHECKING:
    from finetune.training.objective import Setup


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The answers of a step, the same on all ranks. Answers follow each other prompt after prompt.

    Attributes:
        step: the first step that learns from it.
        rows: the row of each prompt.
        answers: single answers, with the token that ends each, or whole conversations.
        rewards: of each answer by function; nan: none.
        advantages: of each answer.
        metrics: of the step.
        old_nats: -log p of the tokens of each answer that is in the loss, and nothing for other answers. None if they
            are those of the first step.
    """

    step: int
    rows: list[int]
    answers: list[GeneratedConversation]
    rewards: list[list[float]]
    advantages: list[float]
    metrics: Mapping[str, Any]
    old_nats: list[list[float]] | None = None


class RolloutLoader:
    """A loader like `TrainLoader`, whose rows are answers that the model generates.

    Collective: every rank makes one and takes its steps in the same order. The answers to a step are generated when it
    is asked for, with the weights of the step before. `rule` assigns the prompts of the training split to steps.

    Attributes:
        recorded: a folder whose rollouts are learnt from instead of new ones; None: answers are generated.
    """

    recorded: RunFolder | None = None
    generates_rows = True

    def __init__(
        self,
        setup: Setup,
        rule: BatchRule,
        prompts: PromptRows,
        rewards: Rewards,
        answering: SingleAnswers,
        warnings: RewardWarnings,
    ) -> None:
        config = setup.config
        self.rule = replace(rule, repeats=config.grpo.num_iterations)
        self._loss = group_loss_of(config)
        self._setup = setup
        self._runtime = setup.runtime
        self._config = config
        self._prompts = prompts
        self._rewards = rewards
        self._answering = answering
        self._warnings, self._is_explained = warnings, False
        self._stops = stops_of(setup)
        self._training = setup.memory.resolve(config).training
        self._max_tokens = self._training.max_tokens_per_microbatch
        self._rollout: Rollout | None = None
        self._largest: list[torch.Tensor] = []
        """The largest ratio of each turn, in each micro-batch of the step."""
        self._server = None if config.rollout.server is None else RolloutServer(setup, config.rollout)

    def metrics_of(self, step: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the metrics of the last yielded step and of its answers. Collective."""
        assert self._rollout is not None
        own = torch.stack(self._largest).amax(0).tolist() if self._largest else [0.0] * self._loss.turns
        if self._runtime.world_size > 1:
            before = [0.0] * len(own) * self._runtime.rank
            after = [0.0] * len(own) * (self._runtime.world_size - self._runtime.rank - 1)
            of_ranks = self._runtime.collectives.sum([*before, *own, *after])
            own = [max(of_ranks[turn :: len(own)]) for turn in range(len(own))]
        return {**self._rollout.metrics, **self._loss.summarize(step, own)}

    def steps(self, epoch: int, first_step: int = 0) -> Iterator[list[tuple[int, GroupMicrobatch]]]:
        """Yield for each step of an epoch the (index in the global batch, micro-batch) pairs of this rank, if any."""
        order = self.rule.order(epoch)
        for place in range(first_step, self.rule.steps_per_epoch):
            step = epoch * self.rule.steps_per_epoch + place + 1
            first = step - place % self.rule.repeats
            if self._rollout is None or self._rollout.step != first:
                rows = self.rule.examples_of_step(order, place)
                is_new = first == step and not self._is_on_record(step)
                self._rollout = self._generate(step, rows) if is_new else self._read(first, rows)
            yield self._microbatches(self._rollout)

    def halve(self, epoch: int, step: int) -> int | None:
        """Halve the micro-batches of the last yielded step and of later ones. Return their limit in tokens, or None."""
        del epoch, step
        assert self._rollout is not None
        rule = self._rule_of_answers(self._rollout, self._in_loss(self._rollout))
        smaller = rule.halved(0, 0) if rule.lengths else None
        if smaller is None:
            return None
        self._max_tokens = smaller.max_tokens
        return self._max_tokens

    def _generate(self, step: int, rows: list[int]) -> Rollout:
        """Generate the answers to a step's prompts, reward and record them."""
        runtime, section = self._runtime, self._config.rollout
        runtime.liveness.enter_phase("rollout", step)
        started = time.monotonic()
        sampling = Sampling(
            temperature=section.temperature,
            top_k=section.top_k or None,
            top_p=None if section.top_p == 1 else section.top_p,
            seed=derived_seed(self._config.seed, "rollout", step),
        )
        of_answers = [row for row in rows for _ in range(section.num_generations)]
        decoding = Decoding(
            stop_ids=self._stops,
            max_new_tokens=section.max_completion_length,
            sampling=sampling,
            keeps_stop=True,
        )
        model = self._setup.model
        draw: Draw = partial(sample_answers, model, batch_size=section.batch_size, runtime=runtime)
        if self._server is not None:
            draw = partial(self._server.sample, step)
        answers = self._answering.converse(
            [self._prompts.prompts[row] for row in of_answers],
            decoding,
            draw,
            rows=map(self._prompts.row, of_answers),
            runtime=runtime,
            model=model,
        )
        assert answers is not None, "sampling is not asked to stop"
        runtime.liveness.enter_phase("rewards", step)
        rewards = reward_on_main(self._setup, self._rewards, self._prompts, of_answers, answers)
        rollout = self._compare(step, rows, answers, rewards)
        if self._config.grpo.num_iterations > 1 or self._server is not None:
            rollout = replace(rollout, old_nats=self._nats(rollout, section.temperature))
        nats = self._before_temperature(rollout)
        if nats is None and (self._server is not None or step == 1):
            nats = self._nats(rollout, 1.0)
        if nats is not None:
            rollout = self._with_drawn_ratios(rollout, nats)
            cause = self._check_drawn(rollout, nats)
            if self._server is not None:
                rollout = replace(rollout, metrics={**rollout.metrics, **self._difference(rollout, nats, cause)})
        rollout = replace(rollout, metrics={**rollout.metrics, "rollout_seconds": time.monotonic() - started})
        self._setup.on_main(
            lambda journal: write_rollout(journal.folder, self._as_record(rollout)), f"recording the rollout of {step}"
        )
        return rollout

    def check_sources(self) -> None:
        """Check the reward functions, and the server if there is one, see `RolloutServer.check`. Collective."""
        self._rewards.check()
        if self._server is not None:
            self._server.check(self._prompts)

    def _difference(self, rollout: Rollout, nats: Sequence[Sequence[float]], cause: str) -> dict[str, float]:
        """Compare the server's -log p of the tokens in the loss with the run's."""
        assert self._server is not None
        chosen = self._in_loss(rollout)
        own_nats = [value for n in chosen for value in nats[n]]
        server_nats = [value for n in chosen for value in rollout.answers[n].nats]
        return self._server.compare(rollout.step, own_nats, server_nats, cause)

    def _compare(
        self, step: int, rows: list[int], answers: list[GeneratedConversation], rewards: list[list[float]]
    ) -> Rollout:
        """Compute advantages and the metrics of a rollout."""
        names = self._rewards.metrics
        table = torch.tensor(rewards, dtype=torch.float64)
        group = self._config.rollout.num_generations
        group_advantages = advantages_of(
            table, self._rewards.weights, self._config.grpo.scale_rewards, num_generations=group
        )
        nats = [value for answer in answers for value in answer.nats]
        metrics = {
            "reward": float(group_advantages.rewards.nanmean()),
            "reward_std": float(group_advantages.deviations.mean()),
            **mean_rewards(self._rewards, table),
            "equal_groups": float((group_advantages.values == 0).all(1).double().mean()),
            "answer_length": sum(answer.num_generated for answer in answers) / len(answers),
            "truncated": sum(not answer.has_end for answer in answers) / len(answers),
            "drawn_entropy": math.fsum(nats) / len(nats) if nats else math.nan,
            **self._answering.metrics_of(answers),
        }
        numbers = {name: value for name, value in metrics.items() if not math.isnan(value)}
        values = {"reward": group_advantages.rewards.flatten()}
        values |= {names[name]: table[:, k] for k, name in enumerate(self._rewards.names)}
        return Rollout(
            step=step,
            rows=rows,
            answers=answers,
            rewards=rewards,
            advantages=group_advantages.values.flatten().tolist(),
            metrics={**numbers, **self._answering.by_turn(answers, values)},
        )

    def _before_temperature(self, rollout: Rollout) -> Sequence[Sequence[float]] | None:
        """Return -log p of the rollout as the run computes it, if temperature does not change it; None otherwise."""
        return rollout.old_nats if self._config.rollout.temperature == 1 else None

    def _drawn(self, rollout: Rollout, nats: Sequence[Sequence[float]]) -> list[DrawnAnswer]:
        """Return the answers in the loss, each with -log p as drawn and as the run computes it."""
        chosen = [n for n in self._in_loss(rollout) if nats[n]]
        answers = rollout.answers
        return [DrawnAnswer(self._scored(rollout, n).row, answers[n].nats, nats[n], answers[n].turns) for n in chosen]

    def _with_drawn_ratios(self, rollout: Rollout, nats: Sequence[Sequence[float]]) -> Rollout:
        """Add by how much the probabilities that training computes differ from those with which tokens were drawn."""
        measured = drawn_metrics(self._drawn(rollout, nats), self._loss.turns)
        return replace(rollout, metrics={**rollout.metrics, **measured})

    def _check_drawn(self, rollout: Rollout, nats: Sequence[Sequence[float]]) -> str:
        """Warn once of drawn probabilities that are not the run's own. Return the warning on main. Collective."""
        drawn = self._drawn(rollout, nats)
        bound = LARGEST_DIFFERENCES[self._runtime.precision]
        if self._is_explained or max((answer.largest for answer in drawn), default=0.0) <= bound:
            return ""
        self._is_explained, cause = True, ""
        with self._runtime.collectives.failing_together("comparing log-probabilities"):
            if self._runtime.is_main_process:
                cause = explain_difference(self._setup, drawn)
                self._warnings.add("drawn", cause)
        return cause

    def _is_on_record(self, step: int) -> bool:
        """Return whether an earlier start, or the run that is replayed, generated the answers. Collective."""
        journal = self._setup.journal
        there = self.recorded is not None or (journal is not None and journal.folder.rollout(step).exists())
        return self._runtime.collectives.broadcast_from_main(there)

    def _read(self, step: int, rows: list[int]) -> Rollout:
        """Read a rollout on the main process, and return it on every rank. Collective.

        Raises:
            CheckpointError: on all ranks, if it cannot be read, or the configuration now asks for other answers.
        """
        record: Any = None
        with self._runtime.collectives.failing_together("reading the rollout"):
            if self._setup.journal is not None:
                folder = self.recorded or self._setup.journal.folder
                record = read_rollout(folder, step)
                if problem := self._problem_of(record, step, rows):
                    if self.recorded is not None:
                        raise CheckpointError(
                            f"{folder.rollout(step)} {problem}, so this step cannot be computed again."
                        )
                    raise unusable_rollout(folder, step, f"{problem}, so go on without this change or with new answers")
        rollout = self._from_record(self._runtime.collectives.broadcast_from_main(record), step, rows)
        nats = self._before_temperature(rollout)
        return rollout if nats is None else self._with_drawn_ratios(rollout, nats)

    def _from_record(self, record: Mapping[str, Any], step: int, rows: list[int]) -> Rollout:
        """Return a recorded rollout with the advantages of this configuration."""
        answers = [answer for group in record["groups"] for answer in group["answers"]]
        rewards = [
            [math.nan if (value := answer["rewards"][name]) is None else value for name in self._rewards.names]
            for answer in answers
        ]
        generated = [self._answering.from_record(answer, self._stops) for answer in answers]
        rollout = self._compare(step, rows, generated, rewards)
        metrics = {**rollout.metrics, **record.get("server", {})}
        return replace(rollout, metrics=metrics, old_nats=[answer.get("nats", []) for answer in answers])

    def _problem_of(self, record: Mapping[str, Any], step: int, rows: list[int]) -> str:
        """Return why recorded answers are not those that a step with these rows learns from; empty if they are."""
        groups, section = record["groups"], self._config.rollout
        names, size = self._rewards.names, section.num_generations
        prompts = [self._prompts.prompts[row] for row in rows]
        # The made-up answers of a benchmark belong to any prompts.
        of_rows = [group.get("prompt", prompt) for group, prompt in zip(groups, prompts, strict=False)]
        if len(groups) != len(rows) or of_rows != prompts:
            return "has answers to other prompts than this configuration asks for"
        if any(len(group["answers"]) != size for group in groups):
            return f"does not have {size} answers to each prompt, as rollout.num_generations says"
        answers = [answer for group in groups for answer in group["answers"]]
        missing = [name for name in names if any(name not in answer["rewards"] for answer in answers)]
        if missing:
            return f"has no rewards of {', '.join(missing)}, which reward.functions names"
        turns = max(ceil_div(len(answer.get("parts", [0])), 2) for answer in answers)
        if turns > max(1, self._loss.turns):
            return f"has answers of {turns} turns, more than this configuration allows (rollout.max_turns)"
        if (temperature := record.get("temperature", section.temperature)) != section.temperature:
            return f"has log-probabilities at rollout.temperature={temperature:g}, not {section.temperature:g}"
        return self._problem_of_nats(record, self._from_record(record, step, rows))

    def _problem_of_nats(self, record: Mapping[str, Any], rollout: Rollout) -> str:
        """Say if an answer is in the loss now, and was not when -log p of the tokens was computed."""
        nats = rollout.old_nats or []
        if self.rule.repeats == 1 and not any(nats):
            return ""
        # Earlier versions recorded 0 for what they did not compute, and no temperature.
        may_be_zeros = bool(self._config.resume_allow) and "temperature" not in record
        lacking = [n for n in self._in_loss(rollout) if not nats[n] or (may_be_zeros and not any(nats[n]))]
        if not lacking:
            return ""
        return (
            f"has no log-probabilities of {counted(len(lacking), 'answer')} that this configuration learns from, "
            "because the one before needed none"
        )

    def _as_record(self, rollout: Rollout) -> dict[str, Any]:
        names = self._rewards.names
        old: Sequence[Sequence[float]] = rollout.old_nats or [[]] * len(rollout.answers)
        answers = [
            {
                "ids": answer.ids,
                "text": self._prompts.text(answer.ids),
                "rewards": {
                    name: None if math.isnan(value) else value for name, value in zip(names, each, strict=True)
                },
                "advantage": advantage,
                "sampled_nats": answer.nats,
                **({"nats": nats} if nats else {}),
                **self._answering.as_record(answer, self._prompts.text),
            }
            for answer, each, advantage, nats in zip(
                rollout.answers, rollout.rewards, rollout.advantages, old, strict=True
            )
        ]
        size = self._config.rollout.num_generations
        server = {name: value for name, value in rollout.metrics.items() if name == SERVER_DIFFERENCE}
        return {
            "step": rollout.step,
            **({"temperature": self._config.rollout.temperature} if rollout.old_nats else {}),
            **({"server": server} if server else {}),
            "groups": [
                {
                    "source": self._prompts.sources[row],
                    "prompt": self._prompts.prompts[row],
                    "text": self._prompts.text(self._prompts.prompts[row]),
                    "answers": answers[place * size : (place + 1) * size],
                }
                for place, row in enumerate(rollout.rows)
            ],
        }

    def _counts(self, answer: GeneratedConversation) -> bool:
        """Whether an answer's tokens count in the loss."""
        return answer.has_end or not self._config.grpo.mask_truncated_completions

    def _in_loss(self, rollout: Rollout) -> list[int]:
        """Return the answers that have a gradient: with an advantage of 0 they have none, unless there is a KL term."""
        has_gradient = [bool(advantage) or self._config.grpo.beta > 0 for advantage in rollout.advantages]
        return [n for n, answer in enumerate(rollout.answers) if has_gradient[n] and self._counts(answer)]

    def _microbatches(self, rollout: Rollout) -> list[tuple[int, GroupMicrobatch]]:
        """Cut the answers of a rollout into micro-batches, and return this rank's."""
        self._largest = []
        chosen = self._in_loss(rollout)
        num_tokens = sum(answer.num_generated for answer in rollout.answers if self._counts(answer))
        denominator = self._loss.denominator(len(rollout.answers), num_tokens)
        of_turns = Counter(turn for n in chosen for turn in rollout.answers[n].turns)
        groups, own_groups = self._split(rollout, chosen)
        microbatches = [
            (
                n,
                put_answers_together(
                    [self._scored(rollout, chosen[index]) for index in groups[n].rows],
                    rows=self._setup.collate,
                    # The first one stands for all of them: they have one denominator.
                    num_targets=denominator if n == 0 else 0,
                    per_token=denominator / of_turns.total(),
                    largest=self._largest,
                    per_turn=[denominator / (of_turns[turn] or math.nan) for turn in range(self._loss.turns)],
                ),
            )
            for n in own_groups
        ]
        if not groups and self._runtime.is_main_process:
            nothing = torch.zeros(EMPTY_MICROBATCH.num_rows, dtype=torch.float64)
            microbatches = [(0, GroupMicrobatch(rows=EMPTY_MICROBATCH, advantages=nothing, num_targets=denominator))]
        return microbatches

    def _split(self, rollout: Rollout, chosen: Sequence[int]) -> tuple[list[RowGroup], list[int]]:
        """Return the micro-batches of these answers, as indices in `chosen`, and which of them are this rank's."""
        rule = self._rule_of_answers(rollout, chosen)
        groups = rule.split(range(len(chosen))) if chosen else []
        runtime = self._runtime
        return groups, assign_to_ranks([group.num_tokens for group in groups], runtime.world_size)[runtime.rank]

    def _rule_of_answers(self, rollout: Rollout, chosen: Sequence[int]) -> BatchRule:
        training = self._training
        rows = [torch.tensor(self._prompt_and_answer(rollout, n), dtype=torch.int32).numpy() for n in chosen]
        return BatchRule(
            lengths=list(map(len, rows)),
            global_batch_size=max(1, len(rows)),
            batch_size=training.batch_size,
            max_tokens=self._max_tokens,
            boundary=longrope_boundary(self._setup.model),
            tokens=rows.__getitem__ if self._setup.is_packed and training.packing else None,
            share_prefixes=training.share_prefixes,
        )

    def _prompt_and_answer(self, rollout: Rollout, n: int) -> list[int]:
        row = rollout.rows[n // self._config.rollout.num_generations]
        return [*(rollout.answers[n].prompt or self._prompts.prompts[row]), *rollout.answers[n].ids]

    def _scored(self, rollout: Rollout, n: int) -> ScoredAnswer:
        ids, answer = torch.tensor(self._prompt_and_answer(rollout, n)), rollout.answers[n]
        is_target = torch.zeros(len(ids), dtype=torch.bool)
        is_target[len(ids) - len(answer.ids) :] = torch.tensor(is_generated(answer.lengths), dtype=torch.bool)
        old = None if rollout.old_nats is None else rollout.old_nats[n]
        return ScoredAnswer(EncodedExample(ids, is_target), rollout.advantages[n], old, answer.turns)

    def _nats(self, rollout: Rollout, temperature: float) -> list[list[float]]:
        """Compute -log p of the tokens of answers in the loss, the same on all ranks. Collective.

        Other answers get an empty list.
        """
        runtime = self._runtime
        chosen = self._in_loss(rollout)
        groups, own_groups = self._split(rollout, chosen)
        compute = partial(nats_of_tokens, temperature=temperature)
        answer_nats: list[list[float]] = [[] for _ in rollout.answers]
        for n in chosen:
            answer_nats[n] = [0.0] * rollout.answers[n].num_generated
        with evaluation_mode(self._setup.model):
            for group in own_groups:
                answers = [chosen[index] for index in groups[group].rows]
                rows = self._setup.collate([self._scored(rollout, n).row for n in answers])
                nats = iter(runtime.placement.forward(compute, self._setup.model, rows).tolist())
                for n in answers:
                    answer_nats[n] = [next(nats) for _ in answer_nats[n]]
            if runtime.placement.needs_equal_microbatches:
                for _ in range(ceil_div(len(groups), runtime.world_size) - len(own_groups)):
                    runtime.placement.forward(compute, self._setup.model, EMPTY_MICROBATCH)
        shared = iter(runtime.collectives.sum(value for answer in answer_nats for value in answer))
        return [[next(shared) for _ in answer] for answer in answer_nats]


def stops_of(setup: Setup) -> list[int]:
    """Return the tokens that end an answer."""
    return stop_ids(setup.tokenizer, setup.model.generation_config.eos_token_id)


def mean_rewards(rewards: Rewards, table: torch.Tensor) -> dict[str, float]:
    """Return the mean of each function's rewards by its metric, without functions that gave none.

    `table` has the rewards: (answers, functions); nan where a function gave none.
    """
    means = {rewards.metrics[name]: float(table[:, k].nanmean()) for k, name in enumerate(rewards.names)}
    return {name: mean for name, mean in means.items() if not math.isnan(mean)}


def reward_on_main(
    setup: Setup,
    rewards: Rewards,
    prompts: PromptRows,
    rows: Sequence[int],
    answers: Sequence[GeneratedConversation],
) -> list[list[float]]:
    """Reward all answers or conversations on the main process, so that a function sees them together. Collective.

    `rows` has the row of each answer. If a function fails, all ranks end, after saving the steps before.
    """
    values: list[list[float]] = []
    with setup.runtime.collectives.failing_together("rewarding answers"):
        if setup.runtime.is_main_process:
            stops = stops_of(setup)
            given = [prompts.answer(row, each, stops) for row, each in zip(rows, answers, strict=True)]
            record = "" if setup.journal is None else str(setup.journal.folder.record_file)
            with saving_first():
                values = rewards(given, deadline=partial(setup.runtime.liveness.deadline, record=record))
    return setup.runtime.collectives.broadcast_from_main(values)
