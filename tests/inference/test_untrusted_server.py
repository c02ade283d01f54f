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
from finetune.inference import vllm_server
from finetune.inference.decoding import Decoding
from finetune.inference.sampling import Sampling
from finetune.inference.vllm_answers import Limits
from finetune.inference.vllm_server import ServerError, ServerLostError, VllmServer
from tests.in_process import run_finetune
from tests.launches import free_port
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


def answers_of(server, *, num_prompts=1, num_answers=1, seconds=GENEROUS_SECONDS, at_once=2, **other):
    sampling = Sampling(temperature=1.0, top_k=None, top_p=None, seed=1)
    return VllmServer(server.url, patience_seconds=seconds, **other).answer(
        [[5, 6]] * num_prompts,
        Decoding(stop_ids=[0], max_new_tokens=4, sampling=sampling, keeps_stop=True),
        adapter=Path("/adapter"),
        limits=[Limits(num_answers, 4, VOCABULARY, num_likely=0)] * num_prompts,
        seeds=list(range(num_prompts)),
        at_once=at_once,
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
    rounded = choice([3], 1, logprobs={"token_logprobs": [1e-6]})
    server.answers["/v1/completions"] = completion(rounded, choice([1, 2, 3, 2047], 0))
    first, second = answers_of(server, num_answers=2)
    assert (first.ids, first.nats, second.ids) == ([1, 2, 3, 2047], [0.5] * 4, [3])
    assert second.nats == [-1e-6], "a probability that was rounded up"


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
    "no tokens": (completion(choice([])), "an answer has 0 tokens; asked for 1 to 4"),
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
    "log p is too large": (
        completion(choice(logprobs={"token_logprobs": [0.5] * 2})),
        r"token_logprobs\.0: .*less than",
    ),
    "a likely token is none": (logprobs(top_logprobs=[{"yes": -1.0}]), "log p of 'yes' is -1.0"),
    "a redirect": (http(b"", status="302 Found", headers="Location: http://127.0.0.1:1/\r\n"), "answers 302"),
    "an error that is a list": (http([1], status="400 Bad Request"), r"answers 400: \[1\]"),
    "an error with a detail": (http({"detail": "no adapter"}, status="404 Not Found"), "answers 404: no adapter$"),
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


def checked(server, served_ids, most_tokens):
    server.answers["/tokenize"] = http({"tokens": served_ids})
    asked = VllmServer(server.url, patience_seconds=GENEROUS_SECONDS)
    asked.check(lambda text, **_: {"input_ids": [5, 6, 7]}, "text", most_tokens=most_tokens)


@pytest.mark.parametrize(
    ("served_ids", "message"),
    [([5, 9, 7], "1: [9], here [6]"), ([5, 6], "2: [], here [7]"), ([5, 6, 7, 8], "3: [8], here []")],
)
def test_a_server_with_another_tokenizer_is_refused(server, served_ids, message):
    with pytest.raises(ConfigError, match=r"serves phi\. Its tokenizer reads a prompt of this run") as caught:
        checked(server, served_ids, 100)
    assert f"(token {message})" in str(caught.value)


def test_a_server_with_a_shorter_context_is_refused(server):
    checked(server, [5, 6, 7], 100)
    with pytest.raises(ConfigError, match=r"at most 100 tokens .* needs 101\. Start .* --max-model-len 101, or"):
        checked(server, [5, 6, 7], 101)


def test_an_adapter_is_known_by_its_folder(server):
    of_base, other = {"id": "a", "root": "/adapter"}, {"id": "b", "parent": "a", "root": "/other"}
    server.answers["/v1/models"] = http({"data": [of_base, other, {**of_base, "id": "c", "parent": "a"}]})
    asked = VllmServer(server.url, patience_seconds=GENEROUS_SECONDS)
    assert [asked.name_of(Path(path)) for path in ("/adapter", "/other", "/new")] == ["c", "b", None]


def test_a_request_names_the_adapter_and_all_that_the_server_would_choose_itself(server):
    requests = []

    def note(then):
        def answer(fields):
            requests.append(fields)
            yield then

        return answer

    server.answers |= {path: note(server.answers[path]) for path in list(server.answers) if path.startswith("/v1/")}
    assert [answer.ids for answer in answers_of(server)] == [[1, 2]]
    assert server.asked == ["/v1/load_lora_adapter", "/v1/completions", "/v1/unload_lora_adapter"]
    loaded, asked, unloaded = requests
    assert loaded == {"lora_name": asked["model"], "lora_path": "/adapter"}
    assert unloaded == {"lora_name": asked.pop("model")}
    tokens = {"prompt": [5, 6], "n": 1, "max_tokens": 4, "ignore_eos": True, "stop_token_ids": [0], "seed": 0}
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    read = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    assert asked == tokens | drawn | penalties | read


@pytest.fixture
def without_pauses(monkeypatch):
    monkeypatch.setattr(vllm_server, "_PAUSE_SECONDS", 0.01)


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize(
    ("path", "status", "is_waited_for"),
    [
        ("/v1/completions", "500 Internal Server Error", True),
        ("/v1/load_lora_adapter", "500 Internal Server Error", False),
        ("/v1/load_lora_adapter", "502 Bad Gateway", True),
        ("/v1/completions", "404 Not Found", False),
    ],
)
def test_a_server_that_ends_is_waited_for_and_a_refusal_is_not(server, path, status, is_waited_for):
    whole, fails = server.answers[path], [True]

    def fail_once(_):
        yield http({"error": {"message": "because"}}, status=status) if fails and fails.pop() else whole

    server.answers[path] = fail_once
    if is_waited_for:
        assert [answer.ids for answer in answers_of(server)] == [[1, 2]]
    else:
        assert f"{path} answers {status[:3]}: because" in refused(server, lambda: answers_of(server))


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("is_started_again", [True, False])
def test_requests_end_if_a_server_was_started_again(server, is_started_again):
    loaded = []

    def load(fields):
        loaded.append(fields["lora_name"])
        yield http(b"Success")

    def list_models(_):
        adapters = [] if is_started_again else [{"id": name, "parent": "phi"} for name in loaded]
        yield http({"data": [{"id": "phi"}, *adapters]})

    def hang_at_first(_):
        if len(loaded) == 1:
            time.sleep(0.25)  # more than ten pauses
        yield completion(choice([len(loaded)]))

    server.answers |= {"/v1/load_lora_adapter": load, "/v1/models": list_models, "/v1/completions": hang_at_first}
    assert [answer.ids for answer in answers_of(server)] == [[2 if is_started_again else 1]]
    assert server.asked.count("/v1/models") >= 1


@pytest.fixture
def pauses_of_ten_seconds(monkeypatch):
    """Time passes only between two attempts."""
    seconds = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(seconds), sleep=lambda _: seconds.append(10.0))
    monkeypatch.setattr(vllm_server, "time", clock)


