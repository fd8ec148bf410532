"""Counts what XLA compiles, and where, through jax's own monitoring events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from jaxinfer.config import ConfigError

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompiledWhileServingError(RuntimeError):
    """--strict_shapes: a step needed a program that start-up had not made."""


def use_persistent_cache(directory: Path) -> None:
    """Keeps compiled programs on disk, small and quick ones too, so that a second start compiles nothing.

    Raises:
      ConfigError: the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"compilation_cache_dir={str(directory)!r} cannot be made: {error.strerror}; choose another"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _enable_persistent_cache(True)


def bypass_persistent_cache() -> None:
    """Compiles anew whatever the cache has: what is to be serialised.

    A program that was read from the cache is serialised without its machine code on the CPU, and
    fails when it is called.
    """
    _enable_persistent_cache(False)


def _enable_persistent_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # jax asks whether it is enabled once


@dataclass
class Compilations:
    """Programs that were needed and not there.

    Attributes:
      names: jax's, such as "jit(decode_step)", in order.
      num_cache_hits: how many of them were read from the persistent cache and not compiled.
    """

    names: list[str] = field(default_factory=list)
    num_cache_hits: int = 0

    @property
    def num_requests(self) -> int:
        """Programs that had to be compiled or read from the cache."""
        return len(self.names)

    @property
    def num_compilations(self) -> int:
        """Programs that XLA compiled."""
        return len(self.names) - self.num_cache_hits


class CompilationCounter:
    """What is compiled in this process from now on, in all and by the threads that `watch`.

    Attributes:
      total: in all.
      stopped: set where a start has failed: none of its further programs is compiled.
    """

    def __init__(self) -> None:
        self.total = Compilations()
        self.stopped = threading.Event()
        self._watched: dict[int, Compilations] = {}
        monitoring.register_event_duration_secs_listener(self._on_duration)
        monitoring.register_event_listener(self._on_event)

    @contextmanager
    def watch(self) -> Iterator[Compilations]:
        """What the calling thread compiles inside."""
        found = self._watched[threading.get_ident()] = Compilations()
        try:
            yield found
        finally:
            del self._watched[threading.get_ident()]

    def _counts(self) -> Iterator[Compilations]:
        yield self.total
        # jax calls a listener in the thread that compiles.
        if watched := self._watched.get(threading.get_ident()):
            yield watched

    def _on_duration(self, event: str, duration_secs: float, **labels: str | int) -> None:
        if event == _BACKEND_COMPILE:
            for counts in self._counts():
                counts.names.append(str(labels.get("fun_name", "a program")))

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _CACHE_HIT:
            for counts in self._counts():
                counts.num_cache_hits += 1


class CompileTable:
    """How each program of start-up was come by, and in how many seconds. Many threads may use it."""

    def __init__(self, counter: CompilationCounter) -> None:
        self._counter = counter
        self._rows: dict[str, tuple[float, str]] = {}

    def make(self, name: str, compile_one: Callable[..., Any], *args: Any) -> Any:
        """`compile_one(*args)`, noted under the name.

        Raises:
          CancelledError: the start has failed meanwhile.
        """
        if self._counter.stopped.is_set():
            raise CancelledError(name)
        start_s = time.monotonic()
        with self._counter.watch() as found:
            program = compile_one(*args)
        source = "from the cache" if found.num_cache_hits else "compiled"
        self._rows[name] = (time.monotonic() - start_s, source)
        return program

    def log(self, names: Iterable[str]) -> None:
        """Logs the table, in the order of the names."""
        logging.info("%-32s %8s", "program", "seconds")
        for name in names:
            seconds, source = self._rows[name]
            logging.info("%-32s %8.2f  %s", name, seconds, source)
