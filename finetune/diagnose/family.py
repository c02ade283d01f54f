"""`finetune doctor --model`: prove the promises for a family of models, on a tiny random model with its layers.

`PROMISES` at the end of this file lists what is proven. No weights are read, and no code of a model is run.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from finetune import __version__
from finetune.config.compose import compose
from finetune.config.config_files import resolve_shipped
from finetune.config.hub import Repository, cached_file
from finetune.config.key_advice import did_you_mean
from finetune.config.listing import list_configs
from finetune.config.schema import LoraSection, ModelSection, OptimSection
from finetune.data.batches import pad
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExample
from finetune.data.examples import load_examples
from finetune.diagnose.rehearsal import STAGES, Rehearsal, StageResult
from finetune.diagnose.rehearsal_commands import StageError
from finetune.diagnose.rehearsal_overrides import override
from finetune.engine.decoder import bare_model
from finetune.engine.layout import pack
from finetune.engine.loss import BY_DEVICE, Choices, summed_cross_entropy
from finetune.engine.microbatch import Microbatch
from finetune.engine.supported import unsupported_reason
from finetune.errors import FinetuneError, ModelError, RunFailedError, first_line
from finetune.inference.decoding import Decoding, generate_answers
from finetune.logs import waiting
from finetune.model.base import longrope_boundary, prepare_base, read_model_config
from finetune.model.lora import add_lora
from finetune.model.published import published_sizes
from finetune.model.shrunken import random_model, shrunken_config
from finetune.model.tokens import build_tokenizer
from finetune.runs.recorded_run import RecordedRun
from finetune.training.forward import Computation
from finetune.training.memory.forecast import CANNOT_TRACE, copy_without_data, forecast_step, optimizer_need
from finetune.training.optim import build_optimizer

LOSS, GRADIENT = 1e-6, 5e-4
"""The largest relative errors against float64: of a loss, and of the gradient of each weight."""
CURVE, ADAPTER = 1e-6, 1e-5
"""The first promise of ARCHITECTURE.md: the largest differences of a loss, and of an adapter by its norm."""
RECORDED = 1e-5
"""The largest relative difference between a validation loss in metrics.jsonl and the loss that PEFT computes."""
LOGIT = 1e-4
"""How far below the largest logit the logit of a generated token may be, in standard deviations of the logits."""
MEMORY = 0.1
_VOCABULARY, _STOP_IDS = 2048, (4, 0)
"""Of the tokenizer of phi_tiny."""
_LENGTHS, _BEGINNING = (7, 1, 12, 3, 40), 20
_STEPS, _MINUTES = 6, 10.0
_PACKAGES = ("torch", "transformers", "peft")

Row = tuple[torch.Tensor, torch.Tensor]


def find_family(name: str) -> tuple[Any, str]:
    """Return the configuration that `finetune doctor --model NAME` means, and its source, without asking the hub.

    Raises:
        ModelError: there is none of this name, or its layers are no causal language model.
    """
    presets = [preset for preset, _ in list_configs()["model"]]
    path = Path(name).expanduser()
    if path.is_file():
        try:
            keys = json.loads(path.read_text(encoding="utf-8"))
            section = ModelSection(config=dict(keys))
        except (ValueError, TypeError) as error:
            raise ModelError(f"--model {name} is not a config.json: {first_line(error)}. Give another file.") from error
        source = str(path)
    elif name in presets:
        section = compose([f"model={name}"], complete=False).model
        source = section.path or name
        published = published_sizes(section)
        if published is not None and (folder := _cached_folder(source)):
            section = ModelSection(path=folder)
        elif published is not None:
            section = ModelSection(config=published.as_config())
            source = f"the sizes of {source} in finetune, other keys by default"
    elif name in CONFIG_MAPPING:
        section, source = ModelSection(config={"model_type": name}), f"the defaults of {name} in transformers"
    elif path.is_dir() or (folder := _cached_folder(name)):
        section, source = ModelSection(path=str(path) if path.is_dir() else folder), name
    elif "/" in name:
        raise ModelError(
            f"--model {name} is neither a file or folder here, nor in the hub's cache, and a proof asks no hub. "
            f"Download its config.json with `hf download {name} config.json`, or give a model type of transformers."
        )
    else:
        hint = did_you_mean(name, [*presets, *CONFIG_MAPPING])
        raise ModelError(
            f"--model {name} is neither a preset (`finetune config list`), a model type of transformers, a folder, a "
            f"config.json, nor a hub id. {hint or 'Give one of these.'}"
        )
    return read_model_config(section, takes_text_model=True), source


def _cached_folder(hub_id: str) -> str | None:
    """Return the folder of a model in the hub's cache; None if its config.json is not there."""
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        file = cached_file(Repository(hub_id, None, "model"), "config.json")
        return None if file is None else str(file.parent)
    return None


