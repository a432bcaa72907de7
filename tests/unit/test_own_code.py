"""A user's own code by its path: found, called with what it names, and blamed where it fails."""

from __future__ import annotations

import gc
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline import own_code
from paceline.errors import UsageError

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write the text as the module `mine`, which can then be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(text: str) -> None:
        (tmp_path / "mine.py").write_text(text)

    yield write_module
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("name", ["a:b", "package.module:function", "_a._b:c1", "größe:bau", "../a b/net.py:f"])
def test_a_path_of_a_function_is_ones_own(name: str) -> None:
    assert own_code.is_own(name)


@pytest.mark.parametrize(
    "name",
    ["resnet50", "a.b", ":b", "a:", "a:b:c", "a..b:c", "1a:b", "a/b:c", "a/.py:c", "net.py:", "synthetic:n=2"],
)
def test_other_names_are_not(name: str) -> None:
    assert not own_code.is_own(name)


def test_a_package_is_looked_for_without_running_it(write: Write) -> None:
    write("raise RuntimeError('I ran')\ndef build(): pass\n")
    own_code.check_exists("mine:build", "model")
    for missing, says in {
        "nowhere_at_all.net:build": "there is no Python package.*working folder.*nowhere_at_all.py:function",
        "__main__:build": "there is no Python package.*working folder",
        "json.nowhere:build": "there is no module 'nowhere' in json",
        "mine:biuld": r".*mine\.py defines no 'biuld'; did you mean 'build'",
        "nowhere/mine.py:build": "there is no file .*nowhere/mine.py",
    }.items():
        with pytest.raises(UsageError, match=f"model {missing}: {says}"):
            own_code.check_exists(missing, "model")


def test_ranks_that_are_threads_look_for_it_at_the_same_time(write: Write) -> None:
    """Other threads run whenever garbage is collected, which is often here: also while a module is parsed."""

    class Trash:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0)
            if gc.get_threshold()[0] == often:
                Trash()

    often, usual = 30, gc.get_threshold()
    write("\n".join(f"def function{i}(a, b=({i}, 2)): return [a + b for _ in range({i})]" for i in range(300)))
    gc.set_threshold(often)
    try:
        for _ in range(3):
            Trash()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: own_code.check_exists("mine:function7", "model"), range(4)))
    finally:
        gc.set_threshold(*usual)


def test_names_that_a_module_makes_as_it_runs_are_not_missed(write: Write) -> None:
    write("globals()['build'] = dict\n")
    own_code.check_exists("mine:build", "model")
    write("from collections import OrderedDict as build\n")
    own_code.check_exists("mine:build", "model")
    write("def build(:\n")
    with pytest.raises(UsageError, match=r"model mine:build cannot be read: .*mine\.py, line 1"):
        own_code.check_exists("mine:build", "model")


def test_a_file_is_named_by_its_path_and_may_import_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("from beside_it import SEVEN\ndef build(): return SEVEN\n")
    (tmp_path / "beside_it.py").write_text("SEVEN = 7\n")
    monkeypatch.chdir(tmp_path.parent)
    name = f"{tmp_path.name}/json.py:build"
    own_code.check_exists(name, "model")
    assert own_code.call(name, "model", {}) == 7
    assert own_code.find(name, "model") is own_code.find(f"{tmp_path}/json.py:build", "model")
    assert not hasattr(sys.modules["json"], "build")
    monkeypatch.delitem(sys.modules, "beside_it")


def test_the_working_folder_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "just_here.py").write_text("def build(): return 7")
    own_code.check_exists("just_here:build", "model")
    assert own_code.call("just_here:build", "model", {}) == 7
    monkeypatch.delitem(sys.modules, "just_here")


def test_the_function_gets_what_it_names_and_nothing_else(write: Write) -> None:
    write(
        "def named(classes, depth=3): return classes, depth\n"
        "def keywords(*, weights=None, **kwargs): return kwargs\n"
        "def both(classes, **kwargs): return classes, kwargs\n"
        "class Made:\n    def __init__(self, shape): self.shape = shape\n"
    )
    offered = {"shape": (1, 2, 3), "classes": 10, "num_classes": 10}
    assert own_code.call("mine:named", "model", offered) == (10, 3)
    assert own_code.call("mine:keywords", "model", offered) == {"num_classes": 10}
    assert own_code.call("mine:both", "model", offered) == (10, {})
    assert own_code.call("mine:Made", "model", offered).shape == (1, 2, 3)
    assert own_code.call("builtins:dict", "model", {"num_classes": 10}) == {}  # its signature is not known
    assert list(own_code.parameters("mine:named", "model")) == ["classes", "depth"]


def test_a_parameter_that_nothing_is_known_of_is_named(write: Write) -> None:
    write("def build(shape, depth, *, width): pass")
    with pytest.raises(
        UsageError, match=r"mine:build has unknown parameters: depth, width;.*these names: shape, classes"
    ):
        own_code.call("mine:build", "model", {"shape": 1, "classes": 2})


@pytest.mark.parametrize(("text", "says"), [
    ("x = 1", "mine has no 'build'"),
    ("import nowhere_at_all", r"ModuleNotFoundError: .*nowhere_at_all.*mine\.py, line 1\)"),
    ("\nx = 1 / 0", r"ZeroDivisionError: division by zero \(.*mine\.py, line 2\)"),
    ("def build(:", r"SyntaxError: .*mine\.py, line 1"),
    ("import sys\nsys.exit(3)", r"SystemExit: 3 \(.*mine\.py, line 2\)"),
])  # fmt: skip
def test_what_cannot_be_imported_says_why_and_where(write: Write, text: str, says: str) -> None:
    write(text)
    with pytest.raises(UsageError, match=f"data set mine:build cannot be imported: {says}"):
        own_code.find("mine:build", "data set")


def test_what_is_not_a_function_is_refused(write: Write) -> None:
    write("build = 3")
    with pytest.raises(UsageError, match="mine:build is of type int instead of a function"):
        own_code.find("mine:build", "model")


@pytest.mark.parametrize("folder", [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()])
def test_lines_of_installed_packages_are_not_the_users(folder: str) -> None:
    def call(filename: str) -> str:
        try:
            exec(compile("raise ValueError('wrong')", filename, "exec"))
        except ValueError as error:
            return own_code.reason(error)
        return ""

    assert __file__ in call(f"{folder}/package/module.py")
    assert "(/home/me/model.py, line 1)" in call("/home/me/model.py")


def test_an_error_that_no_line_of_the_user_led_to_cites_none() -> None:
    with pytest.raises(UsageError, match=r"called with s='\(', failed: JSONDecodeError: [^/]*$"):
        own_code.call("json:loads", "model", {"s": "("})


def test_a_call_that_fails_is_blamed_on_the_users_line_not_the_librarys(write: Write) -> None:
    write("import json\n\ndef build(classes):\n    return json.loads('nonsense')\n")
    says = r"mine:build, called with classes=10, failed: JSONDecodeError: Expecting value.*\(.*mine\.py, line 4\)"
    with pytest.raises(UsageError, match=says):
        own_code.call("mine:build", "model", {"classes": 10})
