"""Checks a trace against Chrome's Trace Event Format, as strictly as the format is described."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "process_sort_index": ("sort_index", int)}


def check_trace(path: Path) -> list[Event]:
    """The events of a trace; an assertion fails if one is not as the format demands."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    trace = json.loads(text, parse_constant=lambda word: 1 / 0)  # NaN and Infinity are not JSON
    assert trace.keys() == {"displayTimeUnit", "traceEvents", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    named: set[tuple[int, int | None]] = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        check_phase(event)
        if event["name"] in ("process_name", "thread_name"):
            named.add((event["pid"], event["tid"] if event["name"] == "thread_name" else None))
    for event in events:
        assert (event["pid"], None) in named, "every process has a name"
        assert event["ph"] != "X" or (event["pid"], event["tid"]) in named, "every thread with slices has a name"
    check_nesting(events)
    return events


def check_phase(event: Event) -> None:
    match event["ph"]:
        case "X":
            assert isinstance(event["dur"], int | float)
            assert event["dur"] >= 0
        case "i":
            assert event["s"] in ("g", "p", "t")
        case "C":
            assert event["args"]
            assert all(isinstance(value, int | float) and math.isfinite(value) for value in event["args"].values())
        case "M":
            key, kind = METADATA[event["name"]]
            assert isinstance(event["args"][key], kind)
        case other:
            raise AssertionError(f"phase {other!r}")


def check_nesting(events: list[Event]) -> None:
    """Slices of a thread contain each other or do not overlap."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            threads[event["pid"], event["tid"]].append((start, -(start + round(event["dur"] * 1000)), event["name"]))
    for slices in threads.values():
        opened: list[int] = []
        for start, minus_end, name in sorted(slices, key=lambda each: each[:2]):
            while opened and opened[-1] <= start:
                opened.pop()
            assert not opened or -minus_end <= opened[-1], f"{name} overlaps another slice"
            opened.append(-minus_end)


def slices(events: list[Event], rank: int, thread: int = 1) -> list[Event]:
    """The slices of a rank, in the order in which they were written."""
    return [event for event in events if (event["ph"], event["pid"], event["tid"]) == ("X", rank, thread)]
