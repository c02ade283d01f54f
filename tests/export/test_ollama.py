"""A Modelfile renders like the tokenizer's chat template, for every Phi template, and in Go itself if installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from finetune.errors import ModelError
from finetune.export.ollama import modelfile, read_turn_pieces
from finetune.export.system_turn import with_default_system
from tests.export.go_templates import render_go
from tests.model.variants import VARIANTS
from tests.tiny import tiny_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI2 = (
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
    "{{- ('' if loop.first else '\n') + 'Instruct: ' + message['content'] + '\nOutput:' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- ' ' + message['content'] + eos_token -}}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}{%- endfor -%}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    + CHATML.removeprefix("{% for message in messages %}")
)
QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>"
    "\n' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'user' or message.role == 'assistant' or "
    "(message.role == 'system' and not loop.first) %}{{- '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set given = messages[0].content if messages[0].role == 'system' else '' %}{{ '<|header|>system\nDate: today\n' "
    "+ given + '<|eot|>' }}{% for m in messages %}{% if m.role != 'system' %}{{ '<|header|>' + m.role "
    "+ '\n' + m.content + '<|eot|>' }}{% endif %}{% endfor %}{{ '<|header|>assistant\n' }}"
)
TEMPLATES = {
    **{name: variant.template for name, variant in VARIANTS.items() if variant.template},
    "chatml": CHATML,
    "a system turn that is always there, as Llama 3's": LLAMA3,
    "with a beginning of its own": "{{ '<s>' }}" + CHATML,
}
ADDED = 'Say "it".\n\nIn {{ two }} lines \U0001f642.\n'
DEFAULTS = {
    "SmolLM2": (SMOLLM2, "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
    "Qwen2.5": (QWEN25, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "--add-system": (with_default_system(CHATML, ADDED), ADDED),
    "--add-system, with a beginning": (with_default_system("{{ '<s>' }}" + CHATML, ADDED), ADDED),
    "--add-system, phi-4": (with_default_system(TEMPLATES["phi-4"], ADDED), ADDED),
}
"""Templates that add a system turn, and its text."""
TALK = [
    ("user", "Hi"),
    ("assistant", "yes"),
    ("user", 'And "so"?\n\nTwo lines.'),
    ("assistant", "no"),
    ("user", "{{ a }}"),
]
CONVERSATIONS = [TALK[:1], TALK[:3], TALK, [("system", "Be brief."), *TALK[:1]], [("system", "Be brief."), *TALK]]
GO_PROGRAM = """
package main

import ("encoding/json"; "os"; "strings"; "text/template")

