"""Schedules: each micro-batch once, no deadlock, and as long, as idle and as drawn as they say."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby, pairwise

import pytest

from paceline.errors import UsageError
from paceline.pipeline.schedule import SCHEDULES, Instruction, Op, bubble, in_flight, instructions

SIZES = [(stages, micros) for stages in range(1, 9) for micros in range(1, 13)]
# Which way a message goes, and what receives it there.
SENDS = {Op.SEND_ACTIVATION: (1, Op.RECV_ACTIVATION), Op.SEND_GRADIENT: (-1, Op.RECV_GRADIENT)}
RECEIVES = {receive: (-way, send) for send, (way, receive) in SENDS.items()}
LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B"}
EQUAL = {Op.FORWARD: 1, Op.BACKWARD: 1}
Pick = Callable[[list[int]], int]

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def plans(schedule: str, stages: int, micros: int) -> list[list[Instruction]]:
    return [instructions(schedule, stages, micros, stage) for stage in range(stages)]


def micros_of(plan: list[Instruction], op: Op) -> list[int]:
    return [instruction.micro for instruction in plan if instruction.op is op]


@dataclass
class Played:
    """When each stage starts each instruction, and when it has done it all, where messages take no time."""

    starts: list[dict[Instruction, int]]
    ends: list[int]
    stuck: list[int]  # stages that wait for a message that nobody will send

    @property
    def span(self) -> int:
        return max(self.ends)


def play(todo: list[list[Instruction]], seconds: dict[Op, int], pick: Pick = min) -> Played:
    """Stages do their instructions; a receive waits until the neighbour's send is done, a send does not wait."""
    at = [0] * len(todo)
    now = [0] * len(todo)
    starts: list[dict[Instruction, int]] = [{} for _ in todo]

    def ready(stage: int) -> bool:
        if at[stage] == len(todo[stage]):
            return False
        instruction = todo[stage][at[stage]]
        way, send = RECEIVES.get(instruction.op, (0, None))
        return send is None or Instruction(send, instruction.micro) in starts[stage + way]

    while able := [stage for stage in range(len(todo)) if ready(stage)]:
        stage = pick(able)
        instruction = todo[stage][at[stage]]
        if instruction.op in RECEIVES:
            way, send = RECEIVES[instruction.op]
            now[stage] = max(now[stage], starts[stage + way][Instruction(send, instruction.micro)])
        starts[stage][instruction] = now[stage]
        now[stage] += seconds.get(instruction.op, 0)
        at[stage] += 1
    return Played(starts, now, [stage for stage in range(len(todo)) if at[stage] < len(todo[stage])])


def draw(played: Played) -> str:
    """The table of a schedule's docstring: forward and backward take one column each."""
    rows = [["time", *map(str, range(played.span))]]
    for stage, starts in enumerate(played.starts):
        cells = {time: f"{LETTERS[i.op]}{i.micro}" for i, time in starts.items() if i.op in LETTERS}
        rows.append([f"stage {stage}", *(cells.get(time, ".") for time in range(played.span))])
    return "\n".join(f"{row[0]:8}" + "".join(f"{cell:>3}" for cell in row[1:]) for row in rows)


@each_schedule
def test_it_is_as_its_docstring_draws_it(schedule: str) -> None:
    drawn = inspect.getdoc(SCHEDULES[schedule].order) or ""
    assert draw(play(plans(schedule, 3, 4), EQUAL)) in drawn


@each_schedule
def test_every_micro_batch_goes_forward_then_backward_once_on_every_stage_in_order(schedule: str) -> None:
    for stages, micros in SIZES:
        for plan in plans(schedule, stages, micros):
            assert micros_of(plan, Op.FORWARD) == micros_of(plan, Op.BACKWARD) == list(range(micros))
            places = {instruction: place for place, instruction in enumerate(plan)}
            assert len(places) == len(plan)
            for micro in range(micros):
                assert places[Instruction(Op.FORWARD, micro)] < places[Instruction(Op.BACKWARD, micro)]


