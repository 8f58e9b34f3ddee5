"""The kernels, whose files lie in `kernels/` beside this package.

The folder must not be importable as top-level `kernels`: that is the name of a Hugging Face
package, which transformers imports. In a checkout it is reached through this `__path__`; a wheel
has the files in this folder (`package-dir` in pyproject.toml)."""

from __future__ import annotations

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parent.parent.parent / "kernels"))
