"""Adapters on servers that load them at run time, as vLLM does.

vLLM answers 400 if a name is loaded already, and 404 if a request or an unloading names an adapter that it does not
have (``vllm/entrypoints/openai/models/serving.py``).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.log import log
from rocm_ext.base.openai_http import CHECK_TIMEOUT, Transient, exchange, json_object, message_of
from rocm_ext.model.adapters.peft_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rocm_ext.sampling.server.wire import Server

LOAD_TIMEOUT = 300.0  # seconds
LORA_HINT = (
    "To sample with a trained adapter, a server must load adapters at run time: "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank RANK "
    "(and --enforce-eager on AMD GPUs), with the adapter's folder visible to it under the same path"
)


@dataclass(frozen=True)
class Adapter:
    """An adapter for servers.

    Attributes:
        name: the servers' name of it.
        folder: its absolute PEFT folder.
    """

    name: str
    folder: Path

    @classmethod
    def read(cls, prefix: str, folder: Path) -> "Adapter":
        """Name the adapter in ``folder`` by a hash of its files, because servers cache adapters by name.

        Raises:
            UserError: ``folder`` is not a PEFT folder.
        """
        digest = hashlib.sha256()
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            try:
                digest.update((folder / file).read_bytes())
            except OSError as error:
                raise UserError(f"{folder} is not an adapter in PEFT's format: {one_line(error)}") from error
        return cls(f"{prefix}-{digest.hexdigest()[:12]}", folder.expanduser().resolve())


async def load(client: Any, server: Server, adapter: Adapter) -> None:
    """Make a server serve ``adapter``; a server that already does is fine.

    Args:
        client: an ``httpx.AsyncClient``.
        server: the server.
        adapter: the adapter.

    Raises:
        UserError: the server refuses.
        Transient: the server fails; another attempt may succeed.
        httpx.RequestError: the server cannot be reached.
    """
    response = await _call(client, server, "load", {"lora_name": adapter.name, "lora_path": str(adapter.folder)})
    status = response.status_code
    if status == 200 or (status == 400 and adapter.name in await _served(client, server)):
        return  # another rank may have loaded it meanwhile
    said = f"HTTP {status}: {message_of(response)}"
    if status in (408, 429) or status >= 500:
        raise Transient(f"it does not load the adapter {adapter.folder} ({said})")
    raise UserError(f"{server.url} does not load the adapter {adapter.folder} ({said}). {LORA_HINT}")


async def load_anew(client: Any, server: Server, adapter: Adapter) -> None:
    """Unload what a killed run may have left under the adapter's name, perhaps from another path, and :func:`load`."""
    await _call(client, server, "unload", {"lora_name": adapter.name})
    await load(client, server, adapter)


async def unload(client: Any, server: Server, adapter: Adapter) -> None:
    """Unload ``adapter``; log a warning if the server refuses.

    Raises:
        httpx.RequestError: the server cannot be reached.
    """
    response = await _call(client, server, "unload", {"lora_name": adapter.name}, CHECK_TIMEOUT)
    if response.status_code not in (200, 404):  # a server that was restarted has no adapter: 404
        log.warning("%s does not unload %s: %s", server.url, adapter.name, message_of(response))


async def _call(client: Any, server: Server, verb: str, body: dict[str, str], seconds: float = LOAD_TIMEOUT) -> Any:
    return await exchange(client, "POST", f"{server.url}/v1/{verb}_lora_adapter", seconds, body)


async def _served(client: Any, server: Server) -> set[str]:
    """Return the names of models and adapters that a server lists."""
    try:
        answer = json_object(server.url, await exchange(client, "GET", server.url + "/v1/models", CHECK_TIMEOUT))
    except (UserError, Transient):
        return set()
    cards = answer.get("data")
    return {str(card.get("id")) for card in cards if isinstance(card, dict)} if isinstance(cards, list) else set()
