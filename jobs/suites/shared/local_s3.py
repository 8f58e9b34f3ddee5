"""An S3 server on this machine that counts requests and bytes: moto's, over HTTP, in a process of
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

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}
TRAFFIC_PATH = "/_traffic"  # the server's own page, no bucket


@dataclass(frozen=True)
class Traffic:
    """GET and HEAD requests so far, and the bytes of the replies to GET."""

    requests: int
    bytes: int


@dataclass(frozen=True)
class LocalS3:
    """A running server."""

    endpoint: str

    def traffic(self) -> Traffic:
        with urllib.request.urlopen(f"{self.endpoint}{TRAFFIC_PATH}") as reply:
            return Traffic(**json.load(reply))


@contextmanager
def local_s3(bucket: str) -> Iterator[LocalS3]:
    """Start the server with an empty bucket; this process's AWS variables point at it meanwhile."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
    environment = dict(os.environ)
    try:
        assert process.stdout is not None
        server = LocalS3(f"http://127.0.0.1:{int(process.stdout.readline())}")
        os.environ.update({**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint})
        create = urllib.request.Request(f"{server.endpoint}/{bucket}", method="PUT")
        urllib.request.urlopen(create).close()
        yield server
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ.update(environment)


def _counted(application: Any) -> Any:
    """Wrap a WSGI application so that it counts its replies to GET and HEAD."""
    traffic = {"requests": 0, "bytes": 0}

    def reply(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == TRAFFIC_PATH:
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(traffic).encode()]
        body = b"".join(application(environ, start))
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            traffic["requests"] += 1
        if environ["REQUEST_METHOD"] == "GET":
            traffic["bytes"] += len(body)
        return [body]

    return reply


def main() -> None:
    """Serve until killed; the first line of standard output is the port."""
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
