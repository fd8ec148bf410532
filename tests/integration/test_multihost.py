"""Two processes of two or more CPU devices each, as two hosts: one process's tokens, and failures by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.types import SamplingParams
from tests.integration.engines import MODELS
from tests.integration.processes import TIMEOUT_S, command, environment, run

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.95, "seed": 7, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {"65": 2.0}, "prompt_logprobs": 1},
    {"temperature": 1.0},  # whose seed host 0 draws
    {"temperature": 0.0, "stop": ["\u0142", "K"], "min_tokens": 2},
)
ROWS = [
    {"prompt_token_ids": RNG.integers(0, 150, n).tolist(), "max_tokens": 12, "ignore_eos": True, **sampling}
    for n in (5, 1, 33, 100)
    for sampling in SAMPLING
]


@pytest.fixture(scope="module")
def bundled(tiny: tuple[str, ...]) -> tuple[str, ...]:
    """On 2x2, which is compiled once a session, in fewer shapes."""
    bundle = Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "bundles")
    return (*tiny, "--max_num_batched_tokens=32", "--mesh=2x2", f"--bundle={bundle}")


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def rows_of_one_process(rows_file: Path, tiny: tuple[str, ...]) -> list[dict[str, Any]]:
    output = rows_file.with_name("one.jsonl")
    assert run("batch", *tiny, f"--input={rows_file}", f"--output={output}").returncode == 0
    return read_rows(output)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def staged(bundled: tuple[str, ...]) -> tuple[str, ...]:
    """The same with a pipeline stage a host."""
    return (*bundled, "--mesh=2x1x2")


class Host:
    """A command as one of two hosts. Its output is gathered while it runs."""

    def __init__(self, coordinator: str, host_id: int, argv: list[str], num_devices: int = 2) -> None:
        flags = (f"--coordinator={coordinator}", "--num_hosts=2", f"--host_id={host_id}")
        self.process = subprocess.Popen(
            [*argv, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"},
        )
        self._stdout, self.lines = [], []
        self._threads = [
            threading.Thread(target=_gather, args=args)
            for args in ((self.process.stdout, self._stdout), (self.process.stderr, self.lines))
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line on standard error that matches."""
        for _ in range(TIMEOUT_S * 10):
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            if self.process.poll() is not None:
                break
            self._threads[1].join(0.1)
        raise AssertionError(f"no {pattern!r} from a host that is {self.process.poll()}: {self.errors()}")

    def end(self) -> int:
        """Waits for it; the exit status."""
        status = self.process.wait(TIMEOUT_S)
        for thread in self._threads:
            thread.join()
        return status

    def errors(self) -> str:
        """Standard error, but for what gloo, which connects the processes, writes."""
        return "".join(line for line in self.lines if not line.startswith("[Gloo]"))

    def output(self) -> str:
        """Standard output of a host that has ended."""
        return "".join(self._stdout)


def _gather(stream: IO[str], lines: list[str]) -> None:
    with stream:
        for line in stream:
            lines.append(line)


@contextmanager
def two_hosts(
    coordinator: str, argv_0: list[str], argv_1: list[str] | None = None, num_devices: int = 2
) -> Iterator[tuple[Host, Host]]:
    """Both run the same command unless another is given; they are killed at the end where they still run."""
    hosts = Host(coordinator, 0, argv_0, num_devices), Host(coordinator, 1, argv_1 or argv_0, num_devices)
    try:
        yield hosts
    finally:
        for host in hosts:
            host.process.kill()
            host.end()


def assert_one_line(host: Host, line: str) -> None:
    assert host.end() == 1, host.errors()
    assert re.fullmatch(f"jaxinfer: error: {line}\n", host.errors()), host.errors()


def without_logprobs(row: Mapping[str, Any]) -> dict[str, Any]:
    outputs = [{k: v for k, v in out.items() if "logprobs" not in k} for out in row["outputs"]]
    return {**{k: v for k, v in row.items() if "logprobs" not in k}, "outputs": outputs}


