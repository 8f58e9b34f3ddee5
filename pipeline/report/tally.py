"""Sums over the rows of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("vision", "prefill", "decode")


@dataclass
class Tally:
    """Sums over the rows of a run."""

    done: int = 0  # rows with a text
    failed: Counter[str] = field(default_factory=Counter)  # by error code
    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    seconds: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # in the engine, by phase

    @property
    def answered(self) -> int:
        return self.done + self.failed.total()

    @property
    def engine_s(self) -> float:
        return sum(self.seconds.values())

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts one output row; what it lacks is 0."""
        if row["status"] == "error":
            self.failed[row["error_code"]] += 1
        else:
            self.done += 1
        self.tokens += row.get("num_generated_tokens") or 0
        for name in ("rounds", "proposed", "accepted"):
            setattr(self, name, getattr(self, name) + (row.get(name) or 0))
        for phase in PHASES:
            self.seconds[phase] += row.get(f"{phase}_s") or 0.0