@contextmanager
def errors_of_transformers_only() -> Iterator[None]:
    """Hide what transformers warns of in the block: kernels and keys that the model itself has."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


class FamilyProof:
    """The proof of one family, and the results so far.

    `folder` takes the files of the runs. `show` is called with each result.
    """

    def __init__(self, config: Any, folder: Path, show: Callable[[StageResult], object]) -> None:
        self._folder, self._show = folder, show
        try:
            self._config = shrunken_config(config, _VOCABULARY)
            self._model: Any = random_model(self._config)
            prepare_base(self._model)
            sees_later_tokens = _sees_later_tokens(self._model)
        except Exception as error:  # of any class of transformers
            raise ModelError(
                f"no tiny model can be made of this {config.model_type} configuration: {first_line(error)}. "
                "Give a complete config.json of one stack of decoder layers."
            ) from error
        if sees_later_tokens:
            raise ModelError(
                f"{config.model_type} is no causal language model: its layers let a token see later tokens. "
                "finetune trains models that predict the next token."
            )
        self.why_not_engine = unsupported_reason(self._model)
        self.results: list[StageResult] = []

    @property
    def computed_by(self) -> str:
        """Who computes the forward pass of this family, in words."""
        if self.why_not_engine is None:
            return "the engine"
        return f"transformers' own forward: {self.why_not_engine}"

    @property
    def failed(self) -> list[StageResult]:
        """The promises that do not hold."""
        return [result for result in self.results if result.outcome == "failed"]

    def run(self) -> None:
        """Check all promises. A promise that needs the result of a failed one is not checked."""
        for name, (check, needs) in PROMISES.items():
            begun = time.monotonic()
            broken = next((each.name for each in self.results if each.name in needs and each.outcome != "ok"), None)
            result = StageResult(name, "not run", f"`{broken}` does not hold")
            if broken is None:
                with waiting(f"proving: {name}"):
                    result = _outcome(name, partial(check, self))
            self.results.append(result._replace(seconds=time.monotonic() - begun))
            self._show(self.results[-1])

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for JSON, see docs/doctor.md."""
        config = self._config
        return {
            "version": 1,
            "model_type": config.model_type,
            "computed_by": "transformers" if self.why_not_engine else "engine",
            "why_not_engine": self.why_not_engine,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "promises": [dict(zip(StageResult._fields[:4], result, strict=False)) for result in self.results],
            "versions": {"finetune": __version__, **{name: version(name) for name in _PACKAGES}},
        }

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The commands of a run on the tiny model, which is written to disk here."""
        folder = self._folder
        model = copy.deepcopy(self._model)
        model.generation_config.eos_token_id = list(_STOP_IDS)
        model.save_pretrained(folder / "stand-in")
        AutoTokenizer.from_pretrained(resolve_shipped("shipped:phi_tiny")).save_pretrained(folder / "stand-in")
        # For some model types, transformers then reads these files with another tokenizer.
        AutoTokenizer.from_pretrained(folder / "stand-in").save_pretrained(folder / "stand-in")
        arguments = [
            *("task=finetune_lora", "data=orders", "data.max_rows=16"),
            override("data.cache_dir", str(folder / "cache")),
            *(override("model.path", str(folder / "stand-in")), override("output_dir", str(folder / "run"))),
            *("lora.r=4", "optim.learning_rate=2e-3", "training.device=cpu", "training.precision=fp32"),
            *("training.batch_size=3", "training.global_batch_size=8", "testing.num_samples=0"),
        ]
        config = compose(arguments)
        return Rehearsal(config=config, arguments=arguments, folder=folder, steps=_STEPS, minutes=_MINUTES)

    def stage(self, name: str) -> str:
        """Run a stage of a rehearsal."""
        return STAGES[name](self.rehearsal, self._folder / f"{name}.log")

    def microbatch(self, rows: Sequence[Row], *, shares: bool = False) -> Microbatch:
        """Make a micro-batch for the forward pass of this family."""
        if self.why_not_engine is None:
            return pack(rows, share_prefixes=shares)
        return pad([EncodedExample(*row) for row in rows])

    def adapted(self) -> Any:
        """Return a copy of the model with an adapter that changes its output."""
        model: Any = add_lora(copy.deepcopy(self._model), LoraSection(r=4))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
                weight.normal_(0, 0.1, generator=generator)
        return model.eval()

    def errors(self, model: Any, rows: Sequence[Row], *, shares: bool) -> str:
        """Compare loss and gradients of a micro-batch with those of transformers' forward in float64, row by row."""
        exact, boundary = _in_float64(model), longrope_boundary(model) or 0
        expected = _loss_in_float64(exact, rows)
        # LongRoPE chooses its factors by the longest row of a micro-batch.
        groups = [[row for row in rows if (len(row[0]) > boundary) is is_long] for is_long in (False, True)]
        microbatches = [self.microbatch(group, shares=shares) for group in groups if group]
        computed = torch.stack([summed_cross_entropy(model, microbatch) for microbatch in microbatches]).sum()
        of_loss = abs(computed.item() / expected.item() - 1)
        theirs, ours = _gradients(exact, expected), _gradients(model, computed)
        # The exact gradient of some weights is 0, of a bias of keys for example.
        floor = 1e-3 * torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
        of_gradient, worst = max(
            (float((ours[name] - theirs[name]).norm() / theirs[name].norm().maximum(floor)), name) for name in theirs
        )
        what = f"loss off by {of_loss:.1e} (at most {LOSS:g}), gradients by {of_gradient:.1e} (at most {GRADIENT:g})"
        return _judge(f"{what}, most in {worst}", of_loss <= LOSS and of_gradient <= GRADIENT)