def all_logprobs(row: Mapping[str, Any]) -> list[float]:
    """Every number in what a row tells of log-probabilities."""
    found = [row.get("prompt_logprobs"), *(out.get("logprobs") for out in row["outputs"])]
    return [float(text) for text in re.findall(r"-\d+\.\d+(?:e-\d+)?", json.dumps(found))]


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("flags", "mesh", "num_devices"),
    [
        ("tiny", "2x2", 2),
        long("tiny", "1x4", 2),
        long("tiny", "4x1", 2),
        ("staged", "2x1x2", 2),  # a stage a host
        ("tiny", "4x1x1", 2),  # two stages a host
        long("tiny", "2x2x2", 4),
        long("tiny", "3x1x2", 3),  # the second stage has a device of each host
    ],
)
def test_the_tokens_of_one_process(
    flags: str,
    mesh: str,
    num_devices: int,
    coordinator: str,
    tmp_path: Path,
    rows_file: Path,
    rows_of_one_process: list[dict[str, Any]],
    request: pytest.FixtureRequest,
) -> None:
    files = (f"--input={rows_file}", f"--output={tmp_path / 'two.jsonl'}")
    argv = command("batch", *request.getfixturevalue(flags), f"--mesh={mesh}", *files)
    with two_hosts(coordinator, argv, num_devices=num_devices) as hosts:
        assert [host.end() for host in hosts] == [0, 0], [host.errors() for host in hosts]
        assert hosts[0].lines[-1] == f"{len(ROWS)} rows, 0 with an error, in {tmp_path / 'two.jsonl'}\n"
        assert hosts[1].output() == ""
    got = read_rows(tmp_path / "two.jsonl")
    assert [without_logprobs(row) for row in got] == [without_logprobs(row) for row in rows_of_one_process]
    for row, wanted in zip(got, rows_of_one_process, strict=True):
        assert all_logprobs(row) == pytest.approx(all_logprobs(wanted), abs=1e-4)


def test_the_demo(demo_path: Path, coordinator: str) -> None:
    """On two devices each. Also: standard output is the answer's alone."""
    sizes = ("--max_num_seqs=1", "--max_num_batched_tokens=32", "--max_model_len=128", "--strict_shapes")
    argv = (f"--model={demo_path}", *sizes, "--temperature=0", "--max_tokens=24")
    prompt = "--prompt=The capital of France is"
    with two_hosts(coordinator, command("generate", *argv, "--mesh=1x4", prompt)) as hosts:
        assert [host.end() for host in hosts] == [0, 0], [host.errors() for host in hosts]
        assert hosts[0].output() == run("generate", *argv, prompt).stdout != ""
        assert hosts[1].output() == ""


def test_a_start_from_bundles(bundled: tuple[str, ...], coordinator: str) -> None:
    argv = command("generate", *bundled, "--prompt=Hello", "--max_tokens=8", "--verbosity=0")
    answers = []
    for count in (r"\d+", "0"):
        with two_hosts(coordinator, argv) as hosts:
            assert [host.end() for host in hosts] == [0, 0], [host.errors() for host in hosts]
            for host in hosts:
                host.wait_for(f"ready: .* {count} programs compiled, 0 cached")
            answers.append(hosts[0].output())
    assert answers[0] == answers[1] != ""


def arguments(flags: tuple[str, ...]) -> dict[str, Any]:
    """As `LLM` takes them."""
    pairs = dict(flag.removeprefix("--").split("=", 1) for flag in flags if "=" in flag)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs.items()}


LLM_SCRIPT = """
import json, sys
from jaxinfer import LLM, SamplingParams
args, host_id = json.loads(sys.argv[1]), int(sys.argv[-1].removeprefix("--host_id="))
others = dict(coordinator=sys.argv[-3].removeprefix("--coordinator="), num_hosts=2, host_id=host_id)
params = [SamplingParams(temperature=t, max_tokens=9, ignore_eos=True, n=n) for t, n in ((0, 1), (1, 2))]
with LLM(**args, **others) as llm:
    for _ in range(2):
        outputs = llm.generate([[1, 2, 3], list(range(50))], params)
        token_ids = [[part.token_ids for part in output.outputs] for output in outputs]
        print("tokens", json.dumps(token_ids), flush=True)
    llm.generate([[1, host_id]])
"""


@pytest.mark.parametrize("flags", ["bundled", long("staged")])
def test_a_script_on_two_hosts(flags: str, coordinator: str, request: pytest.FixtureRequest) -> None:
    """Both get the outputs of one process; calls that differ are refused."""
    args = arguments(request.getfixturevalue(flags))
    params = [SamplingParams(temperature=t, max_tokens=9, ignore_eos=True, n=n) for t, n in ((0, 1), (1, 2))]
    alone: dict[str, Any] = {**args, "mesh": "1x1"}
    llm = LLM(**alone)
    want = []
    for _ in range(2):
        outputs = llm.generate([[1, 2, 3], list(range(50))], params)
        want.append([[list(part.token_ids) for part in output.outputs] for output in outputs])
    assert want[0][0] == want[1][0]
    assert want[0][1] != want[1][1]  # sampled, without a seed
    argv = [sys.executable, "-c", LLM_SCRIPT, json.dumps(args)]
    with two_hosts(coordinator, argv) as hosts:
        for host in hosts:
            assert host.end() == 1, host.errors()
            lines = [line.partition("tokens ")[2] for line in host.output().splitlines()]
            assert [json.loads(line) for line in lines if line] == want
            assert "host 1 has prompts=" in host.lines[-1], host.errors()


