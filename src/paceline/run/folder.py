"""A run folder: the names of its files, and one place that writes and reads each of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from paceline.run.atomic import write_whole
from paceline.run.clocks import aligned, read_clock, shifted
from paceline.run.lines import read_lines, stream_lines
from paceline.run.records import (
    MINOR,
    RUNNING,
    SCHEMA,
    Bench,
    Clock,
    Environment,
    Node,
    NodeSample,
    NodeStart,
    RankRow,
    Start,
    Step,
    Summary,
    build_summary,
    of_this_schema,
    with_present_names,
)
from paceline.strict_json import build, dump, naming, parse, plain, read_text

SUMMARY, SPEC, ENVIRONMENT, PLAN, BENCH = "summary.json", "spec.toml", "env.json", "plan.json", "bench.json"
CHAOS = "chaos.json"
MODEL, LOGS, CHECKPOINTS = "model.safetensors", "logs", "checkpoints"
# Space that a run holds from its start, so that it can still say how it ended when the disk is full.
HELD, HELD_BYTES = ".held", 1 << 20
LOCK_SECONDS = 1.0


# Names


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.jsonl"


def rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank_*.jsonl"))


def ranks_in(folder: Path) -> list[int]:
    """The ranks that have recorded something here."""
    found = (re.fullmatch(r"rank_([0-9]{1,6})\.jsonl", path.name) for path in rank_files(folder))
    return sorted(int(match[1]) for match in found if match)


def rank_log(folder: Path, rank: int) -> Path:
    return folder / LOGS / f"rank_{rank}.log"


def gone_mark(folder: Path, rank: int) -> Path:
    """The file in which the launcher says why a worker ended before it could tell its server that it is there."""
    return folder / LOGS / f"rank_{rank}.gone"


def node_file(folder: Path, node: str) -> Path:
    """The samples of a node.

    >>> node_file(Path(), "gpu-7.example.org").name, node_file(Path(), "../ä b").name
    ('node_gpu-7.example.org.jsonl', 'node_..___b.jsonl')
    """
    return folder / f"node_{re.sub(r'[^A-Za-z0-9._-]', '_', node)}.jsonl"


def node_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("node_*.jsonl"))


def record_files(folder: Path) -> list[Path]:
    """What ranks have recorded and printed here."""
    return [*folder.glob("*.jsonl"), *(folder / LOGS).glob("*.log")]


def is_record_of(name: str, rank: int) -> bool:
    """Whether a file of this name in a run folder is one that the rank writes."""
    own = rf"{rank_file(Path(), rank)}|{rank_log(Path(), rank)}".replace(".", r"\.")
    return re.fullmatch(rf"{own}|node_[A-Za-z0-9._-]+\.jsonl", name) is not None


def is_node_file(path: Path) -> bool:
    return path.name.startswith("node_")


def find_folders(paths: Iterable[Path]) -> list[Path]:
    """The run folders in these folders: themselves, or those below them, whether they came to their end or not."""
    found = []
    for path in paths:
        inner = sorted({each.parent for name in (SUMMARY, SPEC) for each in path.rglob(name)})
        found += [path] if path in inner or not inner else inner
    return list(dict.fromkeys(found))


# The summary


def write_summary(folder: Path, summary: Summary) -> None:
    if summary.status != RUNNING:
        give_space(folder)
    write_whole(folder / SUMMARY, dump(summary.as_dict(), indent=1) + "\n")
    summary.folder = folder


def conclude(folder: Path, summary: Summary) -> None:
    """Write the last summary, which nobody who diagnoses the run at the same moment replaces by a poorer one."""
    with sole_writer(folder):
        write_summary(folder, summary)


def check_summary(folder: Path) -> Summary:
    """The folder's summary; raises OSError or ValueError if there is none, or one that cannot be."""
    summary = build_summary(parse(read_text(folder / SUMMARY)))
    summary.folder = folder
    return summary


