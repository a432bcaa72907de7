"""Saves a server's state on disk: the latest two, written atomically as safetensors, so that loading runs no code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.run.atomic import replacing
from paceline.strict_json import dump

# The previous one is kept until all servers have the latest.
KEPT = 2


class Snapshots:
    """The snapshot files of one server, by the number of updates."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def numbers(self) -> list[int]:
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        found = [re.fullmatch(rf"server_{self._rank}_(\d+)\.safetensors", name) for name in names]
        return sorted(int(match.group(1)) for match in found if match)

    def save(self, number: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(number)) as temporary:
            save_file(tensors, temporary, metadata={"facts": dump(facts)})
        for old in self.numbers()[:-KEPT]:
            self._path(old).unlink()

    def load(self, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        with safe_open(self._path(number), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118

    def forget_after(self, number: int) -> None:
        """Remove later snapshots: training goes back to this one, and will not repeat them exactly."""
        for later in self.numbers():
            if later > number:
                self._path(later).unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"server_{self._rank}_{number}.safetensors"
