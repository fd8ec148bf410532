"""What the commands share: flags, one line for an error, the exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxinfer.config import ConfigError
from jaxinfer.flags import HelpRequestedError, UsageError, set_up_logging
from jaxinfer.types import RequestError
from jaxinfer_checkpoints import CheckpointError

T = TypeVar("T")

USAGE_STATUS = 2
FAILURE_STATUS = 1
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
    try:
        options = parse(argv)
        verbosity = options.verbosity
        set_up_logging(verbosity)
        return command(options)
    except HelpRequestedError as text:
        sys.stdout.write(f"{text}\n")
        return 0
    except UsageError as error:
        return _fail(str(error), USAGE_STATUS)
    except BrokenPipeError:
        # The reader has enough. Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except (CommandError, ConfigError, CheckpointError, RequestError, OSError) as error:
        return _fail(str(error), FAILURE_STATUS, verbosity)
    except Exception as error:  # a bug, which a user should see as one line too
        hint = "" if verbosity >= 1 else "; --verbosity=1 shows where"
        return _fail(f"internal error: {type(error).__name__}: {error}{hint}", FAILURE_STATUS, verbosity)


def _fail(message: str, status: int, verbosity: int = -1) -> int:
    if verbosity >= 1:
        traceback.print_exc()
    sys.stderr.write(f"jaxinfer: error: {' '.join(message.split())}\n")
    return status
