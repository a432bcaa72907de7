"""Cluster files: what is read from good ones, what is said about bad ones, and the secret that ranks share."""

import os
import re
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import EXIT_USAGE, UsageError
from paceline.launch.cluster import Cluster, forget_key, read_cluster, read_key, split_address

GOOD = """# Not the line of "127.0.0.1:4328", nor of worker = []
worker = [
    "127.0.0.1:4327",  # beside "127.0.0.1:4330"
    '127.0.0.1:4328',
]
ps = ["127.0.0.1:4330", "[::1]:4330"]
"""


def write(folder: Path, text: str, name: str = "cluster.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def write_key(cluster: Cluster, text: str = "ab" * 32 + "\n", mode: int = 0o600) -> None:
    cluster.key.write_text(text)
    cluster.key.chmod(mode)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return read_cluster(write(tmp_path, GOOD))


@pytest.fixture
def own(tmp_path: Path) -> Cluster:
    return read_cluster(write(tmp_path, GOOD + 'key = "my secret.hex"\n'))


def test_a_good_file_gives_its_lists_and_a_key_beside_it(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster == Cluster(
        path=str(tmp_path / "cluster.toml"),
        worker=("127.0.0.1:4327", "127.0.0.1:4328"),
        ps=("127.0.0.1:4330", "[::1]:4330"),
        key=tmp_path / "cluster.key",
        own_key=False,
    )


def test_a_key_is_found_from_the_files_folder_wherever_the_rank_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    write(tmp_path, GOOD + 'key = "keys/a"\n')
    monkeypatch.chdir(tmp_path / "runs")
    named = read_cluster("../cluster.toml")
    assert named.own_key
    assert named.key.is_absolute()
    assert os.path.normpath(named.key) == str(tmp_path / "keys" / "a")
    write(tmp_path, GOOD + 'key = "/etc/keys/a"\n')
    assert read_cluster("../cluster.toml").key == Path("/etc/keys/a")


def test_lines_are_those_of_the_texts_and_not_of_comments(cluster: Cluster) -> None:
    assert [cluster.line_of(address) for address in (*cluster.worker, *cluster.ps)] == [3, 4, 6, 6]
    assert cluster.line_of("127.0.0.1:432") == 1


def test_lines_are_right_however_toml_lets_a_text_be_written(tmp_path: Path) -> None:
    text = '''worker = ["\\u0061:1", """
b:1""",
'c:1', # 'd:1', """
\'\'\'d:1\'\'\',
"e:1"] # '
'key' = \'\'\'it's
"f:1"\'\'\'
"ps" = ["f:1"]\r
'''
    read = read_cluster(write(tmp_path, text))
    assert read.worker == ("a:1", "b:1", "c:1", "d:1", "e:1")
    assert [read.line_of(address) for address in (*read.worker, *read.ps)] == [1, 1, 3, 4, 5, 8]


@pytest.mark.parametrize(("role", "index", "rank"), [("ps", 0, 0), ("ps", 1, 1), ("worker", 0, 2), ("worker", 1, 3)])
def test_parameter_servers_are_the_first_ranks(cluster: Cluster, role: str, index: int, rank: int) -> None:
    assert cluster.place(role, index) == rank


@pytest.mark.parametrize(
    ("role", "index", "line", "words"),
    [
        ("worker", 2, 2, "there is no worker 2; give one from 0 to 1"),
        ("worker", -1, 2, "there is no worker -1"),
        ("ps", 2, 6, "there is no ps 2"),
        ("ps", None, 6, "the index of the ps is missing"),
        ("worker", None, 2, "the index of the worker is missing"),
    ],
)
def test_a_place_that_is_not_there_is_refused_with_the_line_of_the_list(
    cluster: Cluster, role: str, index: int | None, line: int, words: str
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(cluster.path)} line {line}: {words}"):
        cluster.place(role, index)


def test_a_key_file_that_is_called_like_a_list_is_not_taken_for_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 3: there is no worker 5"):
        read_cluster(write(tmp_path, 'key = "worker"\nps = ["a:1"]\nworker = ["b:1"]\n')).place("worker", 5)


def test_an_unknown_role_is_refused_with_the_nearest_one(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="unknown role 'workers'; did you mean 'worker'"):
        cluster.place("workers", 0)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "worker is missing; write worker"),
        ('worker = ["a:1"]\n', 1, "ps is missing; write ps"),
        ('ps = ["a:1"]\n', 1, "worker is missing"),
        ('worker = ["a:1"]\nps = []\n', 2, "ps is empty"),
        ('ps = ["a:1"]\n\nworker = "b:1"\n', 3, "worker is not a list of strings"),
        ('ps = ["a:1"]\nworker = ""\n', 2, "worker is not a list of strings"),
        ('ps = ["a:1"]\nworker = ["b:1", 4327]\n', 2, "worker is not a list of strings"),
        ('ps = ["a:1"]\n[worker]\nb = 1\n', 2, "worker is not a list of strings"),
        ('ps = ["a:1"]\n# wroker\nwroker = ["b:1"]\n', 3, "unknown key 'wroker'; did you mean 'worker'"),
        ('ps = ["a:1"]\nworker = ["b:1"]\n[tls]\nkey = 1\n', 3, "unknown key 'tls'"),
        ('ps = ["a:1"]\ntls.a = 1\ntls.b = 2\n', 2, "unknown key 'tls'"),
        ('ps = ["a:1"]\nworker = ["b:1"]\n"to p" = 1\n', 3, "unknown key 'to p'"),
        ('ps = ["a:1"]\nworker = ["b:1"]\nkey = 5\n', 3, "the key cannot be 5"),
        ('ps = ["a:1"]\nworker = ["b:1"]\nkey = ""\n', 3, "the key cannot be ''"),
        ('ps = ["a:1"]\nworker = ["b:1"]\nkey = "a\\u0000"\n', 3, "the key cannot be"),
        ('ps = ["a:1"]\nworker = ["b:1"]\nkey = "./cluster.toml"\n', 3, "the key cannot be"),
        ('ps = ["a:1"]\nworker = ["b:1"\n\nkey = "c"\n', 4, "not valid TOML: Unclosed array"),
        ('ps = ["a:1"]\nworker = [\n', 2, "not valid TOML: "),
        ('ps = ["a:1"]\nps = ["b:1"]\n# end\n', 2, "not valid TOML: Cannot overwrite"),
        ('ps = ["a:1"]\nworker = ' + "[" * 2000 + "\n", 2, "not valid TOML: "),
        ('ps = ["a:1"]\nworker = ["b:1", \n"a:1"]\n', 3, "worker: 'a:1' is already on line 1"),
        ('ps = ["a:1"]\nworker = ["b:1",\n"c:1",\n"b:1"]\n', 4, "worker: 'b:1' is already on line 2"),
        ('ps = ["a:1", "a:1"]\nworker = ["b:1"]\n', 1, "ps: 'a:1' is already on line 1"),
        ('worker = ["b:1"]\nps = ["c:1",\n"B:1"]\n', 3, "ps: 'B:1' is already on line 1"),
        ('worker = ["[::1]:1"]\nps = ["[0:0::1]:1"]\n', 2, "ps: '[0:0::1]:1' is already on line 1"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=f"^{re.escape(path)} line {line}: {re.escape(words)}") as caught:
        read_cluster(path)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("name", ["none.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"cannot read the cluster file {re.escape(str(tmp_path / name))}"):
        read_cluster(str(tmp_path / name))


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b'ps = ["a:1"]\nworker = ["gr\xf6\xdfe:1"]\n')
    with pytest.raises(UsageError, match=r"line 2: worker: address .* has no valid host"):
        read_cluster(str(path))


def test_a_cluster_file_that_would_be_its_own_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 1: the key cannot be 'a\.key'"):
        read_cluster(write(tmp_path, GOOD, "a.key"))


PORT, EVERY, HOST = "has no port from 1 to 65535", "stands for all addresses", "has no valid host"
BAD_ADDRESSES = [
    ("", PORT), ("localhost", PORT), ("localhost:", PORT), ("[::1]", PORT), ("a:0", PORT), ("a:65536", PORT),
    ("a:-1", PORT), ("a:http", PORT), ("a:4 330", PORT), ("a: 4330", PORT), ("a:4330 ", PORT), ("a:4330\n", PORT),
    ("a:٤", PORT), ("a:" + "9" * 5000, PORT), ("a:4330/x", PORT),
    ("0.0.0.0:1", EVERY), ("*:1", EVERY), ("[::]:1", EVERY), (":::1", EVERY), ("[0:0:0:0:0:0:0:0]:1", EVERY),
    (":4330", HOST), ("[]:4330", HOST), (" a:1", HOST), ("a b:1", HOST), ("a :1", HOST), ("[fe80::1%a b]:1", HOST),
    ("::1:4330", HOST), ("[::1:4330", HOST), ("[::zz]:1", HOST), ("[127.0.0.1]:1", HOST), ("[a]:1", HOST),
    ("300.0.0.1:1", HOST), ("127.1:1", HOST), ("tcp://a:1", HOST), ("a,b:1", HOST), ("größe:1", HOST),
]  # fmt: skip


@pytest.mark.parametrize(("address", "words"), BAD_ADDRESSES)
def test_a_bad_address_is_refused_with_its_line(tmp_path: Path, address: str, words: str) -> None:
    text = address.replace("\n", "\\n")
    path = write(tmp_path, f'ps = ["a:9"]\nworker = [\n"b:9",\n"{text}"]\n')
    with pytest.raises(UsageError, match=f"^{re.escape(path)} line 4: worker: address .*{words}"):
        read_cluster(path)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:1", "127.0.0.1", 1),
        ("n003.cluster_a.example-site.org:65535", "n003.cluster_a.example-site.org", 65535),
        ("3com:80", "3com", 80),
        ("Node1:80", "node1", 80),
        ("[::1]:4330", "::1", 4330),
        ("[FE80:0::1%eth0]:4330", "fe80::1%eth0", 4330),
    ],
)
def test_hosts_are_names_or_addresses_of_either_kind(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


def test_ranks_that_come_at_the_same_time_read_the_same_secret(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody may put a key in its place before everybody has made one.
    ranks, link = threading.Barrier(8, timeout=20), os.link

    def link_together(source: str, target: Path) -> None:
        ranks.wait()
        link(source, target)

    monkeypatch.setattr(os, "link", link_together)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(read_key, [cluster] * 8))
    assert len(found) == 1
    assert found == {read_key(cluster)}
    assert sorted(os.listdir(tmp_path)) == ["cluster.key", "cluster.toml"]


def test_a_made_key_is_random_hex_that_only_its_owner_reads(cluster: Cluster) -> None:
    old = os.umask(0)
    try:
        secret = read_key(cluster)
    finally:
        os.umask(old)
    assert len(secret) == 32
    assert cluster.key.read_text() == secret.hex() + "\n"
    assert stat.S_IMODE(cluster.key.stat().st_mode) == 0o600
    forget_key(cluster)
    assert read_key(cluster) != secret


def test_a_key_is_never_there_in_part(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    link, seen = os.link, []

    def look(source: str, target: Path) -> None:
        seen.append((target.exists(), Path(source).read_text()))
        link(source, target)

    monkeypatch.setattr(os, "link", look)
    secret = read_key(cluster)
    assert seen == [(False, secret.hex() + "\n")]


def test_a_folder_where_no_key_can_be_made_is_refused_and_left_clean(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r'cannot be used .*; name another with key = "FILE"'):
        read_key(replace(cluster, key=tmp_path / "none" / "cluster.key"))

    def refuse(source: str, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UsageError, match=r"cluster\.key cannot be used \(Operation not permitted\)"):
        read_key(cluster)
    assert os.listdir(tmp_path) == ["cluster.toml"]


def test_a_key_of_the_users_own_is_read_and_never_removed(own: Cluster) -> None:
    for text in ("ab" * 32 + "\n", "AB" * 32):
        write_key(own, text)
        assert read_key(own) == b"\xab" * 32
    forget_key(own)
    assert own.key.exists()


def test_a_missing_key_of_the_users_own_can_be_made_with_the_command_in_the_error(own: Cluster) -> None:
    with pytest.raises(UsageError, match=r"line 7: key file .* cannot be used \(No such file.*; make one: ") as caught:
        read_key(own)
    assert not own.key.exists()
    subprocess.run(["sh", "-c", str(caught.value).split("make one: ")[1]], check=True)
    assert len(read_key(own)) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_key_that_is_open_to_others_is_refused(cluster: Cluster, mode: int) -> None:
    write_key(cluster, mode=mode)
    with pytest.raises(UsageError, match=rf"is open to others \(mode {mode:o}, not 600\); remove it or name another"):
        read_key(cluster)


@pytest.mark.parametrize(
    "text", ["", "\n", "ab" * 31, "ab" * 33, "ab" * 32 + "\n\n", "xy" * 32, " " + "ab" * 32, "größe"]
)
def test_a_key_that_is_not_64_hex_digits_is_refused(own: Cluster, text: str) -> None:
    write_key(own, text)
    with pytest.raises(UsageError, match="is not 64 hex digits; remove it and make one: "):
        read_key(own)


def test_a_key_of_another_owner_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    write_key(cluster)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(UsageError, match="belongs to another user; remove it"):
        read_key(cluster)


def test_a_key_that_is_a_link_or_a_pipe_or_a_folder_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    target = replace(cluster, key=tmp_path / "target")
    write_key(target)
    for there in (target.key, tmp_path / "none"):
        cluster.key.symlink_to(there)
        with pytest.raises(UsageError, match="is not a regular file; remove it or name another"):
            read_key(cluster)
        cluster.key.unlink()
    os.mkfifo(cluster.key, 0o600)
    with pytest.raises(UsageError, match="is not a regular file"):
        read_key(cluster)
    cluster.key.unlink()
    cluster.key.mkdir()
    with pytest.raises(UsageError, match=r"cannot be used \(Is a directory\)"):
        read_key(cluster)


def test_forgetting_removes_a_made_key_and_forgives_a_missing_one(cluster: Cluster) -> None:
    read_key(cluster)
    forget_key(cluster)
    assert not cluster.key.exists()
    forget_key(cluster)
