#!/usr/bin/env python3
"""Checks every kernel against the reference, and times it, on the accelerator that jax finds, or on the CPU.

    .venv/bin/python scripts/check_device.py [--json_out=FILE] [--budget_s=420] [--small]

Prints a row for each check: the largest error and its bound, milliseconds of a launch, bytes and FLOPs a
second that the op has to move and compute, and their share of the chip's published figures. Ends with
status 1 if any row is wrong. What the budget leaves no time for is named and counts as nothing.

The checks run in a process of their own. One that fails, hangs or takes the device down costs its own row:
a new process goes on with the next. The JSON is written after each row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

START_S, CHECK_S = 120, 60  # that a process may take to start, and a check, before it is given up
ROOT = Path(__file__).parents[1]
# By what jax calls the device, the longest first that fits.
CHIPS = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7x": "tpu7x",
    "nvidia h100": "h100",
    "nvidia h200": "h200",
    "nvidia b200": "b200",
}


# --- In the process that has the device -----------------------------------------------------------


def work(first: int, small: bool, results: IO[str]) -> None:
    """Runs the checks from `first` on, and writes a line of JSON as it starts, and for each check."""
    from device_checks import device_checks

    from jaxinfer_checkpoints.hub import DEFAULT_CACHE_DIR
    from jaxinfer_kernels.cpu import load

    about, kernel = describe_device()
    checks = device_checks(about["platform"], kernel, small=small)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=results, flush=True)

    names = [dict(op=c.op, shape=c.shape, dtype=c.dtype, backend=c.backend) for c in checks]
    send(dict(device=about, checks=names))
    cache_dir = Path(os.environ.get("JAXINFER_CACHE_DIR") or DEFAULT_CACHE_DIR).expanduser()
    for check in checks[first:]:
        try:
            if check.backend == "cpu":
                load(cache_dir / "kernels")
            outcome = check.run()
        except Exception as error:  # whatever a kernel or a compiler throws is that check's result
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            lost = not device_works()
            send(dict(ok=False, message=reason, lost=lost))
            if lost:
                return
        else:
            send(row_of(outcome, about))


def device_works() -> bool:
    """After a fault on a GPU nothing runs in that process any more."""
    import jax

    try:
        jax.block_until_ready(jax.numpy.ones(8) + 1)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def describe_device() -> tuple[dict[str, Any], Any]:
    """The device for the report, and the backend of its own kernels."""
    import jax

    from jaxinfer.memory.chips import CHIPS as FIGURES
    from jaxinfer_kernels.gpu import GPU_CAPABILITIES

    device = jax.devices()[0]
    kind = device.device_kind.lower()
    prefix = max((name for name in CHIPS if kind.startswith(name)), key=len, default=None)
    figures = None
    if prefix is not None:
        chip = FIGURES[CHIPS[prefix]]
        figures = {
            "GB/s": chip.bandwidth_gbps,
            "bf16": chip.bf16_tflops,
            "int8": chip.int8_tops,
            "fp8": chip.fp8_tflops,
        }
        figures = {name: value and value / chip.num_devices for name, value in figures.items()}
    about = dict(platform=device.platform, kind=device.device_kind, jax=jax.__version__, published=figures)
    if device.platform == "tpu":
        return about, "tpu"
    if device.platform == "gpu" and device.compute_capability in GPU_CAPABILITIES:
        return about, "gpu"
    return about, "cpu" if device.platform == "cpu" else "xla"


def row_of(outcome: Any, about: dict[str, Any]) -> dict[str, Any]:
    row = dataclasses.asdict(outcome) | dict(ok=outcome.error <= outcome.bound)
    row["GB/s"] = outcome.num_bytes / outcome.ms / 1e6
    row["TFLOP/s"] = outcome.flops / outcome.ms / 1e9
    published = about["published"] or {}
    for name, rate in (("GB/s", "GB/s"), ("TFLOP/s", outcome.rate)):
        row[f"of {name}"] = row[name] / published[rate] if published.get(rate) else None
    return row


# --- In the process that waits for it -------------------------------------------------------------


class Worker:
    """A process that runs the checks from `first` on."""

    def __init__(self, first: int, small: bool) -> None:
        command = [sys.executable, __file__, f"--worker={first}", *(["--small"] if small else [])]
        roots = (ROOT, ROOT / "kernels", ROOT / "checkpoints")
        path = os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next(self, timeout_s: float) -> dict[str, Any]:
        """What it says next. Raises RuntimeError where it ended or took too long."""
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.1))
        except queue.Empty as error:
            raise RuntimeError(f"no answer within {timeout_s:.0f} s") from error
        if line is None:
            raise RuntimeError(f"the process ended with status {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Report:
    """The rows so far, printed and written as they come."""

    def __init__(self, json_out: Path | None) -> None:
        self.device: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.names: list[dict[str, Any]] = []
        self._json_out, self._start_s = json_out, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start_s

    def begin(self, message: dict[str, Any]) -> None:
        if not self.names:
            self.device, self.names = message["device"], message["checks"]
            print("{kind} ({platform}), jax {jax}; published: {published}".format(**self.device))
            columns = ("error", "bound", "ms", "GB/s", "of it", "TFLOP/s", "of it")
            print(f"{'op':17}{'shape':38}{'dtype':33}{'by':6}" + "".join(f"{name:>10}" for name in columns))

    def add(self, row: dict[str, Any]) -> None:
        row = self.names[len(self.rows)] | row
        self.rows.append(row)
        text = f"{row['op']:17}{row['shape']:38}{row['dtype']:33}{row['backend']:6}"
        if "ms" in row:
            shares = [
                f"{row[k]:>10.1%}" if row[k] is not None else f"{'-':>10}" for k in ("of GB/s", "of TFLOP/s")
            ]
            text += f"{row['error']:>10.2e}{row['bound']:>10.2e}{row['ms']:>10.3f}"
            text += f"{row['GB/s']:>10.1f}{shares[0]}{row['TFLOP/s']:>10.2f}{shares[1]}"
        print(text + ("" if row["ok"] else "  WRONG " + row.get("message", "")), flush=True)
        self.write()

    def write(self) -> None:
        if self._json_out is not None:
            report = dict(device=self.device, seconds=self.seconds, rows=self.rows, not_run=self.not_run)
            self._json_out.write_text(json.dumps(report, indent=1))

    @property
    def not_run(self) -> list[dict[str, Any]]:
        return self.names[len(self.rows) :]


def run(report: Report, small: bool, budget_s: float) -> None:
    """Until all checks have a row, or the time is up. Raises RuntimeError where no process starts."""
    while not report.names or (report.not_run and report.seconds < budget_s):
        worker = Worker(len(report.rows), small)
        left_s = budget_s - report.seconds if report.names else START_S
        try:
            report.begin(worker.next(min(START_S, left_s)))
            take_rows(worker, report, budget_s)
        except RuntimeError:
            if not report.names or report.seconds < budget_s:  # else it was given less than its time
                raise
        finally:
            worker.stop()


def take_rows(worker: Worker, report: Report, budget_s: float) -> None:
    """Until the process is of no more use, or the time is up."""
    while report.not_run and report.seconds < budget_s:
        try:
            row = worker.next(min(CHECK_S, budget_s - report.seconds))
        except RuntimeError as error:
            if report.seconds < budget_s:  # else it was given less than its time
                report.add(dict(ok=False, message=str(error), lost=True))
            return
        report.add(row)
        if row.get("lost"):
            return


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json_out", type=Path, help="writes the rows here too")
    parser.add_argument("--budget_s", type=float, default=420, help="seconds in all")
    parser.add_argument("--small", action="store_true", help="shapes that a CPU runs in seconds")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        with os.fdopen(os.dup(1), "w") as results:
            os.dup2(2, 1)  # what libraries print is no result
            work(args.worker, args.small, results)
        return 0
    report = Report(args.json_out)
    try:
        run(report, args.small, args.budget_s)
    except RuntimeError as error:
        print(f"no process that runs the checks starts: {error}")
        return 1
    wrong = [row for row in report.rows if not row["ok"]]
    report.write()
    print(
        f"{len(report.rows)} checks in {report.seconds:.0f} s, {len(wrong)} wrong, "
        f"{len(report.not_run)} not run"
    )
    for name in report.not_run:
        print("not run: {op} {shape} {dtype} {backend}".format(**name))
    return 1 if wrong or not report.rows else 0


if __name__ == "__main__":
    sys.exit(main())
