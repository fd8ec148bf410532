"""Where the C++ kernels are compiled and where they cannot be, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cpu_kernels import kept_files, load_cpu_kernels

LOAD = """
import sys
from pathlib import Path
from jaxinfer_kernels.cpu import CompilerError, load
try:
    load(Path(sys.argv[1]))
except CompilerError as error:
    sys.exit(str(error))
"""


def load_with_path(directory: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Loads the kernels kept in a directory, with the compilers of `path` alone."""
    environment = {**os.environ, "PATH": str(path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOAD, str(directory)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def compiler(directory: Path, script: str) -> Path:
    path = directory / "bin"
    path.mkdir()
    (path / "c++").write_text(f"#!/bin/sh\n{script}\n")
    (path / "c++").chmod(0o755)
    return path


def test_no_compiler(tmp_path: Path) -> None:
    done = load_with_path(tmp_path / "kernels", tmp_path)
    assert done.stderr.strip() == "no C++ compiler is on the PATH (c++, g++, clang++)"
    assert done.returncode == 1


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    done = load_with_path(tmp_path / "kernels", compiler(tmp_path, "echo no such flag >&2; exit 1"))
    assert done.stderr.strip().endswith("c++ cannot compile the kernels: no such flag")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_compiled_once(tmp_path: Path) -> None:
    """A second process needs no compiler."""
    load_cpu_kernels()
    done = load_with_path(kept_files() / "kernels", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
