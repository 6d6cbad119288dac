"""HTTP with servers that speak OpenAI's protocol: addresses, keys, failures."""

import json
import math
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.types import Json

try:  # httpx's successor has the same interface; it needs Python 3.11
    import httpx2 as httpx
except ImportError:
    try:
        import httpx  # type: ignore[no-redef]
    except ImportError as error:
        raise UserError(
            "an OpenAI-compatible server needs an HTTP client, httpx2 or httpx: pip install 'torchtune-rocm[openai]'"
        ) from error

import anyio  # both clients depend on it

RequestError = httpx.RequestError
CHECK_TIMEOUT = 10.0  # seconds, to connect and for requests without computation
MAX_BODY = 64 << 20  # bytes; an answer of 32,000 tokens with log-probs has about 10 MB
BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds
_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


@cache
def certificates() -> ssl.SSLContext:
    """Return the certificates that clients trust; reading them takes longer than loading an adapter."""
    return httpx.create_ssl_context()


def new_client(headers: Mapping[str, str]) -> Any:
    """Return an ``httpx.AsyncClient`` without a limit of connections; :func:`exchange` limits the time."""
    timeout = httpx.Timeout(None, connect=CHECK_TIMEOUT)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=certificates())


class Transient(Exception):
    """The server may answer a repeated request after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(UserError):
    """The server refuses this request; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def checked_urls(urls: Any) -> list[str]:
    """Check the servers' urls and strip ``/v1``.

    Raises:
        UserError: a url is invalid or appears twice, or the list is empty.
    """
    if isinstance(urls, str) or not isinstance(urls, Sequence) or not len(urls):
        raise UserError("urls must be a list with at least one url, like [http://localhost:8000]")
    addresses = []
    for url in urls:
        if not isinstance(url, str) or not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", url):
            raise UserError(
                f"{url!r} in urls is not a server's address; expected one like http://localhost:8000"
            )
        addresses.append(url.rstrip("/").removesuffix("/v1").rstrip("/"))
    twice = {address for address in addresses if addresses.count(address) > 1}
    if twice:
        raise UserError(f"urls names {', '.join(sorted(twice))} twice")
    return addresses


def seconds_of(value: Any, name: str) -> float:
    """Read a time: a number of seconds, or a number with a unit such as ``90 s``, ``10 min`` or ``1.5 h``.

    Raises:
        UserError: ``value`` is not a time of at least 0; the message has ``name``.
    """
    seconds = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", value)
        if match and match[2] in _SECONDS:
            seconds = float(match[1]) * _SECONDS[match[2]]
    elif not isinstance(value, bool) and isinstance(value, int | float):
        seconds = value
    if seconds is None or not 0 <= seconds < math.inf:
        raise UserError(
            f"{name} is {value!r}; expected seconds, or a time such as 90 s, 10 min or 1.5 h"
        )
    return float(seconds)


def authorization(api_key_env: str | None) -> dict[str, str]:
    """Return the header with the API key from the environment variable ``api_key_env``; {} for None.

    Raises:
        UserError: ``api_key_env`` is not a variable's name, or the variable is not set.
    """
    if api_key_env is None:
        return {}
    # The value may be the key itself by mistake, so the message does not show it.
    if not isinstance(api_key_env, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", api_key_env):
        raise UserError("api_key_env must be the name of an environment variable, not the key")
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise UserError(
            "the environment variable that api_key_env names is not set; export it with the API key"
        )
    return {"Authorization": f"Bearer {key}"}


def pause_after(error: Exception, failures: int) -> float:
    """Return the seconds to wait after ``error`` and ``failures`` earlier ones; the server may ask for more."""
    pause = min(MAX_BACKOFF, BACKOFF * 2**failures)
    return max(pause, getattr(error, "retry_after", 0.0))


async def exchange(client: Any, method: str, url: str, seconds: float, json: Any = None) -> Any:
    """Send a request and return the complete response.

    ``seconds`` limits the exchange. An HTTP client's time-out limits one read: a server that sends a byte now and then
    would hold the client for ever.

    Raises:
        httpx.RequestError: the server cannot be reached, or has not answered in time.
        UserError: the body is larger than :data:`MAX_BODY`.
    """
    body = bytearray()
    # a few compressed bytes could become gigabytes
    plain = {"Accept-Encoding": "identity"}
    try:
        # before Python 3.12, asyncio.wait_for loses a cancellation that arrives with the answer
        with anyio.fail_after(seconds):
            async with client.stream(method, url, json=json, headers=plain) as response:
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_BODY:
                        raise UserError(
                            f"{url} answers with more than {MAX_BODY} bytes; is it an OpenAI-compatible server?"
                        )
    except TimeoutError:
        raise httpx.ReadTimeout(f"no complete answer within {seconds:g} s") from None
    headers = {}
    if "retry-after" in response.headers:
        headers["retry-after"] = response.headers["retry-after"]
    return httpx.Response(response.status_code, headers=headers, content=bytes(body))


def json_object(url: str, response: Any) -> Json:
    """Return the JSON object in a response; errors as :func:`json_content`."""
    return json_content(url, response, dict)


def json_content(url: str, response: Any, kind: type) -> Any:
    """Return the JSON in a response.

    Raises:
        Transient: HTTP 408, 429 or 5xx; a repeated request may succeed.
        Refused: any other HTTP error.
        UserError: the body is not JSON of this ``kind``, dict or list.
    """
    status = response.status_code
    if status in (408, 429) or status >= 500:
        raise Transient(f"HTTP {status}: {message_of(response)}", _retry_after(response))
    if status != 200:
        hint = "; set api_key_env" if status in (401, 403) else ""
        raise Refused(
            f"{url} refuses a request with HTTP {status}: {message_of(response)}{hint}", status
        )
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, kind):
        start = start_of(response.text, 150)
        what = "object" if kind is dict else "list"
        raise UserError(
            f"{url} does not answer with a JSON {what}; is it an OpenAI-compatible server? {start}"
        )
    return answer


def _retry_after(response: Any) -> float:
    """Return the Retry-After header in seconds, or the seconds until its date; 0 without it."""
    value = response.headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError, OverflowError):
        left = parsedate_to_datetime(value) - datetime.now(timezone.utc)
        return max(0.0, left.total_seconds())
    return 0.0


def message_of(response: Any) -> str:
    """Return the server's error message: OpenAI's ``error.message``, FastAPI's ``detail``, or the body."""
    with suppress(ValueError, RecursionError):
        body = response.json()
        if isinstance(body, dict):
            message = body.get("error", body.get("detail", body.get("message")))
            if isinstance(message, dict):
                message = message.get("message", message)
            if message:
                return start_of(message if isinstance(message, str) else json.dumps(message), 500)
    return start_of(response.text)


def start_of(text: str, length: int = 200) -> str:
    """Return the start of ``text`` in one line."""
    return " ".join(text.split())[:length] or "(nothing)"


def in_words(error: Exception) -> str:
    """Return the message of an HTTP client's error."""
    if isinstance(error, httpx.TimeoutException):
        return f"no answer in time ({type(error).__name__})"
    return str(error) if isinstance(error, Transient | UserError) else one_line(error)
