"""Scripts of Tinker's SDK train here: the numbers of a loop in Python, each client as if alone, whatever breaks."""

import socket
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rocm_ext import training
from rocm_ext.base.errors import UserError
from rocm_ext.train.lifecycle import Runtime
from tests.kit.families import write_family

tinker = pytest.importorskip("tinker", reason="the SDK needs Python 3.11")

from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as proto  # noqa: E402

from tests.kit.tinker_server import KEY, OVERRIDES, served  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

WEIGHTS = "adapter_model.safetensors"
LAYERS = {"train_unembed": False}
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
DRAW = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("model") / "base", "qwen2")


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    with served(base, tmp_path_factory.mktemp("serve") / "out", most=3) as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def tokens_of(count, length=20):
    generator = np.random.default_rng(count)
    return [generator.integers(0, 300, length + row % 5).tolist() for row in range(count)]


def datum(ids, **inputs):
    """A row whose second half is trained."""
    length = len(ids) - 1
    weights = [0.0] * (length // 2) + [1.0] * (length - length // 2)
    given = {"target_tokens": ids[1:], "weights": weights, **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def row(ids):
    """The same row in Python."""
    first = 1 + (len(ids) - 1) // 2
    return {"tokens": ids, "labels": [-100] * first + ids[first:]}


def train(client, ids, steps, seed=0, rank=8, lr=1e-2):
    trainer = client.create_lora_training_client("base", rank=rank, seed=seed, **LAYERS).result()
    for _ in range(steps):
        gradients = trainer.forward_backward([datum(row) for row in ids], "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=lr))
        gradients.result()
        step.result()
    return trainer


def weights(server, trainer, name):
    """The trainer's adapter, from a checkpoint."""
    path = trainer.save_state(name).result().path
    return load_file(server.adapters.checkpoints.find(path)[0] / WEIGHTS)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# ---- what it computes


def test_a_loop_over_the_wire_is_the_loop_in_python(base, server, client, tmp_path):
    ids = tokens_of(8)
    trainer = client.create_lora_training_client("base", rank=8, seed=0, **LAYERS).result()
    sizes = ("model.lora_rank=8", "model.lora_alpha=32")
    with training.open(base, *OVERRIDES, *sizes, seed=0) as model:
        for _ in range(3):
            theirs = model.forward_backward([row(one) for one in ids])
            ours = trainer.forward_backward([datum(one) for one in ids], "cross_entropy")
            line = model.optim_step(
                1e-2,
                clip_grad_norm=1e9,
                normalize=False,
                betas=(0.9, 0.95),
                eps=1e-12,
                weight_decay=0.0,
            )
            step = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
            metrics = step.result().metrics
            assert metrics["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-5)
            computed = ours.result()
            assert computed.metrics["loss:sum"] == pytest.approx(theirs.summed, rel=1e-6)
            for output, expected in zip(computed.loss_fn_outputs, theirs.logprobs, strict=True):
                logprobs = output["logprobs"].to_numpy()
                np.testing.assert_allclose(logprobs[-len(expected) :], expected, 1e-6, 1e-6)
        model.export(tmp_path / "adapter")
    expected = load_file(tmp_path / "adapter" / WEIGHTS)
    found = weights(server, trainer, "end")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    assert max(value.abs().max() for value in expected.values()) > 1e-2


def test_policies_train_on_what_was_sampled(server, client):
    """The sampler's log-probs are the trainer's, so the first ratios are 1."""
    trainer = train(client, tokens_of(4), 2)
    sampler = trainer.save_weights_and_get_sampling_client()
    answer = sampler.sample(PROMPT, num_samples=2, sampling_params=DRAW).result()
    data = []
    for sequence in answer.sequences:
        ids = [*PROMPT.to_ints(), *sequence.tokens]
        masked = PROMPT.length - 1
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(ids[:-1]),
                loss_fn_inputs={
                    "target_tokens": ids[1:],
                    "logprobs": [0.0] * masked + list(sequence.logprobs),
                    "advantages": [0.0] * masked + [1.0] * len(sequence.tokens),
                },
            )
        )
    result = trainer.forward_backward(data, "importance_sampling").result()
    sampled = sum(len(sequence.tokens) for sequence in answer.sequences)
    assert result.metrics["loss:sum"] == pytest.approx(-sampled, rel=1e-4)
    for output, sequence in zip(result.loss_fn_outputs, answer.sequences, strict=True):
        ours = output["logprobs"].to_numpy()[-len(sequence.tokens) :]
        np.testing.assert_allclose(ours, sequence.logprobs, atol=1e-4)
    assert trainer.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0


def test_a_loss_of_the_clients_own(client):
    """forward_backward_custom sends two calls; the second has weights of any sign."""
    trainer = client.create_lora_training_client("base", rank=4, seed=0, **LAYERS).result()
    data = [datum(ids) for ids in tokens_of(3)]
    plain = trainer.forward_backward(data, "cross_entropy").result()
    norm = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]

    def negative(data, logprobs):
        total = 0.0
        for one, values in zip(data, logprobs, strict=True):
            total = total + (values * one.loss_fn_inputs["weights"].to_torch()).sum()
        return total, {"mine": 1.0}

    result = trainer.forward_backward_custom(data, negative).result()
    assert result.metrics["mine"] == 1.0
    other = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert other == pytest.approx(norm, rel=1e-5)
    assert plain.metrics["loss:sum"] > 0


def test_two_clients_train_as_if_alone(server):
    """Adapters of other ranks over the same base, in turns: bit for bit as without the other."""
    ids = tokens_of(6)
    alone = []
    for rank in (4, 8):
        with server.client() as client:
            alone.append(weights(server, train(client, ids, 3, seed=rank, rank=rank), "alone"))
    together = [None, None]

    def run(place, rank):
        with server.client() as client:
            trained = train(client, ids, 3, seed=rank, rank=rank)
            together[place] = weights(server, trained, "together")

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((4, 8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert_equal(one, other)


def test_which_layers_are_trained(server, client):
    for flags, expected in [
        ({"train_mlp": False, "train_unembed": False}, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ({"train_attn": False, "train_unembed": False}, ("gate_proj", "up_proj", "down_proj")),
        ({"train_attn": False, "train_mlp": False}, ("lm_head",)),
    ]:
        trainer = client.create_lora_training_client("base", rank=2, seed=0, **flags).result()
        found = weights(server, trainer, "layers")
        assert {name.split(".lora_")[0].split(".")[-1] for name in found} == {*expected}
        with server.http() as http:
            name = http.post("/unload_model", json={"model_id": trainer.model_id}).json()[
                "request_id"
            ]
        assert server.wait(name).json()["model_id"] == trainer.model_id


def test_a_sampler_of_weights_that_changed_is_refused(client):
    trainer = train(client, tokens_of(2), 1)
    path = trainer.save_state("again").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    ids = types.ModelInput.from_ints(tokens_of(1)[0])
    first = sampler.compute_logprobs(ids).result()
    trainer.forward_backward([datum(ids) for ids in tokens_of(2)], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    trainer.save_state("again", overwrite=True).result()
    with pytest.raises(tinker.RequestFailedError, match="overwritten"):
        sampler.compute_logprobs(ids).result()
    newer = client.create_sampling_client(model_path=path).result()
    assert newer.compute_logprobs(ids).result() != first
    client.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.APIStatusError, match="no checkpoint"):
        client.create_sampling_client(model_path=path).result()


# ---- samplers


def test_a_sampler_is_a_snapshot(client):
    trainer = train(client, tokens_of(4), 1)
    before = trainer.save_weights_and_get_sampling_client()
    first = before.sample(PROMPT, num_samples=2, sampling_params=DRAW).result()
    trainer.forward_backward([datum(ids) for ids in tokens_of(4)], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.5)).result()
    after = trainer.save_weights_and_get_sampling_client()
    later = after.sample(PROMPT, num_samples=2, sampling_params=DRAW).result()
    again = before.sample(PROMPT, num_samples=2, sampling_params=DRAW).result()
    tokens = [sequence.tokens for sequence in first.sequences]
    assert tokens == [sequence.tokens for sequence in again.sequences]
    assert tokens != [sequence.tokens for sequence in later.sequences]
    assert len({sequence.sequence_id for sequence in first.sequences}) == 2


def test_what_a_sampler_says_about_a_prompt(base, client):
    """Log-probs and most probable tokens, against the model in Python."""
    sampler = client.create_sampling_client(base_model="base").result()
    ids = tokens_of(1)[0]
    prompt = types.ModelInput.from_ints(ids)
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    whole = sampler.sample(prompt, 1, DRAW, **asked).result()
    with training.open(base, *OVERRIDES) as model:
        everything = {"tokens": ids, "labels": [-100, *ids[1:]]}
        (expected,) = model.logprobs([everything])
    np.testing.assert_allclose(whole.prompt_logprobs[1:], expected, atol=1e-5)
    assert whole.prompt_logprobs[0] is None
    assert whole.topk_prompt_logprobs[0] is None
    for token, logprob, best in zip(ids[1:], expected, whole.topk_prompt_logprobs[1:], strict=True):
        assert len(best) == 3
        assert best[0][1] >= best[1][1] >= best[2][1]
        if token in dict(best):
            assert dict(best)[token] == pytest.approx(logprob, abs=1e-5)
        else:
            assert logprob <= best[-1][1] + 1e-5
    (sequence,) = whole.sequences
    for token, logprob, best in zip(
        sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True
    ):
        assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-4)
    last = sampler.sample(prompt, 1, DRAW, include_prompt_logprobs=True, prompt_logprobs_last_n=4)
    scored = last.result().prompt_logprobs
    assert scored[:-4] == [None] * (len(ids) - 4)
    np.testing.assert_allclose(scored[-4:], expected[-4:], atol=1e-5)


def test_where_answers_stop(client):
    sampler = client.create_sampling_client(base_model="base").result()

    def ask(**settings):
        params = types.SamplingParams(max_tokens=10, temperature=0.0, **settings)
        (sequence,) = sampler.sample(PROMPT, 1, params).result().sequences
        return sequence

    free = ask(stop=[])
    assert len(free.tokens) == 10
    assert free.stop_reason == "length"
    stopped = ask(stop=[free.tokens[3]])
    end = free.tokens.index(free.tokens[3]) + 1
    assert stopped.tokens == free.tokens[:end]
    assert stopped.stop_reason == "stop"


# ---- checkpoints


def test_a_checkpoint_continues_bit_for_bit(server, client):
    ids = tokens_of(4)
    trainer = train(client, ids, 2)
    path = trainer.save_state("half").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for one in (trainer, resumed):
        one.forward_backward([datum(row) for row in ids], "cross_entropy").result()
        one.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert_equal(weights(server, trainer, "one"), weights(server, resumed, "other"))
    with pytest.raises(tinker.RequestFailedError, match="overwrite"):
        trainer.save_state("half").result()
    fresh = client.create_training_client_from_state(path).result()
    kept = load_file(server.adapters.checkpoints.find(path)[0] / WEIGHTS)
    assert_equal(weights(server, fresh, "fresh"), kept)
    rest = client.create_rest_client()
    listed = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert {item.checkpoint_id for item in listed} == {"weights/half", "weights/one"}
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8


def test_other_tools_read_a_checkpoint(base, server, client):
    trainer = train(client, tokens_of(4), 2)
    path = trainer.save_weights_for_sampler("best").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    theirs = sampler.compute_logprobs(types.ModelInput.from_ints(tokens_of(1)[0])).result()
    ids = tokens_of(1)[0]
    folder = server.adapters.checkpoints.find(path)[0]
    with training.open(base, *OVERRIDES, adapter=folder) as model:
        (ours,) = model.logprobs([{"tokens": ids, "labels": [-100, *ids[1:]]}])
    np.testing.assert_allclose(theirs[1:], ours, atol=1e-5)


def test_the_end_saves_what_no_checkpoint_has(base, tmp_path):
    ids = tokens_of(4)
    with served(base, tmp_path / "out") as server:
        client = server.client()
        trainer = train(client, ids, 2)
        run = trainer.model_id
    with served(base, tmp_path / "out") as server:
        client = server.client()
        path = f"tinker://{run}/weights/unsaved_000002"
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        with server.http() as http:
            gone = http.post("/get_info", json={"model_id": run}).json()
        assert "not open here" in gone["error"]
        assert resumed.model_id != run


# ---- the order of calls, and clients that repeat them


def call(model, number, ids, weights=None):
    """The body of forward_backward."""
    message = proto.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy")
    for one in ids:
        made = message.data.add()
        made.model_input.add().encoded_text.tokens = np.asarray(one[:-1], np.int32).tobytes()
        targets = made.loss_fn_inputs["target_tokens"]
        targets.dtype = proto.DTYPE_INT64
        targets.dense = np.asarray(one[1:], np.int64).tobytes()
        if weights is not None:
            given = made.loss_fn_inputs["weights"]
            given.dtype = proto.DTYPE_FLOAT32
            given.dense = np.asarray(weights, np.float32).tobytes()
    return message.SerializeToString()


def ask_model(http, rank=4):
    """Ask for a model in a session of its own; return the body and the request's name."""
    session = http.post(
        "/create_session", json={"tags": [], "user_metadata": None, "sdk_version": "0"}
    ).json()["session_id"]
    wanted = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "base",
        "lora_config": {"rank": rank, "seed": 0, **LAYERS},
    }
    return wanted, http.post("/create_model", json=wanted).json()["request_id"]


def new_model(server, http, rank=4):
    wanted, name = ask_model(http, rank)
    session = wanted["session_id"]
    assert http.post("/create_model", json=wanted).json()["request_id"] == name
    return session, server.wait(name).json()["model_id"]


def test_calls_are_done_in_their_order_and_once(server):
    ids = tokens_of(2)
    with server.http() as http:
        session, model = new_model(server, http)
        step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.01}}
        last = http.post("/optim_step", json=step).json()["request_id"]
        second = http.post("/forward_backward", content=call(model, 2, ids)).json()["request_id"]
        first = http.post("/forward_backward", content=call(model, 1, ids)).json()["request_id"]
        again = http.post("/optim_step", json=step).json()["request_id"]
        assert again == last
        losses = []
        for name in (first, second):
            answer = proto.ForwardBackwardOutput.FromString(server.wait(name).content)
            losses.append(answer.metrics["loss:sum"])
        assert losses[0] == losses[1]
        assert server.wait(last).json()["metrics"]["optimizer_step"] == 1
        assert server.wait(last).json() == server.wait(again).json()
        http.post(f"/sessions/{session}/finish", json={})