type Message struct { Role, Content string }
type Case struct { Template string; Messages []Message }

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil { panic(err) }
	out := []string{}
	for _, each := range cases {
		var text strings.Builder
		if err := template.Must(template.New("").Parse(each.Template)).Execute(&text, each); err != nil { panic(err) }
		out = append(out, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(out)
}
"""


def tokenizer_with(template):
    tokenizer = tiny_tokenizer("phi4")
    tokenizer.chat_template = template
    return tokenizer


def turns(conversation):
    return [{"role": role, "content": content} for role, content in conversation]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_go_template_renders_what_the_chat_template_does(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    template = read_turn_pieces(tokenizer).as_go_template()
    for conversation in CONVERSATIONS:
        meant = tokenizer.apply_chat_template(turns(conversation), tokenize=False, add_generation_prompt=True)
        assert render_go(template, turns(conversation)) == meant


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_system_turn_that_the_template_adds_is_the_modelfile_s(name):
    """Ollama puts SYSTEM before a conversation that begins with another turn (server/routes.go, ChatHandler)."""
    template, default = DEFAULTS[name]
    tokenizer = tokenizer_with(template)
    written = modelfile(tokenizer, "./model.gguf", [])
    parts = re.fullmatch(r'FROM \./model\.gguf\nTEMPLATE """(.*)"""\nSYSTEM """(.*)"""\n', written, re.DOTALL)
    assert parts is not None
    assert parts[2] == default
    for conversation in CONVERSATIONS:
        sent = turns(conversation)
        meant = tokenizer.apply_chat_template(sent, tokenize=False, add_generation_prompt=True)
        received = sent if sent[0]["role"] == "system" else [{"role": "system", "content": parts[2]}, *sent]
        assert render_go(parts[1], received) == meant


def test_a_system_turn_that_a_modelfile_cannot_hold_is_refused():
    with pytest.raises(ModelError, match="which a Modelfile cannot hold"):
        modelfile(tokenizer_with(with_default_system(CHATML, 'Say """it""".')), "./model.gguf", [])


@pytest.mark.slow
def test_go_itself_renders_the_same(tmp_path):
    go = shutil.which("go")
    if go is None:
        pytest.skip("Go is not installed: its template language is evaluated by tests/export/go_templates.py alone")
    cases = [
        {"Template": read_turn_pieces(tokenizer_with(template)).as_go_template(), "Messages": turns(conversation)}
        for template in TEMPLATES.values()
        for conversation in CONVERSATIONS
    ]
    (tmp_path / "main.go").write_text(GO_PROGRAM)
    done = subprocess.run(
        [go, "run", "main.go"],
        cwd=tmp_path,
        env={**os.environ, "GOCACHE": str(tmp_path / "cache"), "GOPATH": str(tmp_path / "path"), "GO111MODULE": "off"},
        input=json.dumps(cases),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ours = [
        render_go(case["Template"], [{"role": m["role"], "content": m["content"]} for m in case["Messages"]])
        for case in cases
    ]
    assert json.loads(done.stdout) == ours


def test_a_modelfile_names_the_model_the_template_and_every_stop():
    tokenizer = tokenizer_with(TEMPLATES["phi-4"])
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert modelfile(tokenizer, "./model.gguf", ids) == (
        "FROM ./model.gguf\n"
        'TEMPLATE """{{ range .Messages }}'
        '{{ if eq .Role "system" }}<|im_start|>system<|im_sep|>{{ .Content }}<|im_end|>'
        '{{ else if eq .Role "user" }}<|im_start|>user<|im_sep|>{{ .Content }}<|im_end|>'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant<|im_sep|>{{ .Content }}<|im_end|>'
        '{{ end }}{{ end }}<|im_start|>assistant<|im_sep|>"""\n'
        'PARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop "<|endoftext|>"\n'
    )


def test_a_line_end_before_the_answer_is_spelled_out():
    """At the end of a file an editor, or a parser, may trim it; the model was trained with it."""
    template = read_turn_pieces(tokenizer_with(TEMPLATES["Phi-3.5-mini"])).as_go_template()
    assert template.endswith('<|assistant|>{{ "\\n" }}')


def test_a_tokenizer_without_a_template_takes_prompts_as_they_stand():
    text = modelfile(tiny_tokenizer("none"), "./model.gguf", [1])
    assert 'TEMPLATE """{{ .Prompt }}"""' in text


def test_an_end_beyond_ascii_is_written_as_it_is():
    """As DeepSeek's. A parser of Modelfiles may not know the escapes of JSON."""
    tokenizer = SimpleNamespace(chat_template=None, convert_ids_to_tokens=lambda _: "<｜end｜>")
    assert modelfile(tokenizer, "./model.gguf", [1]).endswith('\nPARAMETER stop "<｜end｜>"\n')


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PHI2, "the last turn ends in"),
        ("{% for m in messages %}{{ m.role + loop.index|string + m.content }}{% endfor %}", "last turn ends in"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "leaves out or repeats one"),
        ("{{ messages[-1].content }}", "leaves out or repeats one"),
        ("{{ raise_exception('no') }}", "refuses the turns user"),
        (CHATML.replace("message['content']", "message['content'] | trim"), r"it renders '.*user\\nuser says 0\.<"),
        (SMOLLM2.replace("message['content']", "message['content'] | trim"), r"it renders '.*user\\nuser says 0\.<"),
        (SMOLLM2.replace("SmolLM", "' ~ messages | length ~ '"), "it renders .*named [13],"),
    ],
)
def test_a_template_that_is_more_than_pieces_is_refused_with_a_way_out(template, reason):
    with pytest.raises(ModelError, match=rf"cannot be written as a Modelfile: .*({reason}).*--no-modelfile"):
        read_turn_pieces(tokenizer_with(template))


def test_a_template_that_spells_go_s_own_signs_is_refused():
    template = "{% for m in messages %}{{ '{' + '{' + m.role + ' ' + m.content }}{% endfor %}"
    with pytest.raises(ModelError, match="which a Modelfile cannot hold"):
        read_turn_pieces(tokenizer_with(template)).as_go_template()