def _check_loss(proof: FamilyProof) -> str:
    rows = _rows()
    whole = proof.errors(proof._model, rows, shares=False)
    return f"all weights: {whole}; LoRA: {proof.errors(proof.adapted(), rows, shares=False)}"


def _check_prefixes(proof: FamilyProof) -> str | None:
    if proof.why_not_engine is not None:
        return None
    computed, given = proof.microbatch(_rows(), shares=True).num_computed, sum(len(ids) for ids, _ in _rows())
    what = f"{computed} of {given} tokens are computed; {proof.errors(proof.adapted(), _rows(), shares=True)}"
    return _judge(what, computed < given)


def _check_generation(proof: FamilyProof) -> str:
    """Compare greedy answers with transformers' forward in float64, which computes each prefix anew."""
    model = proof.adapted()
    exact = _in_float64(model)
    prompts = [ids.tolist() for ids, _ in _rows()[2:5]]
    decoding = Decoding(stop_ids=_STOP_IDS, max_new_tokens=24, keeps_stop=True)
    answers = generate_answers(model, prompts, decoding, batch_size=len(prompts))
    furthest = 0.0
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            for end, token in enumerate(answer):
                logits = exact(input_ids=torch.tensor([prompt + answer[:end]]), use_cache=False).logits[0, -1]
                furthest = max(furthest, float((logits.max() - logits[token]) / logits.std()))
    what = f"{sum(map(len, answers))} greedy tokens, at most {furthest:.1e} standard deviations below the largest logit"
    what += f" (at most {LOGIT:g})"
    return _judge(what, furthest <= LOGIT)


