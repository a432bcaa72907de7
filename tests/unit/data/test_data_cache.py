"""What is in the cache is whole, whoever was killed and whatever changed it."""

import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_origin import gzipped, origin_of, serving, tiny_content, whole, write

from paceline.data import cache
from paceline.data.fetch import ensure, get
from paceline.data.origins import NAMES, Origin
from paceline.errors import DataError, UsageError

CONTENT = tiny_content()
ORIGIN = origin_of(CONTENT)
FILE = "tiny.bin"


@pytest.fixture(autouse=True)
def _only_what_the_test_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def fetching(origin: Origin, place: Path) -> subprocess.Popen[bytes]:
    code = (
        "import pickle, sys; from pathlib import Path; from paceline.data.fetch import ensure; "
        "ensure(pickle.loads(bytes.fromhex(sys.argv[1])), Path(sys.argv[2]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, pickle.dumps(origin).hex(), str(place / FILE)])


def wait_for(barrier: threading.Barrier) -> None:
    barrier.wait()


def test_a_whole_cache_asks_no_source(tmp_path: Path) -> None:
    write(tmp_path, {FILE: whole(CONTENT)})
    assert ensure(ORIGIN, tmp_path / FILE, source="folder") == tmp_path / FILE


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_no_damage_to_a_cached_file_goes_unnoticed(name: str, data: st.DataObject) -> None:
    content = CONTENT[name]
    where = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(0, 255))
    # No flip stands for a cut.
    damaged = content[:where] + bytes([content[where] ^ flip]) + content[where + 1 :] if flip else content[:where]
    blame = f"of its {name}, found" if flip else f"expected {ORIGIN.size} bytes, found"
    with tempfile.TemporaryDirectory() as folder:
        place = write(Path(folder), {FILE: whole(CONTENT | {name: damaged})}) / FILE
        with pytest.raises(DataError, match=f"cache: {place} is corrupt: .*{blame}"):
            ensure(ORIGIN, place, source="folder")


def test_a_corrupt_cache_is_reported_and_fetched_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = write(tmp_path / "cache", {FILE: b"damaged"}) / FILE
    with serving(gzipped(CONTENT)) as web:
        ensure(origin_of(CONTENT, web=web.address), place)
    assert place.read_bytes() == whole(CONTENT)
    said = capsys.readouterr().err
    assert f"warning: cache: {place} is corrupt: expected {ORIGIN.size} bytes, found 7; fetching it again" in said


def test_two_processes_fetching_at_once_are_both_served(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=20)  # nobody is answered before both have asked
    with serving(gzipped(CONTENT)) as web:
        web.before = lambda path: wait_for(together)
        processes = [fetching(origin_of(CONTENT, web=web.address), tmp_path) for _ in range(2)]
        assert [process.wait(30) for process in processes] == [0, 0]
    assert len(web.asked) == 8
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {FILE: whole(CONTENT)}


def size_of(path: Path) -> int:
    """Nothing, of a file that has just gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_process_killed_in_the_middle_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    content = {NAMES[0]: os.urandom(600_000)}
    place = tmp_path / "cache"
    with serving(gzipped(content)) as web:
        web.half_sent = threading.Event()
        process = fetching(origin_of(content, web=web.address), place)
        try:
            until = time.monotonic() + 20
            while not any(size_of(path) for path in place.glob("*")):
                assert time.monotonic() < until, "the download never began"
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    (part,) = place.iterdir()
    assert part.suffix == ".part"
    assert not cache.has(place / FILE, origin_of(content).size)
    os.utime(part, (0, 0))
    ensure(origin_of(content), place / FILE, write(tmp_path / "given", content))
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {FILE: whole(content)}


def test_what_another_process_is_writing_is_not_swept(tmp_path: Path) -> None:
    place = write(tmp_path, {FILE: whole(CONTENT), ".young.part": b"", ".old.part": b""})
    os.utime(place / ".old.part", (0, 0))
    ensure(ORIGIN, place / FILE)
    assert {path.name for path in place.glob(".*")} == {".young.part"}


def test_a_cache_that_cannot_be_made_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*file/cache/.*: Not a directory.*set PACELINE_CACHE"):
        ensure(ORIGIN, tmp_path / "file" / "cache" / FILE, write(tmp_path / "given", CONTENT))


def test_a_cache_that_cannot_be_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(DataError, match=f"cannot read .*{FILE} in the cache: Is a directory.*set PACELINE_CACHE"):
        ensure(ORIGIN, tmp_path / FILE, write(tmp_path / "given", CONTENT))


def test_a_disk_that_takes_no_more_is_named_with_a_remedy(tmp_path: Path) -> None:
    given = write(tmp_path / "given", CONTENT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DataError, match=f"cannot write .*{FILE} in the cache: File too large.*free space"):
            ensure(ORIGIN, tmp_path / "cache" / FILE, given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for variable in ("PACELINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert cache.folder_of("mnist") == Path("/home/someone/.cache/paceline/mnist")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder_of("mnist") == Path("/xdg/paceline/mnist")
    monkeypatch.setenv("PACELINE_CACHE", "relative")
    monkeypatch.chdir(tmp_path)
    assert cache.folder_of("mnist") == tmp_path / "relative" / "mnist"
    monkeypatch.setenv("PACELINE_CACHE", "~no-such-user/cache")
    with pytest.raises(DataError, match="set PACELINE_CACHE to a folder"):
        cache.folder_of("mnist")


def test_only_what_can_be_fetched_is_got() -> None:
    with pytest.raises(UsageError, match="unknown data set to fetch 'synthetic'"):
        get("synthetic")
