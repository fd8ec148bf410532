"""Compiles the C++ kernels for the processor at hand, once, and registers them with XLA (its FFI)."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import MappingProxyType

import jax
from absl import logging

_HERE = Path(__file__).parent
_SOURCES = ("linear.cc", "attention.cc", "elementwise.cc")
_HANDLERS: Mapping[str, str] = MappingProxyType(
    {
        "linear": "JaxinferLinear",
        "gated_linear": "JaxinferGatedLinear",
        "paged_attention": "JaxinferPagedAttention",
        "add_rms_norm": "JaxinferAddRmsNorm",
        "rotate_qkv": "JaxinferRotateQkv",
        "unwritten": "JaxinferUnwritten",
    }
)
_COMPILERS = ("c++", "g++", "clang++")
_NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
_FLAGS = ("-O3", _NATIVE, "-ffp-contract=fast", "-std=c++20", "-fPIC", "-pthread")


class CompilerError(Exception):
    """No C++ compiler is there, or it does not take the kernels; the message says which."""


def load(directory: Path) -> None:
    """Registers the kernels in this process; compiles them into `directory` if they are not there.

    Raises:
      CompilerError: it cannot be done.
    """
    if _registered():
        return
    library = ctypes.CDLL(str(_library(directory)))
    for op, handler in _HANDLERS.items():
        jax.ffi.register_ffi_target(target_name(op), jax.ffi.pycapsule(library[handler]), platform="cpu")
    _registered().append(library)


@cache
def _registered() -> list[ctypes.CDLL]:
    """The library that is registered, if one is: XLA has one registry a process, and takes a name once."""
    return []


@cache
def target_name(op: str) -> str:
    """What a program calls. It names the sources: a program that was compiled for others finds no target."""
    return f"jaxinfer_{op}_{_digest()}"


@cache
def _digest() -> str:
    """Of the sources."""
    contents = (path.read_bytes() for path in sorted(_HERE.iterdir()) if path.suffix in (".cc", ".h"))
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _library(directory: Path) -> Path:
    """The compiled library, whose name says of what, for which jaxlib and for which processor."""
    built_for = (_digest(), importlib.metadata.version("jaxlib"), _FLAGS, _processor())
    name = f"cpu-kernels-{hashlib.sha256(repr(built_for).encode()).hexdigest()[:16]}.so"
    path = directory / name
    if path.exists():
        return path
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise CompilerError(f"no C++ compiler is on the PATH ({', '.join(_COMPILERS)})")
    logging.info("compiling the C++ kernels with %s: some seconds, at this first start alone", compiler)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as work:
            _compile(compiler, Path(work), name)
            (Path(work) / name).replace(path)  # whole at once: other processes may be at it too
    except OSError as error:
        raise CompilerError(f"{directory} cannot hold the kernels: {error.strerror}") from error
    return path


def _compile(compiler: str, work: Path, library: str) -> None:
    """Compiles the sources side by side, and links them in the directory `work`."""

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [compiler, *_FLAGS, *arguments], cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CompilerError(f"{compiler} cannot compile the kernels: {done.stderr.strip()[-2000:]}")

    # XLA's headers are a system's, so that their warnings are not ours.
    include = ("-isystem", jax.ffi.include_dir())
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: run("-c", *include, str(_HERE / name)), _SOURCES))
    run("-shared", *(f"{Path(name).stem}.o" for name in _SOURCES), "-o", library)


def _processor() -> str:
    """What distinguishes processors that do not have the same instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = (line for line in lines if line.startswith(("flags", "Features")))
    return f"{platform.machine()} {next(features, platform.processor())}"