@pytest.mark.parametrize("flags", ["bundled", long("staged")])
def test_bench_on_two_hosts(
    flags: str, coordinator: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bundled = request.getfixturevalue(flags)
    sizes = ("--num_prompts=3", "--input_len=40", "--output_len=5", f"--json_out={tmp_path / 'figures.json'}")
    with two_hosts(coordinator, command("bench", "throughput", *bundled, *sizes)) as hosts:
        assert [host.end() for host in hosts] == [0, 0], [host.errors() for host in hosts]
        assert "output_tok_per_s" in hosts[0].output()
        assert hosts[1].output() == ""
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["compilations_serving"] == 0
    assert figures["num_steps"] >= 5


COUNT_READ_BYTES = """
import json, sys
from jaxinfer import generate
from jaxinfer.engine import engine
from jaxinfer_checkpoints.mapped import MappedFile
load_stages, touch = engine.load_stages, MappedFile.touch
def load(*args, **options):
    read = []
    MappedFile.touch = lambda self, num_bytes: (read.append(num_bytes), touch(self, num_bytes))[1]
    stages = load_stages(*args, **options)
    print("bytes read:", sum(read), file=sys.stderr, flush=True)
    return stages
engine.load_stages = load
start = engine.Engine._start
def start_and_tell(self, config):
    start(self, config)
    print("memory:", json.dumps(self.memory().to_json()), file=sys.stderr, flush=True)
engine.Engine._start = start_and_tell
sys.exit(generate.main(sys.argv[1:]))
"""


def test_each_host_reads_its_own_shards(tiny: tuple[str, ...], coordinator: str) -> None:
    """All weights are divided, but the norms. Of 2 key-value heads each host's two devices have one, both."""
    from jaxinfer_checkpoints import open_checkpoint

    reader = open_checkpoint(MODELS / "llama")
    sizes = {name: reader.read(name).nbytes for name in reader.tensors}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    argv = [sys.executable, "-c", COUNT_READ_BYTES, *tiny, "--mesh=1x4", "--prompt=Hi", "--max_tokens=2"]
    with two_hosts(coordinator, argv) as hosts:
        assert [host.end() for host in hosts] == [0, 0], [host.errors() for host in hosts]
        read = [int(host.wait_for(r"bytes read: (\d+)")[1]) for host in hosts]
    kv = sum(size for name, size in sizes.items() if "k_proj" in name or "v_proj" in name)
    assert read == [norms + (sum(sizes.values()) - norms + kv) // 2] * 2


def test_each_host_has_its_own_stages_alone(staged: tuple[str, ...], coordinator: str) -> None:
    """It reads their layers, and the first the embedding, the last norm and head; it reports its own devices;
    and it starts from a bundle of its own.
    """
    from jaxinfer_checkpoints import open_checkpoint

    reader = open_checkpoint(MODELS / "llama")
    sizes = {name: reader.read(name).nbytes for name in reader.tensors}
    layers = [sum(size for name, size in sizes.items() if f"layers.{i}." in name) for i in range(4)]
    ends = sizes["model.embed_tokens.weight"], sizes["model.norm.weight"] + sizes["lm_head.weight"]
    argv = [sys.executable, "-c", COUNT_READ_BYTES, *staged, "--prompt=Hi", "--max_tokens=2"]
    with two_hosts(coordinator, argv) as hosts:
        assert [host.end() for host in hosts] == [0, 0], [host.errors() for host in hosts]
        read = [int(host.wait_for(r"bytes read: (\d+)")[1]) for host in hosts]
        memory = [json.loads(host.wait_for(r"memory: (.*)")[1]) for host in hosts]
    assert read == [sum(layers[:2]) + ends[0], sum(layers[2:]) + ends[1]]
    for report in memory:
        for name in ("weights", "kv_cache", "slots"):
            assert report["planned"][name] == report["measured"][name], name
    # 4 slots of 128 tokens and the null page; K and V of 1 of 2 heads of 16 in float32, in 2 of 4 layers.
    assert [report["measured"]["kv_cache"] for report in memory] == [2 * 2 * 16 * 4 * (4 * 128 + 8)] * 2
    assert [report["measured"]["slots"] > 0 for report in memory] == [False, True]


@contextmanager
def serving(coordinator: str, flags: tuple[str, ...]) -> Iterator[tuple[Host, Host, httpx.Client]]:
    argv = command("serve", *flags, "--port=0", "--served_model_name=tiny")
    with two_hosts(coordinator, argv) as (leader, follower):
        address = leader.wait_for(r"serving tiny at (http://\S+)")[1]
        with httpx.Client(base_url=address, timeout=TIMEOUT_S) as client:
            yield leader, follower, client


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "Hello",
        "max_tokens": 100,
        "temperature": 0,
        "ignore_eos": True,
    } | changes


@pytest.mark.parametrize("flags", ["bundled", "staged"])
def test_serving_on_two_hosts(flags: str, coordinator: str, request: pytest.FixtureRequest) -> None:
    """A client that hangs up, a refused request, and a signal to both, which lets the last request end."""
    with serving(coordinator, request.getfixturevalue(flags)) as (leader, follower, client):
        alone = client.post("/v1/completions", json=body()).json()
        assert alone["usage"]["completion_tokens"] == 100
        with client.stream("POST", "/v1/completions", json=body(prompt="Bye", stream=True)) as response:
            next(response.iter_lines())
        assert client.post("/v1/completions", json=body(max_tokens=1000)).status_code == 400
        answers: list[httpx.Response] = []
        with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            for host in (leader, follower):
                host.process.send_signal(signal.SIGTERM)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text
        assert alone["choices"][0]["text"].endswith(text)
        assert answers == []
        assert (leader.end(), follower.end()) == (0, 0)


@pytest.mark.parametrize("flags", ["bundled", long("staged")])
def test_a_follower_that_dies_ends_all_requests(
    flags: str, coordinator: str, request: pytest.FixtureRequest
) -> None:
    with serving(coordinator, request.getfixturevalue(flags)) as (leader, follower, client):
        with client.stream("POST", "/v1/completions", json=body(stream=True, n=4)) as response:
            lines = response.iter_lines()
            next(lines)
            follower.process.kill()
            events = list(lines)
        assert "the engine failed: host 1 has gone" in "".join(events)
        assert "[DONE]" not in "".join(events)
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=body()).status_code == 503
        assert leader.end() == 1
        assert leader.lines[-1] == "jaxinfer: error: host 1 has gone; its own output says why\n"


