"""A server's part of checkpoints: cuts its chunks into pieces of the model's tensors, and puts them together again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import Damaged, Manifest, Part, checkpoint_folder, checkpoints, read_manifest, remove
from paceline.checkpoint.save import Held, Saver
from paceline.checkpoint.state import BEST, MODEL, OPTIMIZER, TRANSIENT, hold, optimizer_keys, own_moments
from paceline.server.layout import Layout
from paceline.strategies.parameter_server.flat import FlatModel, Place

# Makes rank 0's manifest, of the leader's facts and all servers' parts.
Describe = Callable[[int, dict[str, Any], tuple[Part, ...]], Manifest]


class CheckpointStore:
    """Saves and loads the chunks of one server. `chunks` are their numbers; the first server saves constants, too."""

    def __init__(
        self, saver: Saver, flat: FlatModel, layout: Layout, chunks: Sequence[int], describe: Describe
    ) -> None:
        self.saver, self._flat, self._layout, self._chunks, self._describe = saver, flat, layout, chunks, describe
        stored = flat.model.state_dict()
        self._prefix = {name: MODEL if name in stored else TRANSIENT for place in flat.places for name in place.names}

    @property
    def busy(self) -> bool:
        return self.saver.busy

    def numbers(self) -> list[int]:
        """The checkpoints that all servers have completed."""
        found = []
        for folder in checkpoints(self.saver.folder):
            with contextlib.suppress(Damaged):
                found.append(read_manifest(folder).position.step)
        return sorted(found)

    def forget_after(self, number: int) -> None:
        """Remove later checkpoints: training goes back to this one, and will not repeat them exactly."""
        for later in self.numbers():
            if later > number:
                remove(checkpoint_folder(self.saver.folder, later))

    def save(self, number: int, mark: str, tensors: dict[int, dict[str, Tensor]], facts: dict[str, Any]) -> None:
        held = [each for chunk, own in tensors.items() for each in self._cut(chunk, own)]
        self.saver.copy([*held, *(self._constants() if self.saver.rank == 0 else ())])
        self.saver.write(number, mark, {}, lambda parts: self._describe(number, facts, parts))

    def abandon(self) -> None:
        self.saver.abandon()

    def _cut(self, chunk: int, tensors: Mapping[str, Tensor]) -> Iterator[Held]:
        """A chunk's tensors as pieces of the model's."""
        span = self._layout.span(chunk)
        for place, first, last in self._in(span):
            start = first - place.start
            for key, values in tensors.items():
                part = values[first - span.start : last - span.start] if values.dim() else values
                if key in ("values", "kept"):
                    for name in place.names:
                        prefix = self._prefix[name] if key == "values" else BEST
                        yield Held(prefix + name, part.to(place.dtype), place.shape, start, place.order)
                elif first >= self._flat.trainable:
                    continue  # buffers are not the optimizer's
                elif values.dim():
                    yield Held(f"{OPTIMIZER}{place.name}.{key}", part, place.shape, start, place.order)
                elif start == 0:
                    yield Held(f"{OPTIMIZER}{place.name}.{key}", values, ())

    def _constants(self) -> Iterator[Held]:
        """What no update changes: frozen parameters."""
        placed = {name for place in self._flat.places for name in place.names}
        for name, tensor in self._flat.model.state_dict().items():
            if name not in placed:
                yield hold(MODEL + name, tensor)

    def load(self, number: int) -> tuple[dict[int, dict[str, Tensor]], dict[str, Any]]:
        checkpoint = Checkpoint(
            checkpoint_folder(self.saver.folder, number), read_manifest(checkpoint_folder(self.saver.folder, number))
        )
        return {chunk: self._chunk(checkpoint, chunk) for chunk in self._chunks}, facts_of(checkpoint.manifest)

    def _chunk(self, checkpoint: Checkpoint, chunk: int) -> dict[str, Tensor]:
        span, dtype = self._layout.span(chunk), self._flat.weights.dtype
        trainable = max(0, min(span.stop, self._flat.trainable) - span.start)
        keys = {} if own_moments(checkpoint) else optimizer_keys(checkpoint)
        found = {"values": torch.empty(len(span), dtype=dtype)}
        if any(True for _ in checkpoint.under(BEST)):
            found["kept"] = torch.empty(len(span), dtype=dtype)
        for place, first, last in self._in(span):
            start, stop = first - place.start, last - place.start
            here = slice(first - span.start, last - span.start)
            found["values"][here] = _values(checkpoint, self._prefix[place.name] + place.name, place, start, stop)
            if "kept" in found:
                best = BEST + place.name
                found["kept"][here] = (
                    _values(checkpoint, best, place, start, stop) if best in checkpoint else found["values"][here]
                )
            for key in keys.get(place.name, ()) if first < self._flat.trainable else ():
                name = f"{OPTIMIZER}{place.name}.{key}"
                if checkpoint.manifest.tensors[name][0][1].shape == place.shape and key != "step":
                    if key not in found:
                        found[key] = torch.zeros(trainable, dtype=dtype)
                    found[key][here] = _values(checkpoint, name, place, start, stop)
                else:
                    found[key] = checkpoint.tensor(name)
        return found

    def _in(self, span: range) -> Iterator[tuple[Place, int, int]]:
        """The tensors that have values in a part of the vector, with the first and the last position."""
        for place in self._flat.places:
            first, last = max(place.start, span.start), min(place.stop, span.stop)
            if first < last:
                yield place, first, last


def _values(checkpoint: Checkpoint, name: str, place: Place, start: int, stop: int) -> Tensor:
    if any(piece.own for _, piece in checkpoint.manifest.tensors[name]):
        whole = checkpoint.tensor(name)
        return whole.permute(place.order or tuple(range(whole.dim()))).reshape(-1)[start:stop]
    return checkpoint.read(name, start, stop, place.order)


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """The leader's facts; of a checkpoint of another strategy, what can be known."""
    facts, position = manifest.facts, manifest.position
    if "tally" not in facts:
        sums, samples = facts["progress"]["sums"], facts["progress"]["samples"]
        epoch = {"sums": sums, "count": samples, "skipped": position.used - samples}
        epochs = {position.epoch: epoch} if position.used else {}
        facts = {**facts, "tally": {"updates": position.step, "epochs": epochs, "gradients": {}, "staleness": {}}}
    return facts
