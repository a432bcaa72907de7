"""Finds the run that a command continues, and reopens its folder; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import (
    MANIFEST,
    STEP,
    Damaged,
    Manifest,
    checkpoints,
    latest,
    remove,
    remove_unfinished,
    step_of,
    verify,
)
from paceline.data.course import Position
from paceline.errors import UsageError
from paceline.launch.folder import begin_summary, continue_run, in_use, make_folder, open_run
from paceline.options import NOTHING, flag
from paceline.run.folder import CHECKPOINTS, find_folders, read_spec, read_summary, sole_writer
from paceline.run.liveness import current_summary, owner_name
from paceline.run.records import COMPLETED
from paceline.spec import FIELDS, OWN, Resolved, RunSpec

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Continued:
    """A run that is continued: its folder, the checkpoint to start from (None: from the first step), what to say."""

    folder: Path
    checkpoint: Path | None
    manifest: Manifest | None
    notes: tuple[str, ...]

    @property
    def position(self) -> Position:
        return self.manifest.position if self.manifest else Position()


def find(spec: RunSpec) -> Continued | None:
    """The run that this spec continues, or None for a new one. Raises UsageError if one was named that cannot be."""
    if spec.emulated or spec.resume == NEVER:
        return None
    if spec.resume != AUTO:
        return _given(spec, Path(spec.resume).resolve())
    parent = Path(spec.output_dir).absolute()
    if spec.name:
        folder = parent / spec.name
        return _named(spec, folder) if read_summary(folder) else None
    found = (folder for folder in _incomplete(parent) if _same(spec, folder))
    newest = max(found, key=lambda folder: folder.stat().st_mtime, default=None)
    return _from_latest(spec, newest) if newest else None


def _incomplete(parent: Path) -> Iterator[Path]:
    """The runs in a folder that have a checkpoint, did not complete, and that no living process owns."""
    for folder in find_folders([parent]) if parent.is_dir() else ():
        try:
            complete = current_summary(folder).status == COMPLETED
            if not complete and checkpoints(folder / CHECKPOINTS) and not in_use(folder):
                yield folder
        except (OSError, ValueError):
            continue


def _same(spec: RunSpec, folder: Path) -> bool:
    """Whether the run has the same options as this one; those that change nothing but how it is run may differ."""
    try:
        theirs = read_spec(folder)
    except (OSError, ValueError):
        return False
    return not _different(theirs, spec, lambda made: made["kept"] or made["affects"] != NOTHING)


def _given(spec: RunSpec, path: Path) -> Continued:
    """The run in a folder, or one of its checkpoints."""
    if (path / MANIFEST).exists():
        try:
            manifest = verify(path)
        except Damaged as damage:
            raise UsageError(f"--resume {spec.resume}: {damage}") from None
        folder = path.parent.parent
        if path.parent.name != CHECKPOINTS or read_summary(folder) is None or not STEP.fullmatch(path.name):
            raise UsageError(f"--resume {spec.resume}: it is not in the {CHECKPOINTS} of a run folder; copy it there")
        _check_free(folder)
        return _continued(spec, folder, path, manifest, ())
    if read_summary(path) is None:
        raise UsageError(f"--resume {spec.resume}: it is neither a run folder nor a checkpoint; give auto, never, or "
                         "the path of one")  # fmt: skip
    _check_free(path)
    found = _from_latest(spec, path)
    if found is None:
        raise UsageError(f"--resume {spec.resume}: this run has no complete checkpoint")
    return found


def _named(spec: RunSpec, folder: Path) -> Continued:
    _check_free(folder)
    summary = read_summary(folder)
    if summary and summary.status == COMPLETED:
        raise UsageError(f"the run {folder} is complete: choose another --name, or remove it; to train it for longer, "
                         f"give --resume {folder}")  # fmt: skip
    found = _from_latest(spec, folder)
    if found:
        return found
    _check_options(spec, read_spec(folder), folder)
    return Continued(folder, None, None, (f"Starting the run {folder} again: it has no complete checkpoint",))


def _from_latest(spec: RunSpec, folder: Path) -> Continued | None:
    found = latest(folder / CHECKPOINTS)
    if found is None:
        return None
    checkpoint, manifest, wrong = found
    return _continued(spec, folder, checkpoint, manifest, tuple(f"Not used: {damage}" for damage in wrong))


def _continued(spec: RunSpec, folder: Path, checkpoint: Path, manifest: Manifest, notes: tuple[str, ...]) -> Continued:
    _check_options(spec, manifest.options, checkpoint)
    position, before = manifest.position, manifest.facts.get("batch")
    notes += (f"Continuing {folder} after {position.step} updates (epoch {position.epoch})",)
    if before not in (None, spec.update_batch):
        notes += (f"An update has {spec.update_batch} samples from here on, and had {before} before: give "
                  f"--global-batch {before} to keep it",)  # fmt: skip
    return Continued(folder, checkpoint, manifest, notes)


def _check_free(folder: Path) -> None:
    if in_use(folder):
        raise UsageError(f"the run {folder} is in use by {owner_name(folder)}: wait until it ends, or choose another "
                         "--name")  # fmt: skip


def _check_options(spec: RunSpec, theirs: dict[str, Any], where: Path) -> None:
    """Refuse to continue another training. Only how the work is divided, and for how long, may differ."""
    names = _different(theirs, spec, lambda made: made["kept"])
    if names:
        name = names[0]
        raise UsageError(f"{where} was made with {flag(name)} {theirs.get(name)}, and this command has "
                         f"{getattr(spec, name)}: give the same, or another --name or --output-dir")  # fmt: skip


def _different(theirs: dict[str, Any], spec: RunSpec, matters: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    """Options that both have and that have different values, of those that matter by their declaration."""
    return [name for name, value in spec.values().items() if matters(FIELDS[name].metadata)
            and (name in theirs or name not in OWN) and theirs.get(name) != value]  # fmt: skip


def reopen(found: Continued, resolved: Resolved) -> None:
    """Make the folder a running run's again, without what is after the checkpoint."""
    folder, position = found.folder, found.position
    with sole_writer(folder):
        _check_free(folder)
        remove_unfinished(folder / CHECKPOINTS)
        for later in checkpoints(folder / CHECKPOINTS):
            if later != found.checkpoint and step_of(later) >= position.step:
                remove(later)
        continue_run(folder, position, resolved.lines(), begin_summary(resolved.spec))