def test_an_end_comes_after_the_calls_before_it(server):
    ids = tokens_of(2)
    with server.http() as http:
        _, model = new_model(server, http)
        http.post("/forward_backward", content=call(model, 1, ids))
        step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
        http.post("/optim_step", json=step)
        saved = {"model_id": model, "seq_id": 3, "path": "last"}
        saved = http.post("/save_weights", json=saved).json()["request_id"]
        end = http.post("/unload_model", json={"model_id": model}).json()["request_id"]
        assert server.wait(end).json()["model_id"] == model
        assert server.wait(saved).json()["path"] == f"tinker://{model}/weights/last"
        late = http.post("/forward_backward", content=call(model, 4, ids))
        assert late.status_code == 400
        assert "has ended" in late.json()["error"]


def test_a_failed_call_leaves_nothing_behind(server):
    """Gradients of calls beside the failed one do not reach the step after the next."""
    ids = tokens_of(2)
    with server.http() as http:
        session, model = new_model(server, http)

        def do(path, number, **body):
            given = {"content": call(model, number, ids)} if not body else {"json": body}
            return server.wait(http.post(path, **given).json()["request_id"])

        def step(number):
            body = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 0.0}}
            return do("/optim_step", number, **body).json()

        do("/forward_backward", 1)
        norm = step(2)["metrics"]["grad_norm"]
        bad = http.post("/forward_backward", content=call(model, 3, [[1, 2, 10**6]])).json()
        do("/forward_backward", 4)
        assert "not done" in step(5)["error"]
        assert "error" in server.wait(bad["request_id"]).json()
        do("/forward_backward", 6)
        assert step(7)["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        # a forward pass that overflows drops no gradients of others
        do("/forward_backward", 8)
        message = proto.ForwardBackwardRequest.FromString(call(model, 9, [[1, 2, 3]], [3e38] * 2))
        message.forward_only = True
        http.post("/forward_backward", content=message.SerializeToString())
        assert step(10)["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        do("/forward_backward", 11)
        no_eps = {"model_id": model, "seq_id": 12, "adam_params": {"eps": 0.0}}
        assert "eps" in do("/optim_step", 12, **no_eps).json()["error"]
        http.post(f"/sessions/{session}/finish", json={})


# ---- what clients get wrong

BAD = {
    "an id outside the vocabulary": (call("M", 1, [[1, 2, 10**6, 3]]), "1000000"),
    "a target outside the vocabulary": (call("M", 1, [[1, 2, 3, 10**6]]), "1000000"),
    "a negative id": (call("M", 1, [[1, -2, 3]]), "-2"),
    "a NaN": (call("M", 1, [[1, 2, 3]], [1.0, float("nan")]), "weights"),
    "unequal lengths": (call("M", 1, [[1, 2, 3]], [1.0]), "weights has 1"),
    "an empty datum": (call("M", 1, [[1]]), "empty"),
    "no data": (call("M", 1, []), "no data"),
    "a datum that is too long": (call("M", 1, [[1] * 300]), "299"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_data_fails_in_one_line(server, what):
    body, found = BAD[what]
    message = proto.ForwardBackwardRequest.FromString(body)
    with server.http() as http:
        session, model = new_model(server, http)
        message.model_id = model
        name = http.post("/forward_backward", content=message.SerializeToString()).json()[
            "request_id"
        ]
        failure = server.wait(name).json()
        assert failure["category"] == "user"
        assert found in failure["error"]
        assert "\n" not in failure["error"]
        # the step that the client has sent already is not done with what is left
        step = {"model_id": model, "seq_id": 2, "adam_params": {}}
        name = http.post("/optim_step", json=step).json()["request_id"]
        assert "not done" in server.wait(name).json()["error"]
        name = http.post("/forward_backward", content=call(model, 3, tokens_of(1))).json()[
            "request_id"
        ]
        assert server.wait(name).headers["content-type"] == "application/x-protobuf"
        http.post(f"/sessions/{session}/finish", json={})


def test_bad_requests_fail_in_one_line(server):
    session = {"session_id": "S", "model_seq_id": 0}
    requests = [
        ("/forward_backward", {"content": b"\xff\xff\xff"}, 400, "protobuf"),
        ("/forward_backward", {"content": call("nobody", 1, tokens_of(1))}, 400, "nobody"),
        ("/forward_backward", {"content": call("nobody", 0, tokens_of(1))}, 400, "seq_id"),
        ("/create_model", {"json": session | {"base_model": "other"}}, 400, "other"),
        ("/create_model", {"json": session | {"base_model": "base"}}, 404, "session S"),
        ("/create_model", {"content": b"{"}, 400, "JSON"),
        ("/create_model", {"json": []}, 400, "object"),
        ("/create_model", {"json": session | {"rank": 1}}, 400, "base_model"),
        ("/load_weights", {"json": session | {"path": "x", "optimizer": 1.5}}, 400, "optimizer"),
        ("/retrieve_future", {"json": {"request_id": "none"}}, 404, "none"),
        (
            "/asample",
            {"json": {"prompt": {"chunks": []}, "sampling_params": {}}},
            400,
            "base_model",
        ),
        ("/weights_info", {"json": {"tinker_path": "tinker://../weights/x"}}, 400, "tinker://"),
        ("/session_heartbeat", {"content": b'{"session_id": "\\ud800"}'}, 404, "session"),
        ("/create_session", {"content": b'{"tags": [], "user_metadata": {"x": NaN}}'}, 400, "NaN"),
        ("/copy_weights", {"json": {}}, 404, "not served"),
    ]
    with server.http() as http:
        for path, body, status, found in requests:
            answer = http.post(path, **body)
            assert answer.status_code == status, (path, answer.text)
            error = answer.json()
            assert error["category"] == "user"
            assert found in error["error"], (path, error)
            assert "\n" not in error["error"]
        assert (
            http.post("/get_info", headers={"x-api-key": "tml-wrong"}, json={}).status_code == 401
        )
        assert http.get("/healthz", headers={"x-api-key": ""}).json() == {"status": "ok"}


def test_a_body_of_100_mb_is_refused_unread(server):
    """The server answers at the headers; without a length it stops reading at its limit."""
    address = urlsplit(server.url)
    head = f"POST /api/v1/asample HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}content-length: {10**8}\r\n\r\n".encode())
        assert b"413" in connection.recv(100)
    with server.http() as http:
        answer = http.post("/asample", content=iter([bytes(2**20)] * 65))
    assert answer.status_code == 413
    assert "64 MiB" in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 10**6}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**6]}]}}, "1000000"),
        ({"prompt": {"chunks": []}}, "empty"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "take another loss_fn"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
        ({"sampling_session_id": "S"}, "seq_id"),
    ],
)
def test_bad_samples_fail_in_one_line(server, change, found):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    asked = {"base_model": "base", "prompt": prompt, "sampling_params": {"max_tokens": 2}, **change}
    with server.http() as http:
        answer = http.post("/asample", json=asked)
    assert answer.status_code == 400
    assert found in answer.json()["error"]


