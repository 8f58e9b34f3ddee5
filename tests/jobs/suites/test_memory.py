"""The cases of the suite `memory` at scale 1, and the meter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jobs.suites.memory.cases import CaseRun, cases
from jobs.suites.memory.meter import tensors_peak
from jobs.suites.memory.suite import measure
from pipeline.plan.capacity import USABLE_MEMORY, Capacity
from pipeline.plan.settings import WaveConfig
from std_core.cost_model.device_specs import estimated_profile
from std_core.cost_model.memory import peak_memory
from std_core.cost_model.profile import Device
from std_core.kernels.cpu import sparse_linear as cpu_sparse_linear

CASES = {case.name: case for case in cases(1)}
# in bfloat16 exactly half of float32: left to the suite
HALVED = ("kv", "draft_kv", "teal", "pair", "round", "weights_tied")


@pytest.mark.parametrize("name", sorted(set(CASES) - {f"{name}_bf16" for name in HALVED}))
def test_the_planned_total_is_within_a_tenth_of_the_measured_peak(name: str) -> None:
    draft = CASES[name].draft
    if draft and draft.channels < 1 and not cpu_sparse_linear.supports(torch.zeros(32, 32)):
        pytest.skip("the plan counts a copy of the weights that only the C++ kernel needs")
    figures = measure(CASES[name], CaseRun.of(CASES[name]))
    assert figures.matches, figures


def test_the_meter_counts_temporaries() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(torch.zeros(1 << 20))
        torch.zeros(1 << 21)  # freed at once

    assert tensors_peak(work) == 12 << 20
    assert tensors_peak(lambda: kept.clear()) == 0  # freeing an earlier tensor does not count


def test_slots_that_the_plan_fits_into_a_device_fit_when_they_run() -> None:
    case = replace(CASES["draft_kv_text"], slots=3)
    memory = peak_memory(case.memory_breakdown()) / USABLE_MEMORY + 1
    device = Device("toy", kind="cpu", bandwidth=1e10, memory=memory, flops=1e12)
    profile = estimated_profile(device, case.size_of(case.model), case.name, case.dtype)
    slots = Capacity(profile, WaveConfig(64)).slots(case.longest, case.draft)
    assert slots == 3
    case_run = CaseRun.of(case)
    assert case_run.weights + tensors_peak(case_run.run) <= memory
