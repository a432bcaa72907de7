"""Where Linux's control groups are, of version 1 and 2, and which of them this process is in; no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")


def mounted(controller: str, proc: Path = PROC) -> tuple[Path, int] | None:
    """The folder of a controller's groups, and the version of its files."""
    for line in (proc / "mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and controller in options.split(","):
            return Path(place), 1
        with contextlib.suppress(OSError):
            if kind == "cgroup2" and controller in Path(place, "cgroup.controllers").read_text().split():
                return Path(place), 2
    return None


def own_groups(controller: str, proc: Path = PROC) -> list[Path]:
    """The folders of the group that this process is in and of all that contain it, as far as they are visible."""
    try:
        found, lines = mounted(controller, proc), (proc / "self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    if found is None:
        return []
    root, version = found
    for _, names, path in (line.split(":", 2) for line in lines):
        if controller in names.split(",") if version == 1 else not names:
            # In a container the path may begin above the group that is mounted there.
            parts = [part for part in path.split("/") if part not in ("", "..")]
            tails = (root.joinpath(*parts[start:]) for start in range(len(parts) + 1))
            group = next(tail for tail in tails if tail.is_dir())
            return [group, *group.parents][: len(group.relative_to(root).parts) + 1]
    return []
