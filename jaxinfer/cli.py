"""What the commands share: flags, one line for an error, the exit status."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jaxinfer.config import ConfigError, EngineConfig, HostsConfig
from jaxinfer.flags import HelpRequestedError, UsageError, keep_libtpu_quiet, set_up_logging
from jaxinfer.parallel.hosts import HostsError
from jaxinfer.types import RequestError
from jaxinfer_checkpoints import CheckpointError

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine

T = TypeVar("T")

USAGE_STATUS = 2
FAILURE_STATUS = 1
LAST_WORDS_S = 3.0  # that host 0's clients have to hear that another host has gone
INTERRUPTED_STATUS = 130  # as shells have it: 128 + SIGINT


class CommandError(Exception):
    """A failure that is the user's to mend: one line that says what is wrong and what to do."""


def run(parse: Callable[[Sequence[str]], Any], command: Callable[[Any], int], argv: Sequence[str]) -> int:
    """Runs a command and returns its exit status; an error is one line on stderr.

    Args:
      parse: makes the command's options, which have a `verbosity`, of `argv`.
      command: takes the options and returns the status. It does the slow imports.
      argv: the arguments, without the program's name.
    """
    verbosity = -1
    hosts = None
    try:
        options = parse(argv)
        verbosity, hosts = options.verbosity, options.engine.hosts
        set_up_logging(verbosity)
        keep_libtpu_quiet()
        if hosts is not None:
            _keep_answers_apart()
        status = _follow(options.engine) if hosts is not None and hosts.host_id else command(options)
    except HelpRequestedError as text:
        sys.stdout.write(f"{text}\n")
        status = 0
    except UsageError as error:
        status = _fail(str(error), USAGE_STATUS)
    except BrokenPipeError:
        # The reader has enough. Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    except (CommandError, ConfigError, CheckpointError, HostsError, RequestError, OSError) as error:
        status = _fail(str(error), FAILURE_STATUS, verbosity)
    except Exception as error:  # a bug, which a user should see as one line too
        hint = "" if verbosity >= 1 else "; --verbosity=1 shows where"
        status = _fail(f"internal error: {type(error).__name__}: {error}{hint}", FAILURE_STATUS, verbosity)
    if hosts is not None:
        _end(status)
    return status


@contextmanager
def started(config: EngineConfig) -> Iterator[Engine]:
    """The engine of a command. When another host goes, it ends the process, since jax cannot go on."""
    hosts = config.hosts
    gc.disable()  # next to nothing that a start makes is garbage, and looking for it takes 5% of the start
    try:
        from jaxinfer.engine.engine import Engine  # imports jax, which takes seconds

        engine = Engine(config) if hosts is None else Engine(config, partial(lose_host, hosts))
    finally:
        gc.enable()
    with engine:
        yield engine


def _follow(config: EngineConfig) -> int:
    with started(config) as engine:
        # Whoever stops a job signals all of it: this host ends when host 0, which lets requests end, does.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        engine.follow()
    return 0


def lose_host(hosts: HostsConfig, message: str) -> None:
    """Ends the process from another thread than the one that may be waiting for the lost host."""

    def end() -> None:
        _end(_fail(message, FAILURE_STATUS))

    if hosts.host_id:
        end()
    timer = threading.Timer(LAST_WORDS_S, end)
    timer.daemon = True
    timer.start()


def _end(status: int) -> None:
    """Ends the process at once: at its exit jax would wait for hosts that have gone, and then abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def _keep_answers_apart() -> None:
    """gloo, which connects CPUs, writes to standard output, where answers go: it gets standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(answers, "w", encoding=sys.stdout.encoding)


def _fail(message: str, status: int, verbosity: int = -1) -> int:
    if verbosity >= 1:
        traceback.print_exc()
    sys.stderr.write(f"jaxinfer: error: {' '.join(message.split())}\n")
    return status
