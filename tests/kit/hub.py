"""A Hugging Face hub of this test's own: an HTTP server that serves folders as models."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, hf_api

COMMIT = "a" * 40


@contextmanager
def hub(
    monkeypatch: pytest.MonkeyPatch, cache: Path, models: dict[str, Path], gated: str = ""
) -> Iterator[list[str]]:
    """Serve ``models`` by name, let the client use this server with an empty cache, and yield the files it asks for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, *args) -> None:
            pass

        def _answer(self, body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if api else parts[:2])
            if name == gated or name not in models:
                code, what = (403, "GatedRepo") if name == gated else (404, "RepoNotFound")
                return self._send(code, b"{}", body, {"X-Error-Code": what})
            files = {
                p.relative_to(models[name]).as_posix(): p
                for p in models[name].rglob("*")
                if p.is_file()
            }
            if api and parts[4] == "revision":
                siblings = [{"rfilename": file} for file in files]
                return self._send(
                    200,
                    json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(),
                    body,
                )
            if api and parts[4] == "tree":
                tree = [
                    {"type": "file", "path": f, "size": p.stat().st_size, "oid": f}
                    for f, p in files.items()
                ]
                return self._send(200, json.dumps(tree).encode(), body)
            file = "/".join(parts[4:])
            if file not in files:
                return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            asked.append(file)
            content = files[file].read_bytes()
            tag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self._send(200, content, body, tag)

        def _send(self, code: int, content: bytes, body: bool, headers: dict | None = None) -> None:
            self.send_response(code)
            for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
