"""The benchmark measures what it says: its rows, its count of operations, its engines' work, its arithmetic."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import profile_ours
from benchmarks.base_model import make_base, row_losses, write_base
from benchmarks.bench import Bench, StepFailedError
from benchmarks.clock import Mark, RankReport
from benchmarks.engines import ENGINES, torch_varlen
from benchmarks.engines.peer_rows import labels_of
from benchmarks.flops import necessary_flops
from benchmarks.job import LORA_RANK, SIZES, Job, RowShape, row_shape
from benchmarks.limit import matmul_rate
from benchmarks.machine import machine_and_versions
from benchmarks.results_page import BEGIN, END, put_into, render
from benchmarks.run import main
from benchmarks.summary import figures_of, limit_shares, loss_difference, paired_ratios, spread

REPOSITORY = Path(__file__).resolve().parent.parent
JOB = Job(size="tiny", steps=2, warmup_steps=1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    """A benchmark whose base model and row losses were made in this process, which has paid for torch already."""
    made = Bench(tmp_path_factory.mktemp("benchmark"))
    base = made.folder / f"base-{JOB.size}-{JOB.seed}"
    write_base(JOB, base)
    losses = row_losses(JOB, base, range(len(JOB.rows())))
    (made.folder / f"row-losses-{JOB.size}-{JOB.seed}.json").write_text(json.dumps(losses))
    return made


def test_the_rows_are_chats_of_the_promised_lengths():
    rows = Job(size="real").rows()
    lengths = [len(row.ids) for row in rows]
    logs = [math.log(length) for length in lengths if length < 512]

    assert len(rows) == 600
    assert statistics.mean(lengths) == pytest.approx(180, abs=9)
    assert max(lengths) == 512
    assert statistics.mean(logs) - statistics.median(logs) == pytest.approx(0, abs=0.1)  # log-normal: no skew in logs
    assert sum(sum(row.is_target) for row in rows) / sum(lengths) == pytest.approx(0.4, abs=0.02)
    assert all(row.is_target[-1] and not row.is_target[0] and len(row.ids) == len(row.is_target) for row in rows)
    assert max(max(row.ids) for row in rows) < SIZES["real"].vocabulary
    assert Job(size="tiny").rows() == Job(size="tiny").rows() != Job(size="tiny", seed=1).rows()
    assert Job(size="tiny").fingerprint() != Job(size="tiny", seed=1).fingerprint()


def test_the_count_of_operations_gives_the_known_figures_of_the_real_models():
    for name, giga_per_token in (("phi4", 62.8), ("phi4-mini", 18.3)):
        count = necessary_flops(SIZES[name], [RowShape(4096, 4096)])
        assert count / 4096 / 1e9 == pytest.approx(giga_per_token, rel=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", ["phi3", "phi"])
def test_the_count_of_operations_is_that_of_torch(family, method):
    from peft import get_peft_model

    from benchmarks.engines.transformers_trainer import lora_config

    size = replace(SIZES["tiny"], family=family)
    base = make_base(JOB, size, attn_implementation="eager")
    model = get_peft_model(base, lora_config(family)) if method == "lora" else base
    row = JOB.rows()[0]
    with FlopCounterMode(display=False) as counter:
        hidden = base.model(input_ids=torch.tensor([row.ids]), use_cache=False).last_hidden_state
        logits = base.lm_head(hidden[:, :-1][torch.tensor([row.is_target[1:]])])
        logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)

    settings = {"rank": LORA_RANK, "trains_all": method == "full", "recomputes_scores": False, "is_causal": False}
    ours = necessary_flops(size, [row_shape(row)], **settings)
    assert counter.get_total_flops() == ours


@pytest.mark.slow
def test_our_engine_reports_every_column(bench):
    bench.note(JOB, "limit", 1, figures={"flops_per_second": matmul_rate(JOB, seconds_each=0.002)}, seconds=1.0)
    figures = bench.train(JOB, "ours training.batch_size=2", 1)
    bench.note(JOB, "ours training.batch_size=2", 1, figures=figures, seconds=1.0)

    assert figures["first_loss_difference"] < 1e-6
    assert figures["num_tokens"] == sum(len(row.ids) for row in JOB.rows()[16:32])
    assert 0 < figures["first_step_seconds"] < figures["total_seconds"]
    assert 100 < figures["peak_memory_mib"] < 4000
    assert 0 < limit_shares(bench.runs(), JOB.name, "ours training.batch_size=2")[1] < 1
    page = render(bench.runs(), machine_and_versions(REPOSITORY, 1, 0.0))
    line = next(line for line in page.splitlines() if line.startswith("| `ours training.batch_size=2` |"))
    *cells, ours_to_this, num_runs = line.strip("| ").split(" | ")
    assert "–" not in cells
    assert (ours_to_this, num_runs) == ("–", "1")  # there is no run of `ours` as it is to compare with


@pytest.mark.slow
def test_a_run_that_is_done_is_not_done_again(bench, capsys):
    engine = "ours training.batch_size=3"
    bench.note(None, "help", 1, figures={"seconds": 0.2}, seconds=1.0)
    for name in ("limit", engine):
        bench.note(JOB, name, 1, figures={"flops_per_second": 1.0}, seconds=1.0)
    before = bench.log.read_text()

    words = ["--sizes", "tiny", "--steps", "2", "--rounds", "1", "--folder", str(bench.folder), "--engines", engine]
    assert main([*words, "unsloth"]) == 0
    assert bench.log.read_text() == before
    said = capsys.readouterr().out
    assert said.count("done before") == 3
    assert "left out: unsloth." in said


@pytest.mark.process
def test_unsloth_trains_with_the_python_that_the_command_names(tmp_path, capsys):
    base = tmp_path / f"base-{JOB.size}-{JOB.seed}"
    base.mkdir()
    (base / "tokenizer_config.json").touch()  # written last, so that this base counts as complete
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo unsloth 1 && exit\necho ran "$2"\nexit 1\n')
    python.chmod(0o755)
    bench = Bench(tmp_path, unsloth=python)

    assert bench.unsloth_versions == "unsloth 1"
    assert bench.code != Bench(tmp_path).code
    with pytest.raises(StepFailedError, match=r"^ran benchmarks\.worker$"):
        bench.train(JOB, "unsloth", 1)

    python.write_text("#!/bin/sh\necho no psutil\nexit 1\n")
    assert main(["--folder", str(tmp_path), "--unsloth", str(python)]) == 2
    assert f"{python} cannot run the benchmark: no psutil" in capsys.readouterr().out


@pytest.mark.slow
def test_the_profile_accounts_for_all_of_the_time(bench, monkeypatch, capsys):
    monkeypatch.setattr(profile_ours, "matmul_rate", partial(matmul_rate, seconds_each=0.002))
    assert profile_ours.main(["--sizes", JOB.size, "--steps", "2", "--folder", str(bench.folder)]) == 0
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    shares = dict(zip(table[0][1:], (int(cell.rstrip("%")) for cell in table[2][1:]), strict=True))
    of_the_limit = shares.pop("of the limit, as a whole")
    assert 0 < of_the_limit < 100
    assert sum(shares.values()) == pytest.approx(100, abs=len(shares))
    assert shares["matrix products"] > 0
    assert shares["elementwise and along rows"] > 0


@pytest.mark.slow
@pytest.mark.needs("trl")
@pytest.mark.parametrize(("objective", "engine"), [("sft", "trl-grouped-targets"), ("dpo", "trl-dpo-targets")])
def test_every_engine_trains_the_same_thing(bench, objective, engine):
    figures = bench.train(replace(JOB, objective=objective), engine, 1)
    assert figures["first_loss_difference"] < 1e-6
    assert figures["num_tokens"] > 0


def dense_varlen(q, k, v, edges, key_edges, longest, longest_key, *, scale, window_size, enable_gqa=False):
    """What torch's kernel computes, which is for CUDA."""
    assert window_size == (-1, 0)
    assert longest == longest_key == max(edges.diff().tolist())
    rows = zip(*(torch.split(x, edges.diff().tolist()) for x in (q, k, v)), strict=True)
    outs = [
        scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in row), is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        for row in rows
    ]
    return torch.cat([out.transpose(0, 1) for out in outs])


