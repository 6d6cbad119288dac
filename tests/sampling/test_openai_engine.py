"""The OpenAI engine, against `transformers serve` and scripted servers."""

import asyncio
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from rocm_ext.base import openai_http
from rocm_ext.base.errors import UserError
from rocm_ext.data.render import TorchtuneRenderer, render_prompt
from rocm_ext.data.tokenizer import ChatTokenizer
from rocm_ext.pocket import load_tokenizer
from rocm_ext.sampling.engine import Request, Sampling
from rocm_ext.sampling.server import openai
from rocm_ext.sampling.server.openai import OpenAIEngine
from tests.kit.families import CHATML
from tests.kit.forks import start, wait
from tests.kit.lines import one_line_has
from tests.kit.servers import CHAT, COMPLETIONS, LOAD, MODELS, Fake, Vllm, is_check, vllm_form
from tests.kit.tiny import write_model, write_tokenizer

GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
PLAIN = Sampling(max_new_tokens=16)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def requests_for(tokenizer, *texts, samples=1):
    conversations = [({"role": "user", "content": text},) for text in texts]
    return [
        Request(
            f"p{i}", sample, 1000 * i + sample, tuple(render_prompt(tokenizer, messages)), messages
        )
        for i, messages in enumerate(conversations)
        for sample in range(samples)
    ]


def wanted(requests):
    return Counter((request.prompt_id, request.sample) for request in requests)


# ---- a real server
@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    # not Qwen: transformers serve answers with a 500 to a <tool_call> without JSON behind it
    folder = write_model(tmp_path_factory.mktemp("served") / "model", "llama")
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
              "bos_token": None, "chat_template": CHATML, "clean_up_tokenization_spaces": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory):
    """Start ``transformers serve`` and return its url."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(model_dir)]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    home = tmp_path_factory.mktemp("hf")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        else:
            pytest.fail(f"transformers serve did not start: {(home / 'log').read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def chat_engine(served, model_dir, **args):
    args = {"model": str(model_dir), "endpoint": "chat", "concurrency": 1, **args}
    return OpenAIEngine(load_tokenizer(model_dir), urls=[served], **args)


@pytest.mark.wide
def test_greedy_answers_of_transformers_serve_are_its_own(served, model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = chat_engine(served, model_dir, concurrency=3)
    engine.check()
    assert (engine.exact_tokens, engine.has_logprobs) == (False, False)
    requests = requests_for(
        engine.tokenizer, "Natalia sold clips", "How many?", "Add 1 and 2.", "a\n\n b"
    )
    with engine.session(None) as session:
        completions = list(session.generate(requests, GREEDY))
        tokens = session.stats()["tokens"]
    assert wanted(c.request for c in completions) == wanted(requests)

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_dir),
        AutoTokenizer.from_pretrained(model_dir),
    )
    stops = list(engine.tokenizer.stop_tokens)
    for completion in completions:
        prompt = torch.tensor([completion.request.tokens])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12,
                             eos_token_id=stops, pad_token_id=stops[-1])[0, prompt.shape[1] :]  # fmt: skip
        assert completion.text == tokenizer.decode(out, skip_special_tokens=True)
        assert completion.finish_reason == ("stop" if out[-1] in stops else "length")
        assert completion.logprobs == []
    assert tokens == sum(len(c.tokens) for c in completions) > 0


@pytest.mark.wide
def test_transformers_serve_samples_as_asked(served, model_dir):
    # the model's own generation config decodes greedily
    engine = chat_engine(served, model_dir)
    requests = requests_for(engine.tokenizer, "Natalia sold clips", samples=24)
    with engine.session(None) as session:
        first = {
            c.request.sample: c for c in session.generate(requests, Sampling(max_new_tokens=64))
        }
        again = {
            c.request.sample: c.text
            for c in session.generate(requests[:4], Sampling(max_new_tokens=64))
        }
        top = list(session.generate(requests[:4], Sampling(max_new_tokens=64, top_k=1)))
        stop = top[0].text[8:10]
        (cut,) = session.generate(requests[:1], Sampling(64, top_k=1, stop_strings=(stop,)))
    assert len({c.text for c in first.values()}) == 24
    assert again == {i: first[i].text for i in range(4)}
    assert len({c.text for c in top}) == 1
    ended = [c for c in first.values() if c.finish_reason == "stop"]
    assert 0 < len(ended) < 24
    assert all(c.tokens[-1] == engine.tokenizer.special_tokens["<|im_end|>"] for c in ended)
    assert not any("<|im_end|>" in c.text for c in first.values())
    # it leaves stop strings in
    assert (cut.text, cut.finish_reason) == (top[0].text[: top[0].text.index(stop)], "stop")
    assert engine.tokenizer.stop_tokens[0] not in cut.tokens


@pytest.mark.wide
def test_what_transformers_serve_cannot_do_is_said_in_a_line(served, model_dir, adapter):
    chat_engine(served, model_dir, model=None).check()
    with pytest.raises(UserError, match=r"prompt must be a string.*set endpoint: chat"):
        chat_engine(served, model_dir, endpoint="completions").check()
    with pytest.raises(UserError, match=r"HTTP 400: Server is pinned to .*; requested 'other'"):
        chat_engine(served, model_dir, model="other").check()
    with (
        pytest.raises(
            UserError,
            match=r"does not load the adapter .* \(HTTP 404: Not Found\)\. .*vllm serve MODEL",
        ),
        chat_engine(served, model_dir).session(adapter),
    ):
        pytest.fail("the adapter was taken")


# ---- a scripted server
@pytest.fixture
def vllm(tokenizer, monkeypatch):
    """Make servers that answer like vLLM, unless ``reply(body)`` gives something else for a request."""
    monkeypatch.setattr(openai_http, "BACKOFF", 0.01)
    fakes = []

    def vllm(reply=None, paths=None, port=0, **rules):
        def scripted(adapter, body):
            said = None if reply is None or is_check(body) else reply(body)
            return vllm_answer(tokenizer, body) if said is None else said

        def answer(path, body):
            if paths and path in paths:
                return paths[path](body) if callable(paths[path]) else paths[path]
            return fake.rules(path, body)

        fake = Fake(answer, port)
        fake.rules = Vllm(scripted, **rules)
        fakes.append(fake)
        return fake

    yield vllm
    for fake in fakes:
        fake.die()


def vllm_answer(tokenizer, body, text="It is 7.", **choice):
    """Return an answer in the form of vLLM's /v1/completions; its text contains the seed."""
    text = f"{text} {body['seed']}" if "seed" in body else text
    tokens = [*tokenizer.encode(text, add_bos=False, add_eos=False), tokenizer.stop_tokens[0]]
    if is_check(body):
        text, tokens = "I", tokens[:1]
    return vllm_form(body, text, tokens, [-0.25 * i for i in range(len(tokens))], **choice)


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def run(engine, requests, sampling=PLAIN):
    with engine.session(None) as session:
        return list(session.generate(requests, sampling)), session