@each_schedule
def test_the_step_is_once_and_last(schedule: str) -> None:
    for stages, micros in SIZES:
        for plan in plans(schedule, stages, micros):
            assert plan[-1] == Instruction(Op.STEP, -1)
            assert Counter(instruction.op for instruction in plan)[Op.STEP] == 1


@each_schedule
def test_every_send_has_its_receive_at_the_neighbour_in_the_same_order(schedule: str) -> None:
    for stages, micros in SIZES:
        todo = plans(schedule, stages, micros)
        for here, following in pairwise(todo):
            ways = ((here, Op.SEND_ACTIVATION, following), (following, Op.SEND_GRADIENT, here))
            for sender, send, receiver in ways:
                assert micros_of(sender, send) == micros_of(receiver, SENDS[send][1]) == list(range(micros))
        for end, ops in ((0, (Op.RECV_ACTIVATION, Op.SEND_GRADIENT)), (-1, (Op.SEND_ACTIVATION, Op.RECV_GRADIENT))):
            assert not [instruction for instruction in todo[end] if instruction.op in ops]


@each_schedule
def test_what_is_computed_has_come_and_what_is_sent_has_been_computed(schedule: str) -> None:
    around = {
        Op.FORWARD: (Op.RECV_ACTIVATION, Op.SEND_ACTIVATION),
        Op.BACKWARD: (Op.RECV_GRADIENT, Op.SEND_GRADIENT),
    }
    for stages, micros in SIZES:
        todo = plans(schedule, stages, micros)
        played = play(todo, {Op.FORWARD: 3, Op.BACKWARD: 5})
        for stage, plan in enumerate(todo):
            places = {instruction: place for place, instruction in enumerate(plan)}
            for instruction, place in places.items():
                if instruction.op in around:
                    before, after = (places.get(Instruction(op, instruction.micro)) for op in around[instruction.op])
                    assert (before is None) == (stage == (0 if instruction.op is Op.FORWARD else stages - 1))
                    assert before is None or before < place
                    assert after is None or after > place
                if instruction.op in RECEIVES:
                    way, send = RECEIVES[instruction.op]
                    sent = played.starts[stage + way][Instruction(send, instruction.micro)]
                    assert played.starts[stage][instruction] >= sent


@each_schedule
def test_every_stage_comes_to_its_end(schedule: str) -> None:
    """No deadlock, in any order of events.

    A stage's list is fixed, sends do not block, and a receive waits for one named message of one named neighbour. So a
    stage that can go on still can after any other has gone on, and any two orders of events can be completed to the
    same state: where one execution ends, all do, with the same times.
    """
    for stages, micros in SIZES:
        assert not play(plans(schedule, stages, micros), EQUAL).stuck
    todo = plans(schedule, 4, 6)
    seed = random.Random(0)
    picks: list[Pick] = [min, max, *[seed.choice] * 5]
    times = [play(todo, {Op.FORWARD: 2, Op.BACKWARD: 3}, pick).starts for pick in picks]
    assert all(each == times[0] for each in times)


def test_a_deadlock_would_be_found() -> None:
    todo = plans("1f1b", 2, 2)
    backward_first = [i for i in todo[0] if i.op is Op.RECV_GRADIENT] + [
        i for i in todo[0] if i.op is not Op.RECV_GRADIENT
    ]
    assert play([backward_first, todo[1]], EQUAL).stuck == [0, 1]


