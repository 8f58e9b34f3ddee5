"""The suite `gpu` without a GPU: an error, or a rehearsal at a tiny size with no package beyond
those that it may import."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from jobs import benchmark
from pipeline.config import ROOT

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a GPU: run the suite itself"
)

# runs the suite as if packages that it must not need were not installed
WITHOUT_PACKAGES = """
import sys
from importlib.machinery import PathFinder
ABSENT = {
    "ray", "fsspec", "s3fs", "av", "decord", "accelerate", "torchvision", "rich", "PIL",
    "matplotlib", "pytest",
}

class WithoutAbsent(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutAbsent
sys.path.insert(0, "")
from jobs import benchmark
from pipeline.config import ROOT
code = benchmark._guarded(sys.argv[1:])
assert not ABSENT & set(sys.modules), ABSENT & set(sys.modules)
sys.exit(code)
"""


def test_without_a_gpu_the_suite_exits_with_2_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert benchmark._guarded(["--suite", "gpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "measures on a GPU and none was found" in captured.err
    assert captured.err.count("\n") == 1


def test_the_rehearsal_passes_all_checks_at_a_tiny_size() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_PACKAGES, "--suite", "gpu", "--device", "cpu"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["checks"]
    assert figures["checks_failed"] == [] and figures["checks_without_time"] == []
    (model,) = figures["decode"].values()
    for point in model.values():
        assert point["fraction_of_bound"] > 0 and set(point["drafts"]) == {"16-bit", "int4"}
        assert 0 < point["shares"]["decode_share"] < 1
