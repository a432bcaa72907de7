"""The programs that Paceline's launcher starts: one rank (with mpiexec or a lab's agent), or a zygote for all ranks.

    python -P .../start.py rank RUN_FOLDER MODULE_FOLDER...
    python -P .../start.py zygote MODULES MODULE_FOLDER...
    python -P .../start.py zygote-of-lab MODULES MODULE_FOLDER... NODES
    python -P .../start.py killed OWNER MODULE_FOLDER... RUN_FOLDER

A zygote imports MODULES, separated by commas; the first has the function that is a rank.
Installed modules come first. Folders that are only on the launcher's import path (its working folder, a script's
folder) come last, so that a random.py there does not replace Python's.
"""

import sys


def main() -> None:
    kind, *rest = sys.argv[1:]
    argument = rest.pop() if kind == "killed" else rest.pop(0)
    nodes = rest.pop() if kind == "zygote-of-lab" else None
    owner = rest.pop(0) if kind == "killed" else ""
    sys.path += [folder for folder in rest if folder not in sys.path]
    if kind in ("zygote", "zygote-of-lab"):
        from paceline.lab.spaces import NodeSpaces
        from paceline.launch import zygote

        zygote.main(argument.split(","), "run_rank", NodeSpaces.from_json(nodes) if nodes else None)
    if kind == "killed":
        from pathlib import Path

        from paceline.launch.diagnose import launcher_was_killed

        launcher_was_killed(Path(argument), owner)
        return
    from paceline.launch.signals import quiet_interrupt

    with quiet_interrupt():
        from paceline.launch.worker import run_rank
    run_rank(argument)


if __name__ == "__main__":
    main()
