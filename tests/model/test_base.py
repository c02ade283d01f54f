import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, Gemma3TextConfig

from finetune.config.schema import LoraSection, ModelSection
from finetune.distributed.device import convert_weights
from finetune.errors import ModelError
from finetune.model.base import build_base_model, count_parameters, evaluation_mode, longrope_boundary, max_context
from finetune.model.from_hub import locate
from finetune.model.lora import add_lora
from finetune.model.tokens import build_tokenizer
from tests.tiny import tiny_tokenizer
from tests.tiny_models import PHI3_SIZES, SIZES, build_tiny, tiny_phi3_config, tiny_phi_config

RANDOM = {"init": "random", "config": {"model_type": "phi3", **PHI3_SIZES}}


def section(**keys):
    return ModelSection.model_validate(keys)


@pytest.fixture
def folder(tmp_path):
    """A whole model folder."""
    build_tiny(tiny_phi_config()).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_its_weights_in_the_type_they_are_stored_in(folder):
    build_tiny(tiny_phi_config(), dtype=torch.bfloat16).save_pretrained(folder)
    model = build_base_model(section(path=str(folder)))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = build_tiny(tiny_phi_config(), dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.config.use_cache is False


def test_random_weights_follow_from_the_seed_of_torch():
    def build(seed):
        torch.manual_seed(seed)
        return build_base_model(section(**RANDOM)).state_dict()

    first, same, other = build(1), build(1), build(2)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_random_weights_can_take_the_configuration_of_a_folder(folder):
    model = build_base_model(section(path=str(folder), init="random"))
    assert model.config.model_type == "phi"
    assert not torch.equal(model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_asked_for_is_used(folder, attention):
    for keys in ({"path": str(folder)}, RANDOM):
        assert build_base_model(section(**keys, attention=attention)).config._attn_implementation == attention


def test_a_path_without_a_model_is_refused_with_what_is_there(tmp_path):
    with pytest.raises(ModelError, match=r"model\.path is not set"):
        build_base_model(section())
    with pytest.raises(ModelError, match="no such folder"):
        build_base_model(section(path=str(tmp_path / "none")))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"no config\.json \(found: notes\.txt\)"):
        build_base_model(section(path=str(tmp_path)))
    add_lora(build_tiny(tiny_phi_config()), LoraSection(r=2)).save_pretrained(tmp_path / "adapter")
    for folder in (tmp_path, tmp_path / "adapter"):  # a run, and its adapter
        advice = f"Name its adapter's base in model.path, and train on with lora.start_from={folder}."
        with pytest.raises(ModelError, match=re.escape(advice)):
            build_base_model(section(path=str(folder)))
    with pytest.raises(ModelError, match="no such folder"):
        build_tokenizer(section(path="./none"))


def test_weights_that_do_not_fit_are_refused_by_name_and_never_made_up(folder, caplog):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()  # the weights are mapped from it
    save_file({**weights, "adapter.extra": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    build_base_model(section(path=str(folder)))
    assert "holds 1 weights that its architecture does not use" in caplog.text
    save_file({**weights, "lm_head.weight": torch.zeros(7, 16)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 mismatched \(.*lm_head\.weight"):
        build_base_model(section(path=str(folder)))
    del weights["model.layers.1.mlp.fc1.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"do not fit its config\.json: 1 missing \(model\.layers\.1\.mlp\.fc1\.weight"
    ):
        build_base_model(section(path=str(folder)))


def test_absent_pickled_and_damaged_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()

    def refuse():
        with pytest.raises(ModelError, match="cannot be loaded"):
            build_base_model(section(path=str(folder)))

    refuse()
    torch.save(weights, folder / "pytorch_model.bin")
    refuse()
    (folder / "model.safetensors").write_bytes(b"not tensors")
    refuse()
    (folder / "config.json").write_text("{")
    refuse()


def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path):
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertModel(BertConfig(**sizes, intermediate_size=8)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "clip_text_model"}))
    with pytest.raises(ModelError, match="clip_text_model model, which transformers does not know as a causal"):
        build_base_model(section(path=str(tmp_path), init="random"))
    with pytest.raises(ModelError, match="t5 model, which transformers does not know as a causal"):
        build_base_model(section(init="random", config={"model_type": "t5"}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has no model_type"),
        ({"model_type": "phi99"}, "phi99 cannot be loaded"),
        ({"model_type": "phi3", "hidden_size": "wide"}, "phi3 cannot be loaded"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused(config, words):
    with pytest.raises(ModelError, match=words):
        build_base_model(section(init="random", config=config))


def test_the_tokenizers_own_template_wins_over_the_configurations(folder):
    own = tiny_tokenizer().chat_template
    assert build_tokenizer(section(path=str(folder), chat_template="{{ 1 }}")).chat_template == own


def test_a_tokenizer_without_a_template_takes_the_configurations_or_that_of_a_file(tmp_path):
    tiny_tokenizer("none").save_pretrained(tmp_path)
    tokenizer = {"tokenizer": str(tmp_path)}
    assert build_tokenizer(section(**tokenizer)).chat_template is None
    assert build_tokenizer(section(**tokenizer, chat_template="{{ 1 }}")).chat_template == "{{ 1 }}"
    (tmp_path / "own.jinja").write_text("{{ 2 }}")
    by_file = section(**tokenizer, chat_template=str(tmp_path / "own.jinja"))
    assert build_tokenizer(by_file).chat_template == "{{ 2 }}"
    (tmp_path / "other.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(ModelError, match=r"other\.jinja, which cannot be read: it is not UTF-8"):
        build_tokenizer(section(**tokenizer, chat_template=str(tmp_path / "other.jinja")))
    with pytest.raises(ModelError, match=r"none\.jinja, which cannot be read: No such file"):
        build_tokenizer(section(**tokenizer, chat_template=str(tmp_path / "none.jinja")))
    with pytest.raises(ModelError, match=r"phi4_mini, which is neither .* are values of data\.chat_template"):
        build_tokenizer(section(**tokenizer, chat_template="phi4_mini"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    build_tiny(tiny_phi_config()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        build_tokenizer(section(path=str(tmp_path)))
    build_tiny(tiny_phi3_config()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the tokenizer .* cannot be loaded"):
        build_tokenizer(section(path=str(tmp_path)))
    with pytest.raises(ModelError, match=rf"the tokenizer {tmp_path} cannot be loaded"):
        build_tokenizer(section(path="microsoft/phi-4", tokenizer=str(tmp_path)))


def test_a_path_that_tokenizers_cannot_encode_is_said_to_need_utf8(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "läufe")
    in_the_locale_c = str(tmp_path / "läufe").encode().decode("ascii", "surrogateescape")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*\. Set PYTHONUTF8=1"):
        build_tokenizer(section(path="microsoft/phi-4", tokenizer=in_the_locale_c))


def test_a_place_is_a_hub_id_or_an_absolute_folder(folder, monkeypatch):
    assert locate("microsoft/phi-4", "model.path") == "microsoft/phi-4"
    assert locate("gpt2", "model.path") == "gpt2"
    monkeypatch.chdir(folder.parent)
    assert locate("model", "model.path") == locate("./model", "model.path") == str(folder)


def test_parameters_are_counted_once_when_tied():
    model = build_tiny(tiny_phi3_config(tie_word_embeddings=True))
    trainable, total = count_parameters(model)
    untied = count_parameters(build_tiny(tiny_phi3_config(tie_word_embeddings=False)))[1]
    assert trainable == total == untied - 64 * 16
    adapted = add_lora(model, LoraSection(r=2))
    adapter_size = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert count_parameters(adapted) == (adapter_size, total + adapter_size)


@pytest.mark.parametrize("was_training", [True, False])
def test_evaluation_mode_is_undone_whatever_happens(was_training):
    model = torch.nn.Linear(1, 1).train(was_training)

    def fail():
        with evaluation_mode(model):
            assert not model.training
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.training is was_training
    assert torch.is_grad_enabled()


def test_context_and_longrope_boundary_come_from_the_configuration():
    assert max_context(build_tiny(tiny_phi3_config())) == 128
    assert longrope_boundary(build_tiny(tiny_phi3_config())) is None
    assert longrope_boundary(build_tiny(tiny_phi_config())) is None
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    long = tiny_phi3_config(
        original_max_position_embeddings=32, rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    )
    assert longrope_boundary(build_tiny(long)) == 32
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 24, **factors}
    by_type = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    assert longrope_boundary(Gemma3TextConfig(**SIZES, head_dim=4, rope_parameters=by_type)) == 24
    by_type["sliding_attention"] = {**rope, "original_max_position_embeddings": 48}
    with pytest.raises(ModelError, match=r"several limits \(original_max_position_embeddings \[24, 48\], by type"):
        longrope_boundary(Gemma3TextConfig(**SIZES, head_dim=4, rope_parameters=by_type))


def test_a_weight_is_moved_and_converted_in_one_step(folder):
    model = add_lora(build_base_model(section(path=str(folder))), LoraSection(r=4))
    with Moves() as moves:
        convert_weights(model, "bf16", torch.device("meta"))
    types = [torch.float32 if parameter.requires_grad else torch.bfloat16 for parameter in model.parameters()]
    assert moves.seen == [(torch.device("meta"), dtype) for dtype in types]
    assert [parameter.dtype for parameter in model.parameters()] == types


class Moves(TorchDispatchMode):
    """Writes down where tensors would be moved, and leaves them where they are."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.ops.aten._to_copy.default:
            self.seen.append((kwargs.pop("device"), kwargs["dtype"]))
        return function(*args, **kwargs)
