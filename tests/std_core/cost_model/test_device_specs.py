from __future__ import annotations

from std_core.cost_model.device_specs import (
    PUBLISHED_DEVICES,
    QUOTED_DEVICES,
    estimated_profile,
    local_device,
    match_device_name,
    published_device,
)
from std_core.cost_model.model_size import ModelSize

SIZE = ModelSize(
    2,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=100,
    parameters=1000,
)


def test_devices_are_matched_by_the_names_their_drivers_report() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "A100-80G",
        "NVIDIA A100-PCIE-40GB": "A100-40G",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA L4": "L4",
        "NVIDIA L40S": "L40S",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "Tesla T4": None,
    }
    assert {name: match_device_name(name) for name in names} == names
    assert set(QUOTED_DEVICES) <= set(PUBLISHED_DEVICES)


def test_an_estimated_profile_has_more_drafts_on_a_gpu() -> None:
    gpu = estimated_profile(published_device("A100-80G"), SIZE, "m", "bfloat16")
    assert gpu.drafts and not gpu.measured
    assert gpu.spread.low < 1 < gpu.spread.high
    cpu = estimated_profile(local_device("cpu"), SIZE, "m", "bfloat16")
    assert 0 < len(cpu.drafts) < len(gpu.drafts) and cpu.device.memory > 0
