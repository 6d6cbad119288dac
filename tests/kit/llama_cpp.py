"""llama.cpp's server, from the package xllamacpp, in a process of its own."""

import ctypes
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from tokenizers import Tokenizer

from rocm_ext.data.render import render_prompt
from rocm_ext.export import Source
from rocm_ext.model.weights.unpack import BLOCKS

_PROGRAM = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = sys.argv[1], 0, 512, 1
params.use_jinja, params.warmup, params.verbosity = True, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 1
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.cache_ram_mib = 0
if len(sys.argv) > 2:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in sys.argv[2:]]
server = xllamacpp.Server(params)
print("listening", server.listening_address, flush=True)
sys.stdin.read()
"""


def unpacked(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Unpack blocks [n, bytes] by llama.cpp's own function: [n, values]."""
    (folder,) = importlib.util.find_spec("xllamacpp").submodule_search_locations
    library = ctypes.CDLL(str(next(Path(folder).glob("xllamacpp*.so"))))
    name = kind if kind.endswith("_K") else kind.lower()
    function = library[f"dequantize_row_{name[0].lower()}{name[1:]}"]
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    values = np.empty((len(blocks), BLOCKS[kind][0]), np.float32)
    function(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


class LlamaCpp:
    """A running server.

    Attributes:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Post ``body`` and return the answer."""
        request = Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[tuple[int, float]]]:
        """Return the ``count`` most probable tokens behind ``prompt``, and ids with log-probs.

        llama.cpp leaves out the log-probs of tokens that end within a character.
        """
        plain = {
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self.ask(
            "/completion",
            {"prompt": prompt, "n_predict": count, "n_probs": 1, "return_tokens": True, **plain},
        )
        return answer["tokens"], [
            (each["id"], each["logprob"]) for each in answer.get("completion_probabilities", [])
        ]

    def logprobs(self, prompt: list[int]) -> dict[int, float] | None:
        """Return the log-probs of all next tokens; None: the most probable one ends within a character."""
        only = {"n_predict": 1, "n_probs": 1 << 20, "temperature": 0, "cache_prompt": False}
        answer = self.ask("/completion", {"prompt": prompt, **only})
        told = answer.get("completion_probabilities")
        return {each["id"]: each["logprob"] for each in told[0]["top_logprobs"]} if told else None

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Tokenise ``text``; ``special``: with the tokens that the model expects before it."""
        return self.ask(
            "/tokenize", {"content": text, "add_special": special, "parse_special": True}
        )["tokens"]

    def rendered(self, messages: list[dict[str, str]]) -> str:
        """Render a conversation with the file's chat template."""
        return self.ask("/apply-template", {"messages": messages})["prompt"]

    def assert_reads_like(self, tokenizer: Tokenizer, source: Source, texts: list[str]) -> None:
        """Assert that it tokenises ``texts`` and renders a conversation as the model's own folder does."""
        for text in texts:
            assert self.tokens(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
            assert self.tokens(text, special=True) == tokenizer.encode(text).ids
        chat = [("user", "In May?"), ("assistant", "No"), ("user", "Why")]
        messages = [{"role": role, "content": content} for role, content in chat]
        assert self.tokens(self.rendered(messages), special=True) == render_prompt(
            source.tokenizer, messages
        )


@contextmanager
def llama_cpp(model: Path, *adapters: Path) -> Iterator[LlamaCpp]:
    """Serve a GGUF file, with adapters' beside it."""
    command = [sys.executable, "-c", _PROGRAM, *map(str, (model, *adapters))]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said: list[str] = []
        try:
            for line in process.stdout:
                said.append(line)
                if line.startswith("listening "):
                    break
            else:
                raise AssertionError(f"llama.cpp does not open {model}:\n{''.join(said[-40:])}")
            yield LlamaCpp(said[-1].split()[1])
        finally:
            process.kill()
