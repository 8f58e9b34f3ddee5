"""The folder `kernels/` next to Hugging Face's package of the same name.

transformers imports the package `kernels` as soon as its metadata is on the path. A regular module
of ours under that name would break `import transformers`, so the folder is imported as
`std_core.kernels` only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CAPTION = """
import sys
sys.path.insert(0, {root!r})          # what `ray job submit --working-dir .` does
import transformers, kernels
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available(), "transformers does not find the stand-in"
assert kernels.__file__.startswith({site!r}), kernels.__file__
import torch
from std_core.engine.engine import Engine
from std_core.types import Draft, Request, Sampling
import std_core.kernels.attention as ours
assert ours.__file__.startswith({root!r}), ours.__file__
frames = torch.zeros(4, 84, 84, 3, dtype=torch.uint8)
request = Request("a", "Describe this video.", frames, sampling=Sampling(4))
(result,) = Engine.load({model!r}, max_num_seqs=1, threads=1).run([request], Draft())
assert result.error is None and result.token_ids
print("captioned")
"""

STAND_IN = """
class _Anything:
    def __init__(self, *args, **kwargs): pass
    def __class_getitem__(cls, item): return cls
    def __getattr__(self, name): return _Anything()
    def __call__(self, *args, **kwargs): return args[0] if args else self

CUDAProperties = Device = KernelizeFallback = ROCMProperties = _Anything
LayerRepository = LocalLayerRepository = _Anything
FuncRepository = LocalFuncRepository = _Anything
class Mode:
    TRAINING = INFERENCE = TORCH_COMPILE = 0
def register_kernel_mapping(*args, **kwargs): pass
def replace_kernel_forward_from_hub(*args, **kwargs): pass
def use_kernel_mapping(*args, **kwargs): pass
def get_kernel(*args, **kwargs): pass
def kernelize(model, *args, **kwargs): return model
def use_kernel_forward_from_hub(name): return lambda cls: cls
def use_kernelized_func(*functions): return lambda cls: cls
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A path with a distribution `kernels` of a version that transformers accepts."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    package = tmp_path / "kernels"
    info = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {KERNELS_MIN_VERSION!r}\n{STAND_IN}")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    )
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    (info / "top_level.txt").write_text("kernels\n")
    return tmp_path


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, in the repository root, with `path` on the import path."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_captions_with_hugging_faces_kernels_installed(stand_in: Path) -> None:
    code = CAPTION.format(root=str(ROOT), site=str(stand_in), model=str(ROOT / "conf/model/demo"))
    done = run_python(code, stand_in)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("captioned")


def test_the_folder_is_no_regular_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["std_core.pipeline", "std_core.jobs", "std_core.kernels.kernels"])
def test_std_core_reaches_nothing_else_of_the_repository(name: str) -> None:
    """A second import path to the same file would define its exceptions twice."""
    done = run_python(f"import std_core.kernels, {name}")
    assert done.returncode == 1
    assert f"ModuleNotFoundError: No module named '{name}'" in done.stderr
