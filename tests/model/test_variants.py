"""Every Phi variant: its tokens, what carries loss, where it stops, what LoRA adapts, and rows that see no others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config.schema import LoraSection
from finetune.data.batches import BatchRule, Collate, pad
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.distributed.launch import launch
from finetune.engine.layout import pack
from finetune.engine.loss import cross_entropy_per_target
from finetune.engine.supported import unsupported_reason
from finetune.errors import DataError
from finetune.export.merge import merge_adapter
from finetune.inference.decoding import Decoding, generate_answers
from finetune.model.base import build_base_model, longrope_boundary
from finetune.model.lora import add_lora
from finetune.model.targets import resolve_targets
from finetune.model.tokens import build_tokenizer, set_stop_and_pad_ids
from finetune.runs.model_files import encode_full_model
from finetune.training.trainer import Trainer
from tests.launches import REPOSITORY
from tests.model.phi_table import COLUMNS, Fact, record_row, rows_of_page
from tests.model.variants import BOUNDARY, SYSTEM, TURNS, VARIANTS, Variant
from tests.rounding import rounding_of

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))
"""By variant: tokens as they are spelled, their ids, and a 1 for each that carries loss. Read through by a person."""


@pytest.fixture(scope="module", params=VARIANTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Variant, Path]:
    """A variant and its folder."""
    variant = VARIANTS[request.param]
    return variant, variant.write(tmp_path_factory.mktemp("variant") / "model")


def encode(variant: Variant, folder: Path, row: dict[str, Any], tmp_path: Path) -> tuple[EncodedExamples, Any]:
    """A row on the way that a run's rows take."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n", encoding="utf-8")
    config = variant.run_config(folder, f"data.path={rows}", f"data.cache_dir={tmp_path / 'cache'}")
    tokenizer = build_tokenizer(config.model)
    return encode_examples(load_examples(config.data), tokenizer, config.data).train, tokenizer


def test_tokens_and_targets_of_a_conversation(made: tuple[Variant, Path], tmp_path: Path) -> None:
    variant, folder = made
    examples, tokenizer = encode(variant, folder, variant.row, tmp_path)
    ids, is_target = (tensor.tolist() for tensor in examples[0])
    golden = GOLDEN[variant.name]
    assert tokenizer.convert_ids_to_tokens(ids) == golden["tokens"].split(" ")
    assert " ".join(map(str, ids)) == golden["ids"]
    assert "".join(str(int(target)) for target in is_target) == golden["targets"]
    turns = [*(variant.completed or ()), tokenizer.eos_token]
    whole = "".join(turns) if variant.completed else tokenizer.apply_chat_template(variant.turns, tokenize=False)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"], "a token was doubled or cut"

    answers = [answer + variant.end for answer in variant.answers]
    learned = tokenizer.decode([token for token, target in zip(ids, is_target, strict=True) if target])
    assert learned.replace(" ", "") == "".join(answers).replace(" ", "")

    num_ends = sum(target and token == examples.end_id for token, target in zip(ids, is_target, strict=True))
    assert tokenizer.convert_ids_to_tokens(examples.end_id) == variant.end
    assert num_ends == len(answers), "an end of turn carries no loss"
    whose = "" if variant.template else ", of the preset"
    whose = whose if variant.completed is None else " of a prompt and its completion: no template"
    facts = {Fact.PRESET: f"`{variant.preset}`", Fact.TEMPLATE: f"{len(ids)} ids{whose}"}
    facts |= {Fact.MASK: f"{sum(is_target)} of {len(ids)}", Fact.END: f"`{variant.end}`, {num_ends} of {num_ends}"}
    record_row(variant.name, facts)


