"""The page of a prediction in a real browser, as wide as a screen and as a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import look
import pytest
from conftest import NO_BROWSER
from made_up_experiments import SHORT_EVIL
from made_up_outlook import made_up_outlook
from selenium.webdriver import Chrome

from paceline.report.plotly_js import plotly_js
from paceline.report.prediction import prediction_page

pytestmark = pytest.mark.skipif(look.programs() is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with look.browser() as started:
        yield started


@pytest.mark.parametrize("width", look.WIDTHS)
def test_a_prediction_is_whole_at_every_width(driver: Chrome, tmp_path: Path, width: int) -> None:
    path = tmp_path / "prediction.html"
    path.write_text(prediction_page(made_up_outlook(f"net{SHORT_EVIL}"), plotly_js()), "utf-8")
    assert look.problems(driver, path, width) == []
    assert driver.title == f"Prediction: net{SHORT_EVIL} on cifar10"
    before, after = look.toggle(driver, "limits")
    assert after < before
    if width == max(look.WIDTHS):
        assert look.paper_problems(driver) == []
