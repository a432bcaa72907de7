"""All charts that a study has data for: first that of the verdict, then in the order that the experiment gives."""

from __future__ import annotations

from collections.abc import Callable

from paceline.analysis.study import Study
from paceline.report import (
    charts_learning,
    charts_over_time,
    charts_pipeline,
    charts_resources,
    charts_scaling,
    charts_time,
    charts_worth,
)
from paceline.report.figure import Chart
from paceline.report.table import CHARTS

DRAWN_BY: dict[str, Callable[[Study], Chart | None]] = {
    "worth": charts_worth.worth,
    "strong": charts_scaling.strong,
    "weak": charts_scaling.weak,
    "speedup-by-model": charts_scaling.speedup_by_model,
    "throughput": charts_scaling.throughput,
    "breakdown": charts_time.breakdown,
    "breakdown-by-rank": charts_time.breakdown_by_rank,
    "pipeline-step": charts_pipeline.step,
    "pipeline-cut": charts_pipeline.cut,
    "utilisation": charts_over_time.utilisation,
    "packets": charts_over_time.packets,
    "traffic": charts_resources.traffic,
    "servers": charts_scaling.servers,
    "accuracy-by-workers": charts_learning.accuracy_by_workers,
    "loss-by-workers": charts_learning.loss_by_workers,
    "time-by-batch": charts_time.time_by_batch,
    "accuracy-by-batch": charts_learning.accuracy_by_batch,
    "loss-by-batch": charts_learning.loss_by_batch,
    "nodes": charts_time.nodes,
    "learning-time": charts_learning.learning_time,
    "learning-samples": charts_learning.learning_samples,
    "time-to-accuracy": charts_learning.time_to_accuracy,
    "time-to-loss": charts_learning.time_to_loss,
    "memory": charts_resources.memory,
}


def draw(study: Study) -> list[Chart]:
    """Omits charts without data, and unknown names, which other versions or damaged experiments may have."""
    asked = (study.bench.draw if study.bench else ()) or tuple(CHARTS)
    first = (study.headline.chart,) if study.headline.chart else ()
    names = [name for name in dict.fromkeys((*first, "worth", *asked)) if name in CHARTS]
    found = [DRAWN_BY[name](study) for name in names] if study.groups else []
    return [chart for chart in found if chart]
