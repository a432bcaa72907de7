"""All data sets by name, with their sizes; no torch."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import own_code
from paceline.data.origins import ORIGINS, SHAKESPEARE, SHAKESPEARE_CHARACTERS
from paceline.errors import DataError, UsageError, unknown
from paceline.plugins import Table


@dataclass(frozen=True)
class DataInfo:
    """The description of a data set, known before it is read."""

    name: str
    shape: tuple[int, ...]  # of one sample's input; images: channels, height, width; tokens: (block,)
    classes: int  # or the size of the vocabulary; 0 if targets are floating-point numbers
    train: int
    test: int
    about: str
    mean: tuple[float, ...] | None = None  # of each channel of the training images, with bytes divided by 255
    std: tuple[float, ...] | None = None
    load: str | None = None  # of a plug-in: module:function that returns ((x_train, y_train), (x_test, y_test))
    normalize: bool = False  # default of --normalize
    kind: str = "images"  # or "tokens"; "arrays" is anything else
    input_dtype: str = "float32"  # of what the model is given: float32 (or the model's own dtype), int64 or bool
    inputs: Any = None  # of several: a tuple or dict of texts such as "float32 3x4"; `shape` is that of the first
    target_shape: tuple[int, ...] = ()  # of one sample's targets; tokens: (block,)
    target_dtype: str = "int64"  # or float32 (or the model's own dtype)


@dataclass(frozen=True)
class Text:
    """A row of tokens: `block` of them are a sample, and the last part of them is for testing."""

    kind: str  # "shakespeare", "text" or "tokens"
    path: Path | None = None  # None: inside the package
    block: int = 128
    test: float = 0.1
    level: str = "bytes"  # or characters: what a token of a text is
    dtype: str = "uint16"  # of tokens
    vocabulary: int | None = None  # of tokens; None: the largest and 1

    def cut(self, count: int) -> int:
        """The position of the first of `count` tokens that is for testing."""
        return count - round(count * self.test)

    @property
    def mapped(self) -> bool:
        """Whether a file has the tokens as they are used."""
        return self.path is not None and (self.kind == "tokens" or self.level == "bytes")


def text_info(name: str, text: Text, count: int, vocabulary: int, about: str) -> DataInfo:
    """The data set with this many tokens. Targets are the inputs one token later, so a part needs one token more."""
    cut, shape = text.cut(count), (text.block,)
    train, test = (max(0, (tokens - 1) // text.block) for tokens in (cut, count - cut))
    if not (train and test):
        raise DataError(
            f"the data set {name!r} has {cut} tokens for training and {count - cut} for testing, but at least "
            f"{text.block + 1} of each are needed for block={text.block}: use a smaller block or a longer text"
        )
    return DataInfo(name, shape, vocabulary, train, test, about, kind="tokens", input_dtype="int64", target_shape=shape)


_OURS = (
    DataInfo(
        "mnist-mini",
        (1, 28, 28),
        10,
        10_000,
        2_000,
        "the first digits of MNIST, equally many of each class",
        mean=(0.132074,),
        std=(0.3096,),
    ),
    DataInfo("mnist", (1, 28, 28), 10, 60_000, 10_000, "handwritten digits", mean=(0.13066,), std=(0.308108,)),
    DataInfo(
        "fashion-mnist",
        (1, 28, 28),
        10,
        60_000,
        10_000,
        "clothes; harder than digits, same shape",
        mean=(0.286041,),
        std=(0.353024,),
    ),
    DataInfo(
        "cifar10",
        (3, 32, 32),
        10,
        50_000,
        10_000,
        "small photographs of animals and vehicles, in colour",
        mean=(0.4914, 0.482158, 0.446531),
        std=(0.247032, 0.243485, 0.261588),
        normalize=True,
    ),
    DataInfo("synthetic", (1, 28, 28), 10, 10_000, 2_000, "generated patterns and noise, of any shape and number"),
    text_info(
        "shakespeare",
        Text("shakespeare"),
        SHAKESPEARE.size,
        256,
        "ten tragedies, 1.4 MB of English text",
    ),
)
TABLE = Table("paceline.data", DataInfo, _OURS)

_EXAMPLE = "synthetic:3x32x32,classes=100,train=5000,test=1000"
_PART = re.compile(r"[0-9]{1,9}x[0-9]{1,9}x[0-9]{1,9}|(classes|train|test)=[0-9]{1,9}")
_MOST_BYTES = 2**34


OWN = f"images:FOLDER, arrays:FILE.npz, text:FILE, tokens:FILE.bin, {own_code.FORMS}"


def describe(name: str) -> DataInfo | None:
    """The entry for a name, or for ours with parameters; None for own data, which is known only after loading.

    Whether own data exists is not checked here, because a rank may not need it.
    """
    if name in TABLE:
        return TABLE[name]
    kind, _, parameters = name.partition(":")
    if kind == "synthetic":
        return _synthetic(name, parameters)
    if text := text_of(name):
        if text.path:
            return None
        vocabulary = 256 if text.level == "bytes" else SHAKESPEARE_CHARACTERS
        return text_info(name, text, SHAKESPEARE.size, vocabulary, TABLE["shakespeare"].about)
    if not own_file(name) and not own_code.is_own(name):
        raise UsageError(f"{unknown('data set', name, TABLE)}, or your own: {OWN}")
    return None


def kind_of(name: str) -> str:
    """`images`, `tokens` or `arrays`; the latter are any that a user's own data may be."""
    if info := describe(name):
        return info.kind
    return "tokens" if text_of(name) else "images" if name.startswith("images:") else "arrays"


