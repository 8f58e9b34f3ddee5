"""Sizes that the kernels share with the rest of the project. Importable without PyTorch."""

from __future__ import annotations

# Cache entries per split of the attention kernels. With `fixed`, splits of this size are reduced
# separately and then merged. Caches grow by whole splits. PyTorch's fused CPU attention has the
# same block size built in.
SPLIT_SIZE = 512
# Input channels that share a scale and an offset in 4-bit weights.
GROUP_SIZE = 32
