"""A user's folder of images: what is read, how it is divided, and an error for each thing that is wrong."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data import images
from paceline.data.load import load
from paceline.data.prepare import prepare
from paceline.errors import DataError


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> Image.Image:
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return Image.fromarray(pixels)


def save(path: Path, image: Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def folder_of(root: Path, classes: dict[str, int], mode: str = "RGB") -> Path:
    """PNG files 0.png, 1.png … in each class, every one another picture."""
    for number, (name, count) in enumerate(classes.items()):
        for index in range(count):
            save(root / name / f"{index}.png", picture(100 * number + index, mode))
    return root


def in_tensor(image: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels[None]


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("test", ["test", "val", "valid"])
def test_a_training_and_a_test_folder_are_read(tmp_path: Path, mode: str, test: str) -> None:
    folder_of(tmp_path / "own" / "train", {"dog": 3, "cat": 2}, mode)
    folder_of(tmp_path / "own" / test, {"cat": 1, "dog": 2}, mode)
    data = load(f"images:{tmp_path}/own")
    channels = 3 if mode == "RGB" else 1
    assert (data.info.shape, data.info.classes, data.info.train, data.info.test) == ((channels, 5, 6), 2, 5, 3)
    assert data.info.name == f"images:{tmp_path}/own"
    assert data.info.normalize
    assert data.train.targets.tolist() == [0, 0, 1, 1, 1]  # cat before dog
    assert data.test.targets.tolist() == [0, 1, 1]
    assert data.train.inputs.dtype == torch.uint8
    for index, seed in enumerate((100, 101, 0, 1, 2)):
        assert torch.equal(data.train.inputs[index], in_tensor(picture(seed, mode)))


def test_without_a_test_folder_a_fifth_of_each_class_is_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"a": 10, "b": 4, "c": 2})
    data = load(f"images:{folder}")
    assert torch.bincount(data.train.targets).tolist() == [8, 3, 1]
    assert torch.bincount(data.test.targets).tolist() == [2, 1, 1]
    listing = images.scan(folder)
    assert {path for path, _ in listing.train}.isdisjoint(path for path, _ in listing.test)
    assert len(listing.files) == 16


def test_how_the_test_set_was_chosen_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = folder_of(tmp_path / "one", {"a": 10, "b": 10})
    for _ in range(2):  # also when it has been packed before
        prepare(f"images:{one}")
        said = f"paceline: images:{one}: 16 images to train on and 4 to test with: a fifth of each class, chosen by"
        assert capsys.readouterr().err.startswith(said)
    folder_of(tmp_path / "two" / "train", {"a": 3, "b": 2})
    folder_of(tmp_path / "two" / "val", {"a": 1, "b": 1})
    chosen = str(images.scan(tmp_path / "two"))
    assert chosen == f"5 images to train on and 2 to test with: those in {tmp_path}/two/val"


def test_which_are_kept_depends_on_names_alone(tmp_path: Path) -> None:
    first = folder_of(tmp_path / "first", {"a": 10, "b": 10})
    second = folder_of(tmp_path / "elsewhere" / "second", {"b": 10, "a": 10})
    for path in second.rglob("*.png"):
        os.utime(path, (1, 1))
    names = [[str(path.relative_to(folder)) for path, _ in images.scan(folder).test] for folder in (first, second)]
    assert names[0] == names[1]
    assert names[0] != sorted(f"{name}/{index}.png" for name in "ab" for index in (0, 1))


def test_every_known_kind_is_read_whatever_the_case(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for suffix in (".png", ".PNG", ".jpg", ".JPEG", ".bmp", ".webp"):
            save(tmp_path / "own" / name / f"x{suffix}", picture(1))
        save(tmp_path / "own" / name / "link.gif", picture(1), format="PNG")  # what counts is what is inside
    (tmp_path / "own" / ".hidden").write_text("no image")
    (tmp_path / "own" / "a" / ".hidden").write_text("no image")
    (tmp_path / "own" / "a" / "y.png").symlink_to(tmp_path / "own" / "b" / "x.png")
    data = load(f"images:{tmp_path}/own")
    assert len(data.train) + len(data.test) == 15


def test_a_grey_gif_is_read(tmp_path: Path) -> None:
    every_grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    for name in ("a/1", "a/2", "b/1", "b/2"):
        save(tmp_path / "own" / f"{name}.gif", every_grey, optimize=False)
    data = load(f"images:{tmp_path}/own")
    assert torch.equal(data.train.inputs[0].flatten(), torch.arange(256, dtype=torch.uint8))


def broken(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def cut(path: Path, image: Image.Image) -> Path:
    """A picture of noise, so large that a cut takes pixels away and not only the end's mark."""
    save(path, image)
    return broken(path, path.read_bytes()[: path.stat().st_size // 2])


def check_refused(tmp_path: Path, reason: str, folder: Path | None = None) -> None:
    with pytest.raises(DataError, match=reason):
        prepare(f"images:{folder or tmp_path / 'own'}")
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_images_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"a": 3, "b": 3})
    bad = broken(folder / "b" / "x.png", b"")
    check_refused(tmp_path, f"{bad} is empty")
    broken(bad, b"no image at all")
    check_refused(tmp_path, f"{bad} cannot be decoded .*damaged or not an image; replace or remove it")
    bad.unlink()
    for suffix in (".png", ".jpg", ".bmp", ".webp"):
        bad = cut(folder / "b" / f"x{suffix}", picture(1, size=(6, 5)))
        check_refused(tmp_path, f"{bad} cannot be decoded")
        bad.unlink()
    (folder / "b" / "gone.png").symlink_to(tmp_path / "nowhere")
    check_refused(tmp_path, f"cannot read {folder}/b/gone.png: No such file")


