"""How near the lab's links come to the speed that was asked for: one pair of nodes, and all pairs at once.

    python benchmarks/lab_links.py [--rounds 3] [--seconds 5] [--nodes 4]

Speeds from 10 Mbit/s to 1 Gbit/s, interleaved: every round makes a lab of each. What is measured are the bytes that the
kernel counts on the nodes' interfaces while programs in the nodes send over TCP as fast as they can. A veth counts
1500 of a full frame's 1514 bytes, and the link's speed is for all of them: 0.991 is all that can be.
"""

from __future__ import annotations

import argparse
import os
import statistics

from paceline.lab import client
from paceline.lab.measure import measure
from paceline.lab.plan import in_words, make_plan

MEGABITS = (10, 30, 100, 300, 1000)


def ratios(megabits: int, nodes: int, seconds: float) -> dict[str, list[float]]:
    """Measured ÷ asked: of the link of one pair, and of every node in each direction while all send to all."""
    plan = make_plan({"rate": f"{megabits}mbit", "nodes": nodes, "name": f"bench-{os.getpid()}"}, "benchmark")
    keeper = client.start(plan, detached=False)
    try:
        names = [node.name for node in plan.nodes]
        every = [(a, b) for a in names for b in names if a != b]
        pair = measure(plan.name, plan, every[:1], seconds)
        together = measure(plan.name, plan, every, seconds)
    finally:
        client.stop(keeper)
    return {
        "one pair": [rate.measured / rate.asked for rate in pair],
        "all pairs: sent": [rate.measured / rate.asked for rate in together if rate.way == "up"],
        "all pairs: received": [rate.measured / rate.asked for rate in together if rate.way == "down"],
    }


def _row(found: list[float]) -> str:
    off = max(abs(ratio - 1) for ratio in found)
    return f"{statistics.median(found):.3f} ({min(found):.3f}–{max(found):.3f}){' ' if off <= 0.05 else '!'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--nodes", type=int, default=4)
    args = parser.parse_args()
    table: dict[int, dict[str, list[float]]] = {megabits: {} for megabits in MEGABITS}
    for number in range(args.rounds):
        for megabits in MEGABITS:
            print(f"round {number + 1} of {args.rounds}: {in_words(megabits * 10**6)}", flush=True)
            for column, found in ratios(megabits, args.nodes, args.seconds).items():
                table[megabits].setdefault(column, []).extend(found)
    print(f"\nmeasured ÷ asked: median (least–most); ! is more than 5 % off. {args.nodes} nodes, {args.rounds} rounds")
    print(f"{'asked':<14}" + "".join(f"{column:<24}" for column in table[MEGABITS[0]]))
    for megabits, columns in table.items():
        print(f"{in_words(megabits * 10**6):<14}" + "".join(f"{_row(found):<24}" for found in columns.values()))


if __name__ == "__main__":
    main()