@dataclass
class Handshakes:
    """Ranks whose messages wait at the sender until the receive is posted, as large ones do.

    A rank posts its receives in order: that at which it stands, and `ahead` more. With `blocking`, it stands at a send
    until that is taken: harsher than the executor, which goes on.
    """

    todo: list[list[Instruction]]
    ahead: int
    blocking: bool
    taken: set[tuple[int, Instruction]] = field(default_factory=set)  # by the stage that received it
    offered: list[tuple[int, Instruction]] = field(default_factory=list)  # to that stage, for that receive

    def __post_init__(self) -> None:
        self.at = [0] * len(self.todo)

    def posted(self, stage: int) -> list[Instruction]:
        rest = self.todo[stage][self.at[stage] :]
        standing = 1 if rest and rest[0].op in RECEIVES else 0
        return [i for i in rest if i.op in RECEIVES][: standing + self.ahead]

    def hand_over(self) -> None:
        """What is offered goes into the first receive of its kind that has none; it must be the one it is for."""
        for to, receive in list(self.offered):
            free = [i for i in self.posted(to) if i.op is receive.op and (to, i) not in self.taken]
            if free:
                assert free[0] == receive
                self.taken.add((to, receive))
                self.offered.remove((to, receive))

    def go_on(self, stage: int) -> bool:
        """One instruction further, if that is possible."""
        if self.at[stage] == len(self.todo[stage]):
            return False
        instruction = self.todo[stage][self.at[stage]]
        if instruction.op in SENDS:
            way, receive = SENDS[instruction.op]
            message = (stage + way, Instruction(receive, instruction.micro))
            if message not in self.offered and message not in self.taken:
                self.offered.append(message)
                self.hand_over()
            if self.blocking and message not in self.taken:
                return False
        elif instruction.op in RECEIVES and (stage, instruction) not in self.taken:
            return False
        self.at[stage] += 1
        self.hand_over()
        return True

    def end(self) -> bool:
        """Whether all come to their end, and all messages to their receiver."""
        self.hand_over()
        while any(self.go_on(stage) for stage in range(len(self.todo))):
            pass
        return not self.offered and self.at == [len(plan) for plan in self.todo]


@each_schedule
@pytest.mark.parametrize(("ahead", "blocking"), [(0, False), (1, False), (2, False), (1, True), (3, True)])
def test_it_ends_with_few_receives_posted_ahead(schedule: str, ahead: int, blocking: bool) -> None:
    """Messages that wait for their receive do no harm: with one receive posted ahead, not even if sends block."""
    for stages, micros in [(1, 3), (2, 1), (2, 7), (3, 2), (4, 4), (5, 11), (8, 3), (8, 12)]:
        assert Handshakes(plans(schedule, stages, micros), ahead, blocking).end()


def test_sends_that_block_would_need_a_receive_posted_ahead() -> None:
    assert not Handshakes(plans("1f1b", 2, 4), ahead=0, blocking=True).end()


@each_schedule
def test_a_stage_holds_as_many_micro_batches_as_it_says(schedule: str) -> None:
    for stages, micros in SIZES:
        for stage, plan in enumerate(plans(schedule, stages, micros)):
            held = most = 0
            for instruction in plan:
                held += (instruction.op is Op.FORWARD) - (instruction.op is Op.BACKWARD)
                most = max(most, held)
            assert (most, held) == (in_flight(schedule, stages, micros, stage), 0)


@each_schedule
@pytest.mark.parametrize("backward", [1, 2])
def test_equal_stages_are_idle_for_just_the_bubble(schedule: str, backward: int) -> None:
    for stages, micros in SIZES:
        played = play(plans(schedule, stages, micros), {Op.FORWARD: 1, Op.BACKWARD: backward})
        idle = 1 - Fraction(stages * micros * (1 + backward), stages * played.span)
        assert float(idle) == bubble(schedule, stages, micros)


def test_1f1b_holds_fewer_than_gpipe_and_is_as_fast() -> None:
    assert [in_flight("1f1b", 4, 8, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("gpipe", 4, 8, stage) for stage in range(4)] == [8, 8, 8, 8]
    assert play(plans("1f1b", 4, 8), EQUAL).span == play(plans("gpipe", 4, 8), EQUAL).span == 22


def test_one_forward_one_backward_in_turn_once_it_is_full() -> None:
    computed = [i.op for i in instructions("1f1b", 4, 8, 1) if i.op in LETTERS]
    runs = [(LETTERS[op], len(list(group))) for op, group in groupby(computed)]
    assert runs == [("F", 3), *[("B", 1), ("F", 1)] * 5, ("B", 3)]


def test_an_unknown_schedule_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match=r"unknown schedule 'gpip'; did you mean 'gpipe'"):
        instructions("gpip", 2, 2, 0)
