"""Figures of a report over time: rates, and how busy the engines were."""

from __future__ import annotations

import numpy as np

from pipeline.report.data import ReportData
from pipeline.report.tally import PHASES

MAX_BINS = 60


def bin_edges(data: ReportData) -> np.ndarray:
    """Edges of equal time bins in seconds since the start, (bins + 1,).

    No bin is shorter than a second, unless the whole job is.
    """
    bins = int(np.clip(data.total_seconds, 1, MAX_BINS))
    return np.linspace(0.0, data.total_seconds, bins + 1)


def rate_per_second(data: ReportData, weights: np.ndarray) -> np.ndarray:
    """Sum of the rows' weights per second, (bins,); a row belongs to the bin of its creation.

    Args:
        weights: (rows,).
    """
    edges = bin_edges(data)
    sums, _ = np.histogram(data.row_seconds, edges, weights=weights)
    return sums / np.diff(edges)


def utilization(data: ReportData) -> dict[str, np.ndarray]:
    """Phase → share of the engines' time per bin, (bins,).

    A row tells how long the engine worked on it, but not when. The work is assigned to the latest
    bins possible: to the bin of the row's creation, and as far as that bin's capacity (engines ×
    seconds) is exceeded, to the bins before.
    """
    edges = bin_edges(data)
    capacity = np.diff(edges) * data.num_engines
    work = np.stack(
        [
            np.histogram(data.row_seconds, edges, weights=data.phase_seconds[phase])[0]
            for phase in PHASES
        ]
    )
    for bin_index in range(len(capacity) - 1, 0, -1):
        total = work[:, bin_index].sum()
        if total > capacity[bin_index]:
            excess = work[:, bin_index] * (1 - capacity[bin_index] / total)
            work[:, bin_index] -= excess
            work[:, bin_index - 1] += excess
    return dict(zip(PHASES, work / capacity, strict=True))
