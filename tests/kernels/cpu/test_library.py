"""The cache of the compiled library, with a library that every CPU runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from std_core.kernels.cpu import library as library_module
from std_core.kernels.cpu import loader
from std_core.kernels.cpu.library import (
    BUILD_PREFIX,
    Library,
    LibraryUnavailable,
    cache_folders,
    find_or_build,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

SELF_TEST = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
if library.answer() != 42:
    raise SystemExit("the answer is wrong")
"""
# a library that is large enough to be truncated within its code and data
SOURCE = """
static const int table[100000] = {1};
extern "C" int answer() { return table[99999] + 42; }
"""


@pytest.fixture
def library(tmp_path: Path) -> Library:
    (tmp_path / "answer.cpp").write_text(SOURCE)
    (tmp_path / "self_test.py").write_text(SELF_TEST)
    return Library(
        sources=(tmp_path / "answer.cpp",),
        headers=(),
        flags=("-fPIC",),
        self_test=tmp_path / "self_test.py",
    )


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty cache and temporary folders; returns the cache folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "std-caption"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each call of the compiler."""
    log = tmp_path / "calls"
    log.touch()
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec g++ "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    return log


def compilations(calls: Path) -> int:
    return sum(" -c " in line for line in calls.read_text().splitlines())


def answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).answer()


def test_a_library_is_built_once(library: Library, folders: Path, calls: Path) -> None:
    path = find_or_build(library)
    assert answer(path) == 42
    assert find_or_build(library) == path
    assert compilations(calls) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert folders.stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in folders.iterdir()) == sorted([path.name, "lock"])


def test_other_sources_and_another_compiler_are_another_library(
    library: Library, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find_or_build(library)
    library.sources[0].write_text(SOURCE + "// changed")
    second = find_or_build(library)
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -m64")
    third = find_or_build(library)
    assert len({first, second, third}) == 3
    assert compilations(calls) == 3


# -------------------------------------------------------------------- broken libraries


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 4)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def other_content(path: Path) -> None:
    path.write_bytes(b"#!/bin/sh" + bytes(100_000))


@pytest.mark.parametrize("damage", [truncate, empty, other_content])
@pytest.mark.parametrize("checksum_fits", [False, True])
def test_a_broken_library_is_built_again(
    library: Library, calls: Path, damage: object, checksum_fits: bool
) -> None:
    """Also one whose checksum is right: a child process finds that it does not work."""
    path = find_or_build(library)
    damage(path)  # type: ignore[operator]
    if checksum_fits:
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        path = path.rename(path.with_name(f"{path.stem.rpartition('-')[0]}-{checksum}.so"))
    rebuilt = find_or_build(library)
    assert answer(rebuilt) == 42
    assert compilations(calls) == 2
    assert rebuilt == path or not path.exists()


def test_a_library_that_ends_its_process_is_not_loaded(library: Library, tmp_path: Path) -> None:
    dying = "import os, signal\nos.kill(os.getpid(), signal.SIGBUS)"
    library.self_test.write_text(dying)
    with pytest.raises(LibraryUnavailable, match="its test died of SIGBUS"):
        find_or_build(library)
    assert not list(tmp_path.rglob("*.so"))


def test_what_a_killed_process_left_behind_is_removed(library: Library, folders: Path) -> None:
    left = folders / f"{BUILD_PREFIX}killed"
    left.mkdir(parents=True)
    folders.chmod(0o700)
    (left / "answer.o").write_text("half")
    find_or_build(library)
    assert not left.exists()


# -------------------------------------------------------------------- who may write


def test_a_library_that_everyone_can_write_is_built_again(library: Library, calls: Path) -> None:
    path = find_or_build(library)
    path.chmod(0o666)
    assert find_or_build(library).stat().st_mode & 0o777 == 0o600
    assert compilations(calls) == 2


def test_a_link_is_not_loaded(library: Library, tmp_path: Path, calls: Path) -> None:
    path = find_or_build(library)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert not find_or_build(library).is_symlink()
    assert compilations(calls) == 2


def test_a_folder_that_everyone_can_write_is_not_used(library: Library, folders: Path) -> None:
    folders.mkdir(parents=True)
    folders.chmod(0o777)
    path = find_or_build(library)
    assert path.parent == cache_folders()[1]
    assert not list(folders.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_files_and_folders_of_other_users_are_not_used(library: Library, calls: Path) -> None:
    path = find_or_build(library)
    os.chown(path, 12345, 12345)
    assert find_or_build(library).stat().st_uid == 0
    os.chown(path.parent, 12345, 12345)
    assert find_or_build(library).parent == cache_folders()[1]
    assert compilations(calls) == 3


def test_an_owner_other_than_root_and_this_user_is_distrusted() -> None:
    fields = [0o100600, 0, 0, 1, 12345, 0, 0, 0, 0, 0]
    assert library_module._distrust(os.stat_result(fields)) == "it belongs to user 12345"
    for owner in (0, os.getuid()):
        fields[4] = owner
        assert library_module._distrust(os.stat_result(fields)) is None


# -------------------------------------------------------------------- environments


def test_without_a_home_the_library_lies_in_a_private_temporary_folder(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry
    folder = find_or_build(library).parent
    assert folder == tmp_path / "temporary" / f"std-caption-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_cache_folder_that_cannot_be_made_is_skipped(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find_or_build(library).parent == cache_folders()[1]


def test_the_compiler_may_have_flags(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -m64 '-DUNUSED=a b'")
    assert answer(find_or_build(library)) == 42


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "g++ 'unclosed", "false", " "])
def test_without_a_compiler_a_library_of_an_earlier_run_is_used(
    library: Library, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(LibraryUnavailable, match=r"there is no C\+\+ compiler \(CXX is"):
        find_or_build(library)
    monkeypatch.delenv("CXX")
    path = find_or_build(library)
    monkeypatch.setenv("CXX", compiler)
    assert find_or_build(library) == path
    truncate(path)
    with pytest.raises(LibraryUnavailable, match="it holds no library"):
        find_or_build(library)


def test_the_reason_is_the_compilers_first_error(library: Library, calls: Path) -> None:
    library.sources[0].write_text("int answer() { return forty_two; }")
    with pytest.raises(LibraryUnavailable, match=r"compiler failed: .*forty_two"):
        find_or_build(library)
    assert compilations(calls) == 1  # another folder would not help


def test_two_cold_processes_build_once(library: Library, calls: Path) -> None:
    code = f"""
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("library", {library_module.__file__!r})
module = importlib.util.module_from_spec(spec)
sys.modules["library"] = module
spec.loader.exec_module(module)
source, test = Path({str(library.sources[0])!r}), Path({str(library.self_test)!r})
print(module.find_or_build(module.Library((source,), (), ("-fPIC",), test)))
"""
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, env=environment
        )
        for _ in range(3)
    ]
    paths = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(paths) == 1
    assert compilations(calls) == 1


# -------------------------------------------------------------------- the kernels' own test

PLAIN_KERNELS = """
#include <cmath>
extern "C" void rms_norm_float(
    const float* x, const float* weight, float* y, int rows, int width, float eps
) {
    for (int row = 0; row < rows; ++row, x += width, y += width) {
        double squares = 0;
        for (int i = 0; i < width; ++i) squares += x[i] * x[i];
        for (int i = 0; i < width; ++i) y[i] = x[i] / std::sqrt(squares / width + eps) * weight[i];
    }
}
extern "C" void linear_float(
    const float* x, const float* weight, const float* up, const float* bias, float* y,
    int rows, int in, int out, int threads
) {
    for (int row = 0; row < rows; ++row)
        for (int o = 0; o < out; ++o) {
            float sum = bias[o];
            for (int i = 0; i < in; ++i) sum += x[row * in + i] * weight[o * in + i];
            y[row * out + o] = sum;
        }
}
"""


@pytest.mark.parametrize("fault", ["", "squares / width", "bias[o]"])
def test_the_self_test_tells_right_kernels_from_wrong_ones(tmp_path: Path, fault: str) -> None:
    """With plain C++ in place of the kernels, which need AVX-512."""
    source = tmp_path / "kernels.cpp"
    source.write_text(PLAIN_KERNELS.replace(fault, "1", 1) if fault else PLAIN_KERNELS)
    library = Library(
        (source,), (), ("-fPIC",), loader.FOLDER / "self_test.py", loader._openmp_runtime()
    )
    if not fault:
        assert find_or_build(library).exists()
        return
    with pytest.raises(LibraryUnavailable, match=r"its test failed: ValueError: \w+ gave"):
        find_or_build(library)


def test_the_openmp_runtime_is_the_one_that_pytorch_has_loaded() -> None:
    runtime = loader._openmp_runtime()
    assert torch.backends.openmp.is_available() == bool(runtime)
    assert all(Path(file).exists() for file in runtime)


def test_a_library_that_is_missing_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert loader._kernels.__wrapped__() == {}
    (record,) = caplog.records
    assert "PyTorch's operations are used instead" in record.getMessage()
    assert len(record.getMessage().splitlines()) == 1
