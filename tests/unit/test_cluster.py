"""The hosts of a job, from the environments that Slurm, Kubernetes and Cloud TPU make."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from jaxinfer.config import ConfigError, HostsConfig
from jaxinfer.flags import UsageError, generate_options
from jaxinfer.parallel.cluster import find_hosts, first_node

# What no test may ask: the machine that runs it may be a Cloud TPU VM.
NOWHERE = {"GCE_METADATA_IP": "127.0.0.1:9"}


def hosts(environment: dict[str, str], num_hosts: int | None = None, name: str = "") -> HostsConfig | None:
    return find_hosts({**NOWHERE, **environment}, num_hosts, lambda: name)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("cpu1,gpu[3-5]", "cpu1"),
        ("rack[7-9]-gpu,cpu1", "rack7-gpu"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_slurm_step() -> None:
    environment = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_NODELIST": "tpu[04-07]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
    }
    # 61440 + 2 * (1234567 % 2000)
    assert hosts(environment) == HostsConfig("tpu04:62574", num_hosts=4, host_id=2)
    assert hosts(environment | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    with pytest.raises(ConfigError, match="SLURM_PROCID='' must be a number"):
        hosts({name: value for name, value in environment.items() if name != "SLURM_PROCID"})


def test_a_kubernetes_job() -> None:
    environment = {"JOB_COMPLETION_INDEX": "13"}
    name = "serve-13.hosts.default.svc.cluster.local"
    found = hosts(environment, num_hosts=16, name=name)
    assert found == HostsConfig("serve-0.hosts.default.svc.cluster.local:8476", num_hosts=16, host_id=13)
    with pytest.raises(ConfigError, match="give num_hosts"):
        hosts(environment, name=name)
    with pytest.raises(ConfigError, match="headless service"):
        hosts(environment, num_hosts=16, name="serve-13")


def test_a_tpu_pod_on_kubernetes() -> None:
    environment = {"TPU_WORKER_HOSTNAMES": "a-0.svc,a-1.svc", "TPU_WORKER_ID": "1"}
    assert hosts(environment) == HostsConfig("a-0.svc:8482", num_hosts=2, host_id=1)
    assert hosts({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None
    with pytest.raises(ConfigError, match="several TPU slices"):
        hosts(environment | {"MEGASCALE_NUM_SLICES": "2"})


@pytest.fixture(params=["10.0.0.2,10.0.0.3", "n0:0:10.0.0.2,n1:1:10.0.0.3"])
def metadata_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A Cloud TPU VM's, in either of its formats."""
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": request.param}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            directory, _, name = self.path.rpartition("/")
            assert directory == "/computeMetadata/v1/instance/attributes"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(attributes[name].encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_cloud_tpu_vm(metadata_server: str) -> None:
    found = hosts({"GCE_METADATA_IP": metadata_server})
    assert found == HostsConfig("10.0.0.2:8482", num_hosts=2, host_id=1)


def test_no_job_at_all() -> None:
    with pytest.raises(ConfigError, match="no Cloud TPU, Slurm or Kubernetes job"):
        hosts({})


def test_by_hand() -> None:
    given = ("--model=demo", "--mesh=1x4")
    assert generate_options(given).engine.hosts is None
    by_hand = ("--coordinator=[::1]:8476", "--num_hosts=2", "--host_id=1", "--preflight_timeout_s=7")
    found = generate_options((*given, *by_hand)).engine.hosts
    assert found == HostsConfig("[::1]:8476", num_hosts=2, host_id=1, preflight_timeout_s=7.0)
    assert found
    assert (found.address, found.port) == ("::1", 8476)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--coordinator=a:1",), "go together"),
        (("--num_hosts=2", "--host_id=0"), "go together"),
        (("--preflight_timeout_s=5",), "go together"),
        (("--coordinator=auto", "--host_id=0"), "--host_id=0: coordinator=auto finds it"),
        (("--coordinator=a", "--num_hosts=2", "--host_id=0"), "coordinator='a' must be HOST:PORT"),
        (("--coordinator=a:65535", "--num_hosts=2", "--host_id=0"), "must be HOST:PORT"),
        (("--coordinator=a:1", "--num_hosts=1", "--host_id=0"), "num_hosts=1 must be 2 or more"),
        (("--coordinator=a:1", "--num_hosts=2", "--host_id=2"), "host_id=2 must be from 0 to 1"),
    ],
)
def test_wrong_by_hand(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate_options(("--model=demo", *argv))
