"""Counts what XLA compiles, through jax's own monitoring events."""

from __future__ import annotations

from pathlib import Path

import jax
from jax import monitoring

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def use_persistent_cache(directory: Path) -> None:
    """Keeps compiled programs on disk, small and quick ones too, so that a second start compiles nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompilationCounter:
    """Programs compiled in this process since it was made; those read from the persistent cache are apart."""

    def __init__(self) -> None:
        self._num_requests = 0
        self.num_cache_hits = 0
        monitoring.register_event_duration_secs_listener(self._on_duration)
        monitoring.register_event_listener(self._on_event)

    @property
    def num_requests(self) -> int:
        """Programs that had to be compiled or read from the cache."""
        return self._num_requests

    @property
    def num_compilations(self) -> int:
        """Programs that XLA compiled."""
        return self._num_requests - self.num_cache_hits

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _BACKEND_COMPILE:
            self._num_requests += 1

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _CACHE_HIT:
            self.num_cache_hits += 1