def in_file(name: str) -> bool:
    """Whether a prepared data set is a file with its samples."""
    text = text_of(name)
    return text.mapped if text else name in ORIGINS or own_file(name) is not None


def own_file(name: str) -> tuple[str, Path] | None:
    """`images` or `arrays`, and the folder or file of a user's own data."""
    kind, colon, path = name.partition(":")
    if kind not in ("images", "arrays") or not colon:
        return None
    return kind, _own_path(name, path)


def _own_path(name: str, path: str) -> Path:
    if not path:
        raise UsageError(f"the data set {name!r} names no file: use {OWN}")
    try:
        return Path(path).expanduser()
    except RuntimeError as why:
        raise DataError(f"the data set {name!r} cannot be found: {why}") from why


def _synthetic(name: str, parameters: str) -> DataInfo:
    found: dict[str, list[int]] = {}
    for part in parameters.split(",") if parameters else ():
        key = part.partition("=")[0] if "=" in part else "shape"
        numbers = [int(number) for number in re.findall("[0-9]+", part[:40])]
        if not _PART.fullmatch(part) or key in found or 0 in numbers:
            raise UsageError(
                f"cannot read {part!r} in the data set {name!r}: allowed are CHANNELSxHEIGHTxWIDTH, classes=N, train=N "
                f"and test=N, each at most once and every number from 1 to 999999999, as in {_EXAMPLE}"
            )
        found[key] = numbers
    default = TABLE["synthetic"]
    shape = tuple(found.get("shape", default.shape))
    (classes,), (train,), (test,) = (found.get(key, [getattr(default, key)]) for key in ("classes", "train", "test"))
    if (size := (train + test + classes) * math.prod(shape)) > _MOST_BYTES:
        raise UsageError(
            f"the data set {name!r} would take {size / 2**30:,.0f} GiB of memory, but at most {_MOST_BYTES >> 30} are "
            f"allowed: use fewer or smaller images, as in {_EXAMPLE}"
        )
    return replace(default, name=name, shape=shape, classes=classes, train=train, test=test)


_LEVELS, _DTYPES = ("bytes", "characters"), ("uint8", "uint16", "uint32", "int32", "int64")
_WHOLE = r"0*[1-9][0-9]{0,8}"
# What a parameter of a text or of tokens takes, in words and as a pattern.
_PARAMETERS = {
    "block": ("block=N", _WHOLE),
    "level": (f"level={' or '.join(_LEVELS)}", "|".join(_LEVELS)),
    "dtype": (f"dtype={', '.join(_DTYPES)}", "|".join(_DTYPES)),
    "vocabulary": ("vocabulary=N", _WHOLE),
    "test": ("test=PART, a number between 0 and 1", r"0?\.[0-9]*[1-9][0-9]*"),
}
_TEXTS = {
    "shakespeare": ("block", "level", "test"),
    "text": ("block", "level", "test"),
    "tokens": ("block", "dtype", "vocabulary", "test"),
}


def text_of(name: str) -> Text | None:
    """The text or tokens that a name describes; None for other data sets."""
    kind, colon, rest = name.partition(":")
    if kind not in _TEXTS or (kind != "shakespeare" and not colon):
        return None
    parameters, path = rest, None
    if kind != "shakespeare":  # the name of a file may have commas, too
        file, parameters = re.fullmatch(r"(.*?)((?:,\w*=[^,/]*)*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        path, parameters = _own_path(name, file), parameters[1:]
    found: dict[str, Any] = {}
    for part in parameters.split(",") if parameters else ():
        key, _, value = part.partition("=")
        if key not in _TEXTS[kind] or key in found or not re.fullmatch(_PARAMETERS[key][1], value):
            allowed = "; ".join(_PARAMETERS[each][0] for each in _TEXTS[kind])
            raise UsageError(f"cannot read {part!r} in the data set {name!r}: allowed are {allowed}; each at most once")
        found[key] = float(value) if key == "test" else int(value) if value.isdecimal() else value
    return Text(kind, path, **found)
