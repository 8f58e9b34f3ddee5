"""A proxy in front of an S3 server that makes a seeded share of the calls fail: it replies 503, or
closes the connection before the request is forwarded, after it, or in the middle of the reply."""

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
HOP_BY_HOP = ("connection", "transfer-encoding", "date", "server")  # this hop sets its own

Headers = list[tuple[str, str]]


@contextmanager
def faulty_proxy(endpoint: str, share: float, seed: int) -> Iterator[tuple[str, Counter[str]]]:
    """Run the proxy; yields its endpoint and the calls by outcome, which it goes on counting.

    The outcomes are `FAULTS` and "passed"; "calls" counts all.

    Args:
        endpoint: of the S3 server behind the proxy.
        share: of the calls that fail, 0 to 1.
    """
    outcomes: Counter[str] = Counter()
    rng = random.Random(seed)
    lock = threading.Lock()

    def draw_fault() -> str | None:
        with lock:
            outcomes["calls"] += 1
            fault = rng.choice(FAULTS) if rng.random() < share else None
            outcomes[fault or "passed"] += 1
            return fault

    handler = type(
        "Handler",
        (_Handler,),
        {"server_address": urlsplit(endpoint).netloc, "draw_fault": staticmethod(draw_fault)},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", outcomes
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_address: str

    @staticmethod
    def draw_fault() -> str | None:
        """One of `FAULTS`, or None for a call that is forwarded as it is."""
        raise NotImplementedError

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client process was killed

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.draw_fault()
        if fault == "busy":
            self._reply(503, "Slow Down", [("Content-Type", "application/xml")], SLOW_DOWN)
            return
        if fault == "cut before":
            self._close()
            return
        reply, content = self._call_server(body)
        if fault == "cut after":
            self._close()
            return
        self._reply(
            reply.status,
            reply.reason,
            _end_to_end_headers(reply),
            content,
            half=fault == "cut in the middle",
        )

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _forward

    def _call_server(self, body: bytes) -> tuple[HTTPResponse, bytes]:
        server = HTTPConnection(self.server_address)
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("connection", "expect")
        }
        server.request(self.command, self.path, body, headers)
        reply = server.getresponse()
        content = reply.read()
        server.close()
        return reply, content

    def _reply(
        self, status: int, reason: str, headers: Headers, content: bytes, half: bool = False
    ) -> None:
        """Send a reply; with `half`, half of its body, and then close the connection."""
        self.send_response_only(status, reason)
        length = str(len(content))
        for name, value in headers:
            if name != "Content-Length":
                self.send_header(name, value)
            elif self.command == "HEAD":  # has no body, but tells the length of the object's
                length = value
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)
        if half:
            self._close()

    def _close(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there are thousands of calls."""


def _end_to_end_headers(reply: HTTPResponse) -> Headers:
    """The reply's headers without the hop-by-hop ones, `Content-Length` spelled in one way."""
    headers = []
    for name, value in reply.getheaders():
        if name.lower() == "content-length":
            headers.append(("Content-Length", value))
        elif name.lower() not in HOP_BY_HOP:
            headers.append((name, value))
    return headers
