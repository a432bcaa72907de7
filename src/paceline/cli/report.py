"""paceline report: writes a page from run folders; also CSV files and pictures."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.study import Study, read_study
from paceline.analysis.wording import count
from paceline.cli.main import add_json
from paceline.cli.output import check_output, make_folder, write_text
from paceline.errors import UsageError, visible
from paceline.predict.beside import predictions_beside
from paceline.report.draw import draw
from paceline.report.figure import Chart
from paceline.report.images import write_images
from paceline.report.page import page
from paceline.report.plotly_js import plotly_js
from paceline.report.tables import beside_paper, missing, results
from paceline.strict_json import dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="+", type=Path,
        help="a folder of `paceline bench`, a run folder, or a folder of run folders",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="(report.html)")
    parser.add_argument("--csv", metavar="DIR", type=Path, help="also the numbers: one file a chart, and results.csv")
    parser.add_argument("--svg", metavar="DIR", type=Path, help="also the charts as pictures, to be scaled")
    add_json(parser, "what the report says in short")
    parser.add_argument("--png", metavar="DIR", type=Path, help="also the charts as pictures of points")


def run(args: argparse.Namespace) -> int:
    study = _study(args.folders)
    check_output(args.output, "report.html")
    for folder in (args.output.parent, args.csv, args.svg, args.png):
        if folder:
            make_folder(folder)
    charts = draw(study)
    if args.csv:
        _write_csv(study, charts, args.csv)
    for folder, form in ((args.svg, "svg"), (args.png, "png")):
        if folder:
            write_images(charts, folder, form)
    write_text(args.output, page(study, charts, plotly_js(), predictions_beside(study.runs)))
    gone = missing(study)
    if args.json:
        warnings = [{"kind": each.kind, "about": each.about, "text": each.text} for each in study.warnings]
        print(dump({"report": str(args.output.resolve()), "headline": study.headline.sentence, "runs": len(study.runs),
                    "settings": len(study.groups), "left_out": [{"name": name, "why": why} for name, why in gone],
                    "charts": [chart.name for chart in charts], "warnings": warnings}))  # fmt: skip
        return 0
    print(visible(study.headline.sentence))
    for name, why in gone[:10]:
        print(visible(f"left out: {name}: {why}"))
    if len(gone) > 10:
        print(f"left out: {len(gone) - 10} more; the report lists all")
    kinds = {each.kind for each in study.warnings}
    print(f"{count(len(study.runs), 'run')} in {count(len(study.groups), 'setting')}, {len(gone)} left out, "
          f"{count(len(charts), 'chart')}, {count(len(kinds), 'kind')} of warnings")  # fmt: skip
    for folder in (args.csv, args.svg, args.png):
        if folder:
            print(visible(f"also in {folder}"))
    print(visible(f"The report is {args.output.resolve()}"))
    return 0


def _study(folders: Sequence[Path]) -> Study:
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: give run folders, such as runs/NAME")
    study = read_study(folders)
    if not study.runs:
        why = "".join(f"\n  {name}: {reason}" for name, reason in missing(study))
        raise UsageError(f"there is no completed run to report on, and nothing was written:{why}")
    return study


def _write_csv(study: Study, charts: Sequence[Chart], folder: Path) -> None:
    _write_rows(folder / "results.csv", results(study))
    if study.bench and study.bench.paper:
        _write_rows(folder / "paper.csv", beside_paper(study))
    for chart in charts:
        _write_rows(folder / f"{chart.name}.csv", chart.rows)


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
