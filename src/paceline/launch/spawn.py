"""Start the ranks of a run on this machine, as child processes or with mpiexec."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.comm.table import mpiexec
from paceline.launch import env as names
from paceline.launch import janitor, zygote
from paceline.launch import start as rank_program
from paceline.launch.memory_kills import RanksMemory
from paceline.launch.placement import Places
from paceline.launch.zygote import ForkedRank, Zygote
from paceline.layout import threads_per_rank
from paceline.messages import LOGGER
from paceline.run.folder import LOGS
from paceline.run.liveness import owner_text
from paceline.spec import RunSpec

Process = subprocess.Popen[bytes] | ForkedRank
# How long mpiexec may take to end its ranks.
MPIEXEC_SECONDS = 5.0
# Open MPI's mpiexec listens on the wildcard address for daemons of other nodes, and no setting changes that.
MPIEXEC_LISTENS = (
    "until the run ends, mpiexec listens on all network interfaces of this machine; its ranks do not "
    "(--transport gloo: loopback only)"
)


@dataclass
class Crew:
    """The processes of a run by rank (a process that runs all ranks counts as rank 0)."""

    processes: dict[int, Process]
    janitor: subprocess.Popen[bytes]
    private: Path
    memory: RanksMemory
    are_ranks: bool  # false: the only process is mpiexec, and the ranks are its children
    exits: dict[int, int] = field(default_factory=dict)
    lives: Counter[int] = field(default_factory=Counter)  # how often each rank was restarted
    examined: set[tuple[int, int]] = field(default_factory=set)  # ranks, and their lives, whose end was looked into
    start_rank: Callable[[int, int], Process] | None = None
    zygote: Zygote | None = None

    def lost_zygote(self) -> str | None:
        """How the zygote ended, if it ended before its ranks."""
        if self.zygote is None or not self.zygote.dead:
            return None
        code = self.zygote.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        if code == -signal.SIGKILL:
            how = self.memory.describe() or how
        return f"the process that starts the ranks (their zygote) {how}"

    def tell(self, line: str) -> None:
        """Send a line to the janitor."""
        assert self.janitor.stdin is not None
        with suppress(BrokenPipeError):
            self.janitor.stdin.write(f"{line}\n".encode())
            self.janitor.stdin.flush()

    def add(self, rank: int, process: Process) -> None:
        self.processes[rank] = process
        if process.pid is not None:
            self.watch(process.pid)

    def watch(self, pid: int) -> None:
        """Let the janitor kill this process group if the launcher dies."""
        self.tell(f"process {pid}")

    def start_again(self, rank: int) -> None:
        """Restart a rank whose process has ended."""
        assert self.start_rank is not None
        self.lives[rank] += 1
        del self.exits[rank]
        self.add(rank, self.start_rank(rank, self.lives[rank]))

    def running(self) -> dict[int, Process]:
        for rank, process in self.processes.items():
            if (code := process.poll()) is not None:
                self.exits.setdefault(rank, code)
        return {rank: process for rank, process in self.processes.items() if rank not in self.exits}

    def signal(self, number: int) -> None:
        for process in self.running().values():
            self.send(process, number)

    def send(self, process: Process, number: int) -> None:
        """Send a signal to a rank and the processes that it has started."""
        with suppress(ProcessLookupError):
            if isinstance(process, ForkedRank):
                process.signal(number)
            else:
                os.killpg(process.pid, number)

    def end(self, ranks: set[int]) -> dict[int, int]:
        """Kill what still runs; return the exit codes of the processes that had ended on their own."""
        running = self.running()
        by_themselves = dict(self.exits)
        if running and not self.are_ranks:
            # mpiexec ends all its ranks, even those that are not in env.json yet; kill them only if it does not.
            self.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(MPIEXEC_SECONDS)
            for pid in ranks if self.running() else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)
        if self.zygote:
            self.zygote.end()
        for process in self.processes.values():
            process.wait()
        self.running()
        return by_themselves

    def dismiss(self) -> None:
        """Remove the shared files after all processes have ended, even if the janitor was killed."""
        shutil.rmtree(self.private, ignore_errors=True)
        self.tell("done")
        assert self.janitor.stdin is not None
        self.janitor.stdin.close()
        self.janitor.wait()


def start(spec: RunSpec, folder: Path, out: int, places: Places | None = None) -> Crew:
    """Start every rank of the run, whose folder must exist; rank 0's standard output goes to the file `out`."""
    private = Path(tempfile.mkdtemp(prefix="paceline-", dir=_shared_memory()))
    program, modules = [sys.executable, "-P", rank_program.__file__], _module_folders()
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", janitor.__file__, *program, "killed", owner_text(folder), *modules],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    crew = Crew(
        {}, watcher, private, RanksMemory(folder, places), are_ranks=not spec.carrier.by_mpiexec or spec.workers == 1
    )
    crew.tell(f"folder {private}")
    crew.tell(f"run {folder}")
    command = [*program, "rank", str(folder), *modules]
    size = spec.ranks
    try:
        if not crew.are_ranks:
            variables = _environment(spec, size)
            if places is None:
                variables = _mpi_variables(private, variables)
            with (folder / LOGS / "mpiexec.log").open("wb") as log:
                words = [*_mpiexec_command(size, places), *command]
                # mpiexec prints a long message about a failed rank, which would bury ours.
                crew.add(0, _popen(words, variables, out, log.fileno()))
            LOGGER.debug("mpiexec is process %s, its log %s: %s", crew.processes[0].pid, log.name, shlex.join(words))
            return crew
        count = 1 if spec.carrier.in_one_process else size
        variables = _environment(spec, spec.workers or 1)
        if places and zygote.available_in_lab():
            words = places.outside([*program, "zygote-of-lab", _imported_once(spec), *modules])
            crew.zygote = Zygote(words, variables, out, in_lab=True)
        elif places is None and zygote.available():
            words = [*program, "zygote", _imported_once(spec), *modules]
            crew.zygote = Zygote(words, variables, out, crew.watch)
        if crew.zygote:
            crew.watch(crew.zygote.process.pid)
            LOGGER.debug("ranks are forked from process %d, which imports torch once", crew.zygote.process.pid)

        def start_rank(rank: int, life: int) -> Process:
            seat = {names.RANK: str(rank), names.SIZE: str(count), names.STORE: str(private / "store")}
            seat |= {names.LIVES: str(life)} | (places.variables(rank) if places else {})
            if crew.zygote:
                node = places.nodes[rank].name if places else None
                return crew.zygote.fork(f"paceline-{rank}", [str(folder)], seat, node)
            words = places.command(rank, command) if places else command
            return _popen(words, variables | seat, out)

        crew.start_rank = start_rank
        for rank in range(count):
            crew.add(rank, start_rank(rank, 0))
    except BaseException:
        crew.end(set())
        crew.dismiss()
        raise
    return crew


