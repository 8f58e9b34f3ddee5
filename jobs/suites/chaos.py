"""Whether a run survives failures of the cluster and of the network. Questions on clips in an S3
bucket are answered twice: once undisturbed, and once while the driver, engines and decoding
processes are killed by SIGKILL and a proxy fails a share of the S3 calls. Every request must have
one row, with the text of the undisturbed run.

Needs moto's server (the extra `dev`). All kills are seeded. No engine is killed before the suspects
of the last kill can have finished, so that no request is alone in two engines that are killed."""

from __future__ import annotations

import json
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.demo_model import world
from jobs.suites.shared.faulty_proxy import faulty_proxy
from jobs.suites.shared.flags import parse_suite_flags
from jobs.suites.shared.local_s3 import local_s3
from jobs.suites.shared.timing import Stopwatch
from pipeline import read, storage
from pipeline.command_line import flag
from pipeline.config import ROOT
from pipeline.driver.driver import MAX_DECODE_ATTEMPTS
from pipeline.records import RunError, UsageError

BUCKET = "chaos"
UNDISTURBED = f"s3://{BUCKET}/undisturbed"
DISTURBED = f"s3://{BUCKET}/disturbed"
ENGINE_COMMANDS = (b"ray::EngineActor",)
DECODER_COMMANDS = (b"ray::decode_video", b"pipeline.video.sandbox")
COLUMNS = ("request_id", "status", "text", "error_code")
KINDS = ("driver", "engine", "decoder")
# exit codes of a run that ended by itself; error rows are counted later
FINISHED = (0, 3)
# seconds, between two looks at the processes
POLL_SECONDS = (0.1, 0.5)
ERROR_LINES = 3  # of the driver's standard error, in an error message


@dataclass(frozen=True)
class Flags:
    """The suite's command line."""

    seed: int = flag(0, "of clips, questions, kills and failing calls")
    requests: int = flag(2000, "questions")
    clips: int = flag(40, "that they are asked on")
    model: str = flag("demo", "preset of conf/model, folder or hub id")
    max_tokens: int = flag(12, "tokens of an answer, at most")
    max_num_seqs: int = flag(4, "slots of an engine")
    driver_kills: int = flag(5, "times the driver and all that it started are killed")
    engine_kills: int = flag(8, "times an engine is killed")
    decoder_kills: int = flag(12, "times a decoding process is killed")
    share: float = flag(0.1, "of the S3 calls that fail")
    part: int = flag(4, "rows of a Parquet part")

    def kills(self, kind: str) -> int:
        """How often a process of this kind is to be killed."""
        return getattr(self, f"{kind}_kills")


def run(argv: list[str]) -> dict[str, Any]:
    """Return the suite's figures."""
    flags = parse_suite_flags(Flags, argv, "chaos", __doc__)
    if not 0 < flags.clips <= flags.requests:
        raise UsageError(f"--clips is {flags.clips}: between 1 and --requests of them are needed")
    watch = Stopwatch()
    with local_s3(BUCKET) as server, tempfile.TemporaryDirectory() as folder:
        manifest = _write_inputs(flags, Path(folder))
        command = _job_command(flags, manifest)
        DriverProcess([*command, "--output", UNDISTURBED], server.endpoint).wait()
        with faulty_proxy(server.endpoint, flags.share, flags.seed) as (proxy, calls):
            disturbance = Disturbance(flags, [*command, "--output", DISTURBED], proxy)
            killed = disturbance.run()
        figures = compare(_rows(UNDISTURBED), _rows(DISTURBED))
    kills = {f"{kind}_kills": killed[kind] for kind in KINDS}
    return figures | kills | {"calls": dict(calls), "seconds": round(watch.seconds, 1)}


