"""A user's own model or data set: a function, named as `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
import threading
import traceback
import zlib
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import UsageError, nearest

FORMS = "FILE.py:function or package.module:function"
_NAME = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*|[^:\0]*[^:/\0]\.py):[^\W\d]\w*")
# A module that says any of these may define names that its text does not show.
_DYNAMIC = re.compile(r"\bglobals\(|\bexec\(|\bsetattr\(|\b__getattr__\b|\bimport \*")
# Ranks can be threads, and Python 3.11's ast.parse fails when another thread calls it meanwhile (cpython issue 106905).
_PARSING = threading.Lock()
# Debian has more folders of packages than sysconfig knows.
_PACKAGES = (sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages())
_LIBRARIES = tuple(folder + os.sep for folder in (os.path.dirname(__file__), *_PACKAGES))


def is_own(name: str) -> bool:
    """Whether a name is the path of a function rather than one from a table."""
    return _NAME.fullmatch(name) is not None


def check_exists(path: str, what: str) -> None:
    """Refuse a file, module or function that is not there, without running any of it."""
    _see_working_folder()
    module, _, name = path.rpartition(":")
    try:
        source = _file(module) if module.endswith(".py") else _source_of(module)
    except FileNotFoundError as error:
        raise UsageError(f"{what} {path}: {error}") from None
    if source is None:  # compiled, or made by hand
        return
    try:
        text = source.read_bytes()
        with _PARSING:
            names = _names(ast.parse(text, str(source)))
    except (OSError, SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{what} {path} cannot be read: {error} ({source}{line})") from error
    if name not in names and not _DYNAMIC.search(text.decode(errors="replace")):
        raise UsageError(f"{what} {path}: {source} defines no {name!r}{nearest(name, names)}")


def _file(path: str) -> Path:
    file = Path(path).absolute()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    return file


def _source_of(module: str) -> Path | None:
    """Where a module's text is; its packages are not imported."""
    package, *inner = module.split(".")
    try:
        # Ranks have a __main__ of their own.
        found = None if package == "__main__" else importlib.util.find_spec(package)
    except ValueError:
        return None
    if found is None:
        raise FileNotFoundError(
            f"there is no Python package or module {package!r} here or in the working folder {os.getcwd()}; "
            f"install it, run from the folder that has it, or name its file: path/to/{package}.py:function"
        )
    for part in inner:
        above: ModuleSpec = found
        found = PathFinder.find_spec(f"{above.name}.{part}", above.submodule_search_locations or [])
        if found is None:
            raise FileNotFoundError(f"there is no module {part!r} in {above.name} ({above.origin or 'a folder'})")
    return Path(found.origin) if found.origin and found.origin.endswith(".py") else None


def _names(tree: ast.AST) -> list[str]:
    """All names that a module's text defines, in functions as well: it is enough that no other can be meant."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return names


def find(path: str, what: str) -> Callable[..., Any]:
    """The function, imported."""
    _see_working_folder()
    module, _, name = path.rpartition(":")
    try:
        found = getattr(_load(module) if module.endswith(".py") else importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        raise UsageError(f"{what} {path} cannot be imported: {reason(error)}") from error
    if not callable(found):
        raise UsageError(f"{what} {path} is of type {type(found).__name__}; a function is expected")
    return found  # type: ignore[no-any-return]


def _load(path: str) -> ModuleType:
    """A file as a module, once; it may import what lies beside it."""
    file = _file(path).resolve()
    name = f"paceline_own_{zlib.crc32(os.fsencode(file)):08x}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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


def reason(error: BaseException, model: Any = None) -> str:
    """The error, the last line of the user's own code on the way to it, and the layer of the `model` it is in."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in frames
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))
    ]
    layers = {id(module): (name, module) for name, module in model.named_modules() if name} if model else {}
    inside = [layers[key] for frame, _ in frames if (key := id(frame.f_locals.get("self"))) in layers]
    where = own[-1:]
    if inside:
        name, module = inside[-1]
        where.append(f"in layer {name!r}, {str(module).partition(chr(10))[0]}")
    return f"{type(error).__name__}: {error}" + (f" ({'; '.join(where)})" if where else "")


def _see_working_folder() -> None:
    """Look there last, so that a file of the user's does not replace a library's module."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _shown(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no arguments"
