"""Looks at a report in a real browser, as wide as a screen and as a phone, and says what is wrong with it.

By hand: python tests/browser/look.py report.html --png FOLDER
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from shapes import Shape, overlap

WIDTHS = (1400, 400)
HEIGHT = 900
PAPER, WIDE = 703, 1032  # pixels of an A4 sheet between its margins, upright and on its side
PATIENCE = 60
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--force-color-profile=srgb")  # fmt: skip
SCRIPT = (Path(__file__).parent / "look.js").read_text("utf-8")
PIECE = 2000  # pixels of a long page in one picture


def programs() -> tuple[str, str] | None:
    """Chromium and its driver, where both are installed."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return (found[0], found[1]) if found[0] and found[1] else None


@contextmanager
def browser() -> Iterator[Chrome]:
    """Debian's Chromium without a window, with a profile of its own that is gone afterwards."""
    found = programs()
    if found is None:
        raise RuntimeError("no chromium or no chromedriver: apt-get install chromium chromium-driver fonts-dejavu-core")
    with tempfile.TemporaryDirectory(prefix="paceline-browser-") as profile:
        options = ChromeOptions()
        options.binary_location = found[0]
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options=options, service=ChromeService(found[1]))
        try:
            driver.get("about:blank")
            for kind in ("browser", "performance"):
                driver.get_log(kind)  # the browser's own first page asked for what is in it
            yield driver
        finally:
            driver.quit()


def resize(driver: Chrome, width: int, height: int = HEIGHT) -> None:
    """A window of this size, a phone's if it is narrow."""
    phone = width < 600
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})


def open_report(driver: Chrome, report: Path, width: int) -> None:
    """At this width, with every chart drawn."""
    resize(driver, width)
    driver.get(report.resolve().as_uri())
    WebDriverWait(driver, PATIENCE).until(lambda d: d.execute_script("return document.documentElement.dataset.drawn"))


def ask(driver: Chrome, function: str, *arguments: Any) -> Any:
    """The answer of a function of look.js."""
    return driver.execute_async_script(
        f"{SCRIPT}\nconst [args, done] = [[...arguments].slice(0, -1), arguments[arguments.length - 1]];"
        f"Promise.resolve({function}(...args)).then(done, (error) => done({{error: String(error)}}));",
        *arguments,
    )


def problems(driver: Chrome, report: Path, width: int) -> list[str]:
    """What is wrong with the report at this width; nothing if it is well."""
    open_report(driver, report, width)
    found = [f"on the page: {text}" for text in [*ask(driver, "firstScreenProblems"), *ask(driver, "pageProblems")]]
    for name in ask(driver, "chartNames"):
        for number, choice in enumerate(ask(driver, "menuOf", name)):
            state = ask(driver, "chartState", name, number)
            where = f"chart {name}" + (f", {choice}" if choice else "")
            found += [f"{where}: {text}" for text in chart_problems(state)]
    return found + console_problems(driver) + network_problems(driver)


def chart_problems(state: dict[str, Any]) -> Iterator[str]:
    if "error" in state:
        yield f"cannot be looked at: {state['error']}"
        return
    if state["marks"] == 0:
        yield "nothing is drawn in it"
    if min(state["width"], state["height"]) < 100:
        yield f"it is only {state['width']:.0f} × {state['height']:.0f} pixels large"
    texts = [Shape(each["text"], each["corners"]) for each in state["texts"]]
    for at, one in enumerate(texts):
        if not one.inside(state["left"], state["top"], state["right"], state["bottom"]):
            yield f"{one.text!r} is cut at the chart's edge"
        for other in texts[at + 1 :]:
            if overlap(one, other):
                yield f"{one.text!r} overlaps {other.text!r}"


def console_problems(driver: Chrome) -> list[str]:
    """What the browser complained about since it was asked last, each complaint once."""
    said = [f"{e['level']}: {e['message'][:300]}" for e in driver.get_log("browser")
            if e["level"] in ("SEVERE", "WARNING")]  # fmt: skip
    return [f"console: {text} ({count} times)" for text, count in Counter(said).items()]


def network_problems(driver: Chrome) -> list[str]:
    """Everything that was asked for and is not in the file itself."""
    asked = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in asked if each["method"] == "Network.requestWillBeSent"]
    return [f"network: it asked for {url[:200]}" for url in urls if not url.startswith(("file:", "data:", "blob:"))]


def toggle(driver: Chrome, name: str) -> tuple[int, int]:
    """How many traces a chart shows before and after a click on the first name in its legend."""
    item = driver.find_element(By.CSS_SELECTOR, f"#plot-{name} .legend .legendtoggle")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", item)
    before = int(ask(driver, "shownTraces", name))
    item.click()
    WebDriverWait(driver, 5).until(lambda d: ask(d, "shownTraces", name) != before)
    return before, int(ask(driver, "shownTraces", name))


def take_pictures(driver: Chrome, report: Path, width: int, folder: Path) -> list[Path]:
    """The whole page, in pieces, as it is first seen."""
    open_report(driver, report, width)
    length = int(driver.execute_script("return document.documentElement.scrollHeight"))
    resize(driver, width, length)
    written = []
    for number, top in enumerate(range(0, length, PIECE), start=1):
        clip = {"x": 0, "y": top, "width": width, "height": min(PIECE, length - top), "scale": 1}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
        path = folder / f"{report.stem}-{width}-{number}.png"
        path.write_bytes(base64.b64decode(shot["data"]))
        written.append(path)
    return written


def paper_problems(driver: Chrome) -> list[str]:
    """What is wrong with an open report on paper; the table of results is on a sheet that lies on its side."""
    size = {"width": PAPER, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    try:
        WebDriverWait(driver, PATIENCE).until(lambda d: len(set(ask(d, "chartWidths"))) == 1)
        found = [f"the table of results is {width} pixels wide" for width in ask(driver, "takeResults") if width > WIDE]
        found += [f"a chart is {10 * width} pixels wide" for width in ask(driver, "chartWidths") if 10 * width > PAPER]
        return [*found, *ask(driver, "pageProblems"), *console_problems(driver)]
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def print_page(driver: Chrome, report: Path, folder: Path) -> Path:
    """On A4, as a PDF."""
    open_report(driver, report, WIDTHS[0])
    size = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False, "preferCSSPageSize": True}
    path = folder / f"{report.stem}.pdf"
    path.write_bytes(base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", size)["data"]))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="look at reports in Chromium, and say what is wrong with them")
    parser.add_argument("reports", metavar="REPORT", nargs="+", type=Path)
    parser.add_argument("--png", metavar="FOLDER", type=Path, help="pictures at both widths, and a PDF as printed")
    args = parser.parse_args(arguments)
    found: list[str] = []
    with browser() as driver:
        for report in args.reports:
            for width in WIDTHS:
                found += [f"{report.name} at {width}: {each}" for each in problems(driver, report, width)]
            if args.png:
                args.png.mkdir(parents=True, exist_ok=True)
                for width in WIDTHS:
                    take_pictures(driver, report, width, args.png)
                print_page(driver, report, args.png)
                found += [f"{report.name} printed: {each}" for each in console_problems(driver)]
    print("\n".join(found) or "nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
