"""A user's own model or data set, named as `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import UsageError

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_LIBRARIES = (
    os.path.dirname(__file__) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)


def is_own(name: str) -> bool:
    """Whether a name is the path of a function rather than one from a table."""
    return _NAME.fullmatch(name) is not None


def check_exists(path: str, what: str) -> None:
    """Refuse a package that is not there, without running any of it."""
    _see_working_folder()
    package = path.partition(":")[0].partition(".")[0]
    try:
        # Ranks have a __main__ of their own.
        there = package != "__main__" and importlib.util.find_spec(package) is not None
    except ValueError:  # a module that something made by hand
        there = package in sys.modules
    if not there:
        raise UsageError(
            f"{what} {path}: there is no Python package or module {package!r} here or in the working folder "
            f"{os.getcwd()}; install it, or run from the folder that has it"
        )


def find(path: str, what: str) -> Callable[..., Any]:
    """The function, imported."""
    _see_working_folder()
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        raise UsageError(f"{what} {path} cannot be imported: {reason(error)}") from error
    if not callable(found):
        raise UsageError(f"{what} {path} is of type {type(found).__name__}; a function is expected")
    return found  # type: ignore[no-any-return]


def parameters(path: str, what: str) -> Mapping[str, inspect.Parameter]:
    """What the function names as its parameters."""
    try:
        return inspect.signature(find(path, what)).parameters
    except (TypeError, ValueError):  # some that are written in C do not say
        return {}


def call(path: str, what: str, offered: Mapping[str, Any]) -> Any:
    """Call the function with those of the offered values that it names as parameters."""
    function, named = find(path, what), parameters(path, what)
    given = {name: value for name, value in offered.items() if name in named}
    if any(p.kind is p.VAR_KEYWORD for p in named.values()) and "num_classes" in offered and "classes" not in given:
        given["num_classes"] = offered["num_classes"]  # torchvision's models hand it down in **kwargs
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [n for n, p in named.items() if p.default is p.empty and p.kind not in kinds and n not in given]
    if missing:
        raise UsageError(
            f"{what} {path} has parameters that nothing is known of: {', '.join(missing)}; give them defaults, or "
            f"use these names: {', '.join(offered)}"
        )
    try:
        return function(**given)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} {path}, called with {_shown(given)}, failed: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The error, and the last line of the user's own code (of any code, where there is none) on the way to it."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and "importlib" not in f.filename
    ]
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _see_working_folder() -> None:
    """As `python script.py` and `python -m` have it; a console script does not."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _shown(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no arguments"
