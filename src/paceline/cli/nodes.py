"""A table of the nodes' CPU and network use, which paceline train prints after a run on several nodes."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from paceline.run.folder import read_nodes
from paceline.run.records import Node, Traffic

WIDTHS = (11, 11, 13, 14, 11, 9)


def table(folder: Path) -> list[str]:
    """A line for each node: mean CPU, and the traffic of its interfaces except loopback during the run."""
    nodes = [node for node in read_nodes(folder).values() if node.samples]
    if len(nodes) < 2:
        return []
    words = ("cores busy", "MB sent", "MB received", "packets sent", "received", "dropped")
    head = f"{'node':<12}" + "".join(f"{word:>{width}}" for word, width in zip(words, WIDTHS, strict=True))
    return [head, *(_row(node) for node in nodes)]


def _row(node: Node) -> str:
    busy = [sample.cpu for sample in node.samples if sample.cpu is not None]
    carried = _carried(node)
    values = (
        f"{fmean(busy):.2f}" if busy else "–",
        f"{carried.tx_bytes / 1e6:,.1f}",
        f"{carried.rx_bytes / 1e6:,.1f}",
        f"{carried.tx_packets:,}",
        f"{carried.rx_packets:,}",
        f"{carried.tx_drops + carried.rx_drops:,}",
    )
    return f"{node.name:<12}" + "".join(f"{value:>{width}}" for value, width in zip(values, WIDTHS, strict=True))


def _carried(node: Node) -> Traffic:
    """The traffic from the first sample to the last, over all interfaces except loopback."""
    first, last = node.samples[0].interfaces, node.samples[-1].interfaces
    names = [name for name in last if name != "lo"]

    def total(what: str) -> int:
        before = [int(getattr(first[name], what)) for name in names if name in first]
        return sum(int(getattr(last[name], what)) for name in names) - sum(before)

    return Traffic(**{what: total(what) for what in Traffic.__dataclass_fields__})
