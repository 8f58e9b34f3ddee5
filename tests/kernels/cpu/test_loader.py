"""The signatures of the C++ kernels, on machines that cannot run them too."""

from __future__ import annotations

import ctypes
import re

import pytest

from std_core.kernels.cpu import loader


def declared_types(parameters: str) -> list[type]:
    """C types of a parameter list."""
    types: list[type] = []
    for parameter in parameters.split(","):
        if "*" in parameter:
            types.append(ctypes.c_void_p)
        else:
            names = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
            types.append(names[parameter.split()[0]])
    return types


@pytest.mark.parametrize("name", loader.SIGNATURES)
def test_signatures_are_those_of_the_sources(name: str) -> None:
    source = "".join((loader.FOLDER / file).read_text() for file in loader.SOURCES)
    found = re.search(rf'extern "C" void {name}_(?:##NAME|float)\((.*?)\) {{', source, re.DOTALL)
    assert found is not None
    parameters = found[1].replace("\\", " ")
    assert declared_types(parameters) == list(loader.SIGNATURES[name].values())
