"""An untrusted server in place of vLLM: slow, endless, too long and malformed answers, and addresses that are none."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from finetune import load_config
from finetune.cli.overrides import train_from_overrides
from finetune.errors import ConfigError
from finetune.export.vllm_served import ServedByVllm
from finetune.inference.decoding import Decoding
from finetune.inference.sampling import Sampling
from finetune.inference.vllm_answers import Limits
from finetune.inference.vllm_server import ServerError, ServerLostError, VllmServer
from tests.in_process import run_finetune
from tests.raw_server import drip, http, raw_server

VOCABULARY = 2048
JSON_START = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
GENEROUS_SECONDS = 30.0
"""For what has a limit of a second or less, on a busy machine."""


def choice(ids=(1, 2), index=0, **other):
    found = {"index": index, "finish_reason": "length", "token_ids": list(ids)}
    return {**found, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, **other}


def completion(*choices, **other):
    return http({"choices": list(choices) or [choice()], **other})


def logprobs(**other):
    return completion(choice(logprobs={"token_logprobs": [-0.5, -0.5], **other}))


@pytest.fixture
def server():
    with raw_server() as running:
        running.answers |= {
            "/health": http(b""),
            "/version": http({"version": "0.32.0"}),
            "/v1/models": http({"data": [{"id": "phi", "max_model_len": 100}]}),
            "/v1/load_lora_adapter": http(b"Success"),
            "/v1/unload_lora_adapter": http(b"Success"),
            "/v1/completions": completion(),
        }
        yield running


def answers_of(server, *, num_prompts=1, num_answers=1, seconds=GENEROUS_SECONDS, **other):
    sampling = Sampling(temperature=1.0, top_k=None, top_p=None, seed=1)
    return VllmServer(server.url, patience_seconds=seconds, **other).answer(
        [[5, 6]] * num_prompts,
        Decoding(stop_ids=[0], max_new_tokens=4, sampling=sampling, keeps_stop=True),
        adapter=Path("/adapter"),
        limits=[Limits(num_answers, 4, VOCABULARY, num_likely=0)] * num_prompts,
        seeds=list(range(num_prompts)),
        at_once=2,
    )


def served(server):
    known = SimpleNamespace(logits=torch.zeros(1, VOCABULARY), stop_ids=[])
    return ServedByVllm(VllmServer(server.url, patience_seconds=GENEROUS_SECONDS), "phi", known)


def refused(server, call):
    """Call, and return the error: one sentence about the server, exit code 3."""
    with pytest.raises(ServerError) as caught:
        call()
    text = str(caught.value)
    assert (caught.value.exit_code, "\n" in text, server.url in text) == (3, False, True), text
    assert len(text) < 1000
    return text


def test_answers_within_the_limits_are_taken(server):
    server.answers["/v1/completions"] = completion(choice([3], 1), choice([1, 2, 3, 2047], 0))
    first, second = answers_of(server, num_answers=2)
    assert (first.ids, first.nats, second.ids) == ([1, 2, 3, 2047], [0.5] * 4, [3])


MALFORMED = {
    "nothing": (http(b""), "Invalid JSON"),
    "no UTF-8": (http(b'{"choices": ["\xff"]}'), "Invalid JSON"),
    "deeply nested": (http(b"[" * 100_000), "Invalid JSON"),
    "a list": (http([]), "all of it: .* an object"),
    "no choices": (http({}), "choices: Field required"),
    "too many choices": (completion(choice(), choice(index=1)), "it has 2 answers"),
    "another index": (completion(choice(index=1)), "answers or wrong indices"),
    "no token ids": (completion(choice(token_ids=None)), r"no token ids; vLLM returns them from version 0\.10\.2 on"),
    "more tokens than asked for": (completion(choice([1] * 5)), "an answer has 5 tokens; asked for 1 to 4"),
    "a token outside the vocabulary": (completion(choice([VOCABULARY])), "token 2048; the vocabulary has 2,048"),
    "a negative token": (completion(choice([-1])), r"token_ids\.0: Input should be greater than or equal to 0"),
    "a token is true": (completion(choice([True])), r"token_ids\.0: Input should be a valid integer"),
    "no log p": (completion(choice(logprobs=None)), "log p of more or fewer tokens"),
    "log p is NaN": (
        completion(choice(logprobs={"token_logprobs": [float("nan")] * 2})),
        r"token_logprobs\.0: .*finite",
    ),
    "log p is far too small": (
        completion(choice(logprobs={"token_logprobs": [-1e300] * 2})),
        r"token_logprobs\.0: .*greater than",
    ),
    "a likely token is none": (logprobs(top_logprobs=[{"yes": -1.0}]), "log p of 'yes' is -1.0"),
    "a redirect": (http(b"", status="302 Found", headers="Location: http://127.0.0.1:1/\r\n"), "answers 302"),
    "an error that is a list": (http([1], status="400 Bad Request"), r"answers 400: \[1\]"),
    "an error of many lines": (http(b"a\n" * 400_000, status="400 Bad Request"), "answers 400: a a a"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_completion_ends_in_one_sentence(server, name):
    server.answers["/v1/completions"], message = MALFORMED[name]
    with pytest.raises(ServerError, match=message):
        answers_of(server)
    refused(server, lambda: answers_of(server))


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", http({"data": []}), "lists no model without an adapter"),
        ("/v1/models", http({"data": [{"id": "a", "parent": "b"}]}), "lists no model without an adapter"),
        ("/v1/models", http({"data": [{"id": 5}]}), r"data\.0\.id"),
        ("/v1/models", http({"data": [{"id": "a", "max_model_len": 0}]}), "max_model_len"),
        ("/tokenize", http({"count": 1}), "tokens: Field required"),
    ],
    ids=["no model", "only adapters", "id 5", "no room", "no tokens"],
)
def test_a_malformed_answer_of_the_first_check_ends_in_one_sentence(server, path, answer, message):
    server.answers[path] = answer
    asked = VllmServer(server.url, patience_seconds=GENEROUS_SECONDS)
    with pytest.raises(ServerError, match=message):
        asked.check(None, "text", most_tokens=10)


@pytest.mark.parametrize("version", [5, "1\x1b[2J", "9" * 500], ids=["5", "escape", "long"])
def test_a_malformed_version_ends_in_one_sentence(server, version):
    server.answers["/version"] = http({"version": version})
    assert "version" in refused(server, lambda: served(server))


@pytest.mark.parametrize(
    ("likely", "message"),
    [
        (None, "fewer than 2,048 tokens at the first position"),
        ([{"token_id:1": -1.0}], "fewer than 2,048 tokens"),
        ([{"token_id:9999999": -1.0}], "log p of 'token_id:9999999' is -1.0"),
        ([[1]], r"log p of a position is \[1\]"),
    ],
    ids=["null", "one", "above all vocabularies", "list"],
)
def test_malformed_likely_tokens_end_in_one_sentence(server, likely, message):
    one = choice([1], logprobs={"token_logprobs": [-0.5], "top_logprobs": likely})
    server.answers["/v1/completions"] = completion(one)
    with pytest.raises(ServerError, match=message):
        served(server).logits([1, 2], [1])


def test_logits_of_a_whole_vocabulary_are_taken(server):
    likely = {f"token_id:{token}": -9999.0 for token in range(VOCABULARY)} | {"token_id:7": -0.25}
    one = choice([7], logprobs={"token_logprobs": [-0.25], "top_logprobs": [likely]})
    server.answers["/v1/completions"] = completion(one)
    logits = served(server).logits([1, 2], [0, 1])
    assert (logits.shape, int(logits[0].argmax()), float(logits[0, 7])) == ((2, VOCABULARY), 7, -0.25)


SLOW = {
    "body": drip(JSON_START),
    "headers": drip(b"HTTP/1.1 200 OK\r\nX: "),
    "chunks": drip(JSON_START.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"), byte=b"1\r\n \r\n"),
    "nothing": drip(b"", byte=b""),
}


@pytest.mark.parametrize("name", SLOW)
def test_an_answer_has_a_deadline_for_all_of_it(server, name):
    server.answers["/v1/completions"] = SLOW[name]
    began = time.monotonic()
    # A server that sends garbage in place of a status is gone: waited for as long again.
    with pytest.raises(ServerLostError, match=r"has not answered completely within|does not answer"):
        answers_of(server, num_prompts=3, seconds=0.3)
    assert time.monotonic() - began < GENEROUS_SECONDS


def test_an_answer_has_a_limit_of_bytes(server):
    def endless(_):
        yield JSON_START
        while True:
            yield b" " * (1 << 20)

    server.answers["/v1/completions"] = endless
    assert "answers more than 1.06 MB, the limit for this request" in refused(server, lambda: answers_of(server))
    assert server.sent < 64 << 20, "the limit, and what lies in the buffers of the sockets"


def test_a_truncated_answer_is_a_server_that_is_gone(server):
    whole = completion()
    server.answers["/v1/completions"] = whole[:-5]
    with pytest.raises(ServerLostError, match="does not answer"):
        answers_of(server, seconds=0.1)


def test_a_stop_signal_ends_the_wait_at_once(server):
    server.answers["/v1/completions"] = drip(JSON_START)
    began = time.monotonic()
    with pytest.raises(ServerLostError) as caught:
        answers_of(server, seconds=600.0, is_to_stop=lambda: "/v1/completions" in server.asked)
    assert caught.value.is_preempted
    assert time.monotonic() - began < GENEROUS_SECONDS


def test_a_prompt_that_fails_ends_the_requests_for_the_others(server):
    def one_fails(fields):
        if fields["seed"] == 0:
            yield http({"choices": []})
        else:
            yield from drip(JSON_START)(fields)

    server.answers["/v1/completions"] = one_fails
    began = time.monotonic()
    refused(server, lambda: answers_of(server, num_prompts=4, seconds=600.0))
    assert time.monotonic() - began < GENEROUS_SECONDS


def test_the_key_is_not_repeated(server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    server.answers["/v1/load_lora_adapter"] = http(b"no such key: s3cret", status="401 Unauthorized")
    assert "s3cret" not in refused(server, lambda: answers_of(server))
    monkeypatch.setenv("VLLM_API_KEY", "s3cret\n")
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as caught:
        VllmServer(server.url, patience_seconds=1)
    assert "s3cret" not in str(caught.value)


ADDRESSES = {
    "no scheme": "localhost:8000",
    "no host": "http://",
    "a port too large": "http://localhost:99999",
    "a newline": "http://localhost\r\nX: y",
    "a user": "http://me:s3cret@localhost:8000",
    "a token in the query": "http://localhost:8000/?token=s3cret",
    "a fragment": "http://localhost:8000/#s3cret",
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_what_is_no_address_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        VllmServer(ADDRESSES[name], patience_seconds=1)
    assert caught.value.exit_code == 2
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"rollout\.server") as caught:
        load_config(["model=phi_tiny", "data=orders", f"rollout.server={ADDRESSES[name]}"], task="finetune_grpo")
    assert "s3cret" not in str(caught.value)


def test_addresses_that_a_server_may_have():
    for address in (
        "http://localhost:8000/",
        "https://host.example/v1",
        "http://[::1]:8000",
        "http://10.0.0.1/proxy/v1",
    ):
        assert not VllmServer(address, patience_seconds=1).url.endswith(("/", "/v1"))


def run_words(server, run, rows, *more):
    rows.write_text("".join(json.dumps({"prompt": f"row {n}: how many?"}) + "\n" for n in range(6)))
    return [
        *("model=phi_tiny", "task=finetune_grpo", f"data.train={rows}", f"output_dir={run}", "lora.r=4"),
        *("reward.functions=length", "training.global_batch_size=2", "training.max_steps=4"),
        *("rollout.num_generations=2", "rollout.max_completion_length=4", f"rollout.server={server.url}"),
        *("rollout.max_difference=1e6", *more),
    ]


def learns(server, tokenizer, then):
    """Answer as vLLM does, with tokens that the prompt decides; after two steps of two prompts as `then` does."""
    asked = []

    def tokenize(fields):
        yield http({"tokens": tokenizer(fields["prompt"], add_special_tokens=False)["input_ids"]})

    def complete(fields):
        asked.append(fields)
        if len(asked) > 4:
            yield from [then] if isinstance(then, bytes) else then(fields)
        else:
            yield completion(*(choice([10 + n] * (n + 2), n) for n in range(fields["n"])))

    server.answers |= {"/tokenize": tokenize, "/v1/completions": complete}
    server.answers["/v1/models"] = http({"data": [{"id": "phi", "max_model_len": 4096}]})


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("finetune/assets/phi_tiny")


@pytest.mark.slow
def test_a_malformed_answer_loses_no_step(server, tokenizer, tmp_path):
    learns(server, tokenizer, completion(choice([1] * 5), choice([1], 1)))
    run = tmp_path / "run"
    ended = run_finetune("train", *run_words(server, run, tmp_path / "rows.jsonl", "checkpoint.save_every=100"))
    assert ended.returncode == 3, ended.stdout
    assert "an answer has 5 tokens; asked for 1 to 4" in ended.stdout
    assert "Traceback" not in ended.stdout
    assert (run / "checkpoints/step-000002").is_dir()


@pytest.mark.slow
@pytest.mark.process
def test_a_server_continues_conversations_with_tools(server, tokenizer, tmp_path):
    """Each turn is a request for each conversation that goes on, with all of its tokens."""
    learns(server, tokenizer, b"")
    asked, end = [], tokenizer.convert_tokens_to_ids("<|end|>")
    call = tokenizer('<|tool_call|>[{"name": "calculator", "arguments": {"expression": "3*4"}}]<|/tool_call|>')

    def complete(fields):
        text, count = tokenizer.decode(fields["prompt"]), fields["n"]
        asked.append((text, count, len(fields["prompt"]) + fields["max_tokens"]))
        answered = [[10 + n] * (n + 1) for n in range(count)] if "12<|end|>" in text else [call["input_ids"]] * count
        yield completion(*(choice([*ids, end], n) for n, ids in enumerate(answered)))

    server.answers["/v1/completions"] = complete
    run, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    more = ("rollout.tools=calculator", "data.chat_template=phi4_mini", "rollout.max_turns=3", "training.max_steps=1")
    more += ("rollout.max_completion_length=120", "data.max_length=512")
    train_from_overrides(run_words(server, run, rows, *more))
    conversations = answers_on_record(run)
    assert [answer["calls"][0][0]["text"] for answer in conversations] == ["12"] * 4
    assert [answer["texts"][0] for answer in conversations] == [tokenizer.decode([*call["input_ids"], end])] * 4
    assert all(answer["sampled_nats"] == [0.5] * sum(answer["parts"][::2]) for answer in conversations)
    firsts, seconds = asked[:2], asked[2:]
    assert [count for _, count, _ in firsts] == [2, 2]
    assert sum(count for _, count, _ in seconds) == 4
    assert {text for text, _, _ in seconds} == {text + "".join(conversations[0]["texts"][:2]) for text, _, _ in firsts}
    assert len({tokens for _, _, tokens in asked}) == 1, "no request exceeds the context that was checked"


def answers_on_record(run):
    rollout = json.loads(gzip.decompress((run / "rollouts/step-000001.json.gz").read_bytes()))
    return [answer for group in rollout["groups"] for answer in group["answers"]]


@pytest.mark.slow
def test_verify_ends_with_2_for_an_address_and_3_for_an_answer(server, tmp_path):
    run, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "How many?", "completion": "three"}) + "\n")
    words = ("model=phi_tiny", "task=finetune_lora", f"data.train={rows}", f"output_dir={run}", "training.max_steps=1")
    train_from_overrides([*words, "data.validation=null"])
    server.answers["/v1/completions"] = http({"choices": [7]})
    found = run_finetune("verify", run, "--server", server.url)
    assert (found.returncode, "Traceback" in found.stdout) == (3, False), found.stdout
    assert "choices.0" in found.stdout
    found = run_finetune("verify", run, "--server", "http://me:s3cret@localhost:1")
    assert (found.returncode, "s3cret" in found.stdout) == (2, False), found.stdout
