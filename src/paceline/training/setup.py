"""Opens the data set of a run for one rank."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from paceline import own_code
from paceline.comm.base import Comm
from paceline.comm.words import all_or_none, share_text
from paceline.data import table as datasets
from paceline.data.batch import Form, form_of, tensors
from paceline.data.input import (
    CountedInput,
    Input,
    OwnInput,
    ScatteredInput,
    TargetsInput,
    TogetherInput,
    as_bytes,
)
from paceline.data.load import Dataset, load
from paceline.data.prepare import prepare
from paceline.data.table import DataInfo
from paceline.data.transforms import Prepare, PrepareImages, PrepareTargets
from paceline.errors import AgreedError
from paceline.spec import RunSpec, check_data
from paceline.strategies.setup import Place, memory_layout


def make_input(spec: RunSpec, comm: Comm, place: Place) -> Input:
    """Open the data set, or get its description from rank 0, which will send it; errors are raised on every rank."""
    if not spec.reads:
        info = datasets.describe(spec.data)
        assert info is not None
        return _counted_input(spec, info, comm, place)
    folder = Path(spec.data_dir) if spec.data_dir else None
    reads = spec.read != "scatter" or comm.rank == 0
    all_or_none(lambda: prepare(spec.data, folder) if reads and place.first else None, comm)
    data = all_or_none(lambda: load(spec.data, folder, prepared=True) if reads else None, comm)
    info, form = _agree_on_data(spec.data, data, comm)
    all_or_none(lambda: check_data(spec, info), comm)
    if spec.emulated:
        return _counted_input(spec, info, comm, place)
    ready = _prepare(spec, info, place)
    validation = spec.validation_samples(info)
    if spec.method.part:
        return _replica_input(spec, data, validation, comm, ready)
    if spec.read == "scatter":
        return ScatteredInput(data, info, form, validation, spec.seed, comm, ready)
    assert data is not None
    kind = OwnInput if spec.read == "own" else TogetherInput
    return kind(data, validation, spec.seed, comm, ready)


def _counted_input(spec: RunSpec, info: DataInfo, comm: Comm, place: Place) -> Input:
    """Batches without samples, for emulated compute."""
    return _of_replica(spec, CountedInput(info, 0, spec.seed, comm, PrepareTargets(place.dtype, place.device)))


def _prepare(spec: RunSpec, info: DataInfo, place: Place) -> Prepare:
    if info.kind != "images":
        return Prepare(place.dtype, place.device)
    _, height, width = spec.input_shape(info)
    normalize = info.normalize if spec.normalize is None else spec.normalize
    return PrepareImages(
        place.dtype,
        place.device,
        layout=memory_layout(spec),
        size=(height, width),
        normal=(info.mean, info.std) if normalize and info.mean and info.std else None,
        augment=spec.augment,
        seed=spec.seed,
    )


def _replica_input(spec: RunSpec, data: Dataset | None, validation: int, comm: Comm, ready: Prepare) -> Input:
    """The input of a replica whose ranks all have the same samples; stages after the first need no inputs."""
    assert data is not None
    spot, source = spec.grid.spot(comm.rank), OwnInput(data, validation, spec.seed, comm, ready)
    if spot.stage:
        targets = PrepareTargets(ready.dtype, ready.device, size=ready.size)
        source = TargetsInput(data, validation, spec.seed, comm, targets)
    return _of_replica(spec, source)


def _of_replica(spec: RunSpec, source: Input) -> Input:
    """The ranks of a replica have the same samples."""
    if spec.method.part:
        source.reader, source.readers = spec.grid.spot(source.comm.rank).replica, spec.grid.replicas
    return source


def _agree_on_data(name: str, data: Dataset | None, comm: Comm) -> tuple[DataInfo, tuple[Form, Form]]:
    """The description of rank 0's data set, and how it is stored; raises if a rank has different data."""
    mine = ""
    if data:
        facts = asdict(data.info)
        facts["stored_inputs"], facts["stored_targets"] = form_of(data.train.inputs), form_of(data.train.targets)
        facts["digest"] = _digest(data) if comm.size > 1 else ""
        mine = json.dumps({key: value for key, value in facts.items() if key not in ("name", "about")})
    answers = share_text(mine, comm)
    different = [rank for rank, answer in enumerate(answers) if answer and answer != answers[0]]
    if different:
        raise AgreedError(
            f"rank {different[0]} has different data than rank 0 under the name {name}: give all ranks the same data, "
            f"and seed random numbers in your own function"
        )
    values: dict[str, Any] = json.loads(answers[0])
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    del values["digest"]
    form = values.pop("stored_inputs"), values.pop("stored_targets")
    return DataInfo(name, about="", **values), form


def _digest(data: Dataset) -> str:
    """A digest of the data, if a user's function returned them or a user's text has them; files have checksums."""
    text = datasets.text_of(data.info.name)
    if not (own_code.is_own(data.info.name) or data.info.load or (text and text.path)):
        return ""
    digest = xxhash.xxh3_128()
    for split in (data.train, data.test):
        stored = [tensor.split(1024) for tensor in tensors(split.inputs) + tensors(split.targets)]
        for piece in chain.from_iterable(zip(*stored, strict=True)):
            digest.update(as_bytes(piece).numpy().data)
    return digest.hexdigest()
