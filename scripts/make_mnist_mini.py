"""Make the data set inside the package from the whole of MNIST: python scripts/make_mnist_mini.py [FOLDER OF MNIST]."""

import gzip
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

from paceline.data.load import load
from paceline.data.mini import FOLDER
from paceline.data.origins import NAMES

SEED = 20260101
PER_CLASS = {"train": 1_000, "t10k": 200}


def main() -> None:
    whole = load("mnist", Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    FOLDER.mkdir(exist_ok=True)
    for (images_name, labels_name), split in ((NAMES[:2], whole.train), (NAMES[2:], whole.test)):
        images, labels = split.inputs.numpy()[:, 0], split.targets.numpy()
        count = PER_CLASS[images_name.split("-")[0]]
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == digit)[:count] for digit in range(10)]))
        np.random.default_rng(SEED).shuffle(chosen)
        for name, array in ((images_name, images[chosen]), (labels_name, labels[chosen])):
            content = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
            path = FOLDER / f"{name}.gz"
            path.write_bytes(gzip.compress(content, 9, mtime=0))
            print(f"{name}  {sha256(content).hexdigest()}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
