"""Errors that a user can act on, and their exit codes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
GIVEN_OPEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


class PacelineError(Exception):
    """An error that its message explains; the command line prints it without a traceback."""

    exit_code = EXIT_FAILED


class UsageError(PacelineError):
    """A wrong value, name, file or combination: what was given, what is allowed, what to do."""

    exit_code = EXIT_USAGE


class AgreedError(UsageError):
    """A UsageError that every rank of the run raises, at the same point."""


class DataError(UsageError):
    """A data set that cannot be found, or has wrong content."""


class CommError(PacelineError):
    """Communication failed. `peer` is the rank at fault, if it is known."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class CommTimeout(CommError):
    """No message arrived before the deadline."""


class DivergedError(PacelineError):
    """The loss or the model is no longer finite, on all ranks. `rank` is the rank that caused it, if only one did."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    @classmethod
    def found(cls, what: str, step: int, since: Mapping[int, int | None], tensor: str | None = None) -> DivergedError:
        """The error that `what` is wrong after a step; `tensor` is the first that is not finite.

        `since` has for each rank the first step in which its own gradient was not finite, or None.
        """
        known = [bad for bad in since.values() if bad is not None]
        first = [rank for rank, bad in since.items() if bad is not None and bad == min(known)]
        if not known or len(first) == len(since):
            return cls(
                f"{what} after step {step}: the training has diverged; lower --lr, or warm up longer with "
                f"--warmup-epochs, or look for values in the data that are not finite"
            ).naming(tensor)
        names = f"rank{'s' if len(first) > 1 else ''} {', '.join(map(str, first))}"
        return cls(
            f"{what} after step {step}: the gradient of {names} was the first that was not finite, in step "
            f"{min(known)}; check the samples of {names} in that step; if they are correct, lower --lr",
            first[0],
        ).naming(tensor)

    def naming(self, tensor: str | None) -> DivergedError:
        """The same error with the name of the first tensor that is not finite."""
        return DivergedError(f"{self} (the first tensor that is not finite is {tensor})", self.rank) if tensor else self


class ReplicaError(PacelineError):
    """Replicas differ that should be equal. `rank` is the one that differs."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def nearest(given: str, allowed: Iterable[str], cutoff: float = 0.65) -> str:
    """`; did you mean 'ring'?` if one of the allowed names is close, otherwise empty. Leading dashes do not count."""
    names = {name.lstrip("-"): name for name in allowed}
    close = difflib.get_close_matches(given.lower().lstrip("-"), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def meant(given: str, allowed: Iterable[str], elsewhere: Mapping[str, str], absent: Mapping[str, str]) -> str:
    """Like `nearest`, but for an option of another tool, its name here, or why there is none.

    Options are longer than names, and often share a word: --pin-memory is not --memory.
    """
    name = given.lstrip("-").replace("_", "-")
    if name in absent:
        return f": {absent[name]}"
    here = elsewhere.get(name)
    return f"; it is called {here!r} here" if here else nearest(given, allowed, cutoff=0.77)


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UsageError:
    """The error for a name that is not in a table."""
    names = list(allowed)
    return UsageError(f"unknown {kind} {given!r}{nearest(given, names)} (one of: {', '.join(names)})")


def visible(text: str) -> str:
    """The text for a terminal, with control characters and unencodable ones escaped.

    >>> visible("run \x1b[31m of \udcff, größer")
    'run \\x1b[31m of \\udcff, größer'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def refuse_pipe(path: str | Path, what: str) -> None:
    """Refuse a named pipe or a device instead of a file, because reading it could wait forever.

    A file that the shell has opened for this process (`<(command)`) may be a pipe.
    """
    found = Path(path)
    if found.exists() and not found.is_file() and not found.is_dir() and not str(path).startswith(GIVEN_OPEN):
        raise UsageError(f"{what} {path} is a pipe or a device: give a regular file")
