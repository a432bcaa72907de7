"""The programs that Paceline's launcher starts: one rank (with mpiexec or a lab's agent), or a zygote for all ranks.

    python -P .../start.py rank RUN_FOLDER MODULE_FOLDER...
    python -P .../start.py zygote MODULE_FOLDER... SOCKET
    python -P .../start.py killed OWNER MODULE_FOLDER... RUN_FOLDER

Installed modules come first. Folders that are only on the launcher's import path (its working folder, a script's
folder) come last, so that a random.py there does not replace Python's.
"""

import sys


def main() -> None:
    kind, *rest = sys.argv[1:]
    argument = rest.pop(0) if kind == "rank" else rest.pop()
    owner = rest.pop(0) if kind == "killed" else ""
    sys.path += [folder for folder in rest if folder not in sys.path]
    if kind == "zygote":
        from paceline.launch import zygote

        zygote.main("paceline.launch.worker", "run_rank", int(argument))
        return
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
