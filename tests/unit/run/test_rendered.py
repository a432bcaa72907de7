"""A summary as people see it: in one line, as text, and as a table in a notebook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from paceline.run.records import COMPLETED, FAILED, Summary

SUMMARY = Summary(
    status=COMPLETED, strategy="ring", workers=2, transport="gloo", model="mlp", data="mnist-mini", batch_size=64,
    global_batch=128, epochs=2, seed=0, steps=1500, total_seconds=75.2, samples_per_second=12345.6,
    train_loss=[0.9, 0.5], validation_loss=[0.7, 0.6, 0.8], validation_accuracy=[0.7, 0.8, 0.75],
    validation_steps=[500, 1000, 1500], best_step=1000, best_epoch=1, test_loss=0.65, test_accuracy=0.7925,
    test_metrics={"f1": 0.5}, verdict="Compute-bound.",
)  # fmt: skip


def cells(summary: Summary) -> dict[str, str]:
    """The rows of the table, as a browser would understand them."""
    rows = ElementTree.fromstring(summary._repr_html_()).iter("tr")
    return {"".join(row[0].itertext()): "".join(row[1].itertext()) for row in rows}


def test_it_says_what_was_trained_how_and_with_which_result() -> None:
    summary = replace(SUMMARY)
    summary.folder = Path("runs/one")
    assert repr(summary) == "<Summary: completed, mlp on mnist-mini, ring, 1500 steps, runs/one>"
    expected = {
        "status": "completed",
        "trained": "mlp on mnist-mini",
        "with": "ring, 2 workers, global batch 128",
        "steps": "1,500 in 2 epochs",
        "total time": "0:01:15",
        "speed": "12,346 samples/s",
        "training loss": "0.5000",
        "best validation": "loss 0.6000, accuracy 80.00%",
        "test": "loss 0.6500, accuracy 79.25%, f1 0.5000",
        "verdict": "Compute-bound.",
        "run folder": "runs/one",
        "report": "paceline report runs/one",
    }
    assert cells(summary) == expected
    assert dict(line.split("  ", 1) for line in str(summary).splitlines()).keys() == expected.keys()
    assert all(value in str(summary) for value in expected.values())


def test_what_is_not_known_is_left_out() -> None:
    bare = Summary(FAILED, "sequential", 1, "single", "mlp", "own data", 1, 1, 0, 0, error="rank 0: no luck")
    assert cells(bare) == {
        "status": "failed", "error": "rank 0: no luck", "trained": "mlp on own data",
        "with": "sequential, 1 worker, global batch 1",
    }  # fmt: skip


def test_nothing_from_the_run_is_html() -> None:
    bad = "<img src=x onerror=\"alert('1')\"> & more"
    summary = replace(SUMMARY, model=bad, data=bad, strategy=bad, error=bad, verdict=bad, disturbed=bad, status=bad,
                      stopped_early=bad, test_metrics={bad: 1.0})  # fmt: skip
    summary.folder = Path(bad)
    assert "<img" not in summary._repr_html_()
    shown = cells(summary)
    assert shown["error"] == shown["verdict"] == shown["run folder"] == bad
    assert set(shown) >= {"trained", "with", "stopped early", "disturbed", "test"}