def _check_memory(proof: FamilyProof) -> str | None:
    """Compare the predicted peak of a step with the measured one, on rows of 100 tokens."""
    model = add_lora(copy.deepcopy(proof._model), LoraSection(r=4)).train()
    make = partial(proof.microbatch, _random_rows([100 - n for n in range(8)]))
    twin = copy_without_data(model)
    need = optimizer_need(build_optimizer(twin, OptimSection()), device_type="cpu")
    try:
        assert need is not None
        how = Computation(loss_of=_choose_loss, device_type="cpu", accumulates=False)
        predicted = forecast_step(twin, make(), how).peak(need).total
    except CANNOT_TRACE:
        return None
    optimizer = build_optimizer(model, OptimSection())

    def step() -> None:
        summed_cross_entropy(model, make()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *states))
    measured = held + measure_peak(step)
    error = predicted / measured - 1
    what = f"{predicted / 1e6:.1f} MB predicted, {measured / 1e6:.1f} MB measured: {error:+.1%} (at most {MEMORY:.0%})"
    return _judge(what, abs(error) <= MEMORY)


def _check_training(proof: FamilyProof) -> str:
    what = proof.stage("train")
    losses = [value for _, value in RecordedRun(proof.rehearsal.folder / "whole").points("step", "loss")]
    return _judge(f"{what.partition(', ')[0]}, which must fall", losses[-1] < losses[0])


def _check_resume(proof: FamilyProof) -> str | None:
    killed = proof.stage("kill")
    return f"{killed}, then {proof.stage('resume')}" if killed.startswith("SIGKILL") else None


def _check_world(proof: FamilyProof) -> str:
    """Train again on two processes, and compare losses and adapters."""
    rehearsal = proof.rehearsal
    two = rehearsal.folder / "two"
    arguments = [override("output_dir", str(two)), "parallel.num_processes=2", "resume=never"]
    rehearsal.command(rehearsal.folder / "two.log", "train", *rehearsal.overrides(), *arguments)
    curves = [
        [value for event in ("step", "validation") for _, value in RecordedRun(folder).points(event, "loss")]
        for folder in (rehearsal.folder / "whole", two)
    ]
    of_losses = max(abs(one - other) / max(1.0, abs(one)) for one, other in zip(*curves, strict=True))
    one, other = (_adapter(folder) for folder in (rehearsal.folder / "whole", two))
    of_adapter = float((one - other).norm() / one.norm())
    what = f"losses differ by {of_losses:.1e} (at most {CURVE:g}), adapters by {of_adapter:.1e} (at most {ADAPTER:g})"
    return _judge(what, of_losses <= CURVE and of_adapter <= ADAPTER)


def _check_peft(proof: FamilyProof) -> str:
    """Compare the last validation loss of the run with the loss of its adapter in plain PEFT, in float64."""
    from peft import PeftModel

    rehearsal = proof.rehearsal
    config, run = rehearsal.config, rehearsal.folder / "whole"
    base = AutoModelForCausalLM.from_pretrained(rehearsal.folder / "stand-in")
    model = _in_float64(PeftModel.from_pretrained(base, run / "adapter").eval())
    splits = encode_examples(load_examples(config.data), build_tokenizer(config.model), config.data)
    assert splits.validation is not None
    rows = [splits.validation[row] for row in range(len(splits.validation))]
    with torch.no_grad():
        loss = float(_loss_in_float64(model, rows)) / sum(int(is_target[1:].sum()) for _, is_target in rows)
    recorded = RecordedRun(run).points("validation", "loss")[-1][1]
    error = abs(recorded / loss - 1)
    what = f"validation loss {recorded:.6g} in the run, {loss:.6g} in PEFT: off by {error:.1e} (at most {RECORDED:g})"
    return _judge(what, error <= RECORDED)


