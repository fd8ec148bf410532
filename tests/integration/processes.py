"""Commands as processes of their own, as a user starts them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Of the demo. Few shapes, so that a start compiles little; the same everywhere: the cache serves all.
ENGINE_FLAGS = (
    *("--max_num_seqs=4", "--max_model_len=512", "--max_num_batched_tokens=128", "--num_pages=160"),
    "--strict_shapes",
)
# Of the tiny model; the shapes of the other tests' engines, for the same reason.
TINY_FLAGS = (
    *("--max_num_seqs=4", "--max_num_batched_tokens=64", "--max_model_len=128", "--page_size=8"),
    "--strict_shapes",
)
TIMEOUT_S = 300


def command(name: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", f"jaxinfer.{name}", *argv]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def run(name: str, *argv: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        command(name, *argv),
        input=stdin,
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
        check=False,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    """The error is one line, with these words in it, and the exit status this one."""
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    assert re.fullmatch(r"jaxinfer: error: [^\n]+\n", result.stderr), result.stderr
    assert [part for part in parts if part not in result.stderr] == [], result.stderr


@contextlib.contextmanager
def serving(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is up, and its address. It is killed at the end where it still runs."""
    process = subprocess.Popen(
        command("serve", "--port=0", *argv),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"serving \S+ at (http://\S+)", line):
                break
        else:
            raise AssertionError(f"the server ended with {process.wait()}: {''.join(lines)}")
        yield process, address[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
