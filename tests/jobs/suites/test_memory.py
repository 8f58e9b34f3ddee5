from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jobs.suites.memory.cases import Subject, cases
from jobs.suites.memory.meter import tensors_peak
from jobs.suites.memory.suite import OFF, figures
from pipeline.plan.capacity import USABLE_MEMORY, Capacity
from pipeline.plan.settings import WaveConfig
from std_core.cost_model.device_specs import estimated_profile
from std_core.cost_model.memory import peak_memory
from std_core.cost_model.profile import Device

CASES = {case.name: case for case in cases(1)}
SAME = (
    "kv",
    "draft_kv",
    "teal",
    "pair",
    "round",
    "weights_tied",
)  # in bfloat16 half of everything: of the suite alone


@pytest.mark.parametrize("name", sorted(set(CASES) - {f"{name}_bf16" for name in SAME}))
def test_a_plans_total_is_within_a_tenth_of_the_measured_peak(name: str) -> None:
    found = figures(CASES[name], Subject.of(CASES[name]))
    assert abs(found["ratio"] - 1) <= OFF, found


def test_the_meter_counts_what_operations_take_inside() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(torch.zeros(1 << 20))
        torch.zeros(1 << 21)  # gone at once

    assert tensors_peak(work) == 12 << 20
    assert tensors_peak(lambda: kept.clear()) == 0  # what was there before is no change


def test_slots_that_just_fit_a_device_do_fit_it() -> None:
    case = replace(CASES["draft_kv_text"], slots=3)
    memory = peak_memory(case.memory_breakdown()) / USABLE_MEMORY + 1
    device = Device("toy", kind="cpu", bandwidth=1e10, memory=memory, flops=1e12)
    profile = estimated_profile(device, case.model_size(case.sizes), case.name, case.dtype)
    slots = Capacity(profile, WaveConfig(64)).slots(case.load, case.draft)
    assert slots == 3
    subject = Subject.of(case)
    assert subject.weights + tensors_peak(subject.run) <= memory
