"""Published figures of devices, the local device, and profiles estimated without a measurement."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from std_core.cost_model.acceptance import AcceptanceCounts
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import (
    CalibratedDraft,
    Device,
    DraftSetupLatency,
    LatencyModel,
    PredictionSpread,
    PrefillLatency,
    Profile,
)
from std_core.types import Draft


class DeviceSpec(NamedTuple):
    """A GPU as its maker specifies it.

    Args:
        words: all of them occur in the name that the driver reports.
        bandwidth: bytes/s.
        memory: bytes.
        flops: of dense bf16 matrix products, FLOP/s.
    """

    words: tuple[str, ...]
    bandwidth: float
    memory: float
    flops: float


# In this order: the first entry that matches a device's name counts (H200 before H100, L40S before
# L4).
PUBLISHED_DEVICES = {
    "A100-80G": DeviceSpec(("A100", "80G"), 2.039e12, 80e9, 312e12),
    "A100-40G": DeviceSpec(("A100", "40G"), 1.555e12, 40e9, 312e12),
    "H200": DeviceSpec(("H200",), 4.8e12, 141e9, 989e12),
    "H100": DeviceSpec(("H100",), 3.35e12, 80e9, 989e12),
    "L40S": DeviceSpec(("L40S",), 0.864e12, 48e9, 362e12),
    "L4": DeviceSpec(("L4",), 0.3e12, 24e9, 121e12),
    "RTX 4090": DeviceSpec(("4090",), 1.008e12, 24e9, 165e12),
    "RTX A6000": DeviceSpec(("A6000",), 0.768e12, 48e9, 155e12),
}
UNKNOWN_GPU = DeviceSpec((), bandwidth=1e12, memory=0, flops=1e14)
# Devices for which a plan also states its time.
QUOTED_DEVICES = ("A100-80G", "H100", "H200", "L4", "RTX 4090")
# Assumed of a CPU that was not measured.
CPU_BANDWIDTH = 2e10
CPU_FLOPS = 5e11

# Efficiencies assumed where nothing was measured: share of the bandwidth that a decode step
# reaches, and share of the peak that the matrix products of prefill and vision reach.
BANDWIDTH_EFFICIENCY = 0.6
COMPUTE_EFFICIENCY = 0.4
# Bounds of a predicted time: bandwidth efficiencies of 0.9 and 0.3 in place of 0.6.
ESTIMATE_SPREAD = PredictionSpread(0.65, 2.0)
# Seconds that launching one layer's kernels takes.
LAUNCH = 2e-5
# Seconds of a prompt lookup per step.
LOOKUP = 1e-5
# Acceptance rates reported or measured on other models. They weigh as much as `ESTIMATE_TOKENS`
# drafted tokens at `ESTIMATE_CONTEXT` tokens of context, and a run's own counts replace them.
ESTIMATED_ACCEPTANCE = {
    Draft("std"): 0.90,
    Draft("std", weights="int8"): 0.88,
    Draft("std", weights="int4"): 0.86,
    Draft("full", weights="int8"): 0.97,
    Draft("full", weights="int4"): 0.95,
    Draft("ngram"): 0.4,
}
# Of these, the drafts that a run on a CPU may try.
CPU_DRAFTS = (Draft("std"), Draft("ngram"))
ESTIMATE_TOKENS = 100
ESTIMATE_CONTEXT = 2048


def local_device(device: str) -> Device:
    """Describe this machine's `cpu` or a CUDA device, with published bandwidth and peak if known.

    Args:
        device: as torch names it.
    """
    if device == "cpu":
        return _local_cpu()
    import torch  # a driver that plans for remote devices runs without torch

    name = torch.cuda.get_device_name(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    known = match_device_name(name)
    spec = PUBLISHED_DEVICES[known] if known else UNKNOWN_GPU
    return Device(
        name,
        kind="cuda",
        bandwidth=spec.bandwidth,
        memory=float(memory),
        flops=spec.flops,
    )


def _local_cpu() -> Device:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        f"{_cpu_name()}, {os.cpu_count()} cores",
        kind="cpu",
        bandwidth=CPU_BANDWIDTH,
        memory=float(memory),
        flops=CPU_FLOPS,
    )


def match_device_name(name: str) -> str | None:
    """Return the key in `PUBLISHED_DEVICES` of a device by the name that its driver reports."""
    normalized = name.upper().replace(" ", "")
    for known, spec in PUBLISHED_DEVICES.items():
        if all(word in normalized for word in spec.words):
            return known
    return None


def published_device(name: str) -> Device:
    """Return a device of `PUBLISHED_DEVICES`."""
    spec = PUBLISHED_DEVICES[name]
    return Device(name, kind="cuda", bandwidth=spec.bandwidth, memory=spec.memory, flops=spec.flops)


def estimated_profile(device: Device, model_size: ModelSize, model: str, dtype: str) -> Profile:
    """Make a profile from published figures.

    Of a CPU too little is known to choose among drafts: the planner uses one only after a wave has
    shown that it pays.

    Args:
        model: the checkpoint's revision.
    """
    multiply_add_s = 2 / (COMPUTE_EFFICIENCY * device.flops)
    # Multiply-adds per token in the projections, and per pair of tokens in QK and PV.
    projections = model_size.layers * model_size.projections
    attention = 2 * model_size.layers * model_size.heads * model_size.head_dim
    causal_attention = attention / 2
    latency = LatencyModel(
        scale=1 / BANDWIDTH_EFFICIENCY,
        constant=LAUNCH * model_size.layers,
        per_token=projections * multiply_add_s,
        per_entry=attention * multiply_add_s,
    )
    setup = DraftSetupLatency(per_token=causal_attention * multiply_add_s)
    drafts = tuple(
        _estimated_draft(draft, rate, latency, setup)
        for draft, rate in ESTIMATED_ACCEPTANCE.items()
        if device.kind == "cuda" or draft in CPU_DRAFTS
    )
    return Profile(
        device,
        model=model,
        dtype=dtype,
        model_size=model_size,
        latency=latency,
        prefill=PrefillLatency(
            constant=0.0,
            per_token=projections * multiply_add_s,
            per_token_squared=causal_attention * multiply_add_s,
        ),
        vision_s_per_token=model_size.tower * model_size.patches * multiply_add_s,
        drafts=drafts,
        spread=ESTIMATE_SPREAD,
        measured=False,
    )


def _estimated_draft(
    draft: Draft, rate: float, latency: LatencyModel, setup: DraftSetupLatency
) -> CalibratedDraft:
    counts = AcceptanceCounts(
        context=ESTIMATE_CONTEXT,
        kind="caption",
        accepted=(round(ESTIMATE_TOKENS * rate),),
        rejected=(round(ESTIMATE_TOKENS * (1 - rate)),),
    )
    if draft.policy == "ngram":
        lookup = LatencyModel(scale=0.0, constant=LOOKUP)
        return CalibratedDraft(draft, lookup, DraftSetupLatency(), (counts,))
    return CalibratedDraft(draft, latency, setup, (counts,))


def _cpu_name() -> str:
    """Return the processor's model name on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"
