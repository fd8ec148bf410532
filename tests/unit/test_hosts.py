"""The channel between hosts, each of them a thread here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from jaxinfer.config import HostsConfig
from jaxinfer.parallel.hosts import Hosts, HostsError

FACTS = {"jax": "1.0", "mesh": "1x4"}


def config(coordinator: str, host_id: int, num_hosts: int = 3, timeout_s: float = 30.0) -> HostsConfig:
    return HostsConfig(coordinator, num_hosts, host_id, timeout_s)


def outcomes(*jobs: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, all running at once."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs]
        return [future.exception() or future.result() for future in futures]


def meet(coordinator: str, *facts: dict[str, str]) -> list[Any]:
    """The hosts, or what each raised."""
    configs = [config(coordinator, i, len(facts)) for i in range(len(facts))]
    return outcomes(*(lambda i=i: Hosts(configs[i], facts[i]) for i in range(len(facts))))


def messages(errors: list[Any]) -> set[str]:
    assert all(isinstance(error, HostsError) for error in errors), errors
    return {str(error) for error in errors}


def test_host_0_tells_the_others_in_order(coordinator: str) -> None:
    hosts = meet(coordinator, FACTS, FACTS, FACTS)
    assert [h.leads for h in hosts] == [True, False, False]
    sent = [{"n": n, "text": "\n\u2028ü" * n} for n in range(100)]
    for message in sent:
        hosts[0].tell(message)
    for follower in hosts[1:]:
        assert [follower.receive() for _ in sent] == sent
    assert outcomes(*(lambda h=h: h.agree({"checkpoint": "a"}) for h in hosts)) == [None] * 3
    assert outcomes(*(lambda h=h: h.share(h.config.host_id * 2) for h in hosts)) == [[0, 2, 4]] * 3
    gone: list[str] = []
    for h in hosts[1:]:
        h.watch(gone.append)
    hosts[0].leave()
    assert [h.receive() for h in hosts[1:]] == [{"end": None}] * 2
    assert gone == []


def test_all_name_the_one_that_differs(coordinator: str) -> None:
    errors = meet(coordinator, FACTS, FACTS, FACTS | {"jax": "0.9", "tpu": "2"})
    difference = "host 2 has jax=0.9, not 1.0; tpu=2, not None, which must be the same on all hosts"
    assert messages(errors) == {difference}


def test_all_name_the_one_that_differs_later(coordinator: str) -> None:
    hosts = meet(coordinator, FACTS, FACTS, FACTS)
    facts = [{"checkpoint": name} for name in ("a", "b", "a")]
    errors = outcomes(*(lambda i=i: hosts[i].agree(facts[i]) for i in range(3)))
    assert messages(errors) == {"host 1 has checkpoint=b, not a, which must be the same on all hosts"}


@pytest.mark.parametrize("ended", [0, 1])
def test_one_that_has_ended_does_not_agree(ended: int, coordinator: str) -> None:
    hosts = meet(coordinator, FACTS, FACTS)
    hosts[ended].leave()
    with pytest.raises(HostsError, match=rf"host {ended} has (ended|gone)|this host has left"):
        hosts[1 - ended].agree({"prompts": "a"})
    with pytest.raises(HostsError, match="this host has left the others"):
        hosts[ended].agree({"prompts": "a"})


def test_those_that_came_name_the_one_that_did_not(coordinator: str) -> None:
    start_s = time.monotonic()
    errors = outcomes(*(lambda i=i: Hosts(config(coordinator, i, timeout_s=1.0), FACTS) for i in (0, 2)))
    port = int(coordinator.split(":")[1]) + 1
    assert messages(errors) == {f"host 1 of 3 did not come within 1 s to 127.0.0.1 port {port}"}
    assert time.monotonic() - start_s < 5


def test_without_host_0(coordinator: str) -> None:
    with pytest.raises(
        HostsError, match=r"host 0 did not answer at 127\.0\.0\.1 port \d+ within 0\.5 s: .*refused"
    ):
        Hosts(config(coordinator, 1, timeout_s=0.5), FACTS)


def test_two_hosts_of_one_number(coordinator: str) -> None:
    errors = outcomes(*(lambda i=i: Hosts(config(coordinator, i), FACTS) for i in (0, 1, 1)))
    assert messages(errors) == {"host_id=1 came twice, or is not from 1 to 2"}


def test_another_number_of_hosts(coordinator: str) -> None:
    errors = outcomes(
        lambda: Hosts(config(coordinator, 0, num_hosts=2), FACTS),
        lambda: Hosts(config(coordinator, 1, num_hosts=3), FACTS),
    )
    assert messages(errors) == {"host 1 has num_hosts=3, not 2, which must be the same on all hosts"}


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_that_is_taken(offset: int, coordinator: str) -> None:
    """jax's own too, of which jax would end the process without a word of ours."""
    port = int(coordinator.split(":")[1]) + offset
    with (
        socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True),
        pytest.raises(HostsError, match=f"host 0 cannot listen on port {port}"),
    ):
        Hosts(config(coordinator, 0), FACTS)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"7\n", b'{"hello": "x", "facts": {}}\n'])
def test_strangers_are_left_alone(coordinator: str, noise: bytes) -> None:
    def stranger() -> None:
        port = int(coordinator.split(":")[1]) + 1
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(noise)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1024):
                        pass
                return
            except ConnectionResetError:
                return
            except ConnectionRefusedError:
                time.sleep(0.02)

    def late_host() -> Hosts:
        met.wait()
        return Hosts(config(coordinator, 1, num_hosts=2), FACTS)

    met = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        host_0 = pool.submit(Hosts, config(coordinator, 0, num_hosts=2), FACTS)
        pool.submit(stranger).result()
        met.set()
        assert pool.submit(late_host).result().leads is False
        assert host_0.result().leads


def test_a_host_that_goes_is_named_at_once(coordinator: str) -> None:
    gone: list[list[str]] = [[], [], []]
    all_told = threading.Barrier(3)

    def on_gone(host_id: int, line: str) -> None:
        gone[host_id].append(line)
        all_told.wait(5)

    def join(host_id: int) -> Hosts:
        return Hosts(config(coordinator, host_id), FACTS, partial(on_gone, host_id))

    hosts = outcomes(*(partial(join, i) for i in range(3)))
    link = hosts[2]._links.pop(0)
    link.close()  # as a kill does, which calls nobody back
    all_told.wait(5)
    line = "host 2 has gone; its own output says why"
    assert gone == [[line], [line], []]
    with pytest.raises(HostsError, match=line):
        hosts[1].receive()
    hosts[0].leave()


def test_a_failure_is_told(coordinator: str) -> None:
    hosts = meet(coordinator, FACTS, FACTS, FACTS)
    hosts[2].leave("no such file")
    errors = outcomes(*(partial(host.agree, {"checkpoint": "a"}) for host in hosts[:2]))
    assert messages(errors) == {"host 2 failed: no such file"}


def test_a_failure_of_host_0_is_told(coordinator: str) -> None:
    hosts = meet(coordinator, FACTS, FACTS, FACTS)
    left = threading.Thread(target=hosts[0].leave, args=("no memory",))
    left.start()
    errors = outcomes(*(host.receive for host in hosts[1:]))
    assert messages(errors) == {"host 0 failed: no memory"}
    left.join()
