"""An S3 server on this machine that counts what it hands out: moto's, over HTTP, in a process of
its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BUCKET = "videos"
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass(frozen=True)
class Counts:
    """What was asked for and handed out so far."""

    requests: int
    bytes: int


@contextmanager
def counting_s3() -> Iterator[Callable[[], Counts]]:
    """Starts the server, points this process's environment at it, and makes the bucket; gives what
    tells the counts."""
    server = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
    before = dict(os.environ)
    try:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        os.environ.update({**_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint})
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")):
            yield lambda: Counts(**json.load(urllib.request.urlopen(f"{endpoint}/_counts")))
    finally:
        server.kill()
        server.wait()
        os.environ.clear()
        os.environ.update(before)


def _counted(application: Any) -> Any:
    """A WSGI application that counts another's answers to GET and HEAD."""
    counts = {"requests": 0, "bytes": 0}

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/_counts":
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(counts).encode()]
        body = b"".join(application(environ, start))
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            counts["requests"] += 1
            counts["bytes"] += len(body) if environ["REQUEST_METHOD"] == "GET" else 0
        return [body]

    return answer


def main() -> None:
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _counted(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
