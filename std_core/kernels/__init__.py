"""The package `std_core.kernels`; its files are in the folder `kernels/` of the repository.

That folder must not be importable as top-level `kernels`: a Hugging Face package has this name, and
transformers imports it. In a checkout this `__path__` leads to the folder; a wheel has the files
here.
"""

from __future__ import annotations

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parent.parent.parent / "kernels"))
