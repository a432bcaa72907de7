"""Batches: the same whoever reads them, made in the background, never more than a few at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.comm.threads import thread_world
from paceline.data.batch import Batch, form_of
from paceline.data.course import Course
from paceline.data.input import (
    AHEAD,
    BatchesOf,
    CountedInput,
    Input,
    OwnInput,
    Samples,
    ScatteredInput,
    TargetsInput,
    evaluation_batch,
)
from paceline.data.load import Dataset, Split, load
from paceline.data.sampler import shuffle
from paceline.data.table import DataInfo
from paceline.data.transforms import Prepare, PrepareImages, PrepareTargets
from paceline.errors import AgreedError, PacelineError
from paceline.training.setup import _agree_on_data

DATA = "synthetic:3x16x16,classes=5,train=70,test=33"
READY = PrepareImages(torch.float64, torch.device("cpu"), augment="crop-flip", size=(24, 24))


def own(data: Dataset, comm: Comm) -> Input:
    return OwnInput(data, 7, 0, comm, READY)


def scattered(data: Dataset, comm: Comm, prepare: Prepare = READY) -> Input:
    form = form_of(data.train.inputs), form_of(data.train.targets)
    return ScatteredInput(data if comm.rank == 0 else None, data.info, form, 7, 0, comm, prepare)


def on_all(
    size: int, make: Callable[[Dataset, Comm], Input], batch: int, data: Dataset | None = None
) -> list[tuple[list[list[Batch]], list[Batch]]]:
    """Two epochs and the test set of each rank."""
    data = data or load(DATA)

    def rank(comm: Comm) -> tuple[list[list[Batch]], list[Batch]]:
        source = make(data, comm)
        course = Course(len(source.numbers["train"]), batch)
        steps = [range(course.per_epoch), range(course.per_epoch, 2 * course.per_epoch)]
        epochs = [list(source.epoch(course, epoch, steps[epoch])) for epoch in range(2)]
        return epochs, list(source.evaluation("test")[1])

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, thread_world(size, 10.0)))


@pytest.mark.parametrize("make", [own, scattered])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_see_what_one_sees_augmentation_included(
    make: Callable[[Dataset, Comm], Input], size: int
) -> None:
    ((alone, test),) = on_all(1, own, 12)
    ranks = on_all(size, make, 12)
    for epoch in range(2):
        for step, whole in enumerate(alone[epoch]):
            parts = [epochs[epoch][step] for epochs, _ in ranks]
            assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
            assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
            assert {part.global_count for part in parts} == {whole.global_count}
    assert sum(step.count for step in alone[0]) == 63
    assert not torch.equal(alone[0][0].inputs, alone[1][0].inputs)
    for which in ("inputs", "targets"):
        together = torch.cat([getattr(batch, which) for _, batches in ranks for batch in batches])
        assert torch.equal(together, torch.cat([getattr(batch, which) for batch in test]))


def mixed(count: int, seed: int = 0) -> Split:
    """Several inputs and targets, of many dtypes and shapes."""
    numbers, random = torch.arange(count), torch.Generator().manual_seed(seed)
    inputs = {
        "wide": (numbers[:, None, None] + torch.rand(count, 3, 2, generator=random)).double(),
        "half": numbers[:, None].half(),
        "ids": (numbers[:, None] + torch.arange(4)).to(torch.uint16),
        "mask": (numbers % 2 == 0)[:, None],
        "rows": torch.arange(3 * count).view(3, count).t().int(),  # not contiguous
    }
    return Split(inputs, (numbers.float(), numbers[:, None].to(torch.int16)))


MIXED = Dataset(DataInfo("mixed", (3, 2), 0, 70, 33, "", kind="arrays", target_dtype="float32"), mixed(70), mixed(33))
AS_GIVEN = Prepare(torch.float32, torch.device("cpu"))


def own_mixed(data: Dataset, comm: Comm) -> Input:
    return OwnInput(data, 7, 0, comm, AS_GIVEN)


def scattered_mixed(data: Dataset, comm: Comm) -> Input:
    return scattered(data, comm, AS_GIVEN)


@pytest.mark.parametrize("make", [own_mixed, scattered_mixed])
def test_inputs_and_targets_may_be_several_tensors_of_any_dtype_and_shape(
    make: Callable[[Dataset, Comm], Input],
) -> None:
    ranks = on_all(3, make, 12, MIXED)
    found: set[int] = set()
    for epoch, step, (epochs, _) in ((e, s, rank) for e in range(2) for s in range(6) for rank in ranks):
        batch = epochs[epoch][step]
        numbers = batch.targets[1][:, 0]
        inputs, targets = MIXED.train.take(numbers)
        assert list(batch.inputs) == list(inputs)
        assert all(torch.equal(batch.inputs[name], inputs[name].to(batch.inputs[name])) for name in inputs)
        assert torch.equal(batch.targets[0], targets[0])
        found |= set(numbers.tolist())
        dtypes = [batch.inputs[name].dtype for name in ("wide", "half", "ids", "mask", "rows")]
        assert dtypes == [torch.float32, torch.float32, torch.int64, torch.bool, torch.int64]
        assert [each.dtype for each in batch.targets] == [torch.float32, torch.int64]
    assert len(found) == 63
    tested = torch.cat([batch.targets[1][:, 0] for _, batches in ranks for batch in batches])
    assert tested.tolist() == list(range(33))


@pytest.mark.parametrize("where", ["same", "inputs", "targets", "test"])
def test_ranks_with_other_inputs_or_targets_are_refused(where: str) -> None:
    """By a digest of all that a user's function has returned; it has the same form on both ranks."""
    info = replace(MIXED.info, name="mine:load", inputs=form_of(MIXED.train.inputs), about="")
    one, other = (Dataset(info, mixed(70, seed=1), mixed(33, seed=1)) for _ in range(2))
    if where == "inputs":
        other.train.inputs["mask"][69] ^= True
    elif where != "same":
        (other.test if where == "test" else other.train).targets[1][5] += 1

    def agree(comm: Comm) -> object:
        try:
            return _agree_on_data("mine:load", other if comm.rank else one, comm)
        except AgreedError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(agree, thread_world(2, 10.0)))
    if where == "same":
        assert answers == [(info, (form_of(one.train.inputs), form_of(one.train.targets)))] * 2
    else:
        assert all(str(each).startswith("rank 1 has different data than rank 0") for each in answers)