@pytest.mark.slow
@pytest.mark.needs("trl")
@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:_compile flag on create_block"
)
@pytest.mark.parametrize("attention", ["flex_attention", torch_varlen.NAME])
def test_rows_without_padding_have_the_loss_that_they_have_alone(bench, attention, monkeypatch):
    """On a CPU, FlexAttention has no backward pass, and varlen attention no kernel: this is their first loss."""
    from transformers import AutoModelForCausalLM, DataCollatorWithFlattening
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    torch_varlen.register()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", dense_varlen)
    model = AutoModelForCausalLM.from_pretrained(bench.base(JOB), attn_implementation=attention)
    known = json.loads((bench.folder / f"row-losses-{JOB.size}-{JOB.seed}.json").read_text())
    rows = JOB.rows()[:5]
    features = [{"input_ids": row.ids, "labels": labels_of(row)} for row in rows]
    packed = {
        "input_ids": [token for row in rows for token in row.ids],
        "labels": [label for row in rows for label in labels_of(row)],
        "seq_lengths": [len(row.ids) for row in rows],
    }
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    expected = sum(known[str(number)][0] for number in range(5)) / sum(known[str(number)][1] for number in range(5))
    flattened = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    for batch in (collate(features), collate([packed]), flattened):
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            assert float(model(**batch, use_cache=False).loss) == pytest.approx(expected, rel=1e-6)


