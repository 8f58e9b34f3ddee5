"""Whether a run survives what a cluster and a bucket do to it: clips in an S3 bucket are captioned
twice, once in peace, once while engines and decoding processes are killed by SIGKILL, the driver
too, and a proxy answers 503 or cuts the connection on a share of all calls. Every request must come
out once, with the text that it has in peace.

Needs moto's server (the extra `dev`). All kills are seeded; no engine is killed before the suspects
of the last kill can have been answered, so that no request can be hit twice alone."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.demo_model import world
from jobs.suites.shared.faulty_proxy import faulty_proxy
from pipeline import read, storage
from pipeline.command_line import (
    parse_flags,
)
from pipeline.config import (
    ROOT,
)
from pipeline.driver.decode_queue import MAX_DECODE_ATTEMPTS
from pipeline.records import RunError, UsageError

BUCKET = "s3://chaos"
ENGINE = b"ray::EngineActor"
DECODERS = (b"ray::decode_video", b"pipeline.video.sandbox")
COLUMNS = ("request_id", "status", "text", "error_code")


@dataclass(frozen=True)
class Flags:
    """The suite's command line. `share` is that of the S3 calls that are spoilt; `part`: rows in a
    part."""

    seed: int = 0
    requests: int = 2000
    clips: int = 40
    model: str = "demo"
    max_tokens: int = 12
    max_num_seqs: int = 4
    driver_kills: int = 5
    engine_kills: int = 8
    decoder_kills: int = 12
    share: float = 0.1
    part: int = 4


def run(argv: list[str]) -> dict[str, Any]:
    """The suite's figures."""
    flags: Flags = parse_flags(Flags, argv, "benchmark.py --suite chaos")
    if not 0 < flags.clips <= flags.requests:
        raise UsageError(f"--clips is {flags.clips}: between 1 and --requests of them are needed")
    began = time.monotonic()
    with _bucket() as endpoint, tempfile.TemporaryDirectory() as folder:
        manifest = _fill(flags, Path(folder))
        job = _command(flags, manifest)
        _Driver([*job, "--output", f"{BUCKET}/peace"], endpoint).finish()
        with faulty_proxy(endpoint, flags.share, flags.seed) as (proxy, calls):
            killed = _Storm(flags, [*job, "--output", f"{BUCKET}/storm"], proxy).run()
        figures = compare(_rows("peace"), _rows("storm"))
    kills = {f"{kind}_kills": killed[kind] for kind in ("driver", "engine", "decoder")}
    return figures | kills | {"calls": dict(calls), "seconds": round(time.monotonic() - began, 1)}


def compare(peace: list[dict[str, Any]], storm: list[dict[str, Any]]) -> dict[str, Any]:
    """What the storm did to the rows."""
    rows = {row["request_id"]: row for row in storm}
    counts = Counter(row["request_id"] for row in storm)
    known = {row["request_id"]: row for row in peace}
    both = known.keys() & rows.keys()
    return {
        "requests": len(known),
        "lost": len(known.keys() - rows.keys()),
        "duplicated": sum(count - 1 for count in counts.values()) + len(rows.keys() - known.keys()),
        "changed": sum(
            rows[i]["text"] != known[i]["text"] for i in both if rows[i]["status"] != "error"
        ),
        "wrongly_blamed": sum(rows[i]["status"] == "error" != known[i]["status"] for i in both),
        "blamed_for": dict(
            Counter(rows[i]["error_code"] for i in both if rows[i]["status"] == "error")
        ),
        "texts": len({row["text"] for row in peace}),
    }


def _rows(name: str) -> list[dict[str, Any]]:
    """All rows, as a reader sees them who knows nothing of the ledger and as one who does; these
    must be the same."""
    table = read(f"{BUCKET}/{name}")
    files = [uri for uri in storage.list_files(f"{BUCKET}/{name}") if "/part-" in uri]
    if len(files) != len(storage.list_names(f"{BUCKET}/{name}/_ledger")):
        raise RunError(f"{BUCKET}/{name} holds parts without a record")
    return table.select(COLUMNS).to_pylist()