def test_a_batch_can_be_changed_without_changing_the_data() -> None:
    """A scattered test set is kept; a model may work in place."""
    for make in (own_mixed, scattered_mixed):
        source = make(MIXED, SingleComm())
        for _ in range(2):
            (batch,) = source.evaluation("test")[1]
            assert torch.equal(batch.inputs["rows"], MIXED.test.inputs["rows"].long())
            assert torch.equal(batch.targets[0], MIXED.test.targets[0])
            batch.inputs["rows"].zero_()
            batch.targets[0].zero_()
            assert MIXED.test.targets[0][1] == 1


def test_a_rank_without_inputs_has_the_targets_of_the_same_samples() -> None:
    whole, course = own_mixed(MIXED, SingleComm()), Course(63, 12)
    part = TargetsInput(MIXED, 7, 0, SingleComm(), PrepareTargets(torch.float32, torch.device("cpu")))
    for one, other in zip(whole.epoch(course, 0, range(6)), part.epoch(course, 0, range(6)), strict=True):
        assert all(map(torch.equal, one.targets, other.targets))
        assert other.inputs.shape == (one.count, 0)


def test_emulated_batches_have_targets_of_the_right_shape_and_dtype() -> None:
    info = DataInfo("t", (16,), 256, 70, 33, "", kind="tokens", input_dtype="int64", target_shape=(16,))
    for each, dtype in ((info, torch.int64), (MIXED.info, torch.float64)):
        source = CountedInput(each, 0, 0, SingleComm(), PrepareTargets(torch.float64, torch.device("cpu")))
        batch = next(source.epoch(Course(70, 12), 0, range(6)))
        assert batch.targets.shape == (12, *each.target_shape)
        assert batch.targets.dtype == source.pick("train", torch.arange(3)).targets.dtype == dtype


def test_long_blocks_and_large_vocabularies_are_evaluated_in_small_batches() -> None:
    tokens = DataInfo("t", (128,), 256, 70, 33, "", kind="tokens", target_shape=(128,))
    assert evaluation_batch(tokens, (128,)) == 128  # 2^22 logits
    large = DataInfo("t", (1024,), 50_257, 70, 33, "", kind="tokens", target_shape=(1024,))
    assert evaluation_batch(large, (1024,)) == 1
    assert evaluation_batch(load(DATA).info, (3, 16, 16)) == 512


