"""Imports a user's own model or data set, given as `package.module:function` or `path/to/file.py:function`."""

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
# A module with any of these may define names that are not in its source.
_DYNAMIC = re.compile(r"\bglobals\(|\bexec\(|\bsetattr\(|\b__getattr__\b|\bimport \*")
# Ranks can be threads, and Python 3.11's ast.parse fails if two threads call it at once (cpython issue 106905).
_PARSING = threading.Lock()
# Debian has more package folders than sysconfig knows.
_PACKAGES = (sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages())
_LIBRARIES = tuple(folder + os.sep for folder in (os.path.dirname(__file__), *_PACKAGES))


def is_own(name: str) -> bool:
    """Whether a name is the path of a function instead of a name in a table."""
    return _NAME.fullmatch(name) is not None


def check_exists(path: str, what: str) -> None:
    """Raise an error if the file, module or function does not exist, without running it."""
    _see_working_folder()
    module, _, name = path.rpartition(":")
    try:
        source = _file(module) if module.endswith(".py") else _source_of(module)
    except FileNotFoundError as error:
        raise UsageError(f"{what} {path}: {error}") from None
    if source is None:  # compiled, or created at run time
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
    """The path of a module's source; its packages are not imported."""
    package, *inner = module.split(".")
    try:
        # Ranks have another __main__.
        found = None if package == "__main__" else importlib.util.find_spec(package)
    except ValueError:
        return None
    if found is None:
        raise FileNotFoundError(
            f"there is no Python package or module {package!r} here or in the working folder {os.getcwd()}; "
            f"install it, run in its folder, or give its file: path/to/{package}.py:function"
        )
    for part in inner:
        above: ModuleSpec = found
        found = PathFinder.find_spec(f"{above.name}.{part}", above.submodule_search_locations or [])
        if found is None:
            raise FileNotFoundError(f"there is no module {part!r} in {above.name} ({above.origin or 'a folder'})")
    return Path(found.origin) if found.origin and found.origin.endswith(".py") else None


def _names(tree: ast.AST) -> list[str]:
    """All names that a module's source defines, also inside functions: a name that is not there cannot exist."""
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
    """Import the function."""
    _see_working_folder()
    module, _, name = path.rpartition(":")
    try:
        loaded = _load(module) if module.endswith(".py") else importlib.import_module(module)
        if not hasattr(loaded, name):
            raise UsageError(f"{what} {path} cannot be imported: {module} has no {name!r}{nearest(name, dir(loaded))}")
        found = getattr(loaded, name)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        raise UsageError(f"{what} {path} cannot be imported: {reason(error)}") from error
    if not callable(found):
        raise UsageError(f"{what} {path} is of type {type(found).__name__} instead of a function")
    return found  # type: ignore[no-any-return]


def _load(path: str) -> ModuleType:
    """Import a file as a module, once; it may import modules in its folder."""
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
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def parameters(path: str, what: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of the function."""
    try:
        return inspect.signature(find(path, what)).parameters
    except (TypeError, ValueError):  # some functions in C have no signature
        return {}


def call(path: str, what: str, offered: Mapping[str, Any]) -> Any:
    """Call the function with those of the offered values that its signature names."""
    function, named = find(path, what), parameters(path, what)
    given = {name: value for name, value in offered.items() if name in named}
    if any(p.kind is p.VAR_KEYWORD for p in named.values()) and "num_classes" in offered and "classes" not in given:
        given["num_classes"] = offered["num_classes"]  # torchvision's models pass it on in **kwargs
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [n for n, p in named.items() if p.default is p.empty and p.kind not in kinds and n not in given]
    if missing:
        raise UsageError(
            f"{what} {path} has unknown parameters: {', '.join(missing)}; give them defaults, or use these names: "
            f"{', '.join(offered)}"
        )
    try:
        return function(**given)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} {path}, called with {_shown(given)}, failed: {reason(error)}") from error


def reason(error: BaseException, model: Any = None) -> str:
    """The error, the last line of the user's own code that led to it, and the layer of the `model` it is in."""
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
    """Search the working folder last, so that a user's file does not replace a library's module."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _shown(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no arguments"