def read_summary(folder: Path) -> Summary | None:
    """The folder's summary, or None where there is none that can be read."""
    try:
        return check_summary(folder)
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Let no other process of this machine decide how the run ended; but do not wait long for one that hangs."""
    lock = None
    with contextlib.suppress(OSError):  # there is no folder, or its file system cannot lock
        lock = os.open(folder, os.O_RDONLY)
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def hold_space(folder: Path) -> None:
    """Raises OSError if there is none."""
    with (folder / HELD).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, HELD_BYTES)


def give_space(folder: Path) -> None:
    (folder / HELD).unlink(missing_ok=True)


def forget_processes(folder: Path) -> None:
    """Remove what says which processes the ranks of a run were: others may have their numbers by now."""
    for path in (folder / ENVIRONMENT, *(folder / LOGS).glob("rank_*.gone")):
        path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


# The other files


def write_environment(folder: Path, values: dict[str, Any]) -> None:
    write_whole(folder / ENVIRONMENT, dump({"minor": MINOR, **values}, indent=1) + "\n")


def check_environment(folder: Path) -> dict[str, Any]:
    """What env.json says; raises OSError or ValueError if it cannot be."""
    path = folder / ENVIRONMENT
    with naming(path):
        values: dict[str, Any] = plain(parse(read_text(path)), "it")
        if not build(Environment, values, extra=True).ranks:
            raise ValueError("it names no ranks")
    return values


def read_ranks(folder: Path) -> tuple[RankRow, ...]:
    """The ranks that env.json names; none where it cannot be read."""
    try:
        return build(Environment, parse(read_text(folder / ENVIRONMENT)), extra=True).ranks
    except (OSError, ValueError):
        return ()


def read_spec(folder: Path) -> dict[str, Any]:
    """What spec.toml says; raises OSError or ValueError if it cannot be."""
    path = folder / SPEC
    with naming(path):
        try:
            values: dict[str, Any] = plain(tomllib.loads(read_text(path)), "it")
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    return values


def read_steps(path: Path) -> list[Step]:
    """In the order of their numbers, on the clock of rank 0; of one that was made again, after a server came back, the
    last counts. Raises ValueError if one cannot be.
    """
    lines = aligned(read_lines(path, Start, Clock, Step))
    by_number = {line.step: line for line in lines if isinstance(line, Step)}
    return [by_number[number] for number in sorted(by_number)]


def read_nodes(folder: Path) -> dict[str, Node]:
    """The nodes of a run folder, by name, on the clock of rank 0; one that was started again has one row of samples.

    Raises ValueError if a sample cannot be.
    """
    nodes, offsets = {}, node_offsets(folder)
    for path in node_files(folder):
        if head := node_head(path):
            told = {f.name: getattr(head, f.name) for f in fields(Node) if f.name != "samples"}
            samples = [shifted(sample, offsets.get(head.name, 0.0)) for sample in read_lines(path, NodeSample)]
            nodes[head.name] = Node(**told, samples=samples)
    return nodes


def node_head(path: Path) -> NodeStart | None:
    """What a node's file says about the node; None if it is of another version."""
    return next((line for line in stream_lines(path, NodeStart) if line.schema == SCHEMA), None)


def rank_offsets(folder: Path) -> dict[int, float]:
    """What to add to the times of ranks on other hosts than rank 0's, where it was measured."""
    rows = read_ranks(folder)
    clocks = {row.rank: read_clock(rank_file(folder, row.rank)) for row in rows if row.host != rows[0].host}
    return {rank: clock.offset for rank, clock in clocks.items() if clock}


def node_offsets(folder: Path) -> dict[str, float]:
    """The same for nodes, by their names: they have the clock of the ranks there."""
    offsets = rank_offsets(folder)
    return {row.host: offsets[row.rank] for row in read_ranks(folder) if row.rank in offsets}


def write_bench(folder: Path, bench: Bench) -> None:
    write_whole(folder / BENCH, dump(asdict(bench), indent=1) + "\n")


def read_bench(folder: Path) -> Bench | None:
    """The experiment of a folder, or None where there is none that can be read."""
    try:
        bench = build(Bench, of_this_schema(parse(read_text(folder / BENCH))))
        for row in bench.paper:
            _check_paper(row)
        return replace(bench, paper=tuple(map(with_present_names, bench.paper)))
    except (OSError, ValueError):
        return None


def _check_paper(row: dict[str, Any]) -> None:
    """Tables of settings, a note, and numbers."""
    kinds: dict[str, tuple[type, ...]] = {"match": (dict,), "of": (dict,), "note": (str,)}
    for name, value in row.items():
        if not isinstance(value, kinds.get(name, (int, float))):
            raise ValueError(f"a paper's {name} cannot be a {type(value).__name__}")
