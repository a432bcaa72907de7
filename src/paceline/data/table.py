"""The table of data sets: what each is called, how large it is and what is in it."""

import re
from dataclasses import dataclass, replace

from paceline.errors import UsageError, unknown


@dataclass(frozen=True)
class DataInfo:
    """What is known of a data set before any of it is read."""

    name: str
    shape: tuple[int, int, int]  # channels, height, width
    classes: int
    train: int
    test: int
    about: str


TABLE: dict[str, DataInfo] = {
    info.name: info
    for info in (
        DataInfo("mnist-mini", (1, 28, 28), 10, 10_000, 2_000, "the first digits of MNIST, as many of each class"),
        DataInfo("mnist", (1, 28, 28), 10, 60_000, 10_000, "handwritten digits"),
        DataInfo("fashion-mnist", (1, 28, 28), 10, 60_000, 10_000, "clothes; harder than digits, of the same shape"),
        DataInfo("synthetic", (1, 28, 28), 10, 10_000, 2_000, "made-up patterns and noise, of any shape and number"),
    )
}

_EXAMPLE = "synthetic:3x32x32,classes=100,train=5000,test=1000"
_PART = re.compile(r"[0-9]{1,9}x[0-9]{1,9}x[0-9]{1,9}|(classes|train|test)=[0-9]{1,9}")
_MOST_BYTES = 2**34


def describe(name: str) -> DataInfo:
    """The entry for a name, or for `synthetic:` and its parameters."""
    if name in TABLE:
        return TABLE[name]
    kind, _, parameters = name.partition(":")
    if kind != "synthetic":
        raise unknown("data set", name, TABLE)
    return _synthetic(name, parameters)


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
    channels, height, width = found.get("shape", default.shape)
    (classes,), (train,), (test,) = (found.get(key, [getattr(default, key)]) for key in ("classes", "train", "test"))
    if (size := (train + test + classes) * channels * height * width) > _MOST_BYTES:
        raise UsageError(
            f"the data set {name!r} would take {size / 2**30:,.0f} GiB of memory, and at most {_MOST_BYTES >> 30} are "
            f"allowed: use fewer or smaller images, as in {_EXAMPLE}"
        )
    return replace(default, name=name, shape=(channels, height, width), classes=classes, train=train, test=test)
