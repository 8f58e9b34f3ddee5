"""Resident memory of this process, from Linux's /proc."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): resets the peak resident set size


def resident_bytes() -> int:
    """Resident set size now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The largest resident set size since the process started or since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Start a new peak at the present resident set size."""
    CLEAR_REFS.write_text(RESET_PEAK)


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    kibibytes = int(line.split()[1])
    return kibibytes * 1024