def compare(
    undisturbed: Sequence[Mapping[str, Any]], disturbed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Differences between the rows of the two runs."""
    expected = {row["request_id"]: row for row in undisturbed}
    found = {row["request_id"]: row for row in disturbed}
    counts = Counter(row["request_id"] for row in disturbed)
    repeated = sum(count - 1 for count in counts.values())
    unknown = found.keys() - expected.keys()
    changed = 0
    wrongly_blamed = 0
    error_codes: Counter[str] = Counter()
    for request_id in expected.keys() & found.keys():
        row = found[request_id]
        if row["status"] != "error":
            changed += row["text"] != expected[request_id]["text"]
        else:
            wrongly_blamed += expected[request_id]["status"] != "error"
            error_codes[row["error_code"]] += 1
    return {
        "requests": len(expected),
        "lost": len(expected.keys() - found.keys()),
        "duplicated": repeated + len(unknown),
        "changed": changed,
        "wrongly_blamed": wrongly_blamed,
        "blamed_for": dict(error_codes),
        "texts": len({row["text"] for row in undisturbed}),
    }


def _rows(output: str) -> list[dict[str, Any]]:
    """All rows of an output.

    Raises:
        RunError: a part has no record in the ledger, so that a plain Parquet reader would see rows
            that `pipeline.read` does not.
    """
    table = read(output)
    parts = [uri for uri in storage.list_files(output) if "/part-" in uri]
    if len(parts) != _count_parts(output):
        raise RunError(f"{output} holds parts without a record")
    return table.select(COLUMNS).to_pylist()


def _count_parts(output: str) -> int:
    """Committed parts, by the ledger's names."""
    return len(storage.list_names(f"{output}/_ledger"))


def _write_inputs(flags: Flags, folder: Path) -> str:
    """Put the clips into the bucket; returns the path of a manifest of questions, those on one clip
    together."""
    rng = random.Random(flags.seed)
    prompts = []
    for number in range(flags.clips):
        scenes, file = world.make_clip(flags.seed * 1000 + number, 1)
        storage.put(f"s3://{BUCKET}/in/{number}.mp4", file)
        questions = [question for question, _ in world.questions(scenes)]
        prompts.append([*world.CAPTION_PROMPTS, *questions])
    lines = []
    for number in range(flags.requests):
        clip = number * flags.clips // flags.requests
        row = {
            "video": f"s3://{BUCKET}/in/{clip}.mp4",
            "question": rng.choice(prompts[clip]),
            "request_id": str(number),
        }
        lines.append(json.dumps(row))
    manifest = folder / "manifest.jsonl"
    manifest.write_text("\n".join(lines))
    return str(manifest)


def _job_command(flags: Flags, manifest: str) -> list[str]:
    """The job's command line without its output."""
    options = {
        "input": manifest,
        "model": flags.model,
        "rows-per-part": flags.part,
        "max-tokens": flags.max_tokens,
        "max-num-seqs": flags.max_num_seqs,
        "temperature": 0,
    }
    script = ROOT / "jobs" / "annotate_dataset.py"
    return [sys.executable, str(script), *(f"--{name}={value}" for name, value in options.items())]


# ---------------------------------------------------------------------------------------- processes


class DriverProcess:
    """A run in a process of its own, whose standard error is kept."""

    def __init__(self, command: Sequence[str], endpoint: str):
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"AWS_ENDPOINT_URL": endpoint},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.reader = threading.Thread(target=self._read_stderr, daemon=True)
        self.reader.start()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    @property
    def done(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            RunError: it failed.
        """
        code = self.process.wait()
        self.reader.join(10)
        if code not in FINISHED:
            last = " ".join(self.lines[-ERROR_LINES:])
            raise RunError(f"the run ended with exit code {code}: {last}")

    def kill(self) -> None:
        """Kill the driver and all processes that it started, as if its machine were lost."""
        started = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(ancestor: int) -> dict[int, bytes]:
    """Command lines, by process id, of the processes that `ancestor` started, directly or not."""
    parents = {}
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may have ended
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes()
            pid = int(folder.name)
            # pid (name) state parent …; the name may contain brackets
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
            commands[pid] = command

    def descends(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == ancestor:
                return True
        return False

    return {pid: command for pid, command in commands.items() if descends(pid)}


# -------------------------------------------------------------------------------------------- kills


class Disturbance:
    """Starts the same command again and again and kills processes, until a run ends by itself."""

    def __init__(self, flags: Flags, command: Sequence[str], endpoint: str):
        self.flags = flags
        self.command = command
        self.endpoint = endpoint
        self.killed: Counter[str] = Counter()
        self.rng = random.Random(flags.seed)
        self.runs = flags.driver_kills + 1

    def run(self) -> Counter[str]:
        """Kills by kind. The driver is killed each time after about an equal share of the rows,
        engines and decoders in between.

        Raises:
            RunError: the last run failed or did not end.
        """
        for number in range(1, self.runs + 1):
            driver = DriverProcess(self.command, self.endpoint)
            goal = _count_parts(DISTURBED) + self._parts_of_run()
            if number == self.runs:
                goal = math.inf  # the last run is left to end
            self._disturb(driver, goal, number)
            if driver.done:
                driver.wait()
                return self.killed
            driver.kill()
            self.killed["driver"] += 1
        raise RunError("the last run did not end")

    def _parts_of_run(self) -> float:
        """Parts that a run may commit before its driver is killed."""
        parts = self.flags.requests / self.flags.part
        return self.rng.uniform(0.5, 1.0) * parts / self.runs

    def _disturb(self, driver: DriverProcess, goal: float, number: int) -> None:
        """Kill engines and decoders until `goal` parts are committed or the run ends.

        Args:
            number: of the run, from 1.
        """
        first = _count_parts(DISTURBED)
        next_engine_kill = first  # parts that must be exceeded
        decoder_kills = 0
        while not driver.done and (parts := _count_parts(DISTURBED)) < goal:
            time.sleep(self.rng.uniform(*POLL_SECONDS))
            processes = descendants(driver.process.pid)
            engine_may_die = parts > next_engine_kill and self._is_due("engine", number)
            if engine_may_die and self._kill("engine", processes, ENGINE_COMMANDS):
                # A part has at least one row. Requests that were answered before the kill may wait
                # for theirs; the suspects come next.
                next_engine_kill = parts + self.flags.part + 2 * self.flags.max_num_seqs
            elif decoder_kills < MAX_DECODE_ATTEMPTS - 1 and self._is_due("decoder", number):
                # one more could be the last try at a single video
                decoder_kills += self._kill("decoder", processes, DECODER_COMMANDS)

    def _is_due(self, kind: str, number: int) -> bool:
        """Whether a kill of this kind is left for run `number`: they are spread over the runs."""
        return self.killed[kind] < self.flags.kills(kind) * number / self.runs

    def _kill(self, kind: str, processes: Mapping[int, bytes], commands: Sequence[bytes]) -> bool:
        """Kill one process whose command line contains one of `commands`, if there is one."""
        victims = sorted(
            pid for pid, line in processes.items() if any(command in line for command in commands)
        )
        if not victims:
            return False
        try:
            os.kill(self.rng.choice(victims), signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed[kind] += 1
        return True
