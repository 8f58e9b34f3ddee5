"""Sums over the rows of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Phases of an engine's work. Rows hold the seconds of each in `<phase>_s`.
PHASES = ("vision", "prefill", "decode")


@dataclass
class Tally:
    """Sums over the rows of a run.

    Attributes:
        succeeded: Rows with a text.
        failed: Error code → rows.
        tokens: Generated tokens.
        rounds: Rounds of drafting and verification.
        proposed: Drafted tokens.
        accepted: Drafted tokens that verification accepted.
        phase_seconds: Phase → seconds in the engine.
    """

    succeeded: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def answered(self) -> int:
        """Requests with a row, error rows included."""
        return self.succeeded + self.failed.total()

    @property
    def engine_seconds(self) -> float:
        return sum(self.phase_seconds.values())

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one output row. A missing figure counts as 0."""
        if row["status"] == "error":
            self.failed[row["error_code"]] += 1
        else:
            self.succeeded += 1
        self.tokens += row.get("num_generated_tokens") or 0
        self.rounds += row.get("rounds") or 0
        self.proposed += row.get("proposed") or 0
        self.accepted += row.get("accepted") or 0
        for phase in PHASES:
            self.phase_seconds[phase] += row.get(f"{phase}_s") or 0.0
