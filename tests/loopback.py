"""A server of HTTP on the loopback interface, in a thread of its own. Use it as a context manager."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Handler(BaseHTTPRequestHandler):
    """Keeps the test's output free of one line for each request."""

    def log_message(self, *_: object) -> None:
        pass


class LoopbackServer:
    def __init__(self, handler: type[Handler]) -> None:
        self._http = _QuietServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that is done resets its connections."""
