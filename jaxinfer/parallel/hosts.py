"""The channel between the hosts of one engine: a TCP connection of each to host 0. Imports no jax.

Before jax starts, the hosts meet and agree here, so that one which is absent or differs is named instead of
waited for. Then host 0 tells the others what its engine is told (engine/engine.py). Messages are JSON
objects, one a line, whose one key says what it is. Nobody is authenticated, as with jax's own service:
the ports belong in a network that only the hosts reach.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from jaxinfer.config import HostsConfig

MAX_MESSAGE_BYTES = 64 << 20  # a request of some million tokens
HELLO_TIMEOUT_S = 5.0
RETRY_S = 0.2
VERDICT_MARGIN_S = 5.0  # that host 0 has to say who is missing
NOTICE_S = 3.0  # in which a link notices that its other end is gone
LEAVING_S = 3.0  # that the others have to leave before a host 0 that failed
ENDING_S = 1.0  # and then to end: a process gives up its links a moment before
# Of a host that is gone without a word: probes after 10 s, and the end after 20 s more.
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))

Message = dict[str, Any]
Facts = Mapping[str, str]


class HostsError(Exception):
    """A host is missing, differs or has gone: one line that names it."""


class Link:
    """One end of a connection. A thread reads, so that no host waits for another to listen."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        """name: of the host at the other end, for messages."""
        self.name = name
        # Called by the thread when the other end is gone without having said so by "end".
        self.on_gone: Callable[[HostsError], None] | None = None
        self._connection = connection
        self._failure = ""  # the line that the other end went with
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            if hasattr(socket, option):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._thread = threading.Thread(target=self._read, name="jaxinfer-hosts", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """From any thread. Raises HostsError where the other end is gone."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._connection.sendall(line)
        except OSError as error:
            raise self.gone() from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message, waited for.

        Raises:
          TimeoutError: none came.
          HostsError: the other end is gone, or says that the hosts do not agree.
        """
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TimeoutError from error
        if message is None:
            self._inbox.put(None)  # it stays gone
            raise self.gone()
        if "refused" in message:
            raise HostsError(message["refused"])
        return message

    def expect(self, what: str, timeout_s: float | None = None) -> Any:
        """What the next message says under that name; raises as `receive`, and where the other end ended."""
        message = self.receive(timeout_s)
        if what not in message:
            raise HostsError(f"{self.name} has ended")
        return message[what]

    def close(self, wait_s: float = 0.0) -> None:
        """The other end reads what was sent, then that this one is gone. Waits for it to go too."""
        with contextlib.suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_WR)
        if wait_s:
            self._thread.join(wait_s)
        self._connection.close()

    def gone(self) -> HostsError:
        """The error that says so."""
        return HostsError(self._failure or f"{self.name} has gone; its own output says why")

    def _read(self) -> None:
        in_order = False
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while not in_order and (line := lines.readline(MAX_MESSAGE_BYTES)).endswith(b"\n"):
                message = json.loads(line)
                if not isinstance(message, dict):
                    break
                if "failed" in message:
                    self._failure = str(message["failed"])
                    break
                self._inbox.put(message)
                in_order = "end" in message or "refused" in message
        if self.on_gone is not None and not in_order:
            self.on_gone(self.gone())
        self._inbox.put(None)
        self._connection.close()


class Hosts:
    """This host's links: host 0 has one to each other host, the others have one to host 0."""

    def __init__(
        self, config: HostsConfig, facts: Mapping[str, str], on_gone: Callable[[str], None] | None = None
    ) -> None:
        """Meets the others.

        Args:
          config: who they are.
          facts: by name, what all must have in common.
          on_gone: as for `watch`, from the moment when all have met.

        Raises:
          HostsError: within `config.preflight_timeout_s`, naming the hosts that did not come, and those that
            differ and in what. All that came raise the same.
        """
        self.config = config
        self._links: dict[int, Link] = {}
        self._watchers = [] if on_gone is None else [on_gone]
        self._lost: HostsError | None = None
        self._is_lost = threading.Event()
        self._meet({**facts, "num_hosts": str(config.num_hosts)})
        for link in self._links.values():
            link.on_gone = self._on_gone

    @property
    def leads(self) -> bool:
        """True on host 0."""
        return self.config.host_id == 0

    def agree(self, facts: Mapping[str, str]) -> None:
        """Returns when all hosts have called this, with the same facts.

        Raises:
          HostsError: on every host, naming the one that differs and in what, or that failed or has gone; or
            this host has left.
        """
        if not self._links:
            raise HostsError("this host has left the others")
        if not self.leads:
            self._links[0].send({"facts": dict(facts)})
            self._await_verdict(None)
            return
        try:
            theirs = {host_id: self._late_facts(link) for host_id, link in self._links.items()}
        except HostsError as error:
            raise self._refused(str(self._lost or error)) from error
        self._judge(theirs, facts)

    def share(self, fact: Any) -> list[Any]:
        """What each host says, by its number. Returns when all have called this.

        Args:
          fact: what this one says; JSON.

        Raises:
          HostsError: a host failed or has gone.
        """
        if not self.leads:
            self._links[0].send({"fact": fact})
            return self._links[0].expect("facts")
        facts = [fact, *(self._links[i].expect("fact") for i in range(1, self.config.num_hosts))]
        self.tell({"facts": facts})
        return facts

    def tell(self, message: Message) -> None:
        """From host 0 to all others.

        Raises:
          HostsError: one has gone.
        """
        for link in list(self._links.values()):
            link.send(message)

    def receive(self) -> Message:
        """What host 0 tells next.

        Raises:
          HostsError: it has gone, or failed and says how.
        """
        return self._links[0].receive()

    def watch(self, on_gone: Callable[[str], None]) -> None:
        """Calls back from a thread, with a line that names it, when another host goes before its time.

        That is at any moment until this host leaves, and before any call here raises for it.
        """
        self._watchers.append(on_gone)

    def lost(self) -> HostsError | None:
        """That another host has gone, which the network may tell jax's collectives a moment earlier."""
        self._is_lost.wait(NOTICE_S)
        return self._lost

    def leave(self, failure: str = "") -> None:
        """Ends the links. `failure` is why, where this host failed; the others then say it too."""
        message: Message = {"end": None}
        if failure:
            message = {"failed": f"host {self.config.host_id} failed: {failure}"}
        links, self._links = self._links, {}  # from here on nobody who goes is missed
        for link in links.values():
            with contextlib.suppress(HostsError):
                link.send(message)
        for link in links.values():
            # Where jax loses its coordinator it aborts the process: host 0 goes last.
            link.close(LEAVING_S if failure and self.leads else 0.0)
        if failure and self.leads:
            time.sleep(ENDING_S)

    def _on_gone(self, error: HostsError) -> None:
        # Nothing is new where this host has left, or another goes because of the first.
        if not self._links or self._lost is not None:
            return
        self._lost = error
        self._is_lost.set()
        if self.leads:
            self._send_all({"failed": str(error)})
        for on_gone in self._watchers:
            on_gone(str(error))

    def _send_all(self, message: Message) -> None:
        """To those who are there."""
        for link in self._links.values():
            with contextlib.suppress(HostsError):
                link.send(message)

    def _meet(self, facts: Facts) -> None:
        config = self.config
        deadline_s = time.monotonic() + config.preflight_timeout_s
        if not self.leads:
            self._links[0] = _reach_host_0(config, facts, deadline_s)
            try:
                self._await_verdict(config.preflight_timeout_s + VERDICT_MARGIN_S)
            except HostsError:
                self.leave()
                raise
            return
        # jax listens on the first port later, and ends the process where that is taken.
        with _listen(config.port), _listen(config.port + 1) as listener:
            theirs = self._accept(listener, deadline_s)
        missing = [str(i) for i in range(1, config.num_hosts) if i not in theirs]
        late = (
            f"host {', '.join(missing)} of {config.num_hosts} did not come within "
            f"{config.preflight_timeout_s:g} s to {config.address} port {config.port + 1}"
        )
        self._judge(theirs, facts, [late] if missing else [])

    def _await_verdict(self, timeout_s: float | None) -> None:
        try:
            self._links[0].expect("agreed", timeout_s)
        except TimeoutError:
            raise HostsError(f"host 0 has said nothing for {timeout_s:g} s") from None

    def _judge(self, theirs: Mapping[int, Facts], ours: Facts, missing: Sequence[str] = ()) -> None:
        """Tells all hosts whether they agree; raises where they don't."""
        problems = list(missing)
        for host_id, facts in sorted(theirs.items()):
            if difference := _difference(facts, ours):
                problems.append(f"host {host_id} has {difference}, which must be the same on all hosts")
        if problems:
            raise self._refused("; ".join(problems))
        self.tell({"agreed": None})

    def _refused(self, reason: str) -> HostsError:
        """What all hosts then raise alike."""
        self._send_all({"refused": reason})
        self.leave()
        return HostsError(reason)

    def _late_facts(self, link: Link) -> Facts:
        """A download may take one host longer than the others, so there is no limit."""
        try:
            return link.expect("facts", self.config.preflight_timeout_s)
        except TimeoutError:
            logging.warning("waiting for %s", link.name)
            return link.expect("facts")

    def _accept(self, listener: socket.socket, deadline_s: float) -> dict[int, Facts]:
        """The facts of the hosts that come in time, by number."""
        theirs: dict[int, Facts] = {}
        while len(theirs) < self.config.num_hosts - 1 and (left_s := deadline_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                break
            link = Link(connection, "a host")
            try:
                hello = link.receive(min(left_s, HELLO_TIMEOUT_S))
                host_id, facts = int(hello["hello"]), dict(hello["facts"])
            except (HostsError, TimeoutError, LookupError, TypeError, ValueError):
                logging.warning("something that is no host came to port %d", self.config.port + 1)
                link.close()
                continue
            link.name = f"host {host_id}"
            if not 0 < host_id < self.config.num_hosts or host_id in theirs:
                self._links[-1] = link
                most = self.config.num_hosts - 1
                raise self._refused(f"host_id={host_id} came twice, or is not from 1 to {most}")
            self._links[host_id], theirs[host_id] = link, facts
        return theirs


def _listen(port: int) -> socket.socket:
    """On all addresses, as jax does.

    Raises:
      HostsError: the port is taken, or not to be had.
    """
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
    except OSError as error:
        raise HostsError(
            f"host 0 cannot listen on port {port}: {error.strerror}; choose another port"
        ) from error


def _reach_host_0(config: HostsConfig, facts: Facts, deadline_s: float) -> Link:
    while True:
        try:
            connection = socket.create_connection((config.address, config.port + 1), HELLO_TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline_s:
                raise HostsError(
                    f"host 0 did not answer at {config.address} port {config.port + 1} within "
                    f"{config.preflight_timeout_s:g} s: {error.strerror or error}"
                ) from error
            time.sleep(RETRY_S)
    link = Link(connection, "host 0")
    link.send({"hello": config.host_id, "facts": dict(facts)})
    return link


def _difference(theirs: Facts, ours: Facts) -> str:
    """ "jax=0.10.2, not 0.12.0", or nothing."""
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    return "; ".join(f"{name}={theirs.get(name)}, not {ours.get(name)}" for name in names)
