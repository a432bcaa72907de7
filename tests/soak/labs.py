"""Make labs and end them: normally, or by killing one of their processes while they are made or used."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from live_lab import PACELINE, check_nothing_left, traces
from live_run import until

from paceline.lab import client
from paceline.lab.plan import make_plan

TRIALS = 1000
LIMITS = {"node": [{"cpu": 0.5, "memory": "512MB"}, {}]}
USED = ("nobody", "keeper", "holder", "both", "command")
WORDS = {"keeper": "the keeper", "holder": "the holder", "both": "keeper and holder", "command": "`lab run`"}
MADE = ("parent", "keeper", "holder")


def trial(seed: int, folder: Path) -> Counter[str]:
    dice = random.Random(seed)
    number = dice.choice([signal.SIGTERM, signal.SIGKILL])
    if dice.random() < 0.3:
        victim = dice.choice(MADE)
        end_while_made(victim, number, folder, dice.randint(1, 15))
        return Counter({f"{number.name} to the {victim} of a lab that was being made": 1})
    victim = dice.choice(USED)
    size: dict[str, Any] = LIMITS if os.getuid() == 0 and dice.random() < 0.3 else {"nodes": dice.randint(1, 8)}
    end_in_use(victim, size, busy=dice.random() < 0.5)
    return Counter({"labs ended normally" if victim == "nobody" else f"SIGKILL to {WORDS[victim]}": 1})


def end_in_use(victim: str, size: dict[str, Any], *, busy: bool = False) -> None:
    """Make a lab and end it, or kill (SIGKILL) its keeper, its holder, both at once, or the command it lives for."""
    before = traces()
    if victim == "command":
        words = [PACELINE, "lab", "run", "home:2", "--", "sh", "-c", "echo up; sleep 60"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.kill()
        check_nothing_left(before)
        return
    plan = make_plan({"preset": "home", "name": f"test-cycle-{os.getpid()}", **size}, "test")
    keeper = client.start(plan, detached=False)
    commands = [client.begin(plan.name, plan.nodes[-1].name, ["sleep", "60"])] if busy else []
    holder = children(keeper.pid)[0]
    for pid in {"nobody": [], "keeper": [keeper.pid], "holder": [holder], "both": [keeper.pid, holder]}[victim]:
        os.kill(pid, signal.SIGKILL)
    client.stop(keeper)
    for command in commands:
        command.connection.close()
    if victim == "both":  # nobody was left to remove its control groups: the next lab does
        client.stop(client.start(plan, detached=False))
    check_nothing_left(before)


def end_while_made(victim: str, number: int, folder: Path, nodes: int = 4) -> None:
    """Signal the command that makes a lab of 30 nodes, its keeper or its holder when so many nodes are there."""
    before = traces()
    limited = "[[node]]\ncpu = 0.5\n" if os.getuid() == 0 else "[[node]]\n"
    (folder / "many.toml").write_text('rate = "1gbit"\n' + limited * 30)
    words = [PACELINE, "lab", "up", "many.toml", "--name", f"test-made-{os.getpid()}"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until("nodes are there", lambda: len(f := line(process.pid)) > 2 and len(children(f[2])) >= nodes, 30)
        found = line(process.pid)
        os.kill(found[MADE.index(victim)], number)
        if (victim, number) == ("holder", signal.SIGTERM):
            os.kill(found[0], number)  # a holder has nothing to do with it
        process.communicate(timeout=60)
    if process.returncode == 0:  # the lab was complete before the signal came
        subprocess.run([PACELINE, "lab", "down", words[-1]], check=False, capture_output=True)
    check_nothing_left(before)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def line(pid: int) -> list[int]:
    """A process, its first child, the first child of that, and so on."""
    found = [pid]
    while len(found) < 3 and (below := children(found[-1])):
        found.append(below[0])
    return found