def test_models_are_counted(base, tmp_path):
    """The first client lives: it is heard after the second has asked."""
    with served(base, tmp_path / "out", most=1) as server, server.http() as http:
        session, _ = new_model(server, http)
        _, second = ask_model(http)
        http.post("/session_heartbeat", json={"session_id": session})
        assert "adapters" in server.wait(second).json()["error"]
        http.post(f"/sessions/{session}/finish", json={})
        new_model(server, http)


def test_a_model_waits_for_the_room_of_a_script_that_has_ended(base, tmp_path, monkeypatch):
    """The script's session has not finished, but is silent."""
    monkeypatch.setattr("rocm_ext.serve.app._SILENT", 2.0)
    with served(base, tmp_path / "out", most=1) as server, server.http() as http:
        _, ended = new_model(server, http)
        _, model = new_model(server, http)
        with pytest.raises(UserError, match="not open here"):
            server.adapters.of(ended)
        assert server.adapters.of(model).lora.rank == 4


def test_single_samples_of_one_prompt_share_a_batch(server, client):
    """Episodes of a group ask one by one; each gets the answer that it would get alone."""
    sampler = client.create_sampling_client(base_model="base").result()
    prompts = [types.ModelInput.from_ints([4 + number % 2, 6, 7]) for number in range(6)]
    draws = [types.SamplingParams(max_tokens=4 + n, temperature=1.0, seed=n) for n in range(6)]
    alone = [
        sampler.sample(prompt, 1, draw).result().sequences[0].tokens
        for prompt, draw in zip(prompts, draws, strict=True)
    ]
    asked = [sampler.sample(prompt, 1, draw) for prompt, draw in zip(prompts, draws, strict=True)]
    assert [future.result().sequences[0].tokens for future in asked] == alone


def test_what_does_not_fit_is_refused_with_its_size(base, tmp_path, monkeypatch):
    with training.open(base, *OVERRIDES, "model.lora_rank=1") as model:
        peak = model.learner.planned_peak
    monkeypatch.setattr(Runtime, "budget_and_reason", lambda self, taken=0: (2 * peak, "small"))
    with served(base, tmp_path / "out") as server, server.client() as client:
        client.create_lora_training_client("base", rank=2, seed=0).result()
        with pytest.raises(tinker.RequestFailedError, match=r"memory plan needs .*iB and has .*iB"):
            client.create_lora_training_client("base", rank=4096, seed=0).result()
        client.create_lora_training_client("base", rank=2, seed=0).result()