def test_everything_that_decides_the_distribution_is_sent(vllm, tokenizer):
    fake = vllm()
    request = Request("p", 3, 2**62 + 5, (7, 8, 9))
    engine = OpenAIEngine(tokenizer, urls=[fake.url])
    (completion,), _ = run(engine, [request])
    plain = {
        "model": "base", "prompt": [7, 8, 9], "seed": 5, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": list(tokenizer.stop_tokens),
        "return_token_ids": True, "logprobs": 1,
    }  # fmt: skip
    expected = vllm_answer(tokenizer, {"seed": 5})["choices"][0]
    assert completion.request is request
    assert (completion.tokens, completion.text) == (expected["token_ids"], "It is 7. 5")
    assert completion.logprobs == expected["logprobs"]["token_logprobs"]
    assert (engine.exact_tokens, engine.has_logprobs) == (True, True)
    chosen = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
    sampling = Sampling(12, stop_strings=("\n\n", "Q:"), **chosen)
    run(OpenAIEngine(tokenizer, urls=[fake.url + "/v1/"]), [request], sampling)
    assert fake.bodies() == [plain, {**plain, **chosen, "max_tokens": 12, "stop": ["\n\n", "Q:"]}]


def test_servers_share_the_load_and_answer_once(vllm, tokenizer):
    def slowly(body):
        time.sleep(0.02)

    fakes = [vllm(slowly), vllm(slowly)]
    requests = requests_for(tokenizer, *"abcdefgh", samples=5)
    engine = OpenAIEngine(tokenizer, urls=[fake.url for fake in fakes], concurrency=3)
    completions, session = run(engine, requests)
    assert wanted(c.request for c in completions) == wanted(requests)
    assert all(c.text.endswith(f" {c.request.seed}") for c in completions)
    shares = [len(fake.bodies()) for fake in fakes]
    assert sum(shares) == 40
    assert min(shares) > 8
    assert [fake.most for fake in fakes] == [3, 3]
    stats = session.stats()
    assert stats["tokens"] == sum(len(c.tokens) for c in completions)
    # 40 answers take at least 7 rounds of 20 ms
    assert 0 < stats["tokens_per_second"] < stats["tokens"] / 0.13
    assert stats["retried"] == 0


# ---- transient failures
def test_server_errors_cut_connections_and_time_outs_are_retried(vllm, tokenizer):
    failures = iter([(500, "down", {}), (503, {"error": {"message": "busy"}}, {}), "abort", "slow"])

    def reply(body):
        failure = next(failures, None)
        if failure == "slow":
            return time.sleep(0.6)
        return (
            vllm_answer(tokenizer, body, finish_reason="abort") if failure == "abort" else failure
        )

    fake = vllm(reply)
    engine = OpenAIEngine(tokenizer, urls=[fake.url], timeout=0.3)
    (completion,), session = run(engine, requests_for(tokenizer, "a"))
    assert completion.text == "It is 7. 0"
    assert session.stats()["retried"] == 4
    assert len({json.dumps(body) for body in fake.bodies()}) == 1


