"""The suite `gpu` without a GPU: refused, or rehearsed at a tiny size, with nothing but what it may
import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs import benchmark

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, and the suite itself to run on it"
)

# as if what the suite must do without were not installed
WITHOUT = """
import sys
from importlib.machinery import PathFinder
ABSENT = {"ray", "fsspec", "s3fs", "av", "decord", "accelerate", "torchvision", "rich", "PIL", "matplotlib", "pytest"}

class Fewer(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Fewer
sys.path.insert(0, "")
import benchmark
code = benchmark._guarded(sys.argv[1:])
assert not ABSENT & set(sys.modules), ABSENT & set(sys.modules)
sys.exit(code)
"""


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert benchmark._guarded(["--suite", "gpu"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "measures on a GPU and none was found" in said.err and said.err.count("\n") == 1


def test_its_whole_path_runs_at_a_tiny_size() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT, "--suite", "gpu", "--device", "cpu"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["checks"] and figures["checks_failed"] == [] == figures["checks_without_time"]
    (model,) = figures["decode"].values()
    for point in model.values():
        assert point["fraction_of_bound"] > 0 and set(point["drafts"]) == {"16-bit", "int4"}
        assert 0 < point["shares"]["decode_share"] < 1
