"""Every Triton kernel compiles to machine code of an A100 and an H100, which takes no GPU: the
interpreter accepts more than the compiler does, and neither counts registers nor shared memory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]

COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from std_core.kernels import gpu_attention, gpu_gather, gpu_low_bit, gpu_mass, gpu_sparse_linear
from std_core.kernels.attention import Groups

class Absent:
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

run, made = JITFunction.run, {}

def compiled(self, *args, grid, warmup, **kwargs):
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    made[self.__name__] = max(made.get(self.__name__, 0), kernel.metadata.shared)

JITFunction.run = compiled
driver.set_active(Absent())
def numbers(*shape): return torch.zeros(*shape, dtype=getattr(torch, sys.argv[2]))
groups, lengths = Groups.of([1, 1], [10, 333]), torch.tensor([3, 250])
for heads, kv_heads, width, dim, fixed in ((28, 4, 8, 128, False), (8, 4, 1, 80, True)):
    own, shared = (2 * (numbers(2, kv_heads, 512, dim),) for _ in range(2))
    gpu_attention.attend_rows(numbers(2, heads, width, dim), own, lengths, shared, groups, 0.1, fixed)
gpu_mass.attention_mass(numbers(28, 40, 128), numbers(4, 300, 128), torch.zeros(28, 40), 0.1)
gpu_gather.gather_entries(numbers(4, 300, 128), torch.zeros(4, 50, dtype=torch.long))
gpu_sparse_linear.sparse_linear(numbers(8, 3584), numbers(512, 3584), None, 0.5)
for bits in (8, 4):
    gpu_low_bit.low_bit_linear(numbers(8, 3584), gpu_low_bit.pack(numbers(512, 3584), bits), None)
print(made)
"""


@pytest.mark.parametrize(("arch", "dtype"), [(80, "bfloat16"), (90, "float32")])
def test_kernels_compile(arch: int, dtype: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": str(ROOT)
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(arch), dtype],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shared = ast.literal_eval(done.stdout.splitlines()[-1])
    assert set(shared) == {
        "_attend_split",
        "_merge_splits",
        "_mass",
        "_gather",
        "_active",
        "_product",
    }
    assert max(shared.values()) <= 163 << 10  # an A100's


def test_the_interpreter_is_on_without_a_gpu() -> None:
    assert torch.cuda.is_available() != (os.environ.get("TRITON_INTERPRET") == "1")
