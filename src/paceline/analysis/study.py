"""Everything that a report shows, from run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.analysis.checks import RunWarning, all_warnings
from paceline.analysis.claim_file import read_claims
from paceline.analysis.claims import claims
from paceline.analysis.findings import Finding, findings
from paceline.analysis.headline import Headline, headline
from paceline.analysis.runs import LeftOut, Run, read_run
from paceline.analysis.scaling import Curve, Group, curves, group
from paceline.analysis.verdicts import Claim
from paceline.run.folder import BENCH, find_folders, read_bench
from paceline.run.records import Bench


@dataclass(frozen=True)
class Study:
    """Runs by setting, how they scale, findings and warnings."""

    bench: Bench | None  # None unless it is the folder of an experiment
    groups: tuple[Group, ...]
    strong: tuple[Curve, ...]
    weak: tuple[Curve, ...]
    warnings: tuple[RunWarning, ...]
    left_out: tuple[LeftOut, ...]
    claims: tuple[Claim, ...]
    findings: tuple[Finding, ...]
    headline: Headline

    @property
    def runs(self) -> list[Run]:
        return [run for one in self.groups for run in one.runs]


def read_study(paths: Sequence[Path]) -> Study:
    """Reads run folders, or folders of them. Folders that cannot be used are listed in `left_out`."""
    bench = read_bench(paths[0]) if len(paths) == 1 else None
    folders = find_folders(paths)
    stale = [folder for folder in folders if bench and folder.name not in bench.runs]
    read = [read_run(folder) for folder in folders if folder not in stale]
    left_out = tuple(each for each in read if isinstance(each, LeftOut))
    left_out += tuple(LeftOut(folder, "not one of the runs that the experiment has now") for folder in stale)
    groups = tuple(group(each for each in read if isinstance(each, Run)))
    strong, weak = (tuple(curves(groups, kind)) for kind in ("strong", "weak"))
    warnings = tuple(all_warnings(groups, [*strong, *weak]))
    declared = read_claims(bench.claims, f"{paths[0] / BENCH}: claims") if bench else ()
    judged = tuple(claims(declared, groups, [*strong, *weak]))
    return Study(bench, groups, strong, weak, warnings, left_out, judged,
                 tuple(findings(groups, strong, weak, left_out)),
                 headline(groups, [*weak, *strong], warnings))  # fmt: skip
