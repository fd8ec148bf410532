"""The hosts of a job, as Cloud TPU, Slurm and Kubernetes describe them to a process. Imports no jax.

jax has such a detection too, but only within `jax.distributed.initialize`: too late for a preflight.
The variables are those that it reads.
"""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxinfer.config import ConfigError, HostsConfig

TPU_PORT = 8482
KUBERNETES_PORT = 8476
SLURM_PORTS = (61440, 2000)  # the first, and how many jobs have a pair of their own
METADATA_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Cluster:
    """What a job's environment says; `num_hosts` is None where it does not say that."""

    coordinator: str
    num_hosts: int | None
    host_id: int


def find_hosts(
    environment: Mapping[str, str],
    num_hosts: int | None = None,
    full_name: Callable[[], str] = socket.getfqdn,
) -> HostsConfig | None:
    """The hosts of the job that this process belongs to; None where it is the only one.

    Args:
      environment: the process's.
      num_hosts: where the user gave it; a Kubernetes Job does not tell its pods.
      full_name: this host's name with its domain.

    Raises:
      ConfigError: there is no such job, or it does not say enough.
    """
    cluster = (
        _slurm(environment)
        or _tpu_variables(environment)
        or _kubernetes(environment, full_name)
        or _tpu_metadata(environment)
    )
    if cluster is None:
        raise ConfigError(
            "coordinator=auto finds no Cloud TPU, Slurm or Kubernetes job: give HOST:PORT of host 0, "
            "num_hosts and host_id"
        )
    count = num_hosts or cluster.num_hosts
    if count is None:
        raise ConfigError("coordinator=auto: the job does not say how many hosts it has: give num_hosts")
    return None if count == 1 else HostsConfig(cluster.coordinator, count, cluster.host_id)


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Of a step: `srun`, a task a node."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    if nodes is None:
        return None
    job_id, tasks, task = (_number(environment, f"SLURM_{name}") for name in ("JOB_ID", "NTASKS", "PROCID"))
    first_port, num_pairs = SLURM_PORTS
    return Cluster(f"{first_node(nodes)}:{first_port + 2 * (job_id % num_pairs)}", tasks, task)


def first_node(nodes: str) -> str:
    """Of Slurm's short form: "gpu[003-005,9],cpu1" begins with gpu003."""
    head, bracket, rest = nodes.split(",")[0].partition("[")
    if not bracket:
        return head
    # Nothing but the first name's own brackets comes before the first of these.
    return head + re.split(r"[-\],]", rest)[0] + nodes.partition("]")[2].split(",")[0]


def _tpu_variables(environment: Mapping[str, str]) -> Cluster | None:
    """Of a pod on Google Kubernetes Engine that has TPUs."""
    names = environment.get("TPU_WORKER_HOSTNAMES")
    if names is None:
        return None
    if environment.get("MEGASCALE_NUM_SLICES", "1") != "1":
        raise ConfigError("coordinator=auto: several TPU slices are not supported: use one")
    return _tpu(names.split(","), _number(environment, "TPU_WORKER_ID"))


def _tpu_metadata(environment: Mapping[str, str]) -> Cluster | None:
    """Of a Cloud TPU VM, whose metadata server knows its slice."""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    try:
        worker = _metadata(server, "agent-worker-number")
        endpoints = _metadata(server, "worker-network-endpoints")
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None
    # Each is a name, or name:id:address.
    return _tpu([endpoint.split(":")[-1] for endpoint in endpoints.split(",")], int(worker))


def _metadata(server: str, name: str) -> str:
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as response:
        return response.read().decode().strip()


def _tpu(addresses: list[str], worker_id: int) -> Cluster:
    return Cluster(f"{addresses[0]}:{TPU_PORT}", len(addresses), worker_id)


def _kubernetes(environment: Mapping[str, str], full_name: Callable[[], str]) -> Cluster | None:
    """Of an indexed Job, whose pods are named NAME-0, NAME-1 ... in the domain of their headless service."""
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    index = _number(environment, "JOB_COMPLETION_INDEX")
    host, _, domain = full_name().partition(".")
    if not domain or not host.endswith(f"-{index}"):
        raise ConfigError(
            f"coordinator=auto: the pod is called {host!r} in the domain {domain!r}: the Job needs a "
            "headless service, and its name as the pods' subdomain"
        )
    return Cluster(f"{host.removesuffix(str(index))}0.{domain}:{KUBERNETES_PORT}", None, index)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"coordinator=auto: {name}={value!r} must be a number")
    return int(value)
