"""Servers for tests: scripted ones, and one that follows vLLM's rules with a real model."""

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from rocm_ext.data.encoder import to_text
from rocm_ext.model.adapters import peft_files

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NOT_FOUND = 404, {"detail": "Not Found"}, {}  # FastAPI's answer to an unknown path


class Fake(ThreadingHTTPServer):
    """Answers with ``reply(path, body)``: a dict, or status, body and headers. It keeps the requests.

    The body may be an iterator of bytes, perhaps one without an end.
    """

    daemon_threads, request_queue_size, allow_reuse_address = True, 256, True

    def __init__(self, reply, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.reply, self.asked, self.lock = reply, [], threading.Lock()
        self.active = self.most = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, path=COMPLETIONS):
        return [body for asked, body, _ in self.asked if asked == path and not is_check(body)]

    def adapter_calls(self):
        """Return the requests that load and unload adapters: verb and body."""
        return [
            (path.split("/")[-1].split("_")[0], body)
            for path, body, _ in self.asked
            if path in (LOAD, UNLOAD)
        ]

    def die(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # the client has disconnected


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def answer(self, body):
        fake = self.server
        with fake.lock:
            fake.asked.append((self.path, body, dict(self.headers)))
            fake.active += 1
            fake.most = max(fake.most, fake.active)
        try:
            reply = fake.reply(self.path, body)
        except Exception:  # a fault of the test shows in the client's message
            reply = 500, traceback.format_exc()[-400:], {}
        finally:
            with fake.lock:
                fake.active -= 1
        status, content, headers = reply if isinstance(reply, tuple) else (200, reply, {})
        self.send_response(status)
        if isinstance(content, Iterator):
            self.end_headers()
            for part in content:
                self.wfile.write(part)
            return
        content = content if isinstance(content, str) else json.dumps(content)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content.encode())))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args):
        pass


def is_check(body):
    return body is not None and body.get("max_tokens") == 1


class Vllm:
    """vLLM's rules for models and adapters; ``answer(adapter's path or None, body)`` gives completions.

    Attributes:
        adapters: paths of the loaded adapters, by name.
        version: vLLM's.
        lora: whether the server was started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING.
    """

    def __init__(
        self, answer: Callable[[str | None, dict], Any], model: str = "base", lora: bool = True
    ):
        self.answer, self.model, self.lora = answer, model, lora
        self.adapters: dict[str, str] = {}
        self.version = "0.27.0"
        self._lock = threading.Lock()

    def restart(self):
        """Lose all adapters, as a restart does."""
        self.adapters.clear()

    def __call__(self, path, body):
        if path == MODELS:
            cards = [{"id": self.model, "parent": None}, {"id": "old", "parent": self.model}]
            return {
                "object": "list",
                "data": cards + [{"id": name, "parent": self.model} for name in self.adapters],
            }
        if path == "/version":
            return {"version": self.version}
        if path in (LOAD, UNLOAD):
            with self._lock:
                return self._adapter(path, body) if self.lora else NOT_FOUND
        if body["model"] != self.model and body["model"] not in self.adapters:
            return error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        return self.answer(self.adapters.get(body["model"]), body)

    def _adapter(self, path, body):
        name = body["lora_name"]
        if path == UNLOAD:
            if name not in self.adapters:
                return error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
            del self.adapters[name]
            return 200, f"Success: LoRA adapter '{name}' removed successfully.", {}
        if name in self.adapters:
            said = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            return error(400, said + "'load_inplace' to True.", "InvalidUserInput")
        if not Path(body["lora_path"], "adapter_config.json").is_file():
            return error(
                404,
                f"Loading lora {name} failed: No adapter found for {body['lora_path']}",
                "NotFoundError",
            )
        self.adapters[name] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{name}' added successfully.", {}


def error(status, message, kind):
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}, {}


def vllm_form(body, text, tokens, values, **choice):
    """Return an answer in the form of vLLM's /v1/completions; ``values`` are the log-probs."""
    choice = {"index": 0, "text": text, "logprobs": {"tokens": ["t"] * len(tokens or ()), "token_logprobs": values},
              "finish_reason": "stop", "stop_reason": None, "token_ids": tokens,
              "prompt_token_ids": body.get("prompt"), **choice}  # fmt: skip
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": {}}


