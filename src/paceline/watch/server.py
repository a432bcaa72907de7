"""Serves the page of a run on loopback: three fixed files and the run's state as JSON, to this machine alone."""

from __future__ import annotations

import errno
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import UsageError
from paceline.messages import LOGGER
from paceline.strict_json import dump
from paceline.watch.state import State

HOST = "127.0.0.1"
PORT = 7223  # unless it is in use
# Another website could give its own name the address 127.0.0.1, and read the page through the browser.
NAMES = (HOST, "localhost")
FRESH = 0.5  # seconds: several windows share one reading of the files
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
STATE = "/state.json"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Listens from the start; `serve_forever` answers."""

    daemon_threads = True

    def __init__(self, state: State, port: int | None = None) -> None:
        self._state, self._text, self._read = state, b"", -FRESH
        self._lock = threading.Lock()
        for tried in (port,) if port else (PORT, 0):  # 0 is any that is free
            try:
                super().__init__((HOST, tried or 0), Handler)
                return
            except OSError as error:
                if port or error.errno != errno.EADDRINUSE:
                    why = "in use" if error.errno == errno.EADDRINUSE else f"not possible: {error.strerror}"
                    raise UsageError(
                        f"--port {tried} is {why}; choose another, or leave --port out for one that is free"
                    ) from None

    def server_bind(self) -> None:
        """Without asking for the name of this machine, which can take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def state(self) -> bytes:
        """As JSON."""
        with self._lock:
            if time.monotonic() - self._read >= FRESH:
                self._state.refresh()
                self._text = dump(self._state.as_dict()).encode("utf-8", "backslashreplace")
                self._read = time.monotonic()
            return self._text

    def handle_error(self, request: Any, client_address: Any) -> None:
        """What went wrong with a request; a browser that has gone is no error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            LOGGER.error("the page of the run cannot be shown: %s: %s", type(error).__name__, error)


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "paceline", ""
    timeout = 10  # seconds: a connection that asks for nothing is closed

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        path = urlsplit(self.path).path
        if name not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, f"ask for http://{HOST} or http://localhost")
        elif path == STATE:
            self._send(HTTPStatus.OK, "application/json", self.server.state())
        elif path in FILES:
            file, kind = FILES[path]
            self._send(HTTPStatus.OK, kind, files(__package__).joinpath(file).read_bytes())
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "there is no such page")

    do_HEAD = do_GET  # noqa: N815  the library's name

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """In plain words, also for what the library refuses."""
        self._send(code, "text/plain; charset=utf-8", f"{message or HTTPStatus(code).phrase}\n".encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        for header, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not news."""
