"""The table of nodes at the end of a run."""

from __future__ import annotations

from pathlib import Path

from raw_lines import RawWriter

from paceline.cli.nodes import table


def write_node(folder: Path, name: str, sent: list[int]) -> None:
    lines = RawWriter(folder / f"node_{name}.jsonl")
    lines.write("node", schema=1, name=name, cores=2, memory_bytes=1, period=0.5, clock="unix", own_processes=True)
    for i, count in enumerate(sent):
        traffic = {"rx_bytes": 10, "tx_bytes": count, "rx_packets": 1, "tx_packets": count // 1000, "rx_drops": 0,
                   "tx_drops": i}  # fmt: skip
        lines.write("sample", time=float(i), cpu=None if i == 0 else 0.5, memory_bytes=5,
                    interfaces={"eth0": traffic, "lo": traffic})  # fmt: skip
    lines.close()


def test_what_the_nodes_sent_between_the_first_sample_and_the_last(tmp_path: Path) -> None:
    write_node(tmp_path, "n1", [5_000_000, 7_000_000, 16_000_000])
    assert table(tmp_path) == [], "one node is no table"
    write_node(tmp_path, "n2", [0])
    head, first, second = table(tmp_path)
    assert head.split()[:3] == ["node", "cores", "busy"]
    assert first.split() == ["n1", "0.50", "11.0", "0.0", "11,000", "0", "2"]
    assert second.split() == ["n2", "–", "0.0", "0.0", "0", "0", "0"]
