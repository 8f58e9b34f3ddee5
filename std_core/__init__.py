"""The decoding method: models, KV caches, selection of what a draft sees, acceptance, the decode loop, the engine.

Knows nothing of Ray, files, URLs, Parquet or video codecs.
"""

from pathlib import Path

# `kernels/` lies beside this package and must not be importable as top-level `kernels`, which is Hugging Face's; in a
# checkout it is reached as `std_core.kernels` through this line, in a wheel through pyproject's package-dir.
__path__.append(str(Path(__file__).resolve().parent.parent))
