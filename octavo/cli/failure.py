"""How a command ends when something is wrong: the last line is the cause and the way out, and the status is not 0."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from octavo.errors import ConfigError, OctavoError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def explained_failures() -> Iterator[None]:
    """Turn exceptions into one line and an exit status. OCTAVO_DEBUG=1 shows the traceback before it."""
    _open_closed_streams()
    try:
        yield
    except ConfigError as error:
        _leave(error, error.message, EXIT_USAGE)
    except OctavoError as error:
        _leave(error, str(error), EXIT_FAILURE)
    except KeyboardInterrupt as error:
        _leave(error, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has left (`octavo generate ... | head`). Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except OSError as error:
        _leave(error, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", EXIT_FAILURE)
    except Exception as error:
        kind = type(error).__name__
        hint = "" if _is_debugging() else " (OCTAVO_DEBUG=1 shows where; please report it)"
        _leave(error, f"unexpected {kind}: {error}{hint}", EXIT_FAILURE)


def _open_closed_streams() -> None:
    """Started with a standard stream closed (`>&-`), Python has None there; what we write goes nowhere instead.

    In this order each gets its own number, the lowest that is free, and the engine process inherits it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _is_debugging() -> bool:
    return os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")


def _leave(error: BaseException, message: str, status: int) -> None:
    if _is_debugging():
        traceback.print_exception(type(error), error, error.__traceback__)
    with contextlib.suppress(OSError):  # a full disk, which may be what the message is about
        sys.stdout.flush()
    sys.stderr.write(f"octavo: {message}\n")
    sys.stderr.flush()
    sys.exit(status)