@pytest.mark.usefixtures("pauses_of_ten_seconds")
def test_a_server_that_stays_away_is_waited_for_as_long_as_asked_and_that_is_logged_once_a_minute(server, caplog):
    server.answers["/health"] = http(b"", status="503 Service Unavailable")
    with pytest.raises(ServerLostError, match=r"answers 503: .*, for 2 min 10 s now\. Start it, then run"):
        VllmServer(server.url, patience_seconds=125.0).wait()
    waits = [message.rpartition("at most ")[2] for message in caplog.messages]
    assert waits == ["2 min 5 s", "1 min 5 s", "5 s"]


def test_the_patience_begins_anew_once_a_server_has_answered_again(server, monkeypatch):
    """The second time, it is gone for a moment, long after the first."""
    asked = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 * len(asked), sleep=lambda seconds: None)
    monkeypatch.setattr(vllm_server, "time", clock)

    def fail_twice(_):
        asked.append(1)
        yield http(b"", status="500 Internal Server Error") if len(asked) in (1, 5) else completion()

    server.answers["/v1/completions"] = fail_twice
    assert len(answers_of(server, num_prompts=4, seconds=150.0, at_once=1)) == 4
    assert len(asked) == 4 + 2, "no prompt is asked again that was answered"


@pytest.mark.parametrize("version", [5, "1\x1b[2J", "9" * 500], ids=["5", "escape", "long"])
def test_a_malformed_version_ends_in_one_sentence(server, version):
    server.answers["/version"] = http({"version": version})
    assert "version" in refused(server, lambda: served(server))


@pytest.mark.parametrize(
    ("likely", "message"),
    [
        (None, "fewer than 2,048 tokens at the first position"),
        ([{"token_id:1": -1.0}], "fewer than 2,048 tokens"),
        ([{"token_id:1": 0.5}], "log p of 'token_id:1' is 0.5"),
        ([{"token_id:9999999": -1.0}], "log p of 'token_id:9999999' is -1.0"),
        ([[1]], r"log p of a position is \[1\]"),
    ],
    ids=["null", "one", "above certainty", "above all vocabularies", "list"],
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


@pytest.mark.parametrize(
    ("prompt", "limits", "most"),
    [
        ([5], Limits(1, 4, VOCABULARY, num_likely=0), "1.05 MB"),
        ([5] * 100_000, Limits(1, 4, VOCABULARY, num_likely=0), "5.85 MB"),
        ([5], Limits(1000, 4, VOCABULARY, num_likely=0), "3.1 MB"),
        ([5], Limits(1, 4, VOCABULARY, num_likely=10_000), "6.17 MB"),
    ],
    ids=["one", "a long prompt", "many", "likely"],
)
def test_an_answer_has_a_limit_of_bytes(server, prompt, limits, most):
    def endless(_):
        yield JSON_START
        while True:
            yield b" " * (1 << 20)

    server.answers["/v1/completions"] = endless
    asked = VllmServer(server.url, patience_seconds=GENEROUS_SECONDS)
    text = refused(server, lambda: asked.complete("phi", prompt, limits))
    assert f"answers more than {most}, the limit for this request" in text
    assert server.sent < 64 << 20, "the limit, and what lies in the buffers of the sockets"


@pytest.mark.usefixtures("pauses_of_ten_seconds")
def test_a_truncated_answer_is_a_server_that_is_gone(server):
    whole = completion()
    server.answers["/v1/completions"] = whole[:-5]
    with pytest.raises(ServerLostError, match="does not answer"):
        answers_of(server)


def test_a_stop_signal_ends_the_wait_at_once(server):
    server.answers["/v1/completions"] = drip(JSON_START)
    began = time.monotonic()
    with pytest.raises(ServerLostError) as caught:
        answers_of(server, seconds=600.0, is_to_stop=lambda: "/v1/completions" in server.asked)
    assert caught.value.is_preempted
    assert time.monotonic() - began < GENEROUS_SECONDS


@pytest.mark.usefixtures("without_pauses")
def test_a_stop_signal_ends_the_wait_for_a_server_that_is_gone_and_for_one_that_answers_at_once(server):
    asked = VllmServer(f"http://127.0.0.1:{free_port()}", patience_seconds=GENEROUS_SECONDS, is_to_stop=lambda: True)
    with pytest.raises(ServerLostError, match="and the run was asked to stop") as caught:
        asked.wait()
    assert caught.value.is_preempted
    with pytest.raises(ServerLostError, match="asked to stop while it waited for answers") as caught:
        answers_of(server, num_prompts=200, is_to_stop=lambda: len(server.asked) > 3)
    assert caught.value.is_preempted


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
