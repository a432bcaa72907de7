"""Makes one rank of a run fail at a step: PACELINE_TEST_FAULT="RANK STEP".

Or presses Ctrl-C when a module is about to be imported: PACELINE_TEST_INTERRUPT=MODULE.

Or is a disk that fails: as long as the file PACELINE_TEST_DISK is there, writing checkpoints ends with the error whose
name is in it, such as EIO.
"""

import errno
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
TARGET = "paceline.strategies.synchronous"


class _Break(MetaPathFinder):
    """When the strategy is imported, let its step raise at the given rank and step."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
        if name != TARGET or not FAULT:
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
        rank, step = map(int, str(FAULT).split())
        real = module.Synchronous.step

        def failing(self: Any, *arguments: Any) -> Any:
            if self.comm.rank == rank and self._steps == step:
                raise ZeroDivisionError("a fault that the test put here")
            return real(self, *arguments)

        module.Synchronous.step = failing


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