@contextmanager
def _bucket() -> Iterator[str]:
    """An S3 server with a bucket, which this process reaches directly."""
    import boto3  # an extra, like moto
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line per call
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    access = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ |= {**access, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    try:
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(
            Bucket=BUCKET.removeprefix("s3://")
        )
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        os.environ.clear()
        os.environ |= before


def _fill(flags: Flags, folder: Path) -> str:
    """Clips into the bucket, and a manifest of questions on them, each clip's together."""
    rng = random.Random(flags.seed)
    lines = []
    pools = []
    for number in range(flags.clips):
        story, file = world.make_clip(flags.seed * 1000 + number, 1)
        storage.put(f"{BUCKET}/in/{number}.mp4", file)
        pools.append(
            [*world.CAPTION_PROMPTS, *(question for question, _ in world.questions(story))]
        )
    for number in range(flags.requests):
        clip = number * flags.clips // flags.requests
        row = {
            "video": f"{BUCKET}/in/{clip}.mp4",
            "question": rng.choice(pools[clip]),
            "request_id": str(number),
        }
        lines.append(json.dumps(row))
    (folder / "manifest.jsonl").write_text("\n".join(lines))
    return str(folder / "manifest.jsonl")


def _command(flags: Flags, manifest: str) -> list[str]:
    words = ["--input", manifest, "--model", flags.model, "--rows-per-part", str(flags.part)]
    words += [
        "--max-tokens",
        str(flags.max_tokens),
        "--max-num-seqs",
        str(flags.max_num_seqs),
        "--temperature",
        "0",
    ]
    return [sys.executable, str(ROOT / "jobs" / "annotate_dataset.py"), *words]


# ------------------------------------------------------------------------------------------ drivers


@dataclass
class _Driver:
    """A run in a process of its own; what it says is listened to."""

    words: list[str]
    endpoint: str
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        environment = os.environ | {"AWS_ENDPOINT_URL": self.endpoint}
        pipes: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        self.process = subprocess.Popen(
            self.words, env=environment, start_new_session=True, **pipes
        )
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())

    @property
    def done(self) -> bool:
        return self.process.poll() is not None

    def finish(self) -> None:
        """Raises RunError unless it ends by itself; error rows are counted later."""
        code = self.process.wait()
        self.listener.join(10)
        if code not in (0, 3):
            raise RunError(f"the run ended with exit code {code}: {' '.join(self.said[-3:])}")

    def kill(self) -> None:
        """The machine is gone: the driver, and whatever it started."""
        family = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for process in family:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def descendants(ancestor: int) -> dict[int, bytes]:
    """Process id → command line of what a process has started, directly or not."""
    parents = {}
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended meanwhile
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            commands[int(folder.name)] = command

    def ours(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == ancestor:
                return True
        return False

    return {process: command for process, command in commands.items() if ours(process)}


@dataclass
class _Storm:
    """One run after another of the same command, until one ends by itself."""

    flags: Flags
    words: list[str]
    endpoint: str
    killed: Counter[str] = field(default_factory=Counter)

    def run(self) -> Counter[str]:
        """How often what was killed. The driver goes after about an equal share of the rows each
        time; on the way to it engines and decoders."""
        self.rng = random.Random(self.flags.seed)
        lives = self.flags.driver_kills + 1
        for life in range(1, lives + 1):
            driver = _Driver(self.words, self.endpoint)
            share = self.rng.uniform(0.5, 1.0) * self.flags.requests / lives / self.flags.part
            self._live(driver, self._parts() + share if life < lives else math.inf, life)
            if driver.done:
                driver.finish()
                return self.killed
            driver.kill()
            self.killed["driver"] += 1
        raise RunError("the last run did not end")

    def _live(self, driver: _Driver, goal: float, life: int) -> None:
        """Until so many parts are written, or the run ends."""
        begun = self._parts()
        safe = 0
        hit = 0
        while not driver.done and (parts := self._parts()) < goal:
            time.sleep(self.rng.uniform(0.1, 0.5))
            family = descendants(driver.process.pid)
            if (
                begun < parts > safe
                and self._due("engine", life)
                and self._kill("engine", family, (ENGINE,))
            ):
                # a part has a row at least; some that were answered before wait for theirs, and the
                # suspects are next
                safe = parts + self.flags.part + 2 * self.flags.max_num_seqs
            elif hit < MAX_DECODE_ATTEMPTS - 1 and self._due(
                "decoder", life
            ):  # one more might be the last try at one video
                hit += self._kill("decoder", family, DECODERS)

    def _due(self, kind: str, life: int) -> bool:
        """Kills are spread over the drivers' lives."""
        most = getattr(self.flags, f"{kind}_kills")
        return self.killed[kind] < most * life / (self.flags.driver_kills + 1)

    def _kill(self, kind: str, family: dict[int, bytes], named: tuple[bytes, ...]) -> bool:
        victims = sorted(
            p for p, command in family.items() if any(name in command for name in named)
        )
        if not victims:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.rng.choice(victims), signal.SIGKILL)
            self.killed[kind] += 1
            return True
        return False

    def _parts(self) -> int:
        """Parts that are committed, as the ledger's names tell."""
        return len(storage.list_names(f"{BUCKET}/storm/_ledger"))
