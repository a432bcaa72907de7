"""The small data set inside the package."""

import gzip
from importlib.resources import files
from pathlib import Path

from paceline.data.origins import File
from paceline.data.sources import SourceError, checked, reading
from paceline.errors import DataError

FOLDER = Path(str(files("paceline.data"))) / "mini"


def read(file: File) -> bytearray:
    """The uncompressed content of one of its files."""
    path = FOLDER / f"{file.name}.gz"
    content = bytearray()
    try:
        with reading(path), gzip.open(path) as stream:
            for chunk in checked(stream, file, path):
                content += chunk
    except SourceError as why:
        raise DataError(f"{why}. This file comes with Paceline: install it again") from why
    return content
