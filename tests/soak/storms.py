"""Simulate parameter servers: messages arrive in random order, and workers, connections and servers fail."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from server_play import MISCHIEF, SERVERS_TOO, Play, check_samples, check_sequential, script

from paceline.server.ledger import UpdatePlan

TRIALS = 1000
PLAYS = 100
WORDS = {"twice": "messages delivered twice", "cut": "connections cut", "kill": "workers killed",
         "murder": "workers killed with their messages", "lapse": "workers silent too long",
         "restart": "workers restarted", "server": "servers restarted from checkpoints"}  # fmt: skip


def trial(seed: int, _folder: Path) -> Counter[str]:
    done: Counter[str] = Counter()
    for number in range(PLAYS):
        try:
            play = storm(random.Random(f"{seed} {number}"))
        except Exception as error:
            error.add_note(f"in play {number} of seed {seed}")
            raise
        done += Counter({"runs simulated": 1}) + Counter({WORDS[what]: count for what, count in play.done.items()})
    return done


def storm(dice: random.Random) -> Play:
    """One simulated run, with all the claims that hold of it."""
    staleness = dice.choice([0, 0, 1, 2, 3, None])
    checkpoints = dice.choice([0, 0, 1, 2, 3, 4])
    # Without a bound each server goes back alone, and then servers differ in the parts that they have.
    servers = 1 if staleness is None and checkpoints else dice.choice([1, 2, 3])
    plan = UpdatePlan(dice.randint(5, 30), dice.randint(1, 6), dice.randint(4, 16), staleness)
    length = dice.choice([200, 400, 1200])
    events = [(dice.randrange(length), dice.randrange(300)) for _ in range(dice.randrange(15))]
    play = Play(plan, dice.randint(1, 5), servers, checkpoints, SERVERS_TOO if checkpoints else MISCHIEF)
    play.run(script(dice.randrange(2**32), events, length))
    check_samples(play)
    if staleness == 0:
        check_sequential(play)
    if not checkpoints:
        assert play.events.updates == list(range(plan.updates))
        assert play.leader.tally.staleness == play.record.staleness()
    assert play.leader.tally.gradients.total() == sum(len(parts) for parts in play.record.made[0])
    return play
