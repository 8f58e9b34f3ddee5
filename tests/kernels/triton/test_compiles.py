"""Every Triton kernel compiles to machine code for an A100 and an H100; this needs no GPU.

The interpreter accepts programs that the compiler rejects, and it checks neither registers nor
shared memory.
"""

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
from std_core.kernels.shared.segments import PrefixGroups, Segment
from std_core.kernels.triton import attention, attention_mass, gather, low_bit, sparse_linear

class AbsentGpu:
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

run = JITFunction.run
shared_memory = {}  # bytes by kernel

def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    shared_memory[self.__name__] = max(shared_memory.get(self.__name__, 0), kernel.metadata.shared)

JITFunction.run = compile_only
driver.set_active(AbsentGpu())

def zeros(*shape):
    return torch.zeros(*shape, dtype=getattr(torch, sys.argv[2]))

groups = PrefixGroups.from_lists([1, 1], [10, 333])
lengths = torch.tensor([3, 250])
for heads, kv_heads, width, dim, fixed in ((28, 4, 8, 128, False), (8, 4, 1, 80, True)):
    shape = (2, kv_heads, 512, dim)
    own, shared = (Segment(zeros(*shape), zeros(*shape)) for _ in range(2))
    attention.attend_rows(zeros(2, heads, width, dim), own, lengths, shared, groups, 0.1, fixed)
attention_mass.attention_mass(zeros(28, 40, 128), zeros(4, 300, 128), torch.zeros(28, 40), 0.1)
gather.gather_entries(zeros(4, 300, 128), torch.zeros(4, 50, dtype=torch.long))
sparse_linear.sparse_linear(zeros(8, 3584), zeros(512, 3584), None, 0.5)
for bits in (8, 4):
    low_bit.low_bit_linear(zeros(8, 3584), low_bit.pack_weight(zeros(512, 3584), bits), None)
print(shared_memory)
"""


@pytest.mark.parametrize(("arch", "dtype"), [(80, "bfloat16"), (90, "float32")])
def test_all_kernels_compile_within_the_shared_memory(arch: int, dtype: str) -> None:
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
    shared_memory = ast.literal_eval(done.stdout.splitlines()[-1])
    assert set(shared_memory) == {
        "_attend_split",
        "_merge_splits",
        "_mass",
        "_gather",
        "_active",
        "_product",
    }
    assert max(shared_memory.values()) <= 163 << 10  # bytes per block on an A100


def test_the_interpreter_is_on_without_a_gpu() -> None:
    assert torch.cuda.is_available() != (os.environ.get("TRITON_INTERPRET") == "1")
