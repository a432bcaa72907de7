"""Makes one rank of a run fail at a step: PACELINE_TEST_FAULT="RANK STEP".

Or presses Ctrl-C when a module is about to be imported: PACELINE_TEST_INTERRUPT=MODULE.

Or kills a rank by SIGKILL when it calls a function, or a method, for the n-th time in one of its lives, counted from 0:
PACELINE_TEST_DEATHS="MODULE:NAME RANK LIFE N", or several of them, separated by semicolons.

Or is a disk that fails: as long as the file PACELINE_TEST_DISK is there, writing checkpoints ends with the error whose
name is in it, such as EIO.
"""

import errno
import functools
import os
import signal
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FAULT = os.environ.get("PACELINE_TEST_FAULT")
INTERRUPT = os.environ.get("PACELINE_TEST_INTERRUPT")
DISK = os.environ.get("PACELINE_TEST_DISK")
DEATHS = [death.split() for death in os.environ.get("PACELINE_TEST_DEATHS", "").split(";") if death]
TARGET = "paceline.strategies.synchronous"


class _Break(MetaPathFinder):
    """When the strategy is imported, let its step raise at the given rank and step."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
        if not (name == TARGET and FAULT) and not any(where.startswith(name + ":") for where, *_ in DEATHS):
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Patched(spec.loader)
        return spec


class _Patched(Loader):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        for where, rank, life, calls in DEATHS:
            if where.startswith(module.__name__ + ":"):
                let_die(module, where.split(":")[1], rank, life, int(calls))
        if FAULT and module.__name__ == TARGET:
            self.let_fail(module)

    def let_fail(self, module: ModuleType) -> None:
        rank, step = map(int, str(FAULT).split())
        real = module.Synchronous.step

        def failing(self: Any, *arguments: Any) -> Any:
            if self.comm.rank == rank and self._steps == step:
                raise ZeroDivisionError("a fault that the test put here")
            return real(self, *arguments)

        module.Synchronous.step = failing


def let_die(module: ModuleType, path: str, rank: str, life: str, calls: int) -> None:
    *outer, name = path.split(".")
    holder: Any = module
    for each in outer:
        holder = getattr(holder, each)
    real = getattr(holder, name)
    made = 0

    @functools.wraps(real)
    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        made += 1
        if made == calls and (os.environ.get("PACELINE_RANK"), os.environ.get("PACELINE_LIVES")) == (rank, life):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(holder, name, dying)


sys.meta_path.insert(0, _Break())

if DISK:
    real_fsync = os.fsync

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if "/.step_" in os.readlink(f"/proc/self/fd/{number}") and os.path.exists(str(DISK)):
            with open(str(DISK)) as said:
                code = getattr(errno, said.read())
            raise OSError(code, os.strerror(code))
        real_fsync(file)

    os.fsync = fsync  # type: ignore[assignment]
