"""Build llama-cpp-python from its source package, which holds llama.cpp and its converters too, in FINETUNE_LLAMA_CPP.

In that folder, `source` has llama.cpp and `packages` what Python imports. What is missing is downloaded and built.
Without the variable, `download` uses a folder in the user's cache.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from finetune.runs.file_lock import FileLock, file_lock

VERSION = "0.3.36"
OTHERS = ["diskcache==5.6.3", "sentencepiece==0.2.3"]
SERVER = [
    *("fastapi==0.121.3", "starlette==0.50.0", "uvicorn==0.54.0", "sse-starlette==3.7.0", "starlette-context==0.3.6"),
    *("pydantic-settings==2.16.3", "python-dotenv==1.2.4", "annotated-doc==0.0.7"),
]
PROGRAMS = ("llama-quantize", "llama-imatrix")
_SETTINGS = (
    *("LLAVA_BUILD=OFF", "LLAMA_OPENSSL=OFF", "GGML_OPENMP=OFF"),
    *("GGML_NATIVE=OFF", "GGML_AVX2=ON", "GGML_FMA=ON", "GGML_F16C=ON"),
)
_ON_OTHER_CPUS = ("LLAVA_BUILD=OFF", "LLAMA_OPENSSL=OFF", "GGML_OPENMP=OFF")


needs_llama_cpp = pytest.mark.skipif(
    "FINETUNE_LLAMA_CPP" not in os.environ,
    reason="llama.cpp: not installed; FINETUNE_LLAMA_CPP names a folder, where the first test builds it in 5 minutes",
)


class LlamaCpp(NamedTuple):
    """Where a built llama.cpp lies."""

    source: Path
    packages: Path


def download() -> LlamaCpp:
    """Return llama.cpp as it was downloaded before, or download it (77 MB). `packages` is empty until `build`."""
    found = _place()
    with _lock(found):
        _download(found)
    return found


def build() -> LlamaCpp:
    """Return llama.cpp as it was built before, or download and build it: about 10 minutes on 2 idle cores."""
    built = _place()
    complete = built.packages.with_name("complete")
    with _lock(built):
        _download(built)
        if not complete.exists():
            shutil.rmtree(built.packages, ignore_errors=True)
            source, cmake = str(built.packages.with_name("source")), " ".join(_settings())
            _pip("install", "--no-deps", f"--target={built.packages}", source, *OTHERS, *SERVER, cmake=cmake)
            complete.touch()
        _build_programs(built.source)
    return built


def _place() -> LlamaCpp:
    home = pwd.getpwuid(os.getuid()).pw_dir  # HOME is a test's own
    place = os.environ.get("FINETUNE_LLAMA_CPP") or Path(home, ".cache", "finetune-tests", f"llama-cpp-{VERSION}")
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    return LlamaCpp(folder / "source" / "vendor" / "llama.cpp", folder / "packages")


def _lock(built: LlamaCpp) -> FileLock:
    folder = built.packages.parent
    return file_lock(folder.with_name(f"{folder.name}.tests.lock"), waiting_for="another worker of pytest")


def _download(built: LlamaCpp) -> None:
    folder = built.packages.parent
    if (folder / "source").exists():
        return
    _pip("download", "--no-deps", "--no-binary=llama-cpp-python", f"llama-cpp-python=={VERSION}", "-d", str(folder))
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    next(path for path in folder.glob("llama_cpp_python-*") if path.is_dir()).rename(folder / "source")


def _build_programs(source: Path) -> None:
    """Build llama-quantize and llama-imatrix where `finetune export` looks for them."""
    if all((source / "build" / "bin" / name).exists() for name in PROGRAMS):
        return
    _run("cmake", "-S", str(source), "-B", str(source / "build"), "-DCMAKE_BUILD_TYPE=Release", *_settings())
    _run("cmake", "--build", str(source / "build"), "-j2", "--target", *PROGRAMS)


def _settings() -> list[str]:
    has_avx = "avx2" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
    return [f"-D{setting}" for setting in (_SETTINGS if has_avx else _ON_OTHER_CPUS)]


def add_to_path(built: LlamaCpp) -> None:
    """Let this process import what was built, after what it has already, and the converters that it starts."""
    if str(built.packages) not in sys.path:
        sys.path.append(str(built.packages))
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(built.packages)])
    assert find_spec("llama_cpp") is not None


def _pip(*words: str, cmake: str = "") -> None:
    _run(sys.executable, "-m", "pip", *words, cmake=cmake)


def _run(*command: str, cmake: str = "") -> None:
    environment = {**os.environ, "HOME": pwd.getpwuid(os.getuid()).pw_dir, "CMAKE_ARGS": cmake}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
