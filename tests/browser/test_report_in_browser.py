"""Reports in a real browser: everything is drawn, nothing overlaps, nothing is asked of the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import look
import pytest
from conftest import NO_BROWSER
from made_up_experiments import language_models, servers_and_ring, sizes_cut_short, training, workers_on_nodes
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from paceline.analysis.study import read_study
from paceline.report.draw import draw
from paceline.report.page import page
from paceline.report.plotly_js import plotly_js
from paceline.report.table import CHARTS

pytestmark = pytest.mark.skipif(look.programs() is None, reason=NO_BROWSER)
MADE = (training, servers_and_ring, sizes_cut_short, workers_on_nodes, language_models)


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with look.browser() as started:
        yield started


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of made-up experiments, which together have every chart; two are like quick forms of real ones."""
    folder = tmp_path_factory.mktemp("reports")
    found, drawn = [], set()
    for make in MADE:
        study = read_study([make(folder / make.__name__)])
        charts = draw(study)
        drawn |= {chart.name for chart in charts}
        found.append(folder / f"{make.__name__}.html")
        found[-1].write_text(page(study, charts, plotly_js()), "utf-8")
    assert drawn == set(CHARTS)
    return found


# Together the first two and the last have every chart; what the third adds is tight on a phone alone, and the fourth
# has the widest table. The first at 1400 is below.
@pytest.mark.parametrize(
    ("number", "width"), [(0, 400), (1, 1400), (1, 400), (2, 400), (3, 1400), (3, 400), (4, 1400), (4, 400)]
)
def test_a_report_is_whole_at_every_width(driver: Chrome, reports: list[Path], number: int, width: int) -> None:
    assert look.problems(driver, reports[number], width) == []


def test_a_report_is_whole_answers_to_the_mouse_sends_nothing_away_and_fits_on_paper(
    driver: Chrome, reports: list[Path]
) -> None:
    """Plotly has a button that uploads a chart: ours has four others. No name of a run is a script."""
    assert look.problems(driver, reports[0], 1400) == []
    assert driver.title.startswith("Made-up training </script>")
    buttons = driver.find_elements(By.CSS_SELECTOR, ".modebar-btn")
    assert {button.get_attribute("data-title") for button in buttons} == {"Download plot", "Zoom", "Pan", "Reset axes"}
    before, after = look.toggle(driver, "throughput")
    assert after < before
    assert look.paper_problems(driver) == []


def test_the_contents_are_not_before_the_verdict_where_they_are_above_the_page(
    driver: Chrome, reports: list[Path], tmp_path: Path
) -> None:
    """Whatever is drawn below them: nothing is, which takes no time."""
    path = tmp_path / "undrawn.html"
    path.write_text(reports[0].read_text("utf-8").replace(plotly_js(), ""), "utf-8")
    look.open_report(driver, path, 1000)
    assert look.ask(driver, "firstScreenProblems") == []
    look.console_problems(driver)  # charts without a library


def test_looking_finds_what_is_wrong(driver: Chrome, tmp_path: Path) -> None:
    """A page with each fault: it would be no test if it could not fail."""
    bad = tmp_path / "bad.html"
    bad.write_text((Path(look.__file__).parent / "bad.html").read_text("utf-8"), "utf-8")
    found = "\n".join(look.problems(driver, bad, 400))
    for fault in ("the verdict is not on the first screen", "'one' overlaps 'two'", "'cut off' is cut",
                  "nothing is drawn", "console: SEVERE", "asked for http",
                  "pixels wide in a window of 400"):  # fmt: skip
        assert fault in found
