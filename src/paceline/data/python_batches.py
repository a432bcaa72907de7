"""Reads CIFAR-10's Python batches, which are pickles of Python 2, without running any code in them.

A pickle is a program for a stack machine. The few instructions here are enough for a dictionary with an array of bytes
and a list of labels. Functions that it names are only names here: nothing is imported, and nothing is called.
"""

import io
import pickletools
import reprlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.sources import SourceError

_NAMES = {
    "numpy.core.multiarray _reconstruct": "an array",
    "numpy._core.multiarray _reconstruct": "an array",
    "numpy ndarray": "the class of arrays",
    "numpy dtype": "a type",
    "_codecs encode": "bytes",  # how Python 3 writes bytes so that Python 2 can read them
}


class _Refused(Exception):
    """The pickle is not supported; the message is the reason."""


@dataclass(frozen=True)
class _Name:
    """A function or class that the pickle names."""

    kind: str


@dataclass
class _Object:
    """The result of a call: an array, once its state is known, or the type of bytes."""

    kind: str
    array: NDArray[np.uint8] | None = None


def read(content: bytes, where: str) -> tuple[NDArray[np.uint8], Any]:
    """The array of bytes and the labels of a batch, of any shape and values; SourceError if there are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about escapes in strings, which are refused anyway
            batch = _Machine().run(content)
        if not isinstance(batch, dict):
            raise _Refused(f"it has a {type(batch).__name__} instead of a dictionary")
        for key in ("data", "labels"):
            if key not in batch:
                raise _Refused(f"its dictionary has no {key!r}")
        data = batch["data"]
        if not isinstance(data, _Object) or data.array is None:
            raise _Refused("its 'data' is not a numpy array")
        return data.array, batch["labels"]
    except _Refused as why:
        raise SourceError(f"{where} is not a Python batch of CIFAR-10: {why}") from why
    except (ValueError, LookupError, RecursionError) as why:  # pickletools raises ValueError if it is truncated
        raise SourceError(f"{where} is damaged, or not a pickle: {why}") from why


@dataclass
class _Machine:
    """The stack machine. Strings of Python 2 and bytes are both text here, one character per byte."""

    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, content: bytes) -> Any:
        value: Any
        for opcode, value, _ in pickletools.genops(io.BytesIO(content)):
            name = opcode.name
            if name in _VALUES:
                self.stack.append(value)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in ("BINPUT", "LONG_BINPUT"):
                self.memo[value] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memo[value])
            elif name == "GLOBAL":
                if value not in _NAMES:
                    raise _Refused(f"it names {value.replace(' ', '.')!r:.80}, which these files do not use; not run")
                self.stack.append(_Name(_NAMES[value]))
            elif name in _STEPS:
                _STEPS[name](self)
            elif name == "STOP":
                return self.stack.pop()
            elif name != "PROTO":
                raise _Refused(f"it has the opcode {name}, which these files do not use")
        raise AssertionError("pickletools raises an error if there is no end")

    def popped(self) -> list[Any]:
        """The values above the last mark."""
        mark = self.marks.pop()
        items, self.stack[mark:] = self.stack[mark:], []
        return items

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def group(self, count: int) -> None:
        items, self.stack[-count:] = tuple(self.stack[-count:]), []
        if len(items) < count:
            raise _Refused("it takes more from its stack than there is")
        self.stack.append(items)

    def append(self) -> None:
        items = self.popped()
        if not isinstance(self.stack[-1], list):
            raise _Refused("it appends to what is not a list")
        self.stack[-1].extend(items)

    def set_items(self) -> None:
        items = self.popped()
        if not isinstance(self.stack[-1], dict) or len(items) % 2 or not all(type(k) is str for k in items[::2]):
            raise _Refused("its dictionary has keys that are not strings")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def reduce(self) -> None:
        """A call."""
        function, arguments = self.stack[-2:]
        del self.stack[-2:]
        match function, arguments:
            case _Name(kind="bytes"), (str() as text, "latin1"):
                self.stack.append(text)
            case _Name(kind="an array"), (_Name(kind="the class of arrays"), (0,), "b"):
                self.stack.append(_Object("an array"))
            case _Name(kind="a type"), ("u1", 0, 1):
                self.stack.append(_Object("a type"))
            case _:
                kind = function.kind if isinstance(function, _Name) else type(function).__name__
                raise _Refused(f"it makes {kind} of {reprlib.repr(arguments)}; only arrays of uint8 are supported")

    def build(self) -> None:
        """Set the state of a call's result."""
        target, state = self.stack[-2:]
        self.stack.pop()
        match target, state:
            case _Object(kind="a type"), (int(), "|", None, None, None, int(), int(), int()):
                pass  # irrelevant for single bytes
            case _Object(kind="an array"), (int(), (int(), int()) as shape, _Object(kind="a type"), 0, str() as raw):
                target.array = np.frombuffer(raw.encode("latin1"), np.uint8).reshape(shape)
            case _:
                raise _Refused("its array is not one of two dimensions of uint8 in the usual order")


_VALUES = ("SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "BININT", "BININT1", "BININT2")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_STEPS = {
    "MARK": _Machine.mark,
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "TUPLE": lambda machine: machine.stack.append(tuple(machine.popped())),
    "TUPLE1": lambda machine: machine.group(1),
    "TUPLE2": lambda machine: machine.group(2),
    "TUPLE3": lambda machine: machine.group(3),
    "APPENDS": _Machine.append,
    "SETITEMS": _Machine.set_items,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
