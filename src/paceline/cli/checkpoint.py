"""paceline checkpoint: lists, verifies and exports the checkpoints of a run."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import MANIFEST, Damaged, checkpoints, latest, read_manifest, verify
from paceline.cli.main import add_json
from paceline.errors import EXIT_FAILED, EXIT_OK, UsageError
from paceline.run.folder import CHECKPOINTS, MODEL
from paceline.strict_json import dump

ACTIONS = {
    "list": "every checkpoint: its step, size, age, and what wrote it",
    "verify": "read every byte and compare checksums; exit code 1 if one is damaged",
    "export": "write the model's weights to one file that other programs can read",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar=" | ".join(ACTIONS), required=True)
    for name, about in ACTIONS.items():
        action = actions.add_parser(name, help=about, description=about, allow_abbrev=False)
        what = "a run folder (its newest checkpoint that is undamaged), or the folder of a checkpoint"
        action.add_argument("run", metavar="RUN", help=what if name == "export" else "a run folder, or a checkpoint's")
        if name == "export":
            action.add_argument("-o", "--output", metavar="FILE", default=MODEL,
                                help="the file; its ending, .safetensors or .pt (a state_dict of PyTorch), says how it "
                                     "is written (default: %(default)s)")  # fmt: skip
            action.add_argument("--best", action="store_true", help="the weights of the best epoch so far")
        else:
            add_json(action, "what is shown")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.run)
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give a run folder, or that of a checkpoint")
    if args.action == "export":
        return _export(folder, Path(args.output), best=args.best)
    found = [folder] if (folder / MANIFEST).exists() else checkpoints(folder / CHECKPOINTS)
    if not found:
        raise UsageError(f"{folder} has no checkpoints; --checkpoint-every and --checkpoint-seconds make them")
    rows = [_describe(each, thoroughly=args.action == "verify") for each in reversed(found)]
    if args.json:
        print(dump(rows))
    else:
        _show(rows)
    return EXIT_FAILED if args.action == "verify" and any(row["damage"] for row in rows) else EXIT_OK


def _describe(folder: Path, *, thoroughly: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"folder": str(folder), "damage": None}
    try:
        found = verify(folder) if thoroughly else read_manifest(folder)
    except Damaged as damage:
        return row | {"damage": str(damage)}
    options = found.options
    return row | {
        "step": found.position.step,
        "epoch": found.position.epoch,
        "bytes": found.bytes,
        "tensors": len(found.tensors),
        "files": len(found.parts),
        "time": found.time,
        "strategy": options.get("strategy"),
        "workers": options.get("workers"),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        name = Path(row["folder"]).name
        if row["damage"]:
            print(f"{name:<14} damaged: {row['damage']}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        by = (
            f"{row['strategy']}, {row['workers']} worker{'' if row['workers'] == 1 else 's'}" if row["strategy"] else ""
        )
        print(f"{name:<14} epoch {row['epoch']:<4} {row['bytes'] / 1e6:>9,.1f} MB in {row['files']} "
              f"file{'' if row['files'] == 1 else 's'}  {when}  {by}")  # fmt: skip


def _export(folder: Path, output: Path, *, best: bool) -> int:
    if output.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"--output {output}: give a name that ends in .safetensors or .pt")
    if not (folder / MANIFEST).exists():
        found = latest(folder / CHECKPOINTS)
        if found is None:
            raise UsageError(f"{folder} has no undamaged checkpoint")
        folder = found[0]
    from paceline.checkpoint.export import export

    count = export(folder, output, best=best)
    print(f"{count} tensors of {folder.name} in {output}")
    return EXIT_OK
