"""Arguments and results of the attention operations, shared by their PyTorch, C++ and Triton
versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Segment(NamedTuple):
    """Cached keys and values, both (rows or prefixes, KV heads, capacity, head size).

    An operation states separately how many entries of each row are valid.
    """

    key: torch.Tensor
    value: torch.Tensor


class Attention(NamedTuple):
    """Attention output with the statistics needed to merge it with another segment's."""

    output: torch.Tensor  # (rows, query heads, T, head size)
    logsumexp: torch.Tensor  # (rows, query heads, T), of the scaled scores


@dataclass(frozen=True)
class PrefixGroups:
    """Assignment of B rows to P shared prefixes; at most R rows share one.

    Slots of `members` that no row occupies hold row 0. Results at such slots are discarded.
    """

    prefix_lengths: torch.Tensor  # (P,) entries of each prefix
    members: torch.Tensor  # (P, R) row indices
    prefix_of_row: torch.Tensor  # (B,) prefix index, -1 for none
    index_in_group: torch.Tensor  # (B,) column of the row in `members`

    def to(self, device: str | torch.device) -> PrefixGroups:
        return PrefixGroups(
            prefix_lengths=self.prefix_lengths.to(device),
            members=self.members.to(device),
            prefix_of_row=self.prefix_of_row.to(device),
            index_in_group=self.index_in_group.to(device),
        )

    @classmethod
    def from_lists(
        cls,
        prefix_of_row: list[int],
        prefix_lengths: list[int],
        device: str | torch.device = "cpu",
        fixed: bool = False,
    ) -> PrefixGroups:
        """Build the tensors from values known on the host.

        Args:
            prefix_of_row: of each row, the index of its prefix, -1 for none.
            prefix_lengths: of each prefix, its number of entries.
            fixed: keep P at the number of prefixes, in use or not, so that all batches without a
                shared prefix have the same shape. Otherwise P ends at the last prefix in use.
        """
        group_sizes = [0] * len(prefix_lengths)
        index_in_group = [0] * len(prefix_of_row)
        for row, prefix in enumerate(prefix_of_row):
            if prefix >= 0:
                index_in_group[row] = group_sizes[prefix]
                group_sizes[prefix] += 1
        prefixes = len(prefix_lengths) if fixed else max(prefix_of_row) + 1
        largest_group = max(group_sizes, default=0)
        members = torch.zeros(prefixes, largest_group or int(fixed), dtype=torch.long)
        for row, prefix in enumerate(prefix_of_row):
            if prefix >= 0:
                members[prefix, index_in_group[row]] = row
        return cls(
            prefix_lengths=torch.tensor(prefix_lengths[:prefixes]),
            members=members,
            prefix_of_row=torch.tensor(prefix_of_row),
            index_in_group=torch.tensor(index_in_group),
        ).to(device)