class Sampler:
    """Samples from a Hugging Face model with merged adapters, for :class:`Vllm`.

    Args:
        folder: the base model.
        tokenizer: decodes answers.

    Attributes:
        stale: answer with the first adapter in whose path this is, whatever is loaded later; ``base``: without any.
    """

    def __init__(self, folder: Path, tokenizer, stale: str | None = None):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._tokenizer, self.stale = tokenizer, stale
        self._weights: dict[str | None, dict[str, torch.Tensor]] = {None: {}}
        self._lock = threading.Lock()

    def __call__(self, adapter, body):
        with self._lock:
            if self.stale == "base":
                adapter = None
            elif self.stale:
                adapter = next(
                    (path for path in self._weights if path and self.stale in path), adapter
                )
            if adapter not in self._weights:
                self._weights[adapter] = merged(self._model, Path(adapter))
            tokens, logprobs, tops = self._sample(self._weights[adapter], body)
        stopped = tokens[-1] in body["stop_token_ids"]
        text = to_text(self._tokenizer, tokens[:-1] if stopped else tokens)
        answer = vllm_form(
            body, text, tokens, logprobs, finish_reason="stop" if stopped else "length"
        )
        answer["choices"][0]["logprobs"]["top_logprobs"] = [{"top": value} for value in tops]
        return answer

    @torch.no_grad()
    def _sample(self, weights, body):
        generator = torch.Generator().manual_seed(body["seed"])
        prompt, tokens, logprobs, tops = body["prompt"], [], [], []
        while len(tokens) < body["max_tokens"] and not (
            tokens and tokens[-1] in body["stop_token_ids"]
        ):
            ids = torch.tensor([prompt + tokens])
            logits = torch.func.functional_call(self._model, weights, (ids,)).logits[0, -1].float()
            noise = -torch.log(torch.empty_like(logits).exponential_(generator=generator))
            greedy = body["temperature"] == 0
            tokens.append(
                int((logits if greedy else logits / body["temperature"] + noise).argmax())
            )
            logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
            tops.append(float(logits.log_softmax(-1).max()))
        return tokens, logprobs, tops


class Prompted:
    """Tokenises chats and scores prompts as vLLM does, with transformers and PEFT, for :class:`Vllm`.

    Args:
        folder: the base model.
        template: its chat template, by default the folder's.
        parses: whether it parses the arguments of calls, as vLLM does.

    Attributes:
        changes: what it does to the ids of each prompt.
        dropped: parts of names of the adapter's weights that are not loaded.
    """

    def __init__(self, folder: Path, template: str | None = None, parses: bool = True):
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        template = template or (folder / "chat_template.jinja").read_text()
        self.parses = parses
        file = str(folder / "tokenizer.json")
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template)
        self._lock = threading.Lock()
        self.changes: Callable[[list[int]], list[int]] = list
        self.dropped: tuple[str, ...] = ()

    @torch.no_grad()
    def __call__(self, adapter, body):
        if "messages" in body:
            for message in body["messages"] if self.parses else ():
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            ids = self._tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                return_dict=False,
                **body.get("chat_template_kwargs", {}),
            )
            return {"count": len(ids), "max_model_len": 512, "tokens": self.changes(ids)}
        assert body["echo"]
        ids = torch.tensor([body["prompt"]])
        with self._lock:  # functional_call puts other weights into the model
            weights = {}
            if adapter is not None:
                weights = merged(self._model, Path(adapter), self.dropped)
            logits = torch.func.functional_call(self._model, weights, (ids,)).logits[0]
        logprobs = logits.log_softmax(-1)
        told = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        return vllm_form(body, "", None, [None, *told, -1.0])


def merged(model, adapter: Path, dropped: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return a model's weights with an adapter's updates, but for weights with ``dropped`` in their names."""
    from safetensors.torch import load_file

    settings = json.loads((adapter / "adapter_config.json").read_text())
    updates = peft_files.updates_by_weight(load_file(adapter / "adapter_model.safetensors"))
    base, scale = model.state_dict(), settings["lora_alpha"] / settings["r"]
    return {
        name: base[name] + scale * (update[".lora_B.weight"] @ update[".lora_A.weight"])
        for name, update in updates.items()
        if not any(part in name for part in dropped)
    }