def test_a_follower_ends_with_host_0(bundled: tuple[str, ...], coordinator: str) -> None:
    with serving(coordinator, bundled) as (leader, follower, client):
        assert client.post("/v1/completions", json=body()).status_code == 200
        leader.process.kill()
        # jax, which aborts a process that loses its coordinator, may be faster than we are.
        assert follower.end() in (1, -signal.SIGABRT)
        assert "host 0 has gone" in follower.errors() or "died" in follower.errors()


def test_an_error_of_host_0_ends_the_others(tiny: tuple[str, ...], coordinator: str) -> None:
    argv = command("generate", *tiny, "--mesh=1x4", "--prompt=Hello", "--max_tokens=1000")
    with two_hosts(coordinator, argv) as (leader, follower):
        message = "prompt has 5 tokens and max_tokens=1000: .*"
        assert_one_line(leader, message)
        assert_one_line(follower, f"host 0 failed: {message}")


def test_a_host_that_is_absent_is_named(tiny: tuple[str, ...], coordinator: str) -> None:
    argv = command("generate", *tiny, "--mesh=1x4", "--prompt=Hello", "--preflight_timeout_s=2")
    port = int(coordinator.split(":")[1]) + 1
    for host_id, line in (
        (0, f"host 1 of 2 did not come within 2 s to 127.0.0.1 port {port}"),
        (1, f"host 0 did not answer at 127.0.0.1 port {port} within 2 s: .*"),
    ):
        host = Host(coordinator, host_id, argv)
        assert_one_line(host, line)
        assert host.output() == ""


OTHER_SOURCE = """
import sys
from jaxinfer import generate
from jaxinfer.engine import preflight
preflight.source_digest = lambda: "other"
sys.exit(generate.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("what", ["flag", "version", "checkpoint", "devices"])
def test_a_host_that_differs_is_named(
    what: str, tiny: tuple[str, ...], coordinator: str, tmp_path: Path
) -> None:
    argv = ["-m", "jaxinfer.generate", *tiny, "--mesh=1x4", "--prompt=Hello"]
    other = list(argv)
    line = "host 1 has {}, which must be the same on all hosts"
    if what == "flag":
        other.append("--max_num_seqs=8")
        line = line.format("max_num_seqs=8, not 4")
    elif what == "version":
        other[:2] = ["-c", OTHER_SOURCE]
        line = line.format("jaxinfer=other, not [0-9a-f]+")
    elif what == "checkpoint":
        shutil.copytree(MODELS / "llama", tmp_path / "llama")
        (weights,) = (tmp_path / "llama").glob("*.safetensors")
        data = bytearray(weights.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        weights.write_bytes(data)
        other[2] = f"--model={tmp_path / 'llama'}"
        line = line.format("checkpoint=[0-9a-f]+, not [0-9a-f]+")
    else:
        other[-2] = argv[-2] = "--mesh=1x2"
        line = "(host 0 failed: )?mesh=1x2 has 2 devices, and the 2 hosts have 4: it must take all of them"
    with two_hosts(coordinator, [sys.executable, *argv], [sys.executable, *other]) as hosts:
        for host in hosts:
            assert_one_line(host, line)
