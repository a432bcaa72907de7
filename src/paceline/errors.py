"""Errors a user can act on, and their exit codes."""

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
    """Something went wrong that the message explains; the command line prints it without a traceback."""

    exit_code = EXIT_FAILED


class UsageError(PacelineError):
    """A wrong value, name, file or combination: what was given, what is allowed, what to do."""

    exit_code = EXIT_USAGE


class AgreedError(UsageError):
    """A UsageError that every rank of the run raises, at the same point."""


class DataError(UsageError):
    """A data set that cannot be found, or that is not what it says it is."""


class CommError(PacelineError):
    """A message did not get through. `peer` is the rank that is to blame, where that is known."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class CommTimeout(CommError):
    """Nothing came before the deadline."""


class DivergedError(PacelineError):
    """The loss or the model is not finite any more; every rank knows. `rank` is the one that is to blame, if one is."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    @classmethod
    def found(cls, what: str, step: int, since: Mapping[int, int | None], tensor: str | None = None) -> DivergedError:
        """`what` is wrong after a step, with `tensor` the first that is not finite.

        `since` says for each rank in which step its own gradient was not finite for the first time, if it ever was.
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
            f"{what} after step {step}: of all ranks' gradients, that of {names} was the first that is not "
            f"finite, in step {min(known)}; look at the samples of {names} in that step; if they are sound, lower --lr",
            first[0],
        ).naming(tensor)

    def naming(self, tensor: str | None) -> DivergedError:
        """The same, with the first tensor that is not finite."""
        return DivergedError(f"{self} (the first tensor that is not finite is {tensor})", self.rank) if tensor else self


class ReplicaError(PacelineError):
    """Replicas that should be equal are not. `rank` is the one that differs."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def nearest(given: str, allowed: Iterable[str], cutoff: float = 0.65) -> str:
    """`; did you mean 'ring'?` when one of the allowed names is close, else nothing. Dashes in front do not count."""
    names = {name.lstrip("-"): name for name in allowed}
    close = difflib.get_close_matches(given.lower().lstrip("-"), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def meant(given: str, allowed: Iterable[str], elsewhere: Mapping[str, str], absent: Mapping[str, str]) -> str:
    """As `nearest`; but an option that other tools have is answered with what it is called here, or why it is absent.

    Options are longer than names, and often have a word in common: --pin-memory is not --memory.
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
    """The text for a terminal: what would control it, or cannot be encoded, is shown as Python writes it.

    >>> visible("run \x1b[31m of \udcff, größer")
    'run \\x1b[31m of \\udcff, größer'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def refuse_pipe(path: str | Path, what: str) -> None:
    """Refuse a named pipe or a device where a file is expected: reading it could wait for ever.

    What this process was given open (`<(command)` of a shell) may be a pipe.
    """
    found = Path(path)
    if found.exists() and not found.is_file() and not found.is_dir() and not str(path).startswith(GIVEN_OPEN):
        raise UsageError(f"{what} {path} is a pipe or a device: give a regular file")