def _outcome(name: str, check: Callable[[], str | None]) -> StageResult:
    try:
        what = check()
    except Exception as error:  # of any class of transformers or PEFT: the promise does not hold
        what = str(error) if isinstance(error, FinetuneError) else f"{type(error).__name__}: {first_line(error)}"
        return StageResult(name, "failed", what, exit_code=RunFailedError.exit_code)
    return StageResult(name, "not run", _NOT_SHOWN[name]) if what is None else StageResult(name, "ok", what)


def _sees_later_tokens(model: Any) -> bool:
    ((ids, _),) = _random_rows([12])
    changed = torch.cat([ids[:-1], ids[-1:] - 1])
    with torch.no_grad():
        one, other = (model(input_ids=row[None], use_cache=False).logits[0, :-1] for row in (ids, changed))
    return float((one - other).abs().max()) > 0.01 * float(one.std())  # the rounding of experts is far smaller


def _judge(what: str, holds: bool) -> str:
    if not holds:
        raise StageError(what, RunFailedError.exit_code)
    return what


def _choose_loss(choices: Choices = BY_DEVICE) -> Any:
    return partial(summed_cross_entropy, choices=choices)


def _random_rows(lengths: Sequence[int], beginning: int = 0) -> list[Row]:
    """Return rows of random tokens, of which about half carry loss; `beginning` tokens of all rows are equal."""
    generator = torch.Generator().manual_seed(beginning)
    draw = partial(torch.randint, 10, _VOCABULARY, generator=generator)
    shared = draw((beginning,))
    rows = [torch.cat([shared, draw((length,))]) for length in lengths]
    return [(ids, torch.rand(len(ids), generator=generator) < 0.5) for ids in rows]


def _rows() -> list[Row]:
    """Return rows of many lengths, some of which share a beginning."""
    return [*_random_rows(_LENGTHS), *_random_rows((5, 9, 30), _BEGINNING)]


def _in_float64(model: Any) -> Any:
    exact = copy.deepcopy(model).double()
    with suppress(AttributeError, ValueError):  # older than transformers 5, or a model without a choice
        bare_model(exact).set_experts_implementation("eager")  # the fast one has no float64
    return exact


def _loss_in_float64(model: Any, rows: Sequence[Any]) -> torch.Tensor:
    """Sum the nats of all targets with transformers' own forward, one row at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, is_target in rows:
        at = is_target[1:].nonzero().squeeze(1)
        if len(at):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, at]
            total = total + functional.cross_entropy(logits, ids[at + 1], reduction="sum")
    return total


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(weight).double() if weight.grad is None else weight.grad.double()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def _adapter(run: Path) -> torch.Tensor:
    weights = load_file(run / "adapter" / "adapter_model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)]).double()


def measure_peak(step: Callable[[], None]) -> int:
    """Return the most bytes that a step has allocated at a time on the CPU, as torch's allocator reports it."""
    from torch.profiler import ProfilerActivity, profile

    with _no_output_of_libraries(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    in_use = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            in_use += event.nbytes()
            highest = max(highest, in_use)
    return highest


@contextmanager
def _no_output_of_libraries() -> Iterator[None]:
    """Discard what C++ code writes to standard error: the profiler reports its start and its stop there."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


PROMISES: dict[str, tuple[Callable[[FamilyProof], str | None], tuple[str, ...]]] = {
    "loss and gradients": (_check_loss, ()),
    "shared prefixes": (_check_prefixes, ("loss and gradients",)),
    "generation": (_check_generation, ("loss and gradients",)),
    "memory": (_check_memory, ("loss and gradients",)),
    "training": (_check_training, ("loss and gradients",)),
    "kill and resume": (_check_resume, ("training",)),
    "two processes": (_check_world, ("training",)),
    "merge": (lambda proof: proof.stage("merge"), ("kill and resume",)),
    "adapter in PEFT": (_check_peft, ("training",)),
}
"""By name: the check, and the promises without which it says nothing."""
_NOT_SHOWN = {
    "kill and resume": "the run ended before it could be killed: try again",
    "shared prefixes": "transformers' own forward computes padded rows and shares nothing",
    "memory": "the model's own forward does not run on tensors without data, so `plan` estimates its memory",
}
