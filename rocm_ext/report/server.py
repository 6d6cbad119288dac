"""Serves a live page to browsers.

On the loopback address everybody on this machine can open the page, as they can look at its load; a site that a browser
visits cannot: it does not see answers of another origin, and the ``Host`` of a request must be a name of the loopback
address, so that a site's own name that leads here (DNS rebinding) is refused. On any other address a random token in
the path is needed, which no site can guess.
"""

import errno
import gzip
import hmac
import os
import secrets
import socket
import sys
import time
from base64 import b64encode
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from rocm_ext.base.errors import UserError
from rocm_ext.report import STYLE
from rocm_ext.report.live import SCRIPT, LivePage, tag_of

PORT = 8642
_LOOPBACK = "127.0.0.1"
_NAMES = (_LOOPBACK, "localhost", "::1")  # a port that ssh forwards is at one of these, too
_CONNECTIONS = 32  # more are closed at once
_FIRST, _NEXT = 5.0, 30.0  # seconds for the first request of a connection, and from an answer to the end of the next


def _source(text: str) -> str:
    """The hash of an inline script or style as a Content-Security-Policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; script-src {_source(SCRIPT)}; style-src {_source(STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "private, no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the token is in the address
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """An HTTP server of one page.

    Args:
        page: the page.
        host: name or address to listen at; None: the loopback address, without a token.
        port: None: :data:`PORT`, or a free one if that is in use.

    Attributes:
        prefix: the beginning of all paths; it holds the token.

    Raises:
        UserError: the port is in use, or this machine does not have the host's address.
    """

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # there, two servers would share the port

    def __init__(self, page: LivePage, host: str | None = None, port: int | None = None) -> None:
        self.page, self.names = page, _NAMES if host is None else None
        self.ends: dict[socket.socket, float] = {}  # time.monotonic() at which a connection is closed
        self.prefix = "/" if host is None else f"/{secrets.token_urlsafe(24)}/"
        self.address_family, address = _address(host or _LOOPBACK)
        try:
            super().__init__((address, PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise _refused(host or _LOOPBACK, PORT if port is None else port, error) from error
            super().__init__((address, 0), _Handler)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        name, port = str(self.server_address[0]), self.server_address[1]
        if name in ("0.0.0.0", "::"):
            name = _outward(self.address_family)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}{self.prefix}"

    def server_bind(self) -> None:
        """Bind; HTTPServer's own way also looks up the machine's name, which takes seconds without a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # too many open files: do not ask again at once
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.ends) >= _CONNECTIONS:
            self.shutdown_request(request)
            return
        self.ends[request] = time.monotonic() + _FIRST
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.ends.pop(request, None)

    def service_actions(self) -> None:
        """Close connections whose time is up; ``serve_forever`` calls this twice a second."""
        for connection, end in list(self.ends.items()):
            if time.monotonic() > end:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show an error, unless a browser only closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _address(host: str) -> tuple[int, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise UserError(f"--host {host}: {error.strerror or error}; expected an address of this machine") from error
    return family, str(address[0])


def _refused(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(f"--host {host} is no address of this machine; 0.0.0.0 stands for all of them")
    return UserError(f"--port {port} of {host}: {error.strerror or error}; name another with --port")


def _outward(family: int) -> str:
    """The address of this machine towards other networks, or its name."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1" if family == socket.AF_INET else "2001:db8::1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _encoded(html: str) -> bytes:
    return html.encode("ascii", "xmlcharrefreplace")


@lru_cache(maxsize=4)
def _packed(html: str) -> tuple[str, bytes]:
    """The ETag of a page, and the page compressed: a site that a browser visits can ask for it as often as it likes."""
    return tag_of(html), gzip.compress(_encoded(html), 1)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rocm-ext", ""

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.server.ends[self.connection] = time.monotonic() + _NEXT

    def do_GET(self) -> None:
        page, prefix = self.server.page, self.server.prefix
        drawn = {"": page.whole, "page": page.page, "machine": page.machine}
        path = self.path.partition("?")[0].encode()
        draw = next((draw for name, draw in drawn.items() if hmac.compare_digest(path, (prefix + name).encode())), None)
        if not self._is_named():
            self._answer(
                HTTPStatus.FORBIDDEN,
                b"This page has another host name; open the address that was printed.",
                Connection="close",
            )
        elif draw is None:
            self._answer(
                HTTPStatus.NOT_FOUND, b"Nothing is here; open the whole address that was printed.", Connection="close"
            )
        else:
            self._show(draw())

    do_HEAD = do_GET

    def _is_named(self) -> bool:
        """Whether the request calls the server by one of its names."""
        if self.server.names is None:
            return True  # the token is the guard
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in self.server.names
        except ValueError:
            return False

    def _show(self, html: str) -> None:
        tag, packed = _packed(html)
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", ETag=tag)
        elif "gzip" in self.headers.get("Accept-Encoding", ""):
            self._answer(HTTPStatus.OK, packed, **{"ETag": tag, "Content-Encoding": "gzip"})
        else:
            self._answer(HTTPStatus.OK, _encoded(html), ETag=tag)

    def _answer(self, status: HTTPStatus, body: bytes, **more: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **more}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""
