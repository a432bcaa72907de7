"""The page of an advice in a real browser, as wide as a screen, as a small one and as a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import look
import pytest
from conftest import NO_BROWSER
from made_up_advice import made_up_advice
from made_up_experiments import SHORT_EVIL
from selenium.webdriver import Chrome

from paceline.report.advice import advice_page
from paceline.report.plotly_js import plotly_js

pytestmark = pytest.mark.skipif(look.programs() is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with look.browser() as started:
        yield started


@pytest.mark.parametrize("width", [*look.WIDTHS, 1280])
@pytest.mark.parametrize("name", ["", SHORT_EVIL])
def test_an_advice_is_whole_at_every_width(driver: Chrome, tmp_path: Path, width: int, name: str) -> None:
    path = tmp_path / "advice.html"
    path.write_text(advice_page(made_up_advice(name), plotly_js()), "utf-8")
    assert look.problems(driver, path, width) == []
    assert driver.title == f"Advice: resnet18{name} on cifar10"
    before, after = look.toggle(driver, "advised-money")
    assert after < before
    if width == max(look.WIDTHS):
        assert look.paper_problems(driver) == []
