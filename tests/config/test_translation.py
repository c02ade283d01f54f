"""`finetune init --from`: small files of other tools, modelled on the examples in their repositories."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from finetune.config.compose import compose
from finetune.config.keys import values
from finetune.config.other_tools import OUR_NAME
from finetune.config.schema import Config
from finetune.config.translation import translate_file
from finetune.diagnose.plan_devices import find_device
from finetune.diagnose.planner import make_plan
from finetune.errors import ConfigError
from finetune.training.setup import check_config
from tests.in_process import run_finetune

AXOLOTL_LORA = """
base_model: org/base
datasets:
  - path: chats.jsonl
    type: chat_template
    message_property_mappings: {role: from, content: value}
    shards: 4
val_set_size: 0.05
output_dir: ./out
adapter: lora
lora_model_dir:
sequence_len: 512
sample_packing: false
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
cosine_min_lr_ratio: 0.1
bf16: auto
tf32: false
gradient_checkpointing: true
attn_implementation: flash_attention_2
warmup_ratio: 0.1
max_steps: 50
evals_per_epoch: 4
weight_decay: 0.0
special_tokens:
  pad_token: "<pad>"
lora_rr: 3
"""
AXOLOTL_FULL_DPO = """
base_model: org/base
rl: dpo
rl_beta: 0.5
datasets: [{path: org/pairs, split: train, field_chosen: good}, {path: json, data_files: more.jsonl, ds_type: json}]
adapter:
optimizer: adamw_torch_fused
adam_beta2: 0.95
learning_rate: "3e-6"
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT}
trust_remote_code: true
"""
LLAMA_FACTORY_LORA = """
model_name_or_path: org/base
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
quantization_bit: 4
dataset: identity,alpaca_en_demo
template: phi4
cutoff_len: 1024
max_samples: 1000
val_size: 200
output_dir: saves/sft
save_strategy: epoch
num_train_epochs: 3.0
lr_scheduler_type: constant
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
report_to: none
"""
LLAMA_FACTORY_FULL = """
model_name_or_path: org/base
stage: dpo
pref_loss: simpo
finetuning_type: full
deepspeed: zero.json
eval_strategy: steps
eval_steps: 100
learning_rate: 1.0e-5
"""
TRL_YAML = """
model_name_or_path: org/base
dataset_name: org/rows
use_peft: true
lora_target_modules: all-linear
load_in_4bit: false
bf16: false
report_to: [wandb]
num_train_epochs: 0.5
hub_token: hf_secret
learning_rate: 2.0e-5
"""
ZERO = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.98], "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "total_num_steps": 100}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
}
EXAMPLES = {
    "axolotl-lora.yml": AXOLOTL_LORA,
    "axolotl-dpo.yml": AXOLOTL_FULL_DPO,
    "llama-factory-lora.yaml": LLAMA_FACTORY_LORA,
    "llama-factory-full.yaml": LLAMA_FACTORY_FULL,
    "trl.yaml": TRL_YAML,
    "arguments.py.txt": repr(
        {"output_dir": "out", "learning_rate": 5e-5, "use_cpu": True, "max_steps": -1, "fsdp": None}
    ),
    "zero.json": json.dumps(ZERO, indent=4),
}
EXPECTED = {
    "axolotl-lora.yml": {
        "output_dir": "./out",
        "model.path": "org/base",
        "data.path": "chats.jsonl",
        "data.validation": "5%",
        "data.max_length": 512,
        "data.on_long_row": "drop",
        "lora.r": 8,
        "lora.alpha": 16,
        "lora.dropout": 0.05,
        "lora.target_modules": "auto",
        "optim.optimizer": "bitsandbytes.optim.AdamW8bit",
        "optim.learning_rate": 2e-4,
        "optim.weight_decay": 0,
        "optim.schedule": "cosine",
        "optim.min_learning_rate": pytest.approx(2e-5),
        "optim.warmup_steps": 5,
        "training.batch_size": 2,
        "training.method": "lora",
        "training.max_steps": 50,
        "training.num_epochs": 3,
        "training.global_batch_size": 8,
        "training.precision": "auto",
        "training.gradient_checkpointing": True,
    },
    "axolotl-dpo.yml": {
        "parallel.sharding": "fsdp2",
        "model.path": "org/base",
        "data.mixture": [
            {"path": "org/pairs", "train": "train", "columns": {"chosen": "good"}},
            {"path": "more.jsonl"},
        ],
        "data.validation": None,
        "data.max_length": 512,
        "data.on_long_row": "drop",
        "optim.optimizer": "torch.optim.AdamW",
        "optim.learning_rate": 3e-6,
        "optim.args": {"betas": [0.9, 0.95]},
        "optim.schedule": "cosine",
        "training.batch_size": 1,
        "training.method": "lora",
        "training.objective": "dpo",
        "preference.beta": 0.5,
    },
    "llama-factory-lora.yaml": {
        "output_dir": "saves/sft",
        "model.path": "org/base",
        "data.validation": "200",
        "data.max_length": 1024,
        "data.max_rows": 1000,
        "lora.r": 8,
        "lora.alpha": 16,
        "lora.target_modules": ["q_proj", "v_proj"],
        "lora.quantize": "nf4",
        "optim.learning_rate": 5e-5,
        "optim.schedule": "constant",
        "training.batch_size": 8,
        "training.method": "lora",
        "training.objective": "sft",
        "training.num_epochs": 3,
        "training.precision": "bf16",
        "checkpoint.save_every_epochs": 1,
    },
    "llama-factory-full.yaml": {
        "parallel.sharding": "fsdp2",
        "parallel.reshard_after_forward": False,
        "model.path": "org/base",
        "data.validation": None,
        "optim.optimizer": "torch.optim.AdamW",
        "optim.learning_rate": 1e-5,
        "optim.args": {"betas": [0.9, 0.98]},
        "optim.schedule": "linear",
        "optim.warmup_steps": 20,
        "optim.max_grad_norm": 0.5,
        "training.batch_size": 4,
        "training.method": "full",
        "training.objective": "simpo",
        "training.num_epochs": 3,
        "training.precision": "bf16",
        "validation.validate_every": 100,
        "checkpoint.save_every": 500,
        "checkpoint.save_every_epochs": None,
    },
    "trl.yaml": {
        "model.path": "org/base",
        "data.path": "org/rows",
        "data.validation": None,
        "lora.target_modules": "auto",
        "optim.learning_rate": 2e-5,
        "training.batch_size": 8,
        "training.method": "lora",
        "training.precision": "fp32",
        "training.report_to": ["wandb"],
        "checkpoint.save_every": 500,
        "checkpoint.save_every_epochs": None,
    },
    "arguments.py.txt": {
        "output_dir": "out",
        "data.validation": None,
        "optim.learning_rate": 5e-5,
        "training.batch_size": 8,
        "training.num_epochs": 3,
        "training.device": "cpu",
        "checkpoint.save_every": 500,
        "checkpoint.save_every_epochs": None,
    },
    "zero.json": {
        "optim.optimizer": "torch.optim.AdamW",
        "optim.learning_rate": 1e-4,
        "optim.args": {"betas": [0.9, 0.98]},
        "optim.schedule": "linear",
        "optim.warmup_steps": 20,
        "optim.max_grad_norm": 0.5,
        "training.batch_size": 4,
        "training.precision": "bf16",
    },
}
DECIDED = {
    "axolotl-lora.yml": ["shards: 4", "N times as many", "evals_per_epoch: 4", "lora_rr: 3  Did you mean lora_r?"],
    "axolotl-dpo.yml": ["training.method is lora here", "trust_remote_code: true", "offload_params: true"],
    "llama-factory-lora.yaml": ["Set data.path to the files of these rows", "Set data.chat_template", "template: phi4"],
    "llama-factory-full.yaml": ["Set data.path"],
    "trl.yaml": [],
    "arguments.py.txt": ["Set training.method", "Set model.path", "Set data.path"],
    "zero.json": ["ZeRO 1 and 2", "optimizer.params.torch_adam: true"],
}


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for name, text in EXAMPLES.items():
        Path(name).write_text(text, encoding="utf-8")


def accepted(name: str) -> Config:
    """Return the configuration of a run file. With a model and rows that exist, `finetune train` accepts it."""
    words = ["model=phi_tiny", "data.path=shipped:orders", "data.mixture=[]"]
    config = compose([], run=name, complete=False)
    words += ["reward.functions=length"] if config.training.objective == "grpo" else []
    check_config(compose(words, run=name))
    return config


def translated(name: str, *words: str) -> str:
    done = run_finetune("init", "--from", name, *words)
    assert done.returncode == 0, done.stdout
    return done.answer


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_file_is_translated_and_the_run_file_loads(name):
    text = translated(name)
    Path("mine.yaml").write_text(text, encoding="utf-8")
    config = compose([], run="mine.yaml", complete=False)
    found = {key: value for key, value in values(config, only_set=True).items() if config.origin(key) != "default"}
    # What a later version may accept as it stands there, this version leaves to the user.
    later = {"optim.warmup_steps", "training.num_epochs"} - EXPECTED[name].keys()
    assert {key: value for key, value in found.items() if key not in later} == EXPECTED[name]
    assert run_finetune("config", "show", "run=mine.yaml").returncode == 0
    accepted("mine.yaml")


TRAINS_ALL = "model_name_or_path: org/base\nstage: sft\nfinetuning_type: full\n"
ADAPTS = "base_model: org/base\nadapter: lora\nmicro_batch_size: 1\n"
REFUSED = {
    "preferences need an adapter": (
        TRAINS_ALL.replace("sft", "kto"),
        {"training.method": "lora"},
        "the reference of KTO is the base with its adapter switched off",
    ),
    "the reference has no adapter": (
        f"{ADAPTS}rl: dpo\nlora_model_dir: sft/out\n",
        {"lora.start_from": None},
        "Merge that adapter into its base first",
    ),
    "Muon and vectors": (
        f"{TRAINS_ALL}optim: muon\nadam_beta2: 0.95\n",
        {"optim.optimizer": "torch.optim.AdamW", "optim.args": {"betas": [0.9, 0.95]}},
        "optim.optimizer=torch.optim.Muon trains matrices only",
    ),
    "8-bit states of shards": (
        f"{TRAINS_ALL}optim: adamw_8bit\nfsdp: full_shard\n",
        {"optim.optimizer": "torch.optim.AdamW", "parallel.sharding": "fsdp2"},
        "cannot update weights that are sharded",
    ),
    "PiSSA and weight decay": (
        f"{TRAINS_ALL.replace('full', 'lora')}pissa_init: true\nweight_decay: 0.1\n",
        {"optim.weight_decay": 0, "lora.init": "pissa_fast"},
        "would shrink what lora.init=pissa keeps",
    ),
    "PiSSA and dropout": (
        f"{TRAINS_ALL.replace('full', 'lora')}pissa_init: true\nlora_dropout: 0.1\n",
        {"lora.init": "default", "lora.dropout": 0.1},
        "needs lora.dropout=0, which is 0.1",
    ),
    "two ways to train embeddings": (
        f"{ADAPTS}tokens: [<a>]\nlora_modules_to_save: [embed_tokens]\n",
        {"lora.new_tokens": ["<a>"], "lora.modules_to_save": []},
        "cannot be combined with lora.new_tokens",
    ),
    "keys of another objective": (
        f"{ADAPTS}rl: dpo\nsimpo_gamma: 1.0\n",
        {"preference.gamma": 0.5},
        "training.objective is dpo, which does not read this",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_train_would_refuse_is_changed_and_said(name):
    text, expected, said = REFUSED[name]
    Path("other.yaml").write_text(text, encoding="utf-8")
    Path("mine.yaml").write_text(translated("other.yaml"), encoding="utf-8")
    found = values(accepted("mine.yaml"))
    assert {key: found[key] for key in expected} == expected
    comments = re.sub("\n# +", " ", Path("mine.yaml").read_text(encoding="utf-8"))
    assert said in comments.replace("\n#", "")


def test_what_no_change_makes_acceptable_is_refused():
    words = ("training.objective=dpo", "training.method=full", "--file", "mine.yaml")
    done = run_finetune("init", "--from", "llama-factory-lora.yaml", *words, code=2)
    assert "Set training.method=lora" in done.errors
    assert not Path("mine.yaml").exists()


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        (f"{ADAPTS}rl: grpo\ntrl: {{beta: 0.04, num_generations: 4, loss_type: dr_grpo, reward_funcs: [f.g]}}\n", None),
        ("beta: 0.04\nloss_type: dr_grpo\nnum_generations: 4\nepsilon_high: 0.3\nlearning_rate: 1.0e-5\n", 2),
    ],
    ids=["axolotl", "TRL"],
)
def test_learning_from_rewards_is_translated(text, prompts):
    Path("other.yaml").write_text(text, encoding="utf-8")
    Path("mine.yaml").write_text(translated("other.yaml"), encoding="utf-8")
    config = accepted("mine.yaml")
    assert (config.training.objective, config.rollout.num_generations) == ("grpo", 4)
    assert config.training.global_batch_size == prompts
    assert (config.grpo.beta, config.grpo.loss_type) == (0.04, "dr_grpo")
    assert config.rollout.max_completion_length == 512, "the default of TRL"
    written = Path("mine.yaml").read_text(encoding="utf-8")
    assert written.count("# DECIDE: Set reward.functions") == 1
    assert ("counts prompts here, not answers: divide" in written) == (prompts is None)
    assert "#     use_bias_correction_kl: true" in written, "the default of TRL, which has no counterpart"
    Path("other.yaml").write_text(text.replace("beta: 0.04", "beta: 0.0"), encoding="utf-8")
    assert "use_bias_correction_kl" not in translated("other.yaml")


def test_the_largest_ratio_of_cispo_is_written_as_its_distance_from_1():
    written = "num_generations: 4\nlearning_rate: 1.0e-5\nepsilon_high: {}\nloss_type: {}\n"
    for theirs, loss_type, ours in ((5.0, "cispo", 4.0), (1.28, "cispo", 0.28), (0.28, "dapo", 0.28)):
        Path("other.yaml").write_text(written.format(theirs, loss_type), encoding="utf-8")
        Path("mine.yaml").write_text(translated("other.yaml"), encoding="utf-8")
        grpo = accepted("mine.yaml").grpo
        assert (grpo.loss_type, grpo.epsilon_high) == (loss_type, ours)


@pytest.mark.parametrize(("accumulation", "prompts"), [(1, 2), (2, 4)])
def test_the_answers_of_a_batch_of_trl_become_prompts(accumulation, prompts):
    written = (
        f"num_generations: 4\nper_device_train_batch_size: 8\ngradient_accumulation_steps: {accumulation}\n"
        "learning_rate: 1.0e-5\nuse_vllm: false\nvllm_mode: colocate\ntop_entropy_quantile: 1.0\nmin_p: null\n"
    )
    Path("other.yaml").write_text(written, encoding="utf-8")
    text = translated("other.yaml")
    Path("mine.yaml").write_text(text, encoding="utf-8")
    training = accepted("mine.yaml").training
    assert (training.batch_size, training.global_batch_size) == (8, prompts)
    assert "UNKNOWN" not in text
    assert "rollout.server" not in text


def test_several_files_are_one_run_and_may_not_say_the_same():
    Path("args.yaml").write_text("learning_rate: 1.0e-5\nuse_peft: null\n", encoding="utf-8")
    Path("adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}', encoding="utf-8")
    both = ("--from", "args.yaml", "--from", "adapter_config.json")
    run_finetune("init", *both, "model=phi_tiny", "data=orders", "--file", "mine.yaml")
    config = accepted("mine.yaml")
    assert (config.optim.learning_rate, config.lora.r, config.training.method) == (1e-5, 4, "lora")
    Path("adapter_config.json").write_text('{"r": 4, "learning_rate": 1}', encoding="utf-8")
    assert "learning_rate is in several of the files" in run_finetune("init", *both, code=2).errors


@pytest.mark.parametrize(("value", "method"), [("false", "full"), ("true", "lora")])
def test_trl_says_by_use_peft_what_is_trained(value, method):
    assert read(f"learning_rate: 1.0e-5\nuse_peft: {value}\n")[0]["training.method"] == method


def test_answers_of_trl_are_counted_as_prompts_once():
    text = "num_generations: 4\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-6\n"
    settings, sentences = read(text)
    assert settings["training.global_batch_size"] == 4
    assert "Choose training.global_batch_size" not in sentences


def test_a_file_of_deepspeed_may_be_beside_the_file_that_names_it():
    Path("below").mkdir()
    Path("below/sharded.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    file = Path("below/args.yaml")
    file.write_text("learning_rate: 1.0e-5\ndeepspeed: sharded.json\n", encoding="utf-8")
    assert translate_file(file).settings["parallel", "sharding"].value == "fsdp2"


def test_an_override_says_which_loss_a_value_of_trl_belongs_to():
    Path("other.yaml").write_text("beta: 0.3\nlearning_rate: 1.0e-5\nuse_peft: true\n", encoding="utf-8")
    Path("mine.yaml").write_text(translated("other.yaml", "training.objective=dpo"), encoding="utf-8")
    assert accepted("mine.yaml").preference.beta == 0.3


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_setting_is_dropped(name):
    text = translated(name)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert len(text.splitlines()) < 160 < len(translated(name, "--full").splitlines())
    for setting in yaml.safe_load(EXAMPLES[name].replace("None", "null")):
        assert any(setting in line for line in comments), setting
    before_keys = "\n".join(comments)
    for line in DECIDED[name]:
        assert line in before_keys
    assert all(len(line) <= 100 for line in comments if line.startswith("# DECIDE"))
    assert "hf_secret" not in text


PACKED_BY_TRL = "packing: true\nmax_length: 512\nper_device_train_batch_size: 2\n"
PACKED_BY_LLAMA_FACTORY = "cutoff_len: 512\nper_device_train_batch_size: 2\n"
PACKED = "sample_packing: true\nsequence_len: 512\nmicro_batch_size: 2\ngradient_accumulation_steps: 3\n"


@pytest.mark.slow
def test_batches_of_packed_rows_become_as_many_rows_as_have_the_same_tokens():
    Path("other.yml").write_text(f"base_model: org/base\n{PACKED}datasets: [{{path: chats.jsonl}}]\n", encoding="utf-8")
    words = ("model=phi_tiny", "data=orders", "data.max_rows=64")
    Path("mine.yaml").write_text(translated("other.yml", *words), encoding="utf-8")
    config = compose([], run="mine.yaml")
    plan = make_plan(config, find_device("cpu")).batches
    assert plan.tokens / plan.rows * config.training.batch_size == pytest.approx(2 * 512, rel=0.05)
    assert config.training.global_batch_size == 3 * config.training.batch_size
    said = " ".join(Path("mine.yaml").read_text(encoding="utf-8").replace("\n# ", " ").split())
    rows = config.training.batch_size
    assert f"DECIDE: training.batch_size is {rows} and training.global_batch_size is {3 * rows} here" in said
    assert f"The first 64 rows have {plan.tokens / plan.rows:.0f} tokens on average, counted with the model's" in said
    assert "# Translated from micro_batch_size: 2 (line 4)\ntraining.batch_size: " in Path("mine.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "words", "batch_size", "said"),
    [
        (PACKED, ["data=rows.jsonl"], round(2 * 512 / 100), "at 4 characters a token"),
        (PACKED_BY_TRL, ["data=rows.jsonl"], 10, "#     packing: true\n"),
        (
            f"{PACKED_BY_LLAMA_FACTORY}neat_packing: true\nstage: sft\n",
            ["data=rows.jsonl"],
            10,
            "#     neat_packing: true\n",
        ),
        (f"{PACKED_BY_LLAMA_FACTORY}stage: pt\n", ["data=texts.jsonl"], 10, "#     packing: true\n"),
        (PACKED, ["data=long.jsonl"], 2, "at 4 characters a token"),  # a row is cut at data.max_length
        (PACKED, ["data=org/rows"], 2, "DECIDE: Set training.batch_size: it counts rows."),
        (PACKED, ["data=rows.jsonl", "training.batch_size=7"], 7, "\n# Set training.batch_size: it counts rows."),
        (PACKED.replace("true", "false"), ["data=rows.jsonl"], 2, "sample_packing: false"),
        (f"{PACKED}rl: orpo\nadapter: lora\n", ["data=rows.jsonl"], 2, "DECIDE: Set training.batch_size"),
    ],
)
def test_packed_rows_are_counted_where_they_can_be_read(text, words, batch_size, said):
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a" * 300, "completion": "b" * 100}) + "\n", encoding="utf-8")
    Path("texts.jsonl").write_text(json.dumps({"text": "a" * 400}) + "\n", encoding="utf-8")
    Path("long.jsonl").write_text(json.dumps({"prompt": "a" * 9000, "completion": "b"}) + "\n", encoding="utf-8")
    model = "base_model" if "micro_batch_size" in text else "model_name_or_path"
    Path("other.yml").write_text(f"{model}: org/base\n{text}", encoding="utf-8")
    Path("mine.yaml").write_text(translated("other.yml", *words), encoding="utf-8")
    assert compose([], run="mine.yaml").training.batch_size == batch_size
    assert said in Path("mine.yaml").read_text(encoding="utf-8")


def decisions(text: str) -> list[str]:
    before_keys = text.partition("DECIDE marks what you must decide.")[2].partition("\n\n")[0]
    return re.findall("^#     (.*)$", before_keys, re.MULTILINE)


def test_the_defaults_of_training_arguments_are_no_decisions():
    from transformers import TrainingArguments

    printed = str(TrainingArguments(output_dir="out", use_cpu=True).to_dict())
    placeholders = {"eos_token": "<EOS_TOKEN>", "pad_token": "<PAD_TOKEN>", "loss_type": "nll", "packing": False}
    Path("arguments.txt").write_text(printed.replace("{", str(placeholders)[:-1] + ", ", 1), encoding="utf-8")
    assert decisions(translated("arguments.txt", "model=phi_tiny", "data=orders")) == ["use_peft: null"]


@pytest.mark.parametrize("value", ["false", '""', "[]", "{}"])
def test_a_setting_that_is_off_or_empty_is_no_decision(value):
    kept = {"max_length", "seed"}
    names = [name for name in OUR_NAME if "." not in name and name not in kept]
    Path("off.yml").write_text("".join(f"{name}: {value}\n" for name in names), encoding="utf-8")
    open_keys = {"model.path", "data.path"}
    translation = translate_file(Path("off.yml"))
    assert translation.comments(open_keys)[0][1:] == []


@pytest.mark.parametrize(("loss", "objective"), [("[sigmoid]", "dpo"), ("sigmoid", "dpo"), ("kto", "kto")])
def test_the_loss_of_trl_says_the_objective(loss, objective):
    Path("other.yaml").write_text(f"beta: 0.3\nloss_type: {loss}\nuse_peft: true\n", encoding="utf-8")
    for words in ([], [f"training.objective={objective}"]):
        text = translated("other.yaml", *words)
        Path("mine.yaml").write_text(text, encoding="utf-8")
        config = accepted("mine.yaml")
        assert (config.training.objective, config.preference.beta) == (objective, 0.3)
        assert "DECIDE: The loss" not in text


@pytest.mark.parametrize("losses", ["[sigmoid, bco_pair, sft]", "[sigmoid, sft]", "[sft, sigmoid]"])
def test_a_weighted_sum_of_losses_is_left_to_the_user(losses):
    Path("other.yaml").write_text(f"learning_rate: 1.0e-5\nloss_type: {losses}\n", encoding="utf-8")
    text = translated("other.yaml")
    assert "DECIDE: The loss" in text
    assert f"loss_type: {losses}" in text


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("epoch", {}),
        ("steps", {"validation.validate_every": 20}),
        ("no", {"data.validation": None}),
    ],
)
@pytest.mark.parametrize("name", ["eval_strategy", "evaluation_strategy"])
def test_the_earlier_name_of_eval_strategy_wins_over_its_default(tmp_path, name, strategy, settings):
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"output_dir": "out", "num_train_epochs": 3.0, name: strategy, "eval_steps": 20}))
    translated = translate_file(file).settings
    keys = ("data.validation", "validation.validate_every")
    assert {key: translated[path].value for key in keys if (path := tuple(key.split("."))) in translated} == settings


def test_a_name_of_another_tool_does_not_change_the_tool_of_a_file(tmp_path):
    file = tmp_path / "a.yml"
    text = (
        "base_model: org/base\nmicro_batch_size: 2\nsequence_len: 512\ngradient_accumulation_steps: 4\nadapter: lora\n"
    )
    file.write_text(text)
    alone = translate_file(file)
    file.write_text(f"{text}lora_rank: 64\n")
    both = translate_file(file)
    assert both.tool == alone.tool == "axolotl"
    decide, _ = both.comments(())
    assert any("DECIDE: This file has names of LLaMA-Factory, too." in line for line in decide)
    assert {path: it.value for path, it in both.settings.items()} == {
        **{path: it.value for path, it in alone.settings.items()},
        ("lora", "r"): 64,
    }
    file.write_text("stage: sft\ncutoff_len: 512\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n")
    assert translate_file(file).settings["training", "global_batch_size"].value == 8


@pytest.mark.parametrize("name", ["train.py", "train.ipynb"])
def test_python_code_is_named_as_such_and_the_way_that_is_named_works(name):
    from peft import LoraConfig

    Path(name).write_text("from trl import SFTConfig\nargs = SFTConfig(output_dir='out')\n", encoding="utf-8")
    errors = run_finetune("init", "--from", name, code=2).errors
    assert f"{name} holds Python code. --from reads settings and runs no code." in errors
    assert "`print(args.to_dict())`" in errors
    LoraConfig(r=5, target_modules=["q_proj", "v_proj"]).save_pretrained("lora")
    assert "\nlora.r: 5\n" in translated("lora/adapter_config.json")


def test_a_whole_model_in_a_device_map_and_unlike_names_are_no_guesses():
    Path("other.yml").write_text(f'{AXOLOTL}device_map: {{"": 0}}\nfreeze_vision_tower: true\n', encoding="utf-8")
    text = translated("other.yml")
    assert "#     device_map.: 0\n" in text
    assert "#     freeze_vision_tower: true\n" in text


AXOLOTL = "base_model: org/base\nsequence_len: 8\n"


@pytest.mark.parametrize(
    ("text", "template", "comment"),
    [
        (f"{AXOLOTL}datasets: [{{path: a.jsonl, type: alpaca}}]", "alpaca", "DECIDE: Set data.chat_template, if"),
        (f"{AXOLOTL}datasets: [{{path: a.jsonl, type: chatml.intel}}]", "chatml", ""),
        (f"{AXOLOTL}datasets: [{{path: a.jsonl, type: chat_template, chat_template: llama3}}]", "llama3", ""),
        (f"{AXOLOTL}datasets: [{{path: a, type: chat_template}}]\nchat_template: gemma3", "gemma", ""),
        (f"{AXOLOTL}datasets: [{{path: a, type: alpaca}}, {{path: b, type: alpaca}}]", "alpaca", ""),
        (f"{AXOLOTL}datasets: [{{path: a, type: alpaca}}, {{path: b}}]", None, "DECIDE: Set data.chat_template to"),
        (f"{AXOLOTL}datasets: [{{path: a, type: gpteacher}}]", None, "datasets has gpteacher."),
        (
            f"{AXOLOTL}datasets: [{{path: a, type: alpaca}}]\nchat_template: chatml",
            "alpaca",
            "DECIDE: Choose data.chat",
        ),
        (f"{AXOLOTL}chat_template: mistral_v2v3", "mistral", ""),
        (f"{AXOLOTL}chat_template: phi_4", None, "DECIDE: Set data.chat_template to"),
        (f"{AXOLOTL}chat_template: tokenizer_default", None, "Nothing to set"),
        (f"{AXOLOTL}chat_template: jinja\nchat_template_jinja: own.jinja", "own.jinja", ""),
        ("stage: sft\ntemplate: llama3", "llama3", ""),
        ("stage: sft\ntemplate: vicuna", None, "DECIDE: Set data.chat_template to"),
    ],
)
def test_the_prompt_format_is_translated(text, template, comment):
    Path("format.yml").write_text(text, encoding="utf-8")
    lines = translated("format.yml")
    Path("mine.yaml").write_text(lines, encoding="utf-8")
    assert compose([], run="mine.yaml", complete=False).data.chat_template == template
    assert comment in " ".join(lines.replace("\n# ", " ").split())


def test_overrides_win_and_replace_the_rows_and_the_model():
    Path("mine.yaml").write_text(
        translated("axolotl-dpo.yml", "model=phi_tiny", "data=orders", "optim.schedule=linear")
    )
    config = compose([], run="mine.yaml")
    assert (config.model.path, config.data.path) == ("shipped:phi_tiny", "shipped:orders")
    assert (config.data.mixture, config.optim.schedule, config.training.objective) == ([], "linear", "dpo")


def test_rows_on_the_command_line_leave_the_prompt_format_open():
    Path("sft.yaml").write_text("stage: sft\ndataset: mine\ntemplate: vicuna\n", encoding="utf-8")
    lines = translated("sft.yaml", "data=orders")
    assert "# DECIDE: Set data.chat_template to" in lines
    assert "# DECIDE: Set data.path" not in lines


@pytest.mark.parametrize(
    "text",
    [
        *("training.batch_size: 2\noutput_dir: x\n", "a: 1\n", "- a\n", "learning_rate: [\n", ""),
        "checkpoint_dir: phi-2\nout_dir: out\nprecision: bf16-true\nlora_r: 8\nseed: 1\n",  # of LitGPT
    ],
)
def test_other_files_are_refused(text):
    Path("other.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        translate_file(Path("other.yaml"))


def test_the_list_of_data_sets_of_llama_factory_is_named_as_such():
    Path("dataset_info.json").write_text('{"mine": {"file_name": "my rows.json", "columns": {"prompt": "q"}}}')
    with pytest.raises(
        ConfigError, match=r"names the files of data sets, as LLaMA-Factory.*give its file: data='my rows"
    ):
        translate_file(Path("dataset_info.json"))


@pytest.mark.parametrize(("strategy", "is_open"), [("concat", False), ("interleave_under", True)])
def test_how_llama_factory_mixes_data_sets_is_a_decision(strategy, is_open):
    Path("lf.yaml").write_text(f"stage: sft\nfinetuning_type: lora\nmix_strategy: {strategy}\n", encoding="utf-8")
    assert ("# DECIDE: Set data.mixture: the weight of a source" in translated("lf.yaml")) == is_open
    assert "UNKNOWN" not in translated("lf.yaml")


def test_values_of_another_type_are_left_to_the_user():
    names = [name for name in OUR_NAME if "." not in name]
    for number, value in enumerate(["[a, {b: 1}]", "{x: [1]}", "abc" * 100]):
        file = Path(f"{number}.yaml")
        file.write_text("".join(f"{name}: {value}\n" for name in names), encoding="utf-8")
        translation = translate_file(file)  # also the name of a DeepSpeed file that is longer than names may be
        noted = "\n".join(
            line for lines in [*translation.notes.values(), *translation.came_from.values()] for line in lines
        )
        assert all(re.search(rf"^{name}[:.]", noted, re.MULTILINE) for name in names)


def test_a_number_in_quotes_is_left_to_the_user_in_whole_sentences():
    text = (
        "num_generations: '4'\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-6\n"
    )
    Path("trl.yaml").write_text(text, encoding="utf-8")
    noted = [str(note) for note in translate_file(Path("trl.yaml")).notes]
    (of_batch,) = [note for note in noted if "training.global_batch_size" in note]
    assert re.fullmatch(r"Set training\.global_batch_size: [^.]+\. finetune cannot read this value\.", of_batch)


@pytest.mark.parametrize("text", [".", "..", "1.2.3"])
def test_text_that_begins_like_a_number_is_no_number(text):
    Path("lf.yaml").write_text(f"stage: sft\nfinetuning_type: lora\noutput_dir: {text}\n", encoding="utf-8")
    assert translate_file(Path("lf.yaml")).settings["output_dir",].value == text


@pytest.mark.parametrize("line", ["val_size: .inf", "loss_type: []", "trl: {bf16: false}", "beta: {path: x}"])
def test_values_that_no_tool_takes_do_not_stop_the_translation(line):
    Path("odd.yaml").write_text(f"stage: dpo\nfinetuning_type: lora\n{line}\n", encoding="utf-8")
    assert translate_file(Path("odd.yaml")).objective == "dpo"


def test_values_and_names_stay_in_their_comments():
    Path("odd.yaml").write_text('base_model: a\n"x\\nseed: 1": "y\\nseed: 2"\nlr_scheduler: "z\\u2028seed: 3"\n')
    Path("mine.yaml").write_text(translated("odd.yaml"), encoding="utf-8")
    assert compose([], run="mine.yaml", complete=False).seed == 0


def read(text: str) -> tuple[dict[str, object], str]:
    """Return our settings for a file, and the sentences about what they leave open."""
    Path("one.yml").write_text(text, encoding="utf-8")
    translation = translate_file(Path("one.yml"))
    return {".".join(key): setting.value for key, setting in translation.settings.items()}, "\n".join(translation.notes)


@pytest.mark.parametrize(
    ("entry", "path", "train", "left_out"),
    [
        ("{path: ./d, data_files: [good.jsonl]}", None, ["good.jsonl"], ""),
        ("{path: json, data_files: [good.jsonl, dev.jsonl]}", None, ["good.jsonl", "dev.jsonl"], ""),
        ("{path: ./gone, data_files: [good.jsonl]}", "./gone", None, "data_files: [good.jsonl]"),
        ("{path: org/a, data_files: {train: b.jsonl}}", "org/a", None, "data_files: {train: b.jsonl}"),
        ("{path: text, data_files: [corpus.txt], type: completion}", None, ["corpus.txt"], ""),
        ("{path: json, data_files: a.jsonl, split: train}", "a.jsonl", None, ""),
        ("{path: a.jsonl.gz, split: 'train[:10%]'}", "a.jsonl.gz", None, "split: train[:10%]"),
        ("{path: org/a, split: 'train[:10%]'}", "org/a", "train[:10%]", ""),
        ("{path: a.jsonl, message_property_mappings: {role: from, tools: tools}}", "a.jsonl", None, ""),
        (
            "{path: a.jsonl, message_property_mappings: {role: who}}",
            "a.jsonl",
            None,
            "message_property_mappings: {role: who}",
        ),
    ],
)
def test_the_files_and_the_split_of_datasets_are_translated_or_said(entry, path, train, left_out):
    Path("d").mkdir()
    settings, said = read(f"{AXOLOTL}datasets: [{entry}]")
    assert (settings.get("data.path"), settings.get("data.train")) == (path, train)
    assert re.findall(r"left out of datasets: (.*)\.", said) == ([left_out] if left_out else [])


def test_each_file_of_a_list_is_a_source_of_a_mixture():
    """A list with a file that is named after another split would be refused."""
    settings, _ = read(f"{AXOLOTL}datasets: [{{path: json, data_files: [good.jsonl, dev.jsonl]}}, {{path: org/a}}]")
    assert settings["data.mixture"] == [{"path": "good.jsonl"}, {"path": "dev.jsonl"}, {"path": "org/a"}]


def test_trl_reads_data_files_from_the_folder_of_the_data_set():
    Path("d").mkdir()
    settings, _ = read("learning_rate: 1.0e-4\nuse_peft: true\ndatasets: [{path: ./d, data_files: good.jsonl}]")
    assert settings["data.train"] == ["./d/good.jsonl"]


@pytest.mark.parametrize(
    ("tests", "validation"),
    [
        ("{path: dev.jsonl, split: train}", ["dev.jsonl"]),
        ("{path: json, data_files: [a.jsonl, b.jsonl]}, {path: c.csv}", ["a.jsonl", "b.jsonl", "c.csv"]),
        ("{path: org/set, split: test}", "test"),
        ("{path: org/set, name: other, split: test}", None),
        ("{path: org/other}", None),
        ("{path: ./d, data_files: [good.jsonl]}", None),
    ],
)
def test_the_test_sets_of_axolotl_are_files_or_a_split(tests, validation):
    settings, said = read(f"{AXOLOTL}datasets: [{{path: org/set, split: train}}]\ntest_datasets: [{tests}]")
    assert settings.get("data.validation") == validation
    assert ("Set data.validation to files of rows" in said) == (validation is None)


@pytest.mark.parametrize(
    ("text", "steps", "has_note"),
    [
        ("warmup_steps: 0", None, False),
        ("warmup_steps: 0\nwarmup_ratio: 0.1", None, False),
        ("warmup_steps: 7", 7, False),
        ("warmup_steps:", 0.03, True),
        ("warmup_ratio: 0.1", 0.1, False),
        ("max_steps: 199", 5, False),
        ("max_steps: 20000", 100, False),
        ("max_steps: 20000\nwarmup_ratio: 0.03", 600, False),
    ],
)
def test_the_warm_up_of_axolotl_is_translated(text, steps, has_note):
    settings, said = read(f"{AXOLOTL}{text}\n")
    assert settings.get("optim.warmup_steps") == steps
    assert ("up to 3,333 steps: axolotl's warm-up has at most 100" in said) == has_note


@pytest.mark.parametrize(("size", "validation"), [("1500000", "1500000"), ("1234567", "1234567"), ("0.05", "5%")])
def test_a_large_validation_split_keeps_its_number_of_rows(size, validation):
    assert read(f"{AXOLOTL}val_set_size: {size}")[0]["data.validation"] == validation


DEEPSPEED = "train_batch_size: 8\nzero_optimization: {stage: 2}\n"


@pytest.mark.parametrize(
    ("params", "optimizer"),
    [
        ("lr: 1.0e-4, weight_decay: 0.1", "torch.optim.AdamW"),
        ("adam_w_mode: true", "torch.optim.AdamW"),
        ("adam_w_mode: false", "torch.optim.Adam"),
    ],
)
def test_adam_of_deepspeed_decouples_the_weight_decay(params, optimizer):
    settings, said = read(f"{DEEPSPEED}optimizer: {{type: Adam, params: {{{params}}}}}")
    assert settings["optim.optimizer"] == optimizer
    assert "Set optim.args" not in said


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("lr: auto", 3e-4), ("lr: 1.0e-4", 3e-4), ("lr: 3.0e-4", 3e-4), ("eps: 1.0e-6", 3e-4)]
)
def test_the_schedulers_of_deepspeed_set_the_rate(optimizer, rate):
    schedule = "type: WarmupDecayLR, params: {warmup_max_lr: 3.0e-4, warmup_min_lr: 0, warmup_num_steps: 5"
    optimizer = f"optimizer: {{type: AdamW, params: {{{optimizer}}}}}"
    settings, said = read(f"{DEEPSPEED}{optimizer}\nscheduler: {{{schedule}}}}}")
    assert (settings["optim.learning_rate"], settings["optim.schedule"]) == (rate, "linear")
    assert "a logarithmic warm-up" in said
    assert "begins above 0" not in said
    _, said = read(
        f"{DEEPSPEED}{optimizer}\nscheduler: {{{schedule}, warmup_type: linear, total_num_steps: 70}}}}".replace(
            "warmup_min_lr: 0", "warmup_min_lr: 1.0e-5"
        )
    )
    assert "a logarithmic warm-up" not in said
    assert "begins above 0" in said
    assert "Set training.max_steps: the rate falls until the last step of the run." in said


@pytest.mark.parametrize("decay", ["", "cosine", "linear"])
def test_the_decay_of_warmup_stable_decay_is_translated(decay):
    kwargs = f"num_decay_steps: 30{decay and f', decay_type: {decay}'}"
    text = f"lr_scheduler_kwargs: {{{kwargs}}}\nlr_scheduler_type: warmup_stable_decay\nlearning_rate: 1.0e-2\n"
    settings, said = read(f"{text}num_train_epochs: 1\n")
    assert (settings["optim.schedule"], settings["optim.decay_steps"]) == ("wsd", 30)
    assert "Set optim.decay_steps" not in said
    assert ("a decay along a cosine" in said) == (decay != "linear")


@pytest.mark.parametrize("name", ["min_lr: 1.0e-3", "min_lr_rate: 0.1", "min_lr_ratio: 0.1"])
def test_a_lowest_rate_above_the_default_rate_is_translated(name):
    Path("other.yml").write_text(
        f"lr_scheduler_kwargs: {{{name}}}\nlr_scheduler_type: cosine_with_min_lr\nlearning_rate: 1.0e-2\n"
        "use_peft: true\nnum_train_epochs: 1\n",
        encoding="utf-8",
    )
    Path("mine.yaml").write_text(translated("other.yml"), encoding="utf-8")
    assert accepted("mine.yaml").optim.min_learning_rate == pytest.approx(1e-3)


def test_a_lowest_rate_of_an_unknown_rate_is_left_to_the_user():
    settings, said = read(f"{DEEPSPEED}scheduler: {{type: WarmupCosineLR, params: {{cos_min_ratio: 0.1}}}}")
    assert "optim.min_learning_rate" not in settings
    assert "Set optim.min_learning_rate to 0.1 times optim.learning_rate." in said


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\n"
            "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\n",
            "parallel.num_processes=4 parallel.sharding=fsdp2 parallel.reshard_after_forward=false "
            "training.precision=bf16",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, gradient_clipping: 0.5}\n"
            "mixed_precision: 'no'\nnum_machines: 2\nnum_processes: 16\n",
            "parallel.world_size=16 parallel.sharding=fsdp2 optim.max_grad_norm=0.5",
        ),
        ("distributed_type: 'NO'\nmixed_precision: fp16\nnum_processes: 1\nuse_cpu: true\n", "training.device=cpu"),
    ],
)
def test_a_file_of_accelerate_is_named_with_the_keys_that_mean_the_same(settings, ours):
    Path("my config.yaml").write_text(f"compute_environment: LOCAL_MACHINE\n{settings}", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        translate_file(Path("my config.yaml"))
    said = str(refused.value)
    assert "accelerate launch --config_file 'my config.yaml' -m finetune train RUN" in said
    assert f"{ours}. See docs/launching.md." in said
    compose(re.findall(r"[a-z_]+\.[a-z_]+=\S+?(?=\.? |\.$)", said), complete=False)  # each is a key and its value