def test_stop_ids_are_saved_as_a_list_and_the_padding_token_ends_nothing(
    made: tuple[Variant, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    variant, folder = made
    section = variant.run_config(folder).model
    tokenizer, model = build_tokenizer(section), build_base_model(section)
    adapted = add_lora(model, LoraSection(r=2))
    stops = set_stop_and_pad_ids(adapted, tokenizer)
    names = tokenizer.convert_ids_to_tokens(stops)
    assert names == list(dict.fromkeys([variant.end, tokenizer.eos_token]))
    assert tokenizer.pad_token_id not in stops
    assert tokenizer.pad_token_id < len(model.get_input_embeddings().weight)
    assert len(model.get_input_embeddings().weight) == len(variant.tokenizer()) + 13, "the vocabulary was cut or grown"
    for name, content in encode_full_model(adapted.unload()).items():
        (tmp_path / name).write_bytes(b"".join(bytes(chunk) for chunk in content))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.generation_config.eos_token_id == stops
    stops_named = ", ".join(f"`{name}`" for name in names)
    record_row(variant.name, {Fact.PAD: f"`{tokenizer.pad_token}`", Fact.STOPS: stops_named})


@pytest.mark.few(5)
def test_lora_adapts_what_is_there_and_a_merge_keeps_logits_and_ties(
    made: tuple[Variant, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    variant, folder = made
    model = build_base_model(variant.run_config(folder).model)
    assert tuple(resolve_targets(model, "auto")) == variant.targets
    torch.manual_seed(1)  # of the adapter
    adapted = add_lora(model, LoraSection(r=2))
    with_adapter = {name.rpartition(".")[2] for name, m in adapted.named_modules() if hasattr(m, "lora_A")}
    assert with_adapter == set(variant.targets)
    facts = {Fact.TARGETS: ", ".join(variant.targets), Fact.TIED: "yes" if variant.is_tied else "no"}
    train_one_step(adapted)
    ids = torch.arange(3, 12).reshape(1, -1)
    adapted.eval()
    tolerance = rounding_of(lambda model: model(input_ids=ids).logits, adapted)
    with torch.no_grad():
        tuned = adapted(input_ids=ids).logits
        with adapted.disable_adapter():
            assert (adapted(input_ids=ids).logits - tuned).abs().max() > 1e-2, "the adapter changes nothing"
    merged = merge_adapter(adapted)
    for name, content in encode_full_model(merged).items():
        (tmp_path / name).write_bytes(b"".join(bytes(chunk) for chunk in content))
    for one in (merged, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert (one.get_input_embeddings().weight is one.get_output_embeddings().weight) is variant.is_tied
        with torch.no_grad():
            assert (one.eval()(input_ids=ids).logits - tuned).abs().max() <= tolerance
    record_row(variant.name, {**facts, Fact.MERGE: "holds"})


def train_one_step(model: Any) -> None:
    model.train()
    losses = cross_entropy_per_target(model, pad(list(rows_of(64))[:3]))
    losses.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02).step()


@cache
def rows_of(vocabulary: int) -> EncodedExamples:
    """Rows on both sides of the boundary, at it, and one right behind it; every token but the first is a target."""
    torch.manual_seed(0)
    lengths = (3, 9, 15, 16, 17, 18, 30, 41)
    rows = [torch.randint(0, vocabulary, (length,)).tolist() for length in lengths]
    return EncodedExamples.from_rows([(ids, [False] + [True] * (len(ids) - 1)) for ids in rows], end_id=2)


def losses_by_row(
    model: Any, collate: Collate, cuts: Sequence[Sequence[int]], rows: EncodedExamples
) -> list[torch.Tensor]:
    """The loss of each target of each row, however the rows are put together."""
    found: dict[int, torch.Tensor] = {}
    for cut in cuts:
        microbatch = collate([rows[row] for row in cut])
        with torch.no_grad():
            losses = cross_entropy_per_target(model, microbatch)
        for place, row in enumerate(cut):
            found[row] = losses[microbatch.target_row == place]
    return [found[row] for row in range(len(rows))]


def largest_difference(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True))


def ways(model: Any) -> Iterator[tuple[str, Collate]]:
    """Padded, through the model's own forward; packed, through the engine, where it knows the model."""
    yield "padded", pad
    if unsupported_reason(model) is None:
        yield "packed", pack


@pytest.mark.few(5)
def test_a_row_alone_has_the_logits_it_has_in_any_batch(made: tuple[Variant, Path]) -> None:
    variant, folder = made
    model = build_base_model(variant.run_config(folder).model).eval()
    boundary = longrope_boundary(model)
    assert boundary == variant.boundary
    rows = rows_of(64)
    lengths = rows.lengths.tolist()
    alone = [[row] for row in range(len(rows))]
    reference = losses_by_row(model, pad, alone, rows)
    tolerance = rounding_of(lambda model: torch.cat(losses_by_row(model, pad, alone, rows)), model)
    assert [way for way, _ in ways(model)] == ["padded", "packed"][: 1 if model.config.model_type == "phimoe" else 2]
    for way, collate in ways(model):
        assert largest_difference(losses_by_row(model, collate, alone, rows), reference) <= tolerance, way
        for batch_size in (2, 3, 8):
            rule = BatchRule(
                lengths=lengths,
                global_batch_size=len(rows),
                batch_size=batch_size,
                boundary=boundary,
                tokens=None if way == "padded" else rows.tokens,
            )
            cuts = [cut.rows for cut in rule.split(range(len(rows)))]
            assert max(map(len, cuts)) > 1
            got = losses_by_row(model, collate, cuts, rows)
            assert largest_difference(got, reference) <= tolerance, f"{way}, {batch_size} rows at most"
    guard = "not needed"
    if variant.boundary is not None:
        mixed = losses_by_row(model, pad, [list(range(len(rows)))], rows)
        short = [row for row, length in enumerate(lengths) if length <= variant.boundary]
        moved = min(largest_difference([mixed[row]], [reference[row]]) for row in short)
        assert moved > 2 * tolerance, "without the guard nothing would happen: this test sees nothing"
        guard = "holds"
    record_row(variant.name, {Fact.GUARD: guard})


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_run_keeps_rows_on_the_two_sides_of_the_boundary_apart(kernels: str, tmp_path: Path) -> None:
    variant = VARIANTS["Phi-4-mini"]
    for name, seed in (("train", 0), ("validation", 1)):
        rng = random.Random(seed)
        turns = [("Hi " * rng.randint(1, 12), f"yes {number}") for number in range(20)]
        rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = [f"data.path={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}"]
    words += [f"training.kernels={kernels}", "training.global_batch_size=20", "ddp=false", "data.on_overlap=warn"]
    config = variant.run_config(variant.write(tmp_path / "model"), *words)
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        model = add_lora(build_base_model(config.model), config.lora)
        train, validation, _ = Trainer(runtime, config, model, tokenizer, splits).prepare_dataloaders()
        for split, cuts in (
            (splits.train, [part.rows for step in train.rule.steps_of_rank(0, 0, 0, 1) for part in step]),
            (splits.validation, validation.row_batches),
        ):
            is_long = [{bool(split.lengths[row] > BOUNDARY) for row in cut} for cut in cuts]
            assert {len(sides) for sides in is_long} == {1}
            assert set().union(*is_long) == {False, True}, "the rows do not try it"


def test_answers_end_at_each_of_the_stop_ids(made: tuple[Variant, Path]) -> None:
    variant, folder = made
    section = variant.run_config(folder).model
    tokenizer, model = build_tokenizer(section), build_base_model(section)
    stops = set_stop_and_pad_ids(model, tokenizer)
    assert tokenizer.eos_token_id in stops
    for stop in stops:
        with torch.no_grad():  # a head that says nothing but this token
            head = torch.nn.Linear(16, len(model.get_input_embeddings().weight))
            head.weight.zero_()
            head.bias.zero_()
            head.bias[stop] = 10.0
        model.lm_head = head
        assert generate_answers(model, [[5, 6]], Decoding(stop_ids=stops, max_new_tokens=4), batch_size=1) == [[]]
        assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4).tolist() == [[5, 6, stop]]


@pytest.mark.parametrize("name", ["Phi-4-reasoning", "Phi-4-reasoning-plus", "Phi-3-medium-4k", "Phi-3-medium-128k"])
def test_a_template_without_room_for_a_system_turn_refuses_it(name: str, tmp_path: Path) -> None:
    folder = VARIANTS[name].write(tmp_path / "model")
    with pytest.raises(DataError, match=r"leaves out messages\[0\]\.content \(role system\)"):
        encode(VARIANTS[name], folder, {"messages": [SYSTEM, *TURNS]}, tmp_path)


def test_phi_1_knows_no_turns(tmp_path: Path) -> None:
    folder = VARIANTS["phi-1"].write(tmp_path / "model")
    with pytest.raises(DataError, match=r"chat messages, but the tokenizer has no chat template"):
        encode(VARIANTS["phi-1"], folder, {"messages": TURNS}, tmp_path)


def test_the_template_of_phi_4_mini_reasoning_renders_what_is_known_of_it() -> None:
    """What onnxruntime-extensions' tests have of microsoft/Phi-4-mini-reasoning."""
    knight = "You are a medieval knight and must provide explanations to modern people."
    question = "How should I explain the Internet?"
    turns = [{"role": "system", "content": knight}, {"role": "user", "content": question}]
    rendered = (
        VARIANTS["Phi-4-mini-reasoning"]
        .tokenizer()
        .apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    )
    own = "Your name is Phi, an AI math expert developed by Microsoft."
    assert rendered == f"<|system|>{own} {knight}<|end|><|user|>{question}<|end|><|assistant|>"


def test_phi_3_5_leaves_an_empty_system_turn_out_and_phi_3_does_not(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": ""}, *TURNS]}
    for name, has_turn in (("Phi-3.5-mini", False), ("Phi-3-mini-4k", True)):
        folder = VARIANTS[name].write(tmp_path / name)
        examples, tokenizer = encode(VARIANTS[name], folder, row, tmp_path / name)
        assert (tokenizer.convert_tokens_to_ids("<|system|>") in examples[0].input_ids.tolist()) is has_turn


def test_the_page_has_these_variants_and_no_empty_cell() -> None:
    page = rows_of_page()
    assert list(page) == list(VARIANTS)
    for name, cells in page.items():
        assert list(cells) == list(COLUMNS), name
        assert all(cells.values()), f"{name}: {cells}"
    presets = {path.stem for path in (REPOSITORY / "configs" / "model").glob("phi*.yaml")}
    assert {f"`{preset}`" for preset in presets - {"phi_tiny"}} == {cells[Fact.PRESET] for cells in page.values()}
