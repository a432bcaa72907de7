"""Which rank a process is, from the variables that real launchers set.

As Slurm 22.05, Open MPI 5.0, MPICH 5.0 (Hydra) and torchrun 2.13 were seen to set them. Inside a Slurm job both MPIs
start daemons with srun, and the ranks have the variables of their daemon's step too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.comm.seat import Seat
from paceline.errors import UsageError
from paceline.launch.env import find_seat

Env = Mapping[str, str]

SHELL = {"HOME": "/home/ada", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "4"}

OWN = SHELL | {"PACELINE_RANK": "1", "PACELINE_SIZE": "2", "PACELINE_STORE": "/dev/shm/paceline-a1b2/store"}

# Rank 3 of `torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint n003:29400`.
TORCHRUN = SHELL | {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "n003",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# What scripts export for init_process_group("env://").
STATIC = SHELL | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}

OPEN_MPI = SHELL | {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-11820@1",
    "PMIX_RANK": "1",
}

MPICH = SHELL | {
    "PMI_RANK": "1",
    "PMI_FD": "11",
    "PMI_SIZE": "4",
    "PMI_HOSTNAME": "n003",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
}

# An sbatch script of -N 2 -n 3, and rank 2 of the srun in it: two ranks on the first node, one on the second.
BATCH = SHELL | {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "n[003-004]",
    "SLURM_NODELIST": "n[003-004]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}
SRUN = BATCH | {
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[003-004]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2",
}
# Rank 1 of srun -N 1 -n 2 in the same job.
ONE_NODE = SRUN | {
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_NNODES": "1",
    "SLURM_STEP_NODELIST": "n003",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}
# The shell of `salloc -N 2 -n 3` where LaunchParameters has use_interactive_step.
SALLOC = BATCH | {
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n003",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# A daemon that mpiexec has started with srun, one on each of two nodes; its ranks inherit this.
DAEMON = SRUN | {
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_GTIDS": "1",
}


def seat_of(env: Env) -> Seat:
    seat = find_seat(env)
    assert seat is not None
    return seat


def place(seat: Seat) -> tuple[int, int, int, int, str]:
    return seat.rank, seat.size, seat.local_rank, seat.local_size, seat.launcher


@pytest.mark.parametrize("env", [{}, SHELL, BATCH, SALLOC], ids=["nothing", "shell", "sbatch", "salloc"])
def test_a_shell_is_no_rank(env: Env) -> None:
    assert find_seat(env) is None


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (OWN, (1, 2, 1, 2, "paceline")),
        (TORCHRUN, (3, 4, 1, 2, "torchrun")),
        (STATIC, (0, 2, 0, 2, "torchrun")),
        (OPEN_MPI, (1, 2, 1, 2, "mpiexec")),
        (MPICH, (1, 4, 1, 4, "mpiexec")),
        (MPICH | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, (1, 4, 0, 2, "mpiexec")),
        (ONE_NODE, (1, 2, 1, 2, "srun")),
        (SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}, (1, 3, 1, 2, "srun")),
        (SRUN, (2, 3, 0, 1, "srun")),
        (ONE_NODE | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "4711.0"}, (1, 2, 1, 2, "srun")),
    ],
    ids=["paceline", "torchrun", "env://", "openmpi", "mpich", "mpich-nodes", "srun-node", "srun-first", "srun-last",
         "srun-pmi2"],
)  # fmt: skip
def test_a_rank_finds_its_place(env: Env, expected: tuple[int, int, int, int, str]) -> None:
    assert place(seat_of(env)) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (ONE_NODE | OWN, (1, 2, 1, 2, "paceline")),
        (DAEMON | TORCHRUN, (3, 4, 1, 2, "torchrun")),
        (OPEN_MPI | TORCHRUN, (3, 4, 1, 2, "torchrun")),
        (BATCH | OPEN_MPI, (1, 2, 1, 2, "mpiexec")),
        (DAEMON | OPEN_MPI, (1, 2, 1, 2, "mpiexec")),
        (BATCH | MPICH, (1, 4, 1, 4, "mpiexec")),
        (DAEMON | MPICH | {"PMI_RANK": "3", "MPI_LOCALNRANKS": "2"}, (3, 4, 1, 2, "mpiexec")),
    ],
    ids=["paceline-srun", "torchrun-srun", "torchrun-mpiexec", "openmpi-sbatch", "openmpi-daemon", "mpich-sbatch",
         "mpich-daemon"],
)  # fmt: skip
def test_the_innermost_launcher_counts(env: Env, expected: tuple[int, int, int, int, str]) -> None:
    assert place(seat_of(env)) == expected


# How the ranks meet.


def test_ranks_of_our_own_launcher_meet_in_its_file() -> None:
    seat = seat_of(OWN)
    assert (seat.store_file, seat.address) == ("/dev/shm/paceline-a1b2/store", None)


def test_under_torchrun_the_agent_hosts_the_store_and_else_rank_0() -> None:
    assert seat_of(TORCHRUN).address == ("n003", 29400)
    assert not any(seat_of(TORCHRUN | {"RANK": rank}).hosts_store for rank in "0123")
    assert seat_of(STATIC).address == ("127.0.0.1", 29511)
    assert [seat_of(STATIC | {"RANK": rank}).hosts_store for rank in "01"] == [True, False]
    assert seat_of(TORCHRUN | {"GLOO_SOCKET_IFNAME": "ib0"}).interface == "ib0"


def test_without_a_local_rank_each_rank_sees_to_its_own_machine_unless_all_are_on_this_one() -> None:
    bare = {"RANK": "3", "WORLD_SIZE": "4"}
    elsewhere, here = (seat_of(SHELL | bare | {"MASTER_ADDR": address}) for address in ("n003", "127.0.0.1"))
    assert (elsewhere.local_rank, elsewhere.local_size) == (0, 1)
    assert (here.local_rank, here.local_size) == (3, 4)


def test_ranks_that_torchrun_starts_again_do_not_meet_where_the_failed_ones_did() -> None:
    # The agent's store outlives them, and still has the addresses of processes that are gone.
    assert seat_of(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}) != seat_of(TORCHRUN)


@pytest.mark.parametrize(
    ("env", "others", "stranger"),
    [
        (
            OPEN_MPI,
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            {"PMIX_NAMESPACE": "prterun-vm-7@1"},
        ),
        (ONE_NODE, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {"SLURM_STEP_ID": "1"}),
        (ONE_NODE, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {"SLURM_JOB_ID": "4712"}),
        (ONE_NODE, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {"SLURM_RESTART_COUNT": "1"}),
        (MPICH, {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, None),
    ],
    ids=["openmpi", "step", "job", "requeued", "mpich"],
)
def test_ranks_of_one_node_meet_in_a_file_of_their_own_job(env: Env, others: Env, stranger: Env | None) -> None:
    seat = seat_of(env)
    assert seat.store_file is not None
    assert seat.address is None
    folder = Path(seat.store_file).parent
    assert folder.parent == Path(tempfile.gettempdir())
    assert folder.name.startswith(f"paceline-{os.getuid()}-")
    assert seat_of({**env, **others}).store_file == seat.store_file
    if stranger is not None:
        assert seat_of({**env, **stranger}).store_file != seat.store_file


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n[003-005,9],m1", "n003"),
        ("n[9,003-005]", "n9"),
        ("m1,n[003-005]", "m1"),
        ("gpu-a-[17-18]", "gpu-a-17"),
        ("n003.cluster.org,n004.cluster.org", "n003.cluster.org"),
    ],
)
def test_ranks_of_several_slurm_nodes_meet_on_the_first(nodes: str, first: str) -> None:
    seats = [seat_of(SRUN | {"SLURM_STEP_NODELIST": nodes, "SLURM_PROCID": rank}) for rank in "012"]
    assert [seat.hosts_store for seat in seats] == [True, False, False]
    (address,) = {seat.address for seat in seats}
    assert address is not None
    assert address[0] == first
    assert 1024 < address[1] < 32768  # below the ports that Linux gives to clients
    assert {seat.store_file for seat in seats} == {None}


@pytest.mark.parametrize("stranger", [{"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}], ids=["job", "step"])
def test_two_slurm_steps_with_one_first_node_do_not_meet(stranger: Env) -> None:
    assert seat_of({**SRUN, **stranger}).address != seat_of(SRUN).address


def test_master_addr_and_port_say_where_to_meet_when_set() -> None:
    told = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000", "GLOO_SOCKET_IFNAME": "ib0"}
    nodes = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    for env in (SRUN | told, OPEN_MPI | nodes | told):
        seat = seat_of(env)
        assert (seat.address, seat.interface, seat.store_file) == (("10.0.0.7", 4000), "ib0", None)
    assert seat_of(OPEN_MPI | nodes).address is None


def test_ranks_of_mpiexec_meet_in_one_place_though_only_some_come_from_a_slurm_step() -> None:
    # mpiexec starts the ranks of its own node itself, and daemons with srun only on the others.
    nodes = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    here = seat_of(BATCH | OPEN_MPI | nodes | {"OMPI_COMM_WORLD_RANK": "0"})
    step = {"SLURM_STEP_NODELIST": "n004", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    there = seat_of(DAEMON | step | OPEN_MPI | nodes)
    assert here.address is not None
    assert there.address == here.address


# Values that no launcher sets.


@pytest.mark.parametrize(
    ("env", "name", "value"),
    [
        *((OWN, "PACELINE_RANK", value) for value in ("", "two", "-1", "1.5", "0x1", "1 ", "²")),
        (OWN, "PACELINE_SIZE", "two"),
        (TORCHRUN, "RANK", "two"),
        (TORCHRUN, "MASTER_PORT", "two"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "two"),
        (MPICH, "PMI_SIZE", "two"),
        (SRUN, "SLURM_PROCID", "two"),
        (SRUN, "SLURM_STEP_NUM_TASKS", "two"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_is_no_number_is_an_error_that_names_the_variable(env: Env, name: str, value: str) -> None:
    with pytest.raises(UsageError) as error:
        find_seat({**env, name: value})
    assert f"{name} is {value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("env", "name"),
    [(OWN, "PACELINE_SIZE"), (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), (TORCHRUN, "MASTER_ADDR")],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_half_of_a_launchers_variables_is_an_error_that_names_what_is_missing(env: Env, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        find_seat({key: value for key, value in env.items() if key != name})


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("0", "0")])
def test_a_rank_beyond_the_size_is_an_error(rank: str, size: str) -> None:
    with pytest.raises(UsageError, match=f"torchrun set an impossible rank: {rank} of {size}"):
        find_seat(TORCHRUN | {"RANK": rank, "WORLD_SIZE": size})
