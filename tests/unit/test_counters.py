"""The kernel's counters are read right, from recorded texts and from the kernel that runs this test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.launch import counters
from paceline.launch.counters import COLUMNS, PAGE, TICKS, Counters, Processes, ProcFile, Queues

STAT = b"""\
cpu  1000 20 300 900000 4000 5 60 7000 80 9
cpu0 500 10 150 450000 2000 3 30 3500 40 4
cpu1 500 10 150 450000 2000 2 30 3500 40 5
intr 8462 0 9 0 0
ctxt 5
btime 1700000000
"""
MEMINFO = b"MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    6000 kB\nHugePages_Total:       0\n"
PROCESS = (
    b"4321 (a b) S (c)) R 1 4321 4321 0 -1 4194304 5000 11 2 0 731 269 17 5 20 0 9 0 123456 9000000 2500 "
    b"18446744073709551615 1 1 0 0 0 0 0 16781312 17442 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
)
NET_DEV = b"""\
Inter-|  Receive  |  Transmit
 face |bytes  packets errs drop fifo frame compressed multicast|bytes  packets errs drop fifo colls carrier compressed
  lo: 1000  10  0  0  0  0  0  0  1000  10  0  0  0  0  0  0
  ifb0:  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0
  eth0:99999999999999 29409  1  2  3  4  5  6  1769423  18520  7  8  9  10  11  12
