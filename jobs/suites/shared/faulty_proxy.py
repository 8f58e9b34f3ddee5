"""A proxy in front of an S3 server that spoils a share of the calls: it answers 503, cuts the
connection before or after the server has done what was asked, or breaks off in the middle of the
reply. Seeded."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("busy", "cut before", "cut after", "cut in the middle")
SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@contextmanager
def faulty_proxy(endpoint: str, share: float, seed: int) -> Iterator[tuple[str, Counter[str]]]:
    """The proxy's own endpoint, and how often it did what (`calls` in all)."""
    done: Counter[str] = Counter()
    rng = random.Random(seed)
    lock = threading.Lock()

    def fate() -> str:
        with lock:
            done["calls"] += 1
            chosen = rng.choice(FAULTS) if rng.random() < share else ""
            done[chosen or "passed"] += 1
            return chosen

    handler = type(
        "Handler",
        (_Handler,),
        {"server_address": urlsplit(endpoint).netloc, "fate": staticmethod(fate)},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", done
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_address: str

    @staticmethod
    def fate() -> str:
        """What becomes of a call; empty for nothing bad."""
        raise NotImplementedError

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client was killed

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fate = self.fate()
        if fate == "busy":
            self._reply(503, "Slow Down", [("Content-Type", "application/xml")], SLOW_DOWN)
            return
        if fate == "cut before":
            self._cut()
            return
        server = HTTPConnection(self.server_address)
        headers = {
            k: v for k, v in self.headers.items() if k.lower() not in ("connection", "expect")
        }
        server.request(self.command, self.path, body, headers)
        reply = server.getresponse()
        content = reply.read()
        server.close()
        if fate == "cut after":
            self._cut()
            return
        self._reply(
            reply.status, reply.reason, _headers(reply), content, half=fate == "cut in the middle"
        )

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

    def _reply(
        self,
        status: int,
        reason: str,
        headers: list[tuple[str, str]],
        content: bytes,
        half: bool = False,
    ) -> None:
        self.send_response_only(status, reason)
        lengths = [
            value for name, value in headers if name == "Content-Length" and self.command == "HEAD"
        ]
        for name, value in headers:
            if name != "Content-Length":
                self.send_header(name, value)
        self.send_header("Content-Length", (lengths or [str(len(content))])[0])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)
        if half:
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def _headers(reply: HTTPResponse) -> list[tuple[str, str]]:
    """What is the server's word to the client and not to the next hop."""
    dropped = ("connection", "transfer-encoding", "date", "server")
    return [
        (_title(name), value) for name, value in reply.getheaders() if name.lower() not in dropped
    ]


def _title(name: str) -> str:
    return "Content-Length" if name.lower() == "content-length" else name