def test_retry_after_is_honoured(vllm, tokenizer):
    times = []

    def reply(body):
        times.append(time.monotonic())
        return (429, "slow down", {"Retry-After": "0.5"}) if len(times) == 1 else None

    run(OpenAIEngine(tokenizer, urls=[vllm(reply).url]), requests_for(tokenizer, "a"))
    assert 0.4 < times[1] - times[0] < 30


@pytest.mark.parametrize(
    ("how", "says"),
    [("fails", "HTTP 500: CUDA out of memory"), ("is none", "does not answer with a JSON object"),
     ("restarts without adapters", "HTTP 404: The model"), ("serves another model", "HTTP 404: The model")],
)  # fmt: skip
def test_the_share_of_a_server_that_fails_moves_to_the_others(
    vllm, tokenizer, adapter, messages, how, says
):
    seen = []

    def failing(body):
        seen.append(1)
        if how == "restarts without adapters":
            bad.rules.lora = False
            bad.rules.restart()
        elif how == "serves another model":
            bad.rules.model = "another"
        elif how == "is none":
            return "<html>"
        elif len(seen) > 3:
            return 500, "CUDA out of memory", {}

    bad, good = vllm(failing), vllm(lambda body: time.sleep(0.01))
    engine = OpenAIEngine(tokenizer, urls=[bad.url, good.url], concurrency=2, patience=0.02)
    requests = requests_for(tokenizer, *"abcdef", samples=5)
    with engine.session(None if how == "serves another model" else adapter) as session:
        assert wanted(c.request for c in session.generate(requests, PLAIN)) == wanted(requests)
    assert one_line_has(messages, f"giving up {bad.url}", says)


def test_what_finished_is_yielded_when_no_server_is_left(vllm, tokenizer):
    seen = []

    def dying(body):
        seen.append(1)
        if len(seen) > 3:
            return 502, "<html>bad gateway</html>", {}

    fakes = [vllm(dying), vllm()]
    engine = OpenAIEngine(
        tokenizer, urls=[fake.url for fake in fakes], concurrency=1, patience="0.02 s"
    )
    got = []
    with engine.session(None) as session:
        fakes[1].die()
        completions = session.generate(requests_for(tokenizer, *"abcdef"), PLAIN)
        with pytest.raises(
            UserError, match=r"no server is left: .* with resume_from_checkpoint=True"
        ) as caught:
            deque(map(got.append, completions))
    assert len(got) == 3
    assert re.search(r"bad gateway</html>, for 0s \(prompt p[0-5], sample 0\)", str(caught.value))
    assert one_line_has(
        str(caught.value), f"{fakes[0].url}: HTTP 502", f"{fakes[1].url}: ConnectError: "
    )


# ---- permanent failures


RUBBISH = {
    "html": ("<html>\n<body>Welcome to nginx!", "not answer with a JSON object.*Welcome to nginx"),
    "no choices": ({"id": 1}, 'no choices: {"id": 1}'),
    "no text": ({"choices": [{"finish_reason": "stop"}]}, "no text"),
    "half a character": ({"choices": [{"text": "\ud800", "finish_reason": "stop"}]}, "not valid Unicode"),
    "reason": ({"choices": [{"text": "a", "finish_reason": "tool_calls"}]}, "the finish_reason 'tool_calls'"),
    "reasoning": ({"choices": [{"text": "a", "reasoning_content": "b"}]}, "without a reasoning parser"),
    "redirect": ((301, "moved", {"location": "/"}), "refuses a request with HTTP 301: moved"),
    "too long": ((400, {"error": {"message": "The context has 4 tokens."}}, {}), "with HTTP 400: The context has 4"),
}  # fmt: skip


def of_values(*values):
    return {"logprobs": {"token_logprobs": [*values, *[-1.0] * (9 - len(values))]}}


