"""Checkpoints in one's own training loop."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import state
from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import Manifest, Part, latest, remove_unfinished
from paceline.checkpoint.save import Saver
from paceline.comm.base import Comm
from paceline.comm.words import all_or_none, tell
from paceline.data.course import Position
from paceline.data.sampler import Sampler
from paceline.errors import PacelineError, UsageError
from paceline.loop.world import world
from paceline.messages import LOGGER
from paceline.run.recorder import flush_all

TIMEOUT = 600.0


class HasState(Protocol):
    """A learning-rate scheduler, or a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Checkpoints:
    """Saves and restores a training: all that is given here, and the random state of every rank.

        checkpoints = Checkpoints("run/checkpoints", model=model, optimizer=optimizer, sampler=sampler, comm=comm)
        step = checkpoints.restore()               # 0 if there is none
        while step < steps:
            for inputs, targets in DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator()):
                ...
                step += 1
                if step % 1000 == 0:
                    checkpoints.save(step)         # copies the state; a thread writes it
        checkpoints.close()

    `step` counts updates since the beginning of the training: the position in the data follows from it, so batches that
    a DataLoader has read ahead are not lost. Instead of a sampler, `loader` may be a loader of `paceline.shard`, or any
    other that has a state_dict which says where it is. All ranks of `comm` (by default, all) call `save`, `restore`
    and `close` together; they must see the same folder. Nothing in a checkpoint is unpickled: what state_dict() of the
    scheduler and the loader return must be numbers, texts, lists and tables.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: HasState | None = None,
        sampler: Sampler | None = None,
        loader: HasState | None = None,
        comm: Comm | None = None,
        keep: int = 2,
    ) -> None:
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.scheduler, self.sampler, self.loader = scheduler, sampler, loader
        self.comm = comm or world()
        self._attempt, self._count = tell(secrets.token_hex(4), self.comm), 0
        self._saver = Saver(self.folder, self.comm.rank, range(self.comm.size), keep, TIMEOUT)

    def save(self, step: int) -> None:
        """Save the state after this many updates: waits until an earlier one is written, and copies."""
        self._check()
        flush_all()
        everyone = tuple(range(self.comm.size))
        held = [*state.hold_model(self.model, lambda name, cut: everyone, own_buffers=self.comm.size > 1)]
        if self.optimizer:
            held += state.hold_optimizer(self.model, self.optimizer, lambda name, cut: everyone)
        self._saver.copy([*held, *state.random_state(self.comm.device)])
        facts = {
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "groups": _settings(self.optimizer) if self.optimizer else None,
            "loader": self.loader.state_dict() if self.loader else None,
        }
        epoch, done = divmod(step, len(self.sampler)) if self.sampler else (0, 0)
        used = min(done * self.sampler.global_batch, self.sampler.samples) if self.sampler else 0
        batch = {"batch": self.sampler.global_batch} if self.sampler else {}

        def manifest(parts: tuple[Part, ...]) -> Manifest:
            return Manifest(Position(step, epoch, used), batch, {"workers": self.comm.size}, parts, facts, time.time())

        self._count += 1
        self._saver.write(step, f"{self._attempt}.{self._count}", {}, manifest)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saver.busy

    def restore(self) -> int:
        """Restore the newest undamaged checkpoint; return its number of updates, or 0 if there is none."""
        found = all_or_none(lambda: latest(self.folder) if self.comm.rank == 0 else None, self.comm)
        for damage in found[2] if found else ():
            LOGGER.warning("%s", damage)
        path = tell(str(found[0]) if found else "", self.comm)
        if self.comm.rank == 0:
            remove_unfinished(self.folder)
        if not path:
            return 0
        return all_or_none(lambda: self._load(Checkpoint(Path(path))), self.comm)

    def _load(self, checkpoint: Checkpoint) -> int:
        manifest = checkpoint.manifest
        same = manifest.division == {"workers": self.comm.size}
        rank = self.comm.rank if same else None
        names = set(checkpoint.under(state.MODEL))
        if names != set(self.model.state_dict()):
            other = min(names ^ set(self.model.state_dict()))
            raise UsageError(f"{checkpoint.folder} is of another model: only one of them has {other!r}")
        state.load_model(self.model, checkpoint, {}, rank)
        if self.optimizer:
            state.load_optimizer(self.model, self.optimizer, checkpoint, {}, rank)
            for group, saved in zip(self.optimizer.param_groups, manifest.facts["groups"] or (), strict=True):
                for key, value in saved.items():
                    group[key] = tuple(value) if isinstance(value, list) else value
        if self.scheduler and manifest.facts["scheduler"] is not None:
            self.scheduler.load_state_dict(manifest.facts["scheduler"])
        if self.loader and manifest.facts.get("loader") is not None:
            self.loader.load_state_dict(manifest.facts["loader"])
        step = manifest.position.step
        if self.sampler:
            before = manifest.options.get("batch")
            if before != self.sampler.global_batch:
                raise UsageError(
                    f"{checkpoint.folder} was made with a global batch of {before}, and the sampler has "
                    f"{self.sampler.global_batch}: give it the same"
                )
            self.sampler.epoch, self.sampler.first = divmod(step, len(self.sampler))
        if same:
            state.set_random_state(checkpoint, self.comm.rank, self.comm.device)
        return step

    def close(self) -> None:
        """Wait until the last checkpoint is on the disk; raises PacelineError if it could not be written."""
        self._check()

    def _check(self) -> None:
        """Wait for the last one; if rank 0 says that it is not there, all ranks raise."""
        all_or_none(lambda: self._saver.wait(TIMEOUT), self.comm)
        saved = self._saver.outcome()
        error = "it was not written in time" if self._saver.busy else saved.error if saved else ""
        if error := tell(error, self.comm):
            raise PacelineError(f"no checkpoint in {self.folder}: {error}")


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rates and all else that is set for each group of parameters, such as a scheduler changes."""
    return [
        {key: value for key, value in group.items() if isinstance(value, bool | int | float | list | tuple | None)
         and key != "params"}
        for group in optimizer.param_groups
    ]  # fmt: skip
