"""What a spec says about parameter servers: what follows from the strategy, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.spec import RunSpec, World, resolve
from paceline.strategies.rate import learning_rate


def spec_of(world: World | None = None, **values: Any) -> RunSpec:
    return resolve(("flag", values), world=world).spec


def test_a_server_a_bound_and_a_transport_follow_from_the_strategy() -> None:
    synchronous, bounded, unbounded = (spec_of(strategy=name) for name in ("ps-sync", "ps-bounded", "ps-async"))
    assert [spec.staleness for spec in (synchronous, bounded, unbounded)] == [None, 4, None]
    assert {spec.servers for spec in (synchronous, bounded, unbounded)} == {1}
    assert {spec.transport for spec in (synchronous, bounded, unbounded)} == {"zmq"}
    assert {spec.workers for spec in (synchronous, bounded, unbounded)} == {2}
    assert spec_of().servers is None


def test_ranks_that_a_launcher_started_are_servers_first() -> None:
    spec = spec_of(World(6, "torchrun"), strategy="ps-async", servers=2)
    assert (spec.servers, spec.workers, spec.ranks) == (2, 4, 6)
    assert spec_of(World(3, "mpiexec"), strategy="ps-sync").transport == "zmq"


def test_an_asynchronous_update_is_one_workers_batch_at_one_workers_rate() -> None:
    unbounded = spec_of(strategy="ps-async", workers=4, batch_size=32, lr=0.1, decay="none")
    synchronous = spec_of(strategy="ps-sync", workers=4, batch_size=32, lr=0.1, decay="none")
    assert (unbounded.update_batch, synchronous.update_batch) == (32, 128)
    assert learning_rate(unbounded, 50, 10, 100) == pytest.approx(0.1)
    assert learning_rate(synchronous, 50, 10, 100) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"strategy": "ring", "workers": 2, "servers": 1},
            "strategy ring has no --servers: leave it out, or use --strategy ps-sync, ps-async or ps-bounded",
        ),
        ({"strategy": "ring", "workers": 2, "staleness": 2}, "strategy ring has no --staleness"),
        ({"strategy": "ring", "workers": 2, "restarts": 1}, "strategy ring has no --restarts"),
        ({"strategy": "ring", "workers": 2, "encrypt": False}, "strategy ring has no --encrypt"),
        ({"strategy": "ring", "workers": 2, "worker_timeout": 3.0}, "strategy ring has no --worker-timeout"),
        ({"strategy": "ring", "workers": 2, "transport": "zmq"}, "only parameter servers use it"),
        ({"strategy": "ps-sync", "transport": "gloo"}, "it uses ZeroMQ; leave --transport out"),
        ({"strategy": "ps-async", "staleness": 3}, "strategy ps-async has no --staleness"),
        ({"strategy": "ps-sync", "staleness": 3}, "has no --staleness: leave it out, or use --strategy ps-bounded"),
        (
            {"strategy": "ps-sync", "staleness_lr": True},
            "has no --staleness-lr: .*use --strategy ps-async",
        ),
        ({"strategy": "ps-sync", "sync_batchnorm": True}, "strategy ps-sync has no --sync-batchnorm"),
        ({"strategy": "ps-sync", "check_replicas": 5}, "strategy ps-sync has no --check-replicas"),
        ({"strategy": "ps-sync", "read": "scatter"}, "use --read own"),
        ({"strategy": "ps-sync", "device": "cuda"}, "use --device cpu"),
        ({"strategy": "ps-bounded", "staleness": -1}, "from 0 to 1000"),
        ({"strategy": "ps-sync", "servers": 0}, "at least 1"),
        ({"strategy": "ps-sync", "batch_size": 9000}, "9000 x 2 workers = 18000"),
        ({"strategy": "ps-async", "batch_size": 20000}, "20000 x 1 worker = 20000"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        spec_of(**values)


@pytest.mark.parametrize(("size", "servers"), [(1, 1), (2, 2), (3, 4)])
def test_ranks_that_leave_no_worker_are_refused(size: int, servers: int) -> None:
    with pytest.raises(UsageError, match=f"has started {size} ranks"):
        spec_of(World(size, "torchrun"), strategy="ps-sync", servers=servers)


def test_the_introduction_names_the_servers() -> None:
    lines = resolve(("flag", {"strategy": "ps-async", "servers": 2, "workers": 3})).introduction()
    assert (
        lines[0] == "mnist-cnn on mnist-mini: ps-async, 2 servers, 3 workers with batches of 128, each an update, zmq"
    )