NO_NUMBERS = {
    "nan": (of_values(-1, math.nan), "the log-prob NaN, not a number up to 0"),
    "positive": (of_values(5.0), r"log-prob 5\.0"),
    "text": (of_values("-1"), 'log-prob "-1"'),
    "first id too many": ({"token_ids": [1, 400]}, "the token id 400, not an id from 0 to 399"),
    "text for an id": ({"token_ids": ["1"]}, 'token id "1"'),
    "too many ids": ({"token_ids": [1] * 18}, "18 tokens to a request for 16"),
    "too many words": ({"token_ids": None, "text": "word " * 100}, "tokens to a request for 16"),
    "too many characters": ({"text": "x" * 20_000}, "20002 characters to a request for 16 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*RUBBISH, *NO_NUMBERS])
def test_what_training_cannot_use_is_refused_in_one_line(vllm, tokenizer, case):
    answer, message = RUBBISH.get(case) or NO_NUMBERS[case]
    fake = vllm(lambda body: answer if case in RUBBISH else vllm_answer(tokenizer, body, **answer))
    decoder = SimpleNamespace(tok_embeddings=SimpleNamespace(num_embeddings=400))
    engine = OpenAIEngine(tokenizer, urls=[fake.url], decoder=decoder, concurrency=1)
    with pytest.raises(UserError, match=f"{fake.url}.*{message}") as caught:
        run(engine, requests_for(tokenizer, "a", "b"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450
    assert len(fake.bodies()) == 1


def test_a_probability_of_zero_has_one_log_prob(vllm, tokenizer):
    """vLLM sends -9999 for it, llama.cpp the least number of 32 bits, others -Infinity."""
    choice = of_values(-9999.0, -3.4028234663852886e38, -math.inf, -(10**400), 1e-4)
    fake = vllm(lambda body: vllm_answer(tokenizer, body, **choice))
    (completion,), _ = run(OpenAIEngine(tokenizer, urls=[fake.url]), requests_for(tokenizer, "a"))
    assert completion.logprobs == [-9999.0] * 4 + [1e-4] + [-1.0] * 4


def forever(part: bytes, pause: float):
    while True:
        yield part
        time.sleep(pause)


def test_an_endless_body_is_refused_and_a_slow_one_ends(vllm, tokenizer, monkeypatch):
    monkeypatch.setattr(openai_http, "MAX_BODY", 100_000)
    endless, slow = (
        vllm(lambda body, way=way: (200, forever(*way), {}))
        for way in ((b" " * 10_000, 0), (b" ", 0.05))
    )
    with pytest.raises(UserError, match=f"{endless.url}.* answers with more than 100000 bytes"):
        run(OpenAIEngine(tokenizer, urls=[endless.url]), requests_for(tokenizer, "a"))
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"no server is left: .*: no answer in time \(ReadTimeout\)"
    ):
        run(
            OpenAIEngine(tokenizer, urls=[slow.url], timeout=0.5, patience=0),
            requests_for(tokenizer, "a"),
        )
    assert time.monotonic() - began < 10


# ---- ends
def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "openai-engine"]


@pytest.mark.parametrize("how", ["close", "throw"])
def test_an_answer_is_yielded_while_others_are_under_way(vllm, tokenizer, how):
    gate = threading.Event()
    fake = vllm(lambda body: None if body["seed"] == 0 else gate.wait(30) and None)
    with OpenAIEngine(tokenizer, urls=[fake.url], concurrency=4).session(None) as session:
        assert list(session.generate([], PLAIN)) == []
        completions = session.generate(requests_for(tokenizer, *"abcdefgh"), PLAIN)
        assert next(completions).request.seed == 0
        assert len(engine_threads()) == 1
        start = time.monotonic()
        if how == "close":
            completions.close()
        else:  # Ctrl-C while waiting
            with pytest.raises(KeyboardInterrupt):
                completions.throw(KeyboardInterrupt())
        assert time.monotonic() - start < 20
        assert engine_threads() == []
    assert len(fake.bodies()) <= 5
    gate.set()


def test_ctrl_c_ends_a_process_that_waits(vllm, tokenizer, tmp_path):
    gate = threading.Event()
    fake = vllm(lambda body: gate.wait(60) and None)
    engine = OpenAIEngine(tokenizer, urls=[fake.url])

    def sample_and_leave() -> NoReturn:
        with engine.session(None) as session:
            try:
                list(session.generate([Request("p", 0, 0, (1,))], Sampling(8)))
            except KeyboardInterrupt:
                print("ended", [t.name for t in threading.enumerate()], flush=True)
                raise SystemExit(0) from None

    pid, receive = start(sample_and_leave, tmp_path, (), None)
    deadline = time.monotonic() + 60
    while not fake.bodies() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fake.bodies(), "the request did not arrive"
    os.kill(pid, signal.SIGINT)
    ended = wait(pid, receive)
    gate.set()
    assert ended == (0, "ended ['MainThread']\n")


def test_a_cancellation_that_arrives_with_the_answer_is_not_lost():
    """A worker that lost it would wait for requests for ever, and the run with it."""

    class Client:
        @asynccontextmanager
        async def stream(self, *_, **__):
            yield SimpleNamespace(status_code=200, headers={}, aiter_bytes=self.parts)

        async def parts(self):
            yield b"{}"
            task.cancel()

    async def ask_for_ever():
        while True:
            await openai_http.exchange(Client(), "POST", "http://server", 60)
            await asyncio.sleep(0)

    async def cancelled() -> bool:
        nonlocal task
        task = asyncio.create_task(ask_for_ever())
        done, _ = await asyncio.wait([task], timeout=1)
        for _ in range(100 * (not done)):  # end what goes on
            task.cancel()
            await asyncio.sleep(0.001)
        return bool(done) and task.cancelled()

    task = None
    assert asyncio.run(cancelled())


# ---- token ids and log-probabilities
def llama_answer(ids, completion_tokens):
    """Return an answer in the form of llama.cpp's /v1/completions."""
    content = [
        {"id": i, "token": "t", "bytes": [116], "logprob": -0.5, "top_logprobs": []} for i in ids
    ]
    text = "So it is." if completion_tokens > 1 else "S"
    choice = {"text": text, "index": 0, "logprobs": {"content": content}, "finish_reason": "stop"}
    return {
        "choices": [choice],
        "usage": {"completion_tokens": completion_tokens, "prompt_tokens": 3},
    }


@pytest.mark.parametrize("exact", [True, False])
def test_ids_in_llama_cpps_logprobs_are_exact_if_complete(vllm, tokenizer, exact):
    text = tokenizer.encode("So it is.", add_bos=False, add_eos=False)
    ids = [*text, tokenizer.stop_tokens[1]]
    sent = ids if exact else ids[:-1]

    def answer(body):
        return llama_answer(ids[:1], 1) if is_check(body) else llama_answer(sent, len(ids))

    engine = OpenAIEngine(tokenizer, urls=[vllm(paths={COMPLETIONS: answer}).url])
    (completion,), _ = run(engine, requests_for(tokenizer, "a"))
    assert completion.tokens == (ids if exact else [*text, tokenizer.special_tokens["<|im_end|>"]])
    assert completion.logprobs == ([-0.5] * len(ids) if exact else [])
    assert (engine.exact_tokens, engine.has_logprobs) == (exact, exact)


def test_without_ids_the_text_is_encoded_again(vllm, tokenizer, messages):
    fake = vllm(paths={COMPLETIONS: lambda body: vllm_answer(tokenizer, body, token_ids=None)})
    engine = OpenAIEngine(tokenizer, urls=[fake.url])
    completions, _ = run(engine, requests_for(tokenizer, *"abc"))
    for completion in completions:
        text = tokenizer.encode(completion.text, add_bos=False, add_eos=False)
        assert completion.tokens == [*text, tokenizer.special_tokens["<|im_end|>"]]
        assert completion.logprobs == []
    assert (engine.exact_tokens, engine.has_logprobs) == (False, False)
    assert "\n".join(messages).count("sends no token ids") == 1


@pytest.mark.parametrize("logprobs", [None, [], {"token_logprobs": [-1.0]}])
def test_logprobs_that_do_not_fit_the_tokens_are_none(vllm, tokenizer, logprobs):
    fake = vllm(lambda body: vllm_answer(tokenizer, body, logprobs=logprobs))
    engine = OpenAIEngine(tokenizer, urls=[fake.url])
    engine.check()
    assert (engine.exact_tokens, engine.has_logprobs) == (True, True)
    (completion,), _ = run(engine, requests_for(tokenizer, "a"))
    assert completion.logprobs == []
    assert (engine.exact_tokens, engine.has_logprobs) == (True, False)


@pytest.mark.parametrize(
    ("choice", "stops", "text", "reason"),
    [({"finish_reason": "length"}, (), "It is 7. 0", "length"), ({"text": "It is"}, (" is",), "It", "stop"),
     ({"text": "It is", "stop_reason": " 7"}, (" 7",), "It is 0", "stop")],
)  # fmt: skip
def test_a_cut_answer_gets_no_stop_token(vllm, tokenizer, choice, stops, text, reason):
    fake = vllm(lambda body: vllm_answer(tokenizer, body, token_ids=None, **choice))
    engine = OpenAIEngine(tokenizer, urls=[fake.url])
    (cut,), _ = run(engine, requests_for(tokenizer, "a"), Sampling(16, stop_strings=stops))
    assert (cut.text, cut.finish_reason) == (text, reason)
    assert cut.tokens == tokenizer.encode(text, add_bos=False, add_eos=False)


def test_another_chat_template_than_ours_is_told(vllm, tokenizer, messages):
    def answer(body):
        assert body["messages"][0]["role"] == "user"
        assert body["logprobs"] is True
        choice = vllm_answer(tokenizer, body)["choices"][0]
        del choice["prompt_token_ids"]
        entries = [{"token": "t", "logprob": -1.0} for _ in choice["token_ids"]]
        choice |= {
            "message": {"role": "assistant", "content": choice.pop("text")},
            "logprobs": {"content": entries},
        }
        return {"choices": [choice], "prompt_token_ids": [1, 2]}

    engine = OpenAIEngine(tokenizer, urls=[vllm(paths={CHAT: answer}).url], endpoint="chat")
    (completion,), _ = run(engine, requests_for(tokenizer, "1"))
    assert completion.logprobs == [-1.0] * len(completion.tokens)
    assert (engine.exact_tokens, engine.has_logprobs) == (True, True)
    assert "\n".join(messages).count("its chat template differs") == 1


def test_chat_sends_messages_tools_and_template_variables(tokenizer):
    args = {"enable_thinking": False}
    chat = ChatTokenizer(
        tokenizer, TorchtuneRenderer(tokenizer), [tokenizer.eos_id], template_args=args
    )
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    tools = ({"type": "function", "function": {"name": "weather"}},)
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    wire = OpenAIEngine(chat, urls=["http://127.0.0.1:1"], endpoint="chat").wire

    def sent(dialect, *of):
        return wire.body(
            openai.Server("http://x", "m", dialect), "m", Request("p", 0, 0, (1,), *of), PLAIN
        )

    body = sent("extended", messages, tools)
    assert (body["tools"], body["tool_choice"], body["chat_template_kwargs"]) == (
        list(tools),
        "none",
        args,
    )
    function = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    expected = {
        **messages[1],
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    assert body["messages"] == [messages[0], expected]
    assert not {"tools", "chat_template_kwargs"} & sent("plain", messages).keys()
    with pytest.raises(UserError, match="prompt p has no messages"):
        sent("plain")


@pytest.mark.parametrize(
    "more", ["generation_config", "stop"], ids=["transformers serve", "OpenAI"]
)
def test_a_server_gets_no_field_that_it_refuses(vllm, tokenizer, more):
    known = {"model", "prompt", "seed", "logprobs", "max_tokens", "temperature", "top_p", more}

    def strict(body):
        if unknown := body.keys() - known:
            return (
                400,
                {"error": {"message": f"Unrecognized request argument supplied: {min(unknown)}"}},
                {},
            )
        return vllm_answer(tokenizer, body, token_ids=None)

    fake = vllm(paths={COMPLETIONS: strict})
    engine = OpenAIEngine(tokenizer, urls=[fake.url])
    (completion,), _ = run(engine, requests_for(tokenizer, "a"))
    assert completion.text == "It is 7. 0"
    assert fake.bodies()[-1].keys() == known - {"stop"}
    sampling = Sampling(8, top_k=5, min_p=0.1)
    if more == "stop":
        with pytest.raises(UserError, match="does not support top_k or min_p; set them to null"):
            run(engine, requests_for(tokenizer, "a"), sampling)
        return
    run(engine, requests_for(tokenizer, "a"), sampling)
    stops = list(tokenizer.stop_tokens)
    wanted = {
        "do_sample": True,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "eos_token_id": stops,
    }
    assert json.loads(fake.bodies()[-1]["generation_config"]) == wanted


# ---- check
def refusal(status, message):
    return status, {"error": {"message": message, "code": status}}, {}


CHECKS = {  # what a server answers, arguments, and what the check says
    "several models": ({MODELS: {"data": [{"id": "a"}, {"id": "b"}, "c", {}]}}, {}, "serves a, b; set model"),
    "models not listed": ({MODELS: refusal(500, "no cache")}, {}, "list its models: HTTP 500: no cache.*; set model"),
    "another model": ({COMPLETIONS: refusal(404, "No `x`.")}, {"model": "x"}, "No `x`.; it serves base, not x"),
    "no token ids": ({COMPLETIONS: refusal(400, "no list")}, {}, "HTTP 400: no list; if .* set endpoint: chat"),
    "no key": ({MODELS: refusal(401, "Unauthorized")}, {"model": "base"}, "HTTP 401: Unauthorized; set api_key_env"),
    "no message": ({CHAT: {"choices": [{"text": "a"}]}}, {"endpoint": "chat"}, "answers with no message"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKS)
def test_check_says_what_is_missing(vllm, tokenizer, case):
    fake = vllm()
    OpenAIEngine(tokenizer, urls=[fake.url]).check()
    assert fake.asked[-1][1]["model"] == "base"
    paths, arguments, message = CHECKS[case]
    with pytest.raises(UserError, match=message):
        OpenAIEngine(tokenizer, urls=[vllm(paths=paths).url], **arguments).check()


def test_check_wants_one_model_of_all_servers(vllm, tokenizer):
    urls = [vllm(model=name).url for name in "ab"]
    with pytest.raises(UserError, match="different models: a, b; set model"):
        OpenAIEngine(tokenizer, urls=urls).check()


def test_check_waits_for_no_server_that_is_gone_or_hangs(vllm, tokenizer, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(
        UserError, match=f"{url} cannot be reached: ConnectError: .*is the server running"
    ) as caught:
        OpenAIEngine(tokenizer, urls=[url]).check()
    assert time.monotonic() - start < 20
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(openai_http, "CHECK_TIMEOUT", 0.3)
    fake = vllm(paths={MODELS: lambda body: time.sleep(0.6) or {}})
    with pytest.raises(UserError, match="cannot be reached: no answer in time"):
        OpenAIEngine(tokenizer, urls=[fake.url]).check()


def test_the_key_is_read_from_the_environment_and_sent(vllm, tokenizer, monkeypatch):
    monkeypatch.setenv("RAFT_KEY", " secret \n")
    fake = vllm()
    run(
        OpenAIEngine(tokenizer, urls=[fake.url], api_key_env="RAFT_KEY"),
        requests_for(tokenizer, "a"),
    )
    sent = [{name.lower(): value for name, value in headers.items()} for *_, headers in fake.asked]
    assert {headers["authorization"] for headers in sent} == {"Bearer secret"}


BAD_ARGUMENTS = [
    ({"urls": "http://x"}, "urls must be a list"),
    ({"urls": ["localhost:8000"]}, "is not a server's address"),
    ({"urls": ["http://x", "http://x/v1/"]}, "names http://x twice"),
    ({"endpoint": "chats"}, "endpoint 'chats' is unknown; did you mean chat"),
    ({"concurrency": 0}, "engine.concurrency is 0; expected a whole number from 1 to 1024"),
    ({"patience": -1}, "patience is -1; expected seconds, or a time such as"),
    ({"patience": "long"}, "patience is 'long'"),
    ({"timeout": 0}, "engine.timeout is 0; expected seconds above 0"),
    ({"lora_name": "a b"}, "lora_name is 'a b'"), ({"api_key_env": "NO_SUCH_VARIABLE_HERE"}, "is not set; export it"),
    ({"api_key_env": "sk-abc"}, "variable, not the key"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "message"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments(tokenizer, args, message):
    with pytest.raises(UserError, match=message) as caught:
        OpenAIEngine(tokenizer, **{"urls": ["http://x"], **args})
    assert not re.search("sk.abc", str(caught.value)), "a key is not repeated"


# ---- adapters
def test_an_adapter_is_loaded_by_all_used_by_name_and_unloaded(
    vllm, tokenizer, adapter, monkeypatch
):
    monkeypatch.chdir(adapter.parent)
    fakes = [vllm(), vllm()]
    engine = OpenAIEngine(
        tokenizer, urls=[fake.url for fake in fakes], lora_name="mine", concurrency=1
    )
    with engine.session(Path("adapter")) as session:
        before = [fake.adapter_calls() for fake in fakes]
        list(session.generate(requests_for(tokenizer, *"abcdef"), PLAIN))
    name = before[0][0][1]["lora_name"]
    assert re.fullmatch("mine-[0-9a-f]{12}", name)
    load = [
        ("unload", {"lora_name": name}),
        ("load", {"lora_name": name, "lora_path": str(adapter.resolve())}),
    ]
    for fake, calls in zip(fakes, before, strict=True):
        assert calls == load
        assert fake.adapter_calls() == [*load, ("unload", {"lora_name": name})]
        assert fake.rules.adapters == {}
        assert {body["model"] for body in fake.bodies()} <= {name}
    assert sum(len(fake.bodies()) for fake in fakes) == 6


def test_requests_are_taken_as_servers_get_free(vllm, tokenizer, adapter):
    """A session answers an iterator that lets it wait, while another session with the same adapter opens and ends."""
    taken, go_on = [], threading.Event()

    def requests(other):
        *first, last = requests_for(tokenizer, *"abcdefg")
        for request in first:
            taken.append(request)
            yield replace(request, adapter=other.adapter if len(taken) > 2 else None)
        while not go_on.wait(0.01):
            yield None
        yield last

    fake = vllm(lambda body: time.sleep(0.01))
    engine = OpenAIEngine(tokenizer, urls=[fake.url], concurrency=2)
    with engine.session(None) as base, engine.session(adapter) as other:
        answers = base.generate(requests(other), PLAIN)
        found = [next(answers)]
        assert len(taken) <= 4
        with engine.session(adapter) as third:
            assert len(list(third.generate(requests_for(tokenizer, "z"), PLAIN))) == 1
        assert [verb for verb, _ in fake.adapter_calls()] == ["unload", "load"]
        found += itertools.islice(answers, 5)
        go_on.set()
        assert wanted(answer.request for answer in [*found, *answers]) == wanted(
            requests_for(tokenizer, *"abcdefg")
        )
    assert Counter(body["model"] for body in fake.bodies()) == {
        fake.rules.model: 3,
        other.adapter.name: 5,
    }
    assert [verb for verb, _ in fake.adapter_calls()] == ["unload", "load", "unload"]


@pytest.mark.parametrize(("status", "told"), [(404, "Not Found")])
def test_a_server_without_adapters_is_found_before_sampling(vllm, tokenizer, adapter, status, told):
    willing, fake = vllm(), vllm(paths={LOAD: (status, {"detail": told}, {})})
    message = rf"{fake.url}.* does not load the adapter {adapter} \(HTTP {status}: {told}\).*RUNTIME_LORA_UPDATING=True"
    with pytest.raises(UserError, match=message):
        OpenAIEngine(tokenizer, urls=[willing.url, fake.url]).check_adapter(adapter)
    assert willing.rules.adapters == {}
    OpenAIEngine(tokenizer, urls=[willing.url]).check_adapter(adapter)


def test_a_server_that_refuses_an_adapter_is_left_out(vllm, tokenizer, adapter, messages):
    willing, fake = vllm(), vllm(lora=False)
    with OpenAIEngine(tokenizer, urls=[willing.url, fake.url]).session(adapter) as session:
        assert len(list(session.generate(requests_for(tokenizer, *"abc"), PLAIN))) == 3
    assert f"{fake.url} does not load the adapter {adapter} (HTTP 404: Not Found)" in "\n".join(
        messages
    )
    assert fake.bodies() == []


def test_a_restarted_server_gets_its_adapter_again(vllm, tokenizer, adapter, messages):
    count = itertools.count()

    def restarts(body):
        if next(count) == 4:
            fake.rules.restart()

    fake = vllm(restarts)
    engine = OpenAIEngine(tokenizer, urls=[fake.url], concurrency=8)
    requests = requests_for(tokenizer, *"abcdef", samples=5)
    with engine.session(adapter) as session:
        completions = list(session.generate(requests, PLAIN))
    assert wanted(c.request for c in completions) == wanted(requests)
    assert [verb for verb, _ in fake.adapter_calls()] == ["unload", "load", "load", "unload"]
    assert f"{fake.url} had lost the adapter {adapter} and has loaded it again" in messages


def test_a_server_that_comes_back_on_its_port_goes_on(vllm, tokenizer, adapter):
    """The process is gone for a while and then back without the adapter."""
    first = vllm()
    port = first.server_address[1]
    engine = OpenAIEngine(tokenizer, urls=[first.url], concurrency=2)
    requests = requests_for(tokenizer, *"abcdef")
    with engine.session(adapter) as session:
        completions = session.generate(requests, PLAIN)
        got = [next(completions)]
        first.die()
        second = vllm(port=port)
        got += completions
    assert wanted(c.request for c in got) == wanted(requests)
    assert [verb for verb, _ in second.adapter_calls()] in (["load", "unload"], ["unload"])


def test_a_stop_ends_waiting_at_once(vllm, tokenizer):
    """Ctrl-C only sets a flag in a recipe; no answer arrives to look at it."""
    stop = threading.Event()
    fake = vllm(lambda body: (stop.set(), (503, "busy", {"Retry-After": "500"}))[1])
    engine = OpenAIEngine(tokenizer, urls=[fake.url], stopped=stop.is_set)
    with engine.session(None) as session:
        assert list(session.generate(requests_for(tokenizer, *"abc"), PLAIN)) == []
    assert engine_threads() == []


def test_what_is_no_adapter(vllm, tokenizer, tmp_path):
    fake = vllm()
    with pytest.raises(UserError, match="is not an adapter in PEFT's format: FileNotFoundError"):
        OpenAIEngine(tokenizer, urls=[fake.url]).session(tmp_path / "none").__enter__()


# ---- of which temperature log-probs are
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0])


def logprobs_of(kind: str, body: dict) -> torch.Tensor:
    """Return the log-probs of the first token that a kind of server computes from ``LOGITS``."""
    logits = LOGITS / body["temperature"] if kind in ("sglang", "processed") else LOGITS
    if kind == "processed":
        kept = logits.softmax(-1).cumsum(-1) - logits.softmax(-1) < body["top_p"]
        logits = logits.masked_fill(~kept, -torch.inf)
    return logits.log_softmax(-1)


def logprob_server(vllm, kind: str):
    def answer(body):
        if kind == "silent":
            return vllm_form(body, "a", [1], [-1.0])
        values = logprobs_of(kind, body).tolist()
        if kind == "llama.cpp":
            entry = {"token": "t", "logprob": values[0]}
            content = [{"id": 0, **entry, "top_logprobs": [entry]}]
            return vllm_form(body, "t", [0], [values[0]], logprobs={"content": content})
        tops = {
            "tokens": ["u"],
            "token_logprobs": [values[1]],
            "top_logprobs": [{"t": values[0], "u": values[1]}],
        }
        return vllm_form(body, "u", [1], [values[1]], logprobs=tops)

    return vllm(paths={COMPLETIONS: answer})


@pytest.mark.parametrize(
    ("kind", "sampling", "refused"),
    [
        ("raw", Sampling(8, temperature=0.7, top_p=0.9), None),
        (
            "raw",
            Sampling(8, temperature=0.7, logprobs_temperature=0.7),
            "--logprobs-mode processed_logprobs",
        ),
        ("llama.cpp", Sampling(8, temperature=0.7, top_k=5), None),
        ("sglang", Sampling(8, temperature=0.7, top_p=0.9, logprobs_temperature=0.7), None),
        ("sglang", Sampling(8, temperature=1.3), "SGLANG_RETURN_ORIGINAL_LOGPROB=1"),
        ("processed", Sampling(8, min_p=0.1), "after truncation"),
        ("processed", Sampling(8, temperature=0.7), "raw_logprobs"),
        ("silent", Sampling(8, temperature=0.7), "does not show"),
        (
            "raw",
            Sampling(8, temperature=0.7, logprobs_temperature=0.9),
            "of temperature 0.9 for samples of 0.7",
        ),
    ],
    ids=str,
)
def test_log_probs_of_another_temperature_are_refused(vllm, tokenizer, kind, sampling, refused):
    engine = OpenAIEngine(tokenizer, urls=[logprob_server(vllm, kind).url])
    with nullcontext() if refused is None else pytest.raises(UserError, match=refused):
        engine.check_logprobs(sampling)
