"""Completion in a shell: the script is valid, and completes verbs, options and values."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from paceline.cli.completion import SHELLS, actions, whole_parser
from paceline.cli.main import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_that_knows_the_verbs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(word in text for word in ("paceline", "train", "compare", "local-sgd"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("paceline tr", {"train"}),
        ("paceline com", {"compare", "completion"}),
        ("paceline train --strat", {"--strategy"}),
        ("paceline train --strategy ps-", {"ps-sync", "ps-async", "ps-bounded"}),
        ("paceline train --data fash", {"fashion-mnist"}),
        ("paceline data g", {"get"}),
        ("paceline data get --so", {"--source"}),
        ("paceline completion z", {"zsh"}),
    ],
)
def test_bash_completes(line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "paceline.sh").write_text(script("bash", capsys))
    subprocess.run(["bash", "-n", "paceline.sh"], cwd=tmp_path, check=True)
    words = line.split()
    asked = (
        f". ./paceline.sh; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
        f"_shtab_paceline paceline {words[-1]} {words[-2]}; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


def test_the_short_form_o_is_the_output_of_a_verb() -> None:
    outputs = [list(action.option_strings) for action in actions(whole_parser()) if "-o" in action.option_strings]
    assert {tuple(each) for each in outputs} == {("-o", "--output"), ("-o", "--output-dir")}
