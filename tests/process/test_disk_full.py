"""A disk that becomes full ends a run with an error that says so; what was measured is kept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from live_run import PACELINE, skip_without_mounts

from paceline.run.folder import read_summary
from paceline.run.records import FAILED, Summary

# Trains on a disk of its own, fills it all but $3 KB once there are steps, and copies what is left of the run.
SCRIPT = """
set -e
mount -t tmpfs -o size=16m paceline-test "$1"
out=$2 left=$3; disk=$1; shift 3
"$@" --output-dir "$disk" --name run > "$out/stdout" 2> "$out/stderr" &
until grep -qs '"step"' "$disk/run/rank_0.jsonl"; do kill -0 $! || break; sleep 0.05; done
free=$(df --output=avail -k "$disk" | tail -1)
dd if=/dev/zero of="$disk/fill" bs=1K count=$((free - left)) 2> "$out/dd" || true
set +e
wait $!
echo $? > "$out/code"
rm "$disk/fill"
cp -r "$disk/run" "$out/run"
"""
# 3.2 MB of weights.
TRAIN = [*PACELINE, "--model", "mlp", "--hidden", "1000", "--batch-size", "8", "--log-every", "0",
         "--data", "synthetic:1x28x28,train=4000,test=20", "--optimizer", "sgd"]  # fmt: skip


def train(output: Path, left: int, *flags: str) -> tuple[int, Summary, str]:
    """The exit code, the summary and what was said on standard error."""
    disk, kept = output / "disk", output / "kept"
    for folder in (disk, kept):
        folder.mkdir()
    skip_without_mounts(disk)
    command = ["unshare", "-m", "bash", "-c", SCRIPT, "bash", str(disk), str(kept), str(left), *TRAIN, *flags]
    subprocess.run(command, check=True, timeout=110, env=dict(os.environ) | {"OMP_NUM_THREADS": "1"})
    summary = read_summary(kept / "run")
    assert summary is not None
    return int((kept / "code").read_text()), summary, (kept / "stderr").read_text()


def test_a_disk_that_is_full_during_the_run_fails_it_with_the_rank_that_noticed(tmp_path: Path) -> None:
    code, summary, said = train(tmp_path, 0, "--workers", "2", "--strategy", "ring", "--steps", "1000000")
    assert code == 1
    assert summary.status == FAILED
    assert summary.failed_rank in (0, 1)
    assert "no space left" in str(summary.error).lower()
    assert f"paceline: rank {summary.failed_rank} failed:" in said
    assert "Traceback" not in said


def test_weights_that_there_is_no_space_for_do_not_take_the_result_with_them(tmp_path: Path) -> None:
    code, summary, said = train(tmp_path, 1800, "--steps", "1000")
    assert code == 1
    assert summary.status == FAILED
    assert summary.test_loss is not None
    assert (summary.steps, summary.samples_per_second is not None) == (1000, True)
    assert "there is no space left in" in str(summary.error)
    assert "Traceback" not in said
    assert not list((tmp_path / "kept" / "run").glob("*.safetensors*"))