def test_an_epochs_chance_does_not_depend_on_where_a_sample_comes() -> None:
    """The same sample in the same epoch looks the same whatever the seed of the shuffle made of its place."""
    data = load(DATA)
    source = own(data, SingleComm())
    train = source.numbers["train"]
    images: dict[int, Tensor] = {}
    for batch_size in (12, 5):
        course = Course(len(train), batch_size)
        order = train[shuffle(len(train), 0, 0)]
        shown = torch.cat([batch.inputs for batch in source.epoch(course, 0, range(course.per_epoch))])
        for number, image in zip(order.tolist(), shown, strict=True):
            assert torch.equal(images.setdefault(number, image), image)
    assert len(images) == 63


class Counting(Input):
    """Counts the batches that it was asked for; `hold` makes it wait, `fail` makes it raise."""

    def __init__(self) -> None:
        super().__init__(load(DATA).info, 0, 0, SingleComm(), PrepareImages(torch.float32, torch.device("cpu")))
        self.read = 0
        self.threads: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.asked = threading.Condition()
        self.fail = False

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        return self._each(batches_of(0))

    def _each(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for numbers in batches:
            self.hold.wait(30)
            if self.fail:
                raise ValueError("a bad sector")
            with self.asked:
                self.read += 1
                self.threads.add(threading.current_thread().name)
                self.asked.notify_all()
            yield torch.zeros(len(numbers), 3, 16, 16, dtype=torch.uint8), torch.zeros(len(numbers))


def input_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("paceline-input")]


def test_batches_are_made_ahead_in_another_thread_but_only_a_few() -> None:
    source = Counting()
    batches = source.epoch(Course(70, 1), 0, range(70))
    for taken in range(1, 60):
        assert next(batches).count == 1
        with source.asked:
            assert source.asked.wait_for(lambda taken=taken: source.read == min(70, taken + AHEAD), 10)  # type: ignore[misc]
        assert source.read <= taken + AHEAD
    assert source.threads
    assert threading.current_thread().name not in source.threads


def test_a_loop_that_leaves_early_leaves_no_thread_behind() -> None:
    source = Counting()
    batches = source.epoch(Course(70, 1), 0, range(70))
    next(batches)
    (thread,) = input_threads()
    del batches
    thread.join(10)
    assert not thread.is_alive()
    assert source.read <= 1 + AHEAD


def test_an_error_in_the_background_reaches_the_trainer() -> None:
    source = Counting()
    source.fail = True
    with pytest.raises(ValueError, match="a bad sector"):
        next(source.epoch(Course(70, 1), 0, range(70)))


def test_a_disk_that_does_not_answer_is_an_error_that_names_the_rank() -> None:
    source = Counting()
    source.patience = 0.2
    source.hold.clear()
    with pytest.raises(PacelineError, match=r"rank 0 waited 0\.2 s for its next batch"):
        next(source.epoch(Course(70, 1), 0, range(70)))
    source.hold.set()


def test_a_rank_whose_disk_does_not_answer_says_so_before_the_others_give_it_up() -> None:
    data = load(DATA)
    assert all(own(data, comm).patience < comm.timeout for comm in thread_world(2, 3.0))
    assert own(data, SingleComm(3.0)).patience > 60  # nobody waits for it


def test_only_the_steps_that_are_asked_for_are_read() -> None:
    source = Counting()
    assert len(list(source.epoch(Course(70, 1), 0, range(3)))) == 3
    assert source.read == 3


def test_large_images_are_evaluated_in_small_batches() -> None:
    info = load(DATA)
    small = OwnInput(info, 0, 0, SingleComm(), PrepareImages(torch.float32, torch.device("cpu")))
    large = OwnInput(info, 0, 0, SingleComm(), PrepareImages(torch.float32, torch.device("cpu"), size=(300, 300)))
    assert small.evaluation("test")[0] == 1
    count, batches = large.evaluation("test")
    sizes = [batch.count for batch in batches]
    assert count == len(sizes) == 3
    assert sum(sizes) == 33