def go_back(folder: Path, resolved: Resolved) -> Position | None:
    """When all ranks have ended, let others restart from the last checkpoint; its position, if there is one."""
    found = latest(folder / CHECKPOINTS)
    if found is None:
        return None
    checkpoint, manifest, _ = found
    with sole_writer(folder):
        remove_unfinished(folder / CHECKPOINTS)
        told = with_checkpoint(resolved, Continued(folder, checkpoint, manifest, ()))
        continue_run(folder, manifest.position, told.lines(), begin_summary(resolved.spec))
    return manifest.position


def with_checkpoint(resolved: Resolved, found: Continued | None) -> Resolved:
    """The spec for the ranks, which do not search again."""
    path = str(found.checkpoint) if found and found.checkpoint else NEVER
    return replace(resolved, spec=replace(resolved.spec, resume=path))


def open_folder(resolved: Resolved) -> tuple[Path, Resolved, Continued | None]:
    """The folder of the run that the spec continues, or a new one; the spec for its ranks."""
    found = find(resolved.spec)
    told = with_checkpoint(resolved, found)
    if found:
        try:
            reopen(found, told)
        except OSError as error:
            raise UsageError(f"cannot write to the run folder {found.folder}: {error.strerror}") from error
        return found.folder, told, found
    folder = make_folder(resolved.spec).absolute()
    open_run(folder, told)
    return folder, told, None