def test_rates_leave_the_warm_up_out():
    job = Job(size="tiny", steps=3, warmup_steps=1)
    row = RowShape(100, 40)
    report = RankReport(
        marks=[Mark(10.0, 8.0), Mark(12.0, 9.0), Mark(14.0, 10.0)],
        rows=[[row] * 5, [row], [row, row]],
        first_rows=[0, 1],
        losses={1: 2.2},
        finished=15.0,
        peak_memory=2**30,
    )
    figures = figures_of(job, [report])

    assert figures["tokens_per_cpu_second"] == 300 / 2
    assert figures["tokens_per_second"] == 300 / 4
    assert (figures["first_step_seconds"], figures["total_seconds"]) == (10.0, 15.0)
    assert figures["peak_memory_mib"] == 1024
    assert figures["flops_per_second"] == necessary_flops(SIZES["tiny"], [row] * 3) / 2
    assert loss_difference([report], {0: (30.0, 10), 1: (10.0, 10)}) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="rank 0 did 3 optimizer steps of 4"):
        figures_of(Job(size="tiny", steps=4, warmup_steps=1), [report])


def test_ratios_are_taken_within_a_round():
    def run(engine, number, value):
        return {"job": "real, fp32", "engine": engine, "round": number, "figures": {"tokens_per_cpu_second": value}}

    pairs = [(1, 100.0, 50.0), (2, 30.0, 10.0), (3, 80.0, 20.0)]
    runs = [run("ours", number, ours) for number, ours, _ in pairs]
    runs += [run("trl-grouped", number, theirs) for number, _, theirs in pairs]
    runs.append({"job": "real, fp32", "engine": "ours", "round": 4, "error": "out of memory"})

    ratios = paired_ratios(runs, "real, fp32", "tokens_per_cpu_second", "ours", "trl-grouped")
    assert ratios == {1: 2.0, 2: 3.0, 3: 4.0}
    assert spread(ratios.values()) == (3.0, 1.0)
    page = render(runs, {})
    for part in ("| `ours` | 80 ± 20 |", "| 3.00 ± 1.00 | 3 |", "3, 1 failed"):
        assert part in page


def test_results_go_between_the_markers_of_their_device(tmp_path):
    page = tmp_path / "README.md"
    places = {name: f"{BEGIN.format(name)}\n\nold\n\n{END.format(name)}\n" for name in ("cpu", "cuda")}
    page.write_text(f"before\n{places['cpu']}between\n{places['cuda']}after\n")
    put_into(page, "new\n", "cuda")
    places["cuda"] = places["cuda"].replace("old", "new")
    assert page.read_text() == f"before\n{places['cpu']}between\n{places['cuda']}after\n"


def test_the_readme_says_what_each_engine_and_column_is():
    text = (REPOSITORY / "benchmarks" / "README.md").read_text()
    for device in ("cpu", "cuda"):
        assert text.count(BEGIN.format(device)) == text.count(END.format(device)) == 1
    said = text.partition("## Last results")[0]
    empty = {"job": "x", "engine": "ours", "round": 1, "figures": {}}
    (heads,) = [line for line in render([empty], {}).splitlines() if line.startswith("| engine |")]
    columns = [f"| {head.strip()} |" for head in heads.strip("| ").split("|")]
    assert [column for column in columns if column not in said] == []
    assert [name for name in ENGINES if f"`{name}`" not in said] == []
