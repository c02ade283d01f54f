"""Whole runs through the engine, against the same runs through the models' own forward: one curve, less work."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.errors import ConfigError
from tests import tiny_training
from tests.tiny import tiny_tokenizer
from tests.tiny_models import PHI3_SIZES, build_tiny, tiny_gemma2_config, tiny_phi3_config, tiny_phi_config
from tests.tiny_runs import MODEL_VOCABULARY
from tests.tiny_training import events, record

SYSTEM = "you take orders for oranges and answer with one short line of plain words and nothing else at all"
SIZES = {"vocab_size": MODEL_VOCABULARY, "initializer_range": 0.05}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0],
    "long_factor": [3.0],
    "original_max_position_embeddings": 48,
}
BASES = {
    "phi3": lambda: tiny_phi3_config(**SIZES, max_position_embeddings=256),
    "longrope": lambda: tiny_phi3_config(
        **SIZES,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=48,
        max_position_embeddings=256,
        sliding_window=None,
    ),
    "phi": lambda: tiny_phi_config(**SIZES, max_position_embeddings=256),
    "gemma2": lambda: tiny_gemma2_config(**SIZES, max_position_embeddings=256),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Rows that all begin with one system turn, some of them with one question and two answers."""
    folder = tmp_path_factory.mktemp("engine")
    for name, config in BASES.items():
        build_tiny(config()).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    text = "please send three crates of sour green apples and oranges to Marta Ruiz in Porto by Friday"
    words = text.split()
    rows = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": " ".join(words[: 3 + number // 2 % 9])},
                {"role": "assistant", "content": " ".join(words[number % 7 : number % 7 + 2 + number % 4])},
            ]
        }
        for number in range(27)
    ]
    for name, part in (("train", rows[:22]), ("validation", rows[22:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def train(inputs: Path, run: Path, base: str, *words: str):
    tiny_training.train(
        [
            "task=finetune_lora",
            *(f"model.path={inputs / base}", f"data.path={inputs}", f"data.cache_dir={inputs / 'cache'}"),
            *(f"output_dir={run}", "lora.r=2", "training.precision=fp32", "training.device=cpu"),
            *("training.batch_size=3", "training.global_batch_size=8", "training.max_steps=5"),
            *("optim.learning_rate=2e-2", "testing.num_samples=0", "testing.general_prompts=none", *words),
        ]
    )


def curve(run: Path):
    return [event["loss"] for event in events(run) if event["event"] in ("step", "validation")]


def weights(run: Path):
    [file] = (run / "adapter").glob("*model.safetensors")
    return load_file(file)


def assert_one_curve(run: Path, reference: Path):
    pairs = list(zip(curve(run), curve(reference), strict=True))
    assert len(pairs) == 7
    assert pairs[4][0] < pairs[0][0], "nothing was learnt"
    assert max(abs(a - b) / max(1, abs(a)) for a, b in pairs) <= 1e-6
    ours, theirs = weights(run), weights(reference)
    difference = math.sqrt(sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs))
    assert difference <= 1e-5 * math.sqrt(sum(float(tensor.square().sum()) for tensor in theirs.values()))


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory):
    """The folder of a run through the model's own forward, once for each base and method."""
    folders = {}

    def trained(base, *words):
        if (base, words) not in folders:
            folders[base, words] = tmp_path_factory.mktemp("reference") / "run"
            train(inputs, folders[base, words], base, "training.kernels=reference", *words)
        return folders[base, words]

    return trained


@pytest.mark.parametrize(
    ("base", "word"),
    [
        pytest.param("phi3", "training.gradient_checkpointing=true", marks=pytest.mark.slow),
        pytest.param("phi", "training.packing=false", marks=pytest.mark.slow),
        ("longrope", "training.max_tokens_per_microbatch=90"),
    ],
)
def test_the_engine_gives_the_curve_of_the_models_own_forward(inputs, reference, tmp_path, base, word):
    train(inputs, tmp_path / "run", base, word)
    assert_one_curve(tmp_path / "run", reference(base))
    assert record(tmp_path / "run")["fallbacks"] == []


def test_full_fine_tuning_goes_through_the_engine_too(inputs, reference, tmp_path):
    words = ("training.method=full", "optim.learning_rate=1e-3")
    train(inputs, tmp_path / "run", "phi3", *words)
    assert_one_curve(tmp_path / "run", reference("phi3", *words))


@pytest.mark.slow
def test_full_fine_tuning_in_bf16_comes_as_close_as_the_models_own_forward_does(inputs, reference, tmp_path):
    words = ("training.method=full", "optim.learning_rate=1e-3")
    train(inputs, tmp_path / "run", "phi3", *words, "training.precision=bf16")
    assert record(tmp_path / "run")["fallbacks"] == []
    exact, theirs = curve(reference("phi3", *words)), curve(reference("phi3", *words, "training.precision=bf16"))

    def off_by(losses):
        return max(abs(a - b) for a, b in zip(losses, exact, strict=True))

    assert 0 < off_by(curve(tmp_path / "run")) <= 4 * off_by(theirs) < 4e-3
    [file] = (tmp_path / "run" / "adapter").glob("*model.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}


def computed(run: Path):
    steps = events(run, "step")
    return sum(event["num_computed"] for event in steps) / sum(event["num_tokens"] for event in steps)


def test_shared_prefixes_are_computed_once_and_the_run_says_how_much_that_was(inputs, tmp_path):
    train(inputs, tmp_path / "shared", "phi3", "training.batch_size=8")
    train(inputs, tmp_path / "apart", "phi3", "training.batch_size=8", "training.share_prefixes=false")
    assert computed(tmp_path / "apart") == 1
    assert computed(tmp_path / "shared") < 0.6
    assert record(tmp_path / "shared")["result"]["shared_tokens"] == pytest.approx(1 - computed(tmp_path / "shared"))
    log = (tmp_path / "shared" / "log.txt").read_text()
    assert f"{1 - computed(tmp_path / 'shared'):.0%} of all tokens were in shared prefixes, computed once" in log


def test_a_model_that_the_engine_does_not_know_goes_its_own_way_and_the_run_says_so(inputs, reference, tmp_path):
    train(inputs, tmp_path / "run", "gemma2")
    [taken] = record(tmp_path / "run")["fallbacks"]
    assert taken["what"] == "training.kernels"
    assert "its attention scores are capped" in taken["why"]
    assert curve(tmp_path / "run") == curve(reference("gemma2"))
    with pytest.raises(ConfigError, match="its attention scores are capped"):
        train(inputs, tmp_path / "strict", "gemma2", "strict=true")


def test_dropout_belongs_to_the_segment_and_repeats(inputs, tmp_path):
    for name in ("one", "two"):
        train(inputs, tmp_path / name, "phi3", "lora.dropout=0.3")
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    assert PHI3_SIZES["sliding_window"] < len(SYSTEM.split())
