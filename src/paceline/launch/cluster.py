"""The cluster file: the addresses of servers and workers, their ranks, and the secret they share."""

import contextlib
import ipaddress
import os
import re
import secrets
import shlex
import stat
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError, refuse_pipe, unknown

ROLES = ("worker", "ps")
# tomllib gives no line numbers. These patterns find them in a valid document: comments, strings, bare words.
TEXTS = (r'"""(?:\\.|[^\\])*?"""(?!")', r"'''.*?'''(?!')", r'"(?:\\.|[^"\\])*"', r"'[^']*'")
TOKEN = re.compile(rf"#[^\n]*|({'|'.join(TEXTS)})|([\w-]+)", re.DOTALL)


@dataclass(frozen=True)
class Cluster:
    """The addresses of a run's workers and parameter servers, as `host:port` or `[IPv6]:port`."""

    path: str
    worker: tuple[str, ...]
    ps: tuple[str, ...]
    key: Path
    own_key: bool  # given in the file with `key =`: no rank creates or removes it
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def line_of(self, address: str) -> int:
        return self.lines.get(address, 1)

    def place(self, role: str, index: int | None) -> int:
        """The rank: parameter servers come first."""
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        count = len(self.ps if role == "ps" else self.worker)
        if index is None or not 0 <= index < count:
            given = f"the index of the {role} is missing" if index is None else f"there is no {role} {index}"
            raise UsageError(f"{self.path} line {self.lines.get(role, 1)}: {given}; give one from 0 to {count - 1}")
        return index if role == "ps" else len(self.ps) + index


def read_cluster(path: str) -> Cluster:
    refuse_pipe(path, "the cluster file")
    try:
        source = Path(path).read_text("utf-8", errors="replace")  # no valid name or address has other characters
        data = tomllib.loads(source)
    except OSError as error:
        raise UsageError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        at = re.findall(r"at line (\d+)", str(error)) or [len(source.splitlines()) or 1]
        raise UsageError(f"{path} line {at[0]}: not valid TOML: {error}") from None
    texts, lines = _lines(source)
    for name in data:
        if name not in (*ROLES, "key"):
            raise UsageError(f"{path} line {lines[name]}: {unknown('key', name, (*ROLES, 'key'))}")
    for role in ROLES:
        listed = data.get(role)
        if not listed or not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            given = "missing" if role not in data else "empty" if listed == [] else "not a list of strings"
            raise UsageError(f'{path} line {lines.get(role, 1)}: {role} is {given}; write {role} = ["host:port"]')
    seen: dict[tuple[str, int], int] = {}
    for role, address in [(name, item) for name in data if name in ROLES for item in data[name]]:
        line = next(line for line, text in texts if text == address)  # both are in the order of the file
        try:
            place = split_address(address)
        except UsageError as error:
            raise UsageError(f"{path} line {line}: {role}: {error}") from None
        if place in seen:
            raise UsageError(f"{path} line {line}: {role}: {address!r} is already on line {seen[place]}; give another")
        seen[place] = line
    file, key = Path(path).absolute(), data.get("key", Path(path).with_suffix(".key").name)
    if not isinstance(key, str) or not key or "\0" in key or file.parent / key == file:
        raise UsageError(f'{path} line {lines.get("key", 1)}: the key cannot be {key!r}; write key = "secret.key"')
    return Cluster(path, tuple(data["worker"]), tuple(data["ps"]), file.parent / key, "key" in data, lines)


def _lines(source: str) -> tuple[Iterator[tuple[int, str]], dict[str, int]]:
    """Every string with its line, and the first line of each string or bare word (bare words are keys, and win)."""
    tokens = [(source.count("\n", 0, token.start()) + 1, token) for token in TOKEN.finditer(source)]
    texts = [(line, str(tomllib.loads(f"text = {token[1]}")["text"])) for line, token in tokens if token[1]]
    words = [(line, token[2]) for line, token in tokens if token[2]]
    return iter(texts), {value: line for line, value in (*reversed(texts), *reversed(words))}


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`; the host in canonical form, without brackets."""
    given, port = re.findall(r"\A(.*?)(?::([^:\]]*))?\Z", address, re.DOTALL)[0]
    bare = given[1:-1] if given[:1] + given[-1:] == "[]" else given
    try:
        host = str(ipaddress.ip_address(bare))
    except ValueError:  # a host name, which has not only digits
        host = bare.lower() if re.fullmatch(r"(?![\d.]*\Z)\w[\w.-]*", given, re.ASCII) else ""
    if not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
        raise UsageError(f"address {address!r} has no port from 1 to 65535; write host:port")
    if {bare, host} & {"0.0.0.0", "*", "::"}:
        raise UsageError(f"address {address!r} stands for all addresses; give the one that other machines connect to")
    if not host or re.search(r"\s", host) or (":" in host) != (bare != given):
        raise UsageError(f"address {address!r} has no valid host; write a name, an IPv4 or a [bracketed IPv6] address")
    return host, int(port)


def read_key(cluster: Cluster) -> bytes:
    """The run's secret, 32 bytes; if the cluster file names no key file, the first rank creates it."""
    key, no_traps = cluster.key, os.O_NOFOLLOW | os.O_NONBLOCK  # refuse links, do not block on pipes
    try:
        if not cluster.own_key and not os.path.lexists(key):
            _make_key(key)
        with open(key, "rb", opener=lambda path, flags: os.open(path, flags | no_traps)) as file:
            status, text = os.fstat(file.fileno()), file.read(66) or b""
        faults = {
            "is not a regular file": not stat.S_ISREG(status.st_mode),
            "belongs to another user": status.st_uid != os.geteuid(),
            f"is open to others (mode {stat.S_IMODE(status.st_mode):o}, not 600)": status.st_mode & 0o077,
            "is not 64 hex digits": not re.fullmatch(rb"[0-9a-fA-F]{64}\n?", text),
        }
        fault = next((fault for fault, holds in faults.items() if holds), "")
    except OSError as error:
        fault = "is not a regular file" if os.path.islink(key) else f"cannot be used ({error.strerror})"
    if not fault:
        return bytes.fromhex(text.decode())
    name, todo = shlex.quote(str(key)), 'name another with key = "FILE"'
    if cluster.own_key:
        todo = f"make one: (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > {name})"
    if os.path.lexists(key):
        todo = f"remove it {'and' if cluster.own_key else 'or'} {todo}"
    raise UsageError(f"{cluster.path} line {cluster.lines.get('key', 1)}: key file {key} {fault}; {todo}")


def _make_key(key: Path) -> None:
    """Write a new secret atomically; if several ranks do so at the same time, the first one's stays."""
    with tempfile.NamedTemporaryFile("w", dir=key.parent, prefix=f".{key.name}.") as file:  # O_EXCL, mode 0600
        print(secrets.token_hex(32), file=file, flush=True)
        with contextlib.suppress(FileExistsError):
            os.link(file.name, key)


def forget_key(cluster: Cluster) -> None:
    """Remove the secret if a rank created it; keep a user's own key file."""
    if not cluster.own_key:
        cluster.key.unlink(missing_ok=True)