def _imported_once(spec: RunSpec) -> str:
    """What the zygote imports for its ranks; first the module of the function that is a rank."""
    served = ["paceline.launch.served_rank"] if spec.servers else []
    # The meta device imports this on first use, and with it SymPy.
    emulated = ["torch.fx.experimental.symbolic_shapes"] if spec.emulated else []
    return ",".join(["paceline.launch.worker", *served, *emulated])


def _popen(command: list[str], variables: dict[str, str], out: int, err: int | None = None) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches only the launcher."""
    return subprocess.Popen(
        command, env=variables, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=err
    )


def _environment(spec: RunSpec, processes: int) -> dict[str, str]:
    """This process's environment, with the number of threads per rank and the level of messages."""
    return dict(os.environ) | {
        "OMP_NUM_THREADS": str(spec.threads or threads_per_rank(processes)),
        names.LOG_LEVEL: str(LOGGER.level or logging.INFO),
    }


def _module_folders() -> list[str]:
    """Folders on this process's import path that ranks may lack; a user's own models and data may be there."""
    return [os.path.abspath(path) for path in sys.path if not path.startswith((sys.prefix, sys.base_prefix))]


def _shared_memory() -> str | None:
    """A folder in memory, if there is one: Open MPI keeps the ranks' shared segments in it."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _mpiexec_command(size: int, places: Places | None = None) -> list[str]:
    program = mpiexec()
    assert program is not None, "checked with the spec"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    if "Open MPI" not in said and "OpenRTE" not in said:
        return [program, "-n", str(size), *(["-hosts", places.hosts()] if places else [])]
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    where = ["--host", places.hosts()] if places else ["--oversubscribe"]
    return [program, *root, *where, "--bind-to", "none", "-n", str(size)]


def _mpi_variables(private: Path, variables: dict[str, str]) -> dict[str, str]:
    """For Open MPI: temporary files in `private`, and ranks that use shared memory and open no port, by default."""
    defaults = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^tcp", "PMIX_MCA_ptl_tcp_if_include": "lo"}
    return (
        defaults
        | variables
        | {
            "TMPDIR": str(private),
            "OMPI_MCA_btl_sm_backing_directory": str(private),
            "OMPI_MCA_btl_vader_backing_directory": str(private),  # its name before Open MPI 5
        }
    )
