"""A summary for people: as text, and as HTML for notebooks."""

from __future__ import annotations

import html
from datetime import timedelta

from paceline.run.records import Summary

BAD, LEFT, TOP = "color: #b3261e", "text-align: left", "vertical-align: top"


def facts(summary: Summary) -> dict[str, str]:
    """What it says, by name; only what is known."""
    s, best = summary, summary.best_validation
    workers = f"{s.workers} worker{'s' if s.workers > 1 else ''}"
    servers = f", {s.servers} server{'s' if s.servers > 1 else ''}" if s.servers else ""
    speeds = ((s.samples_per_second, "samples/s"), (s.tokens_per_second, "tokens/s"))
    validated = {"loss": s.validation_loss, "accuracy": s.validation_accuracy}
    tested = {"loss": s.test_loss, "accuracy": s.test_accuracy, **s.test_metrics}
    found = {
        "status": s.status,
        "error": s.error,
        "trained": f"{s.model} on {s.data}{'' if not s.emulated else ' (emulated: nothing was trained)'}",
        "with": f"{s.strategy}, {workers}{servers}, global batch {s.global_batch}",
        "steps": f"{s.steps:,} in {s.epochs} epoch{'' if s.epochs == 1 else 's'}" if s.steps else None,
        "stopped early": s.stopped_early,
        "total time": None if s.total_seconds is None else _duration(s.total_seconds),
        "speed": ", ".join(f"{value:,.0f} {unit}" for value, unit in speeds if value),
        "training loss": f"{s.train_loss[-1]:.4f}" if s.train_loss else None,
        "best validation": _figures({name: values[best] for name, values in validated.items()
                                     if best is not None and best < len(values)}),
        "test": _figures({name: value for name, value in tested.items() if value is not None}),
        "verdict": s.verdict,
        "disturbed": s.disturbed,
        "run folder": str(s.folder) if s.folder else None,
        "report": f"paceline report {s.folder}" if s.folder and s.status == "completed" else None,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def _figures(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}"
                     for name, value in values.items())  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def as_text(summary: Summary) -> str:
    """One fact a line."""
    found = facts(summary)
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found.items())


def as_html(summary: Summary) -> str:
    """A table; everything that comes from the run is escaped."""
    rows = []
    for name, value in facts(summary).items():
        bad = f' style="{BAD}"' if name in ("error", "disturbed") else ""
        shown = f"<code>{html.escape(value)}</code>" if name in ("run folder", "report") else html.escape(value)
        rows.append(f'<tr style="{TOP}"><th style="{LEFT}; white-space: nowrap">{name}</th>'
                    f'<td style="{LEFT}"><span{bad}>{shown}</span></td></tr>')  # fmt: skip
    return f"<table>{''.join(rows)}</table>"