wlp0s20f3:  0  0  0  0  0  0  0  0  42  1  0  0  0  0  0  0
"""
# A token bucket on interface 1 that has dropped 1969 packets, as `tc -s qdisc` says, too.
QUEUES = bytes.fromhex(
    "bc000000240002000000000077540000000000000100000000000100ffffffff0200000008000100746266002c0002002800010000010000"
    "0000000020bcbe000000000000000000000000003075000000a000000000000005000c00000000003000070014000100206e010000000000"
    "7200000000000000180003001e00000028630000b107000000000000270800002c000300206e01000000000072000000b107000027080000"
    "00000000000000001e0000002863000000000000"
)
LAST_PART = bytes.fromhex("140000000300020000000000775400000000000000000000")[:20]
BURN = "import sys\nwhile True:\n    sum(range(100000))\n    print(flush=True)\n"


def test_cores_that_wait_or_are_stolen_are_not_busy() -> None:
    assert counters.busy_seconds(STAT) == (1000 + 20 + 300 + 5 + 60) / TICKS


def test_what_tells_of_other_programs_is_read_from_its_own_column() -> None:
    assert counters.process_seconds(STAT) == (1000 + 20 + 300) / TICKS
    assert counters.stolen_seconds(STAT) == 7000 / TICKS
    assert counters.waited_seconds(
        b"some avg10=51.05 avg60=4.0 avg300=3.1 total=266471080\nfull avg10=0 total=7\n"
    ) == (266.47108)
    status = b"Name:\tpython\nThreads:\t9\nvoluntary_ctxt_switches:\t796\nnonvoluntary_ctxt_switches:\t31\n"
    assert counters.preemptions(status) == 31
    assert counters.preemptions(b"Name:\tpython\nThreads:\t9\n") == 0, "a sandbox may not count it"


def test_memory_is_what_a_new_process_could_not_have() -> None:
    assert counters.memory(MEMINFO) == (16000 * 1024, 10000 * 1024)


def test_a_programs_name_may_have_spaces_and_parentheses() -> None:
    assert counters.process(PROCESS) == ((731 + 269) / TICKS, 2500 * PAGE, 123456 / TICKS)


def test_interfaces_that_carried_anything_are_read_each_column_for_itself() -> None:
    found = counters.interfaces(NET_DEV)
    assert list(found) == ["lo", "eth0", "wlp0s20f3"]
    assert found["eth0"] == {"rx_bytes": 99999999999999, "rx_packets": 29409, "rx_drops": 2, "tx_bytes": 1769423,
                             "tx_packets": 18520, "tx_drops": 8}  # fmt: skip
    assert (found["wlp0s20f3"]["tx_bytes"], found["wlp0s20f3"]["rx_bytes"]) == (42, 0)


def test_a_long_table_is_read_to_its_end(tmp_path: Path) -> None:
    line = b"%15s: 1 1 0 0 0 0 0 0 2 2 0 0 0 0 0 0\n"
    (tmp_path / "dev").write_bytes(b"a\nb\n" + b"".join(line % f"eth{i}".encode() for i in range(2000)))
    file = ProcFile(tmp_path / "dev")
    assert len(counters.interfaces(file.read())) == 2000
    file.close()


def test_drops_are_those_of_an_interfaces_outermost_queue() -> None:
    dropped: dict[int, int] = {}
    assert not counters.queue_drops(QUEUES, dropped)
    assert dropped == {1: 1969}
    assert counters.queue_drops(LAST_PART, dropped)
    inner = bytearray(QUEUES)
    inner[28:32] = (0x10001).to_bytes(4, "little")  # its parent is another queue, which counts it already
    dropped.clear()
    assert not counters.queue_drops(bytes(inner), dropped)
    assert dropped == {}


def test_the_kernel_answers_about_its_queues_again_and_again() -> None:
    queues = Queues()
    for _ in range(3):
        assert all(count > 0 for count in queues.drops().values())
    queues.close()


def test_ten_megabytes_over_loopback_are_counted() -> None:
    size = 10_000_000
    found = Counters(lambda: [os.getpid()])
    before = found.read()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        thread = threading.Thread(target=sender.sendall, args=(bytes(size),))
        thread.start()
        left = size
        while left:
            left -= len(receiver.recv(1 << 20))
        thread.join()
        receiver.close()
    after = found.read()
    found.close()
    none = dict.fromkeys(COLUMNS, 0)
    moved = {key: after.interfaces["lo"][key] - before.interfaces.get("lo", none)[key] for key in COLUMNS}
    assert moved["rx_bytes"] >= size
    assert moved["tx_bytes"] >= size
    assert moved["rx_packets"] > 0
    assert after.seconds is not None
    assert before.seconds is not None
    assert after.seconds >= before.seconds
    assert after.run_memory_bytes is not None
    assert 0 < after.run_memory_bytes < (after.memory_bytes or 0) * 2


def burn_for(process: subprocess.Popen[str], times: int) -> None:
    assert process.stdout is not None
    for _ in range(times):
        process.stdout.readline()


def test_a_process_that_ends_takes_none_of_its_seconds_back() -> None:
    pids = {os.getpid()}
    processes = Processes(lambda: pids)
    first = processes.read()
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE, text=True) as child:
        pids.add(child.pid)
        burn_for(child, 100)
        with_child = processes.read()
        child.kill()
    after = processes.read()
    pids.remove(child.pid)
    assert first is not None
    assert with_child is not None
    assert after is not None
    assert with_child[0] > first[0], "a new process counts from its birth"
    assert after[0] >= with_child[0]
    assert after[1] < with_child[1], "its memory is free"
    processes.close()


def test_what_a_process_did_before_anybody_looked_does_not_count() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE, text=True) as child:
        burn_for(child, 100)
        time.sleep(2 / TICKS)
        child.send_signal(19)  # SIGSTOP: what it has done is fixed
        processes = Processes(lambda: [child.pid])
        found = processes.read()
        child.kill()
    assert found is not None
    assert found[0] == 0.0
    assert processes.read() is None
    processes.close()


def test_of_the_labs_nodes_all_processes_that_can_be_seen_count() -> None:
    found = Counters(lambda: [], own_processes=True)
    before, start = found.read(), time.process_time()
    while time.process_time() - start < 5 / TICKS:
        sum(range(1000))
    after = found.read()
    assert before.seconds is not None
    assert after.seconds is not None
    assert after.seconds > before.seconds
    assert after.memory_bytes is not None
    assert after.memory_bytes > PAGE
    assert after.run_seconds is None, "it would say the same"
    found.close()


def test_a_file_that_opens_and_cannot_be_read_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    """As /proc/pressure/cpu of a kernel that does not count pressure."""
    (tmp_path / "stat").write_bytes(STAT)
    (tmp_path / "pressure" / "cpu").mkdir(parents=True)  # a folder opens, too
    found = Counters(lambda: [], proc=tmp_path)
    reading = found.read()
    assert (reading.waited_seconds, reading.stolen_seconds) == (None, 7000 / TICKS)
    found.close()


def test_without_proc_there_is_nothing_to_count_and_with_half_of_it_half(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot read counters in"):
        Counters(lambda: [], proc=tmp_path)
    (tmp_path / "meminfo").write_bytes(MEMINFO)
    found = Counters(lambda: [], proc=tmp_path)
    reading = found.read()
    assert (reading.seconds, reading.memory_bytes, reading.interfaces) == (None, 10000 * 1024, {})
    found.close()