def test_a_postscript_file_called_png_is_not_given_to_its_decoder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"a": 3, "b": 3})
    bad = save(folder / "b" / "x.png", picture(1), format="EPS")
    check_refused(tmp_path, f"{bad} cannot be decoded .cannot identify")


@pytest.mark.parametrize("mode", ["P", "RGBA", "1", "LA", "I;16", "CMYK"])
def test_other_modes_are_refused_with_a_way_to_convert(tmp_path: Path, mode: str) -> None:
    folder = folder_of(tmp_path / "own", {"a": 3, "b": 3})
    image = Image.new("I;16", (6, 5)) if mode == "I;16" else picture(1).convert(mode)
    bad = save(folder / "b" / ("x.jpg" if mode == "CMYK" else "x.png"), image)
    check_refused(tmp_path, rf'{bad} is 6×5 {mode}, but only L .grey. and RGB are supported: .*\.convert\("RGB"\)')


def test_mixed_sizes_and_modes_are_refused_with_both_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"a": 6, "b": 6})
    first, _ = images.scan(folder).train[0]
    bad = save(folder / "b" / "x.png", picture(1, size=(7, 5)))
    check_refused(tmp_path, rf"{bad} is 7×5 RGB, but {first} is 6×5 RGB: every image must have the same size and mode")
    save(bad, picture(1, "L"))
    check_refused(tmp_path, rf"{bad} is 6×5 L, but {first} is 6×5 RGB")


def test_an_animation_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"a": 3, "b": 3})
    bad = save(folder / "b" / "x.webp", picture(1), save_all=True, append_images=[picture(2)])
    check_refused(tmp_path, f"{bad} has more than one frame")


@pytest.mark.parametrize("most", [20, 10])  # pixels are 30: Pillow warns above most and raises above twice of it
def test_a_picture_of_too_many_pixels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    folder = folder_of(tmp_path / "own", {"a": 3, "b": 3})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    check_refused(tmp_path, rf"{folder}/.*\.png has more than {most} pixels: scale it down")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_so_it_is_where_warnings_are_not_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "own", {"a": 3, "b": 3})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    check_refused(tmp_path, "has more than 20 pixels")


def test_a_folder_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"a": 3, "b": 3})
    for path, reason in (
        (folder / "notes.txt", "notes.txt is not a class folder: the layout must be FOLDER/CLASS/IMAGE, or"),
        (folder / "a" / "notes.txt", r"a/notes.txt is not an image of a known kind \(.png, .jpg"),
        (folder / "a" / "deep" / "x.png", "a/deep is a folder inside a class"),
    ):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        check_refused(tmp_path, reason)
        path.unlink()
        if path.parent.name == "deep":
            path.parent.rmdir()
    (folder / "c").mkdir()
    check_refused(tmp_path, "own/c has no image: put some into it, or remove it")
    save(folder / "c" / "x.png", picture(1))
    check_refused(tmp_path, "own/c has only 1 image: a class needs 2 or more")


def test_one_class_is_too_few(tmp_path: Path) -> None:
    check_refused(tmp_path, r"has 1 class\(es\) instead of 2 or more", folder_of(tmp_path / "one", {"a": 3}))
    (tmp_path / "none").mkdir()
    check_refused(tmp_path, r"has 0 class\(es\) instead of 2 or more", tmp_path / "none")


def test_training_and_test_folder_need_the_same_classes_and_nothing_beside_them(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder_of(folder / "train", {"a": 1, "b": 1, "c": 1})
    folder_of(folder / "test", {"a": 1, "b": 1})
    check_refused(tmp_path, "own/train has the class 'c', but .*own/test has not: both need the same classes")
    folder_of(folder / "test", {"c": 1, "d": 1})
    check_refused(tmp_path, "own/test has the class 'd', but .*own/train has not")
    folder_of(folder / "train", {"d": 1})
    (folder / "extra").mkdir()
    check_refused(tmp_path, "own/extra is neither the training nor the test folder")
    (folder / "extra").rmdir()
    (folder / "val").mkdir()  # there is a test folder, so this one is not needed
    assert prepare(f"images:{folder}")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"train": 2, "plane": 2})
    assert load(f"images:{folder}").info.classes == 2
