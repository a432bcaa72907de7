"""The program of a rank that our own launcher starts: python -P .../start.py RUN_FOLDER MODULE_FOLDER...

Modules come from where they are installed. The folders in which only the launcher finds modules (its working folder, a
script's folder) come last on the import path: a random.py there does not replace the library's.
"""

import sys


def main() -> None:
    sys.path += [folder for folder in sys.argv[2:] if folder not in sys.path]
    from paceline.launch.signals import quiet_interrupt

    with quiet_interrupt():
        from paceline.launch.worker import run_rank
    run_rank(sys.argv[1])


if __name__ == "__main__":
    main()
