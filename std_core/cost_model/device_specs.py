"""What is published of devices, and which one is at hand."""

from __future__ import annotations

import os
from pathlib import Path

from std_core.cost_model.account import ModelSize
from std_core.cost_model.profile import Accepted, CalibratedDraft, Cost, Device, Profile
from std_core.types import Draft

# bytes/s, bytes, FLOP/s of dense bf16 matrix products, as their makers give them; the first whose
# words are all in a device's name
PUBLISHED = {
    "A100-80G": (("A100", "80G"), 2.039e12, 80e9, 312e12),
    "A100-40G": (("A100", "40G"), 1.555e12, 40e9, 312e12),
    "H200": (("H200",), 4.8e12, 141e9, 989e12),
    "H100": (("H100",), 3.35e12, 80e9, 989e12),
    "L40S": (("L40S",), 0.864e12, 48e9, 362e12),
    "L4": (("L4",), 0.3e12, 24e9, 121e12),
    "RTX 4090": (("4090",), 1.008e12, 24e9, 165e12),
    "RTX A6000": (("A6000",), 0.768e12, 48e9, 155e12),
}
NAMED = ("A100-80G", "H100", "H200", "L4", "RTX 4090")  # for which a plan says what it would take

READS = 0.6  # of the bandwidth that a step reaches where nothing was measured
MULTIPLIES = 0.4  # of the matrix products' peak that prefill and vision reach
SPREAD = (0.65, 2.0)  # 0.9 and 0.3 in place of those
LAUNCH = 2e-5  # s that a layer's kernels take to start
# acceptances as they were reported or measured on other models: a ratio that is to be replaced by
# what a run sees
EXPECTED = {
    Draft("std"): 0.90,
    Draft("std", weights="int8"): 0.88,
    Draft("std", weights="int4"): 0.86,
    Draft("full", weights="int8"): 0.97,
    Draft("full", weights="int4"): 0.95,
    Draft("ngram"): 0.4,
}
SAMPLE = 100  # drafted tokens that an expected acceptance counts for
# of a machine that nobody has measured
CPU_BANDWIDTH = 2e10
CPU_FLOPS = 5e11
DISTANT = 2048  # tokens


def device_at_hand(device: str) -> Device:
    """`cpu` or a CUDA device; bandwidth and peak as published, where its name is known."""
    if device != "cpu":
        import torch  # a driver plans with devices that are elsewhere, and without it

        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        known = published_name(name)
        _, bandwidth, _, flops = PUBLISHED[known] if known else ((), 1e12, 0, 1e14)
        return Device(name, kind="cuda", bandwidth=bandwidth, memory=float(memory), flops=flops)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        f"{_processor()}, {os.cpu_count()} cores",
        kind="cpu",
        bandwidth=CPU_BANDWIDTH,
        memory=float(memory),
        flops=CPU_FLOPS,
    )


def published_name(name: str) -> str | None:
    """The entry of `PUBLISHED` that a device's name belongs to."""
    plain = name.upper().replace(" ", "")
    return next(
        (known for known, (words, *_) in PUBLISHED.items() if all(w in plain for w in words)), None
    )


def published(name: str) -> Device:
    """One of `PUBLISHED`."""
    _, bandwidth, memory, flops = PUBLISHED[name]
    return Device(name, kind="cuda", bandwidth=bandwidth, memory=memory, flops=flops)


def unmeasured(device: Device, account: ModelSize, model: str, dtype: str) -> Profile:
    """A profile without a measurement; on a CPU, of which too little is known beforehand, it leaves
    no choice."""
    work = 2 / (MULTIPLIES * device.flops)  # s of a multiplication and its sum
    text = account.layers * account.projections
    cost = Cost(
        1 / READS,
        LAUNCH * account.layers,
        text * work,
        2 * account.layers * account.heads * account.head_dim * work,
    )
    tried = [
        CalibratedDraft(
            draft,
            cost,
            (0.0, account.layers * account.heads * account.head_dim * work),
            _expected(rate),
        )
        for draft, rate in EXPECTED.items()
        if device.kind == "cuda"
    ]
    return Profile(
        device,
        model=model,
        dtype=dtype,
        account=account,
        full=cost,
        prefill=(0.0, text * work, account.layers * account.heads * account.head_dim * work),
        vision=account.tower * account.patches * work,
        drafts=tuple(_free(t) if t.draft.policy == "ngram" else t for t in tried),
        spread=SPREAD,
        measured=False,
    )


def _free(tried: CalibratedDraft) -> CalibratedDraft:
    return CalibratedDraft(tried.draft, Cost(0.0, 1e-5), (0.0, 0.0), tried.acceptance)


def _expected(rate: float) -> tuple[Accepted, ...]:
    return (Accepted(DISTANT, "caption", (round(SAMPLE * rate),), (round(SAMPLE * (1 - rate)),)),)


def _processor() -> str:
    """The processor's name, as Linux has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown CPU",
    )
