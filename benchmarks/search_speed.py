"""Trials a minute: our builder and runner against TVM's LocalBuilder and LocalRunner on the same candidates in one run.

Candidates are sampled once from the sketch space of a few convolutions and a dense layer; each side builds and measures
the same ones. The proposing is not part of either side. Batches alternate, so that a busy machine is busy for both.
TVM's side runs as its documentation has it: default build function, one worker a core, and a timeout long enough that
none of its builds is lost (stock: 30 s). Results go to standard output and, with --report, to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_BIND_THREADS", "0")

import tvm
from rich.console import Console
from rich.table import Table
from tvm import te, topi
from tvm.s_tir import meta_schedule as ms

from tuning_db.trials import Measured, Workload
from workers.devices import local_cpu
from workers.search import forked_steps
from workers.search.candidates import Built, Candidate, Measurement
from workers.search.forkserver import ForkServer
from workers.search.intrinsics import preload, use_only
from workers.search.lanes import LocalBuilder, LocalRunner
from workers.search.space import Space

console = Console()


def workloads() -> dict[str, Workload]:
    """Layers of the size that a mobile network has."""

    def conv(channels_in: int, channels_out: int, size: int, kernel: int, groups: int = 1) -> Any:
        data = te.placeholder((1, channels_in, size, size), name="data")
        weight = te.placeholder((channels_out, channels_in // groups, kernel, kernel), name="weight")
        if groups == 1:
            out = topi.nn.relu(topi.nn.conv2d_nchw(data, weight, 1, kernel // 2, 1))
        else:
            out = topi.nn.relu(topi.nn.group_conv2d_nchw(data, weight, 1, kernel // 2, 1, groups))
        return te.create_prim_func([data, weight, out])

    def dense(rows: int, inner: int, columns: int) -> Any:
        a, b = te.placeholder((rows, inner), name="a"), te.placeholder((inner, columns), name="b")
        return te.create_prim_func([a, b, topi.matmul(a, b)])

    functions = {
        "conv 3x3, 32 to 32, 28x28": conv(32, 32, 28, 3),
        "conv 1x1, 64 to 128, 14x14": conv(64, 128, 14, 1),
        "depthwise 3x3, 64, 28x28": conv(64, 64, 28, 3, 64),
        "dense 32x256x256": dense(32, 256, 256),
    }
    return {
        name: Workload(*map(str, ms.database.Workload(tvm.IRModule({"main": f})).as_json()))
        for name, f in functions.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="candidates of one workload in one batch")
    parser.add_argument("--rounds", type=int, default=1, help="batches of each workload on each side")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    identity, target_json = local_cpu.probe()
    cores = identity.cores
    target = tvm.target.Target(json.loads(target_json))
    intrinsics = "x86" if identity.arch == "x86_64" else "arm_cpu"
    measurement = Measurement(threads=cores)
    stock_builder = ms.builder.LocalBuilder(max_workers=cores, timeout_sec=300)
    stock_runner = ms.runner.LocalRunner(
        timeout_sec=300,
        evaluator_config=ms.runner.EvaluatorConfig(
            number=1, repeat=measurement.repeat, min_repeat_ms=int(measurement.min_repeat_s * 1000)
        ),
    )
    seconds: dict[str, list[float]] = {"ours": [], "stock": []}
    good = {"ours": 0, "stock": 0}
    rows = []
    with (
        ForkServer(preload(intrinsics)) as server,
        LocalBuilder(server, target_json, workers=cores) as own,
    ):
        runner = LocalRunner(server, measurement)
        for round_number in range(options.rounds):
            for name, workload in workloads().items():
                traces = server.call(
                    forked_steps.propose, target_json, workload, Space(), [], None, local_cpu.cpu_of(identity),
                    options.batch, round_number + 1, deadline_s=60,
                )  # fmt: skip
                candidates = [Candidate(workload, trace) for trace in traces]

                start_s = time.perf_counter()
                outcomes = [runner.run(b) if isinstance(b, Built) else b for b in own.build(candidates)]
                ours_s = time.perf_counter() - start_s
                good["ours"] += sum(isinstance(outcome, Measured) for outcome in outcomes)

                start_s = time.perf_counter()
                good["stock"] += stock(target, candidates, stock_builder, stock_runner)
                stock_s = time.perf_counter() - start_s
                seconds["ours"].append(ours_s / len(candidates))
                seconds["stock"].append(stock_s / len(candidates))
                rows.append((name, len(candidates), ours_s, stock_s))
                console.print(f"{name}: ours {ours_s:.1f} s, stock {stock_s:.1f} s for {len(candidates)} trials")
    table = Table("workload", "trials", "ours, s", "stock, s", "ratio")
    for name, count, ours_s, stock_s in rows:
        table.add_row(name, str(count), f"{ours_s:.1f}", f"{stock_s:.1f}", f"{stock_s / ours_s:.1f}x")
    console.print(table)
    per_minute = {side: 60 / statistics.median(values) for side, values in seconds.items()}
    ratio = statistics.median(s / o for s, o in zip(seconds["stock"], seconds["ours"], strict=True))
    summary = {
        "device": identity.name,
        "trials_per_minute": {side: round(value, 1) for side, value in per_minute.items()},
        "measured": good,
        "median_ratio": round(ratio, 1),
        "batches": [{"workload": n, "trials": c, "ours_s": o, "stock_s": s} for n, c, o, s in rows],
    }
    console.print(
        f"{identity.name}: ours {per_minute['ours']:.0f} trials a minute, stock {per_minute['stock']:.1f}; "
        f"median ratio {ratio:.1f}x; measured {good['ours']} and {good['stock']}"
    )
    if options.report:
        options.report.write_text(json.dumps(summary, indent=1))
    return 0


def stock(target: Any, candidates: list[Candidate], builder: Any, runner: Any) -> int:
    """Build and run the candidates by TVM's own builder and runner; how many were measured."""
    schedules = [forked_steps.schedule_of(candidate.workload, candidate.trace) for candidate in candidates]
    built = builder.build([ms.builder.BuilderInput(schedule.mod, target) for schedule in schedules])
    inputs = [
        ms.runner.RunnerInput(result.artifact_path, "cpu", ms.arg_info.ArgInfo.from_entry_func(schedule.mod))
        for schedule, result in zip(schedules, built, strict=True)
        if result.artifact_path is not None
    ]
    return sum(future.result().run_secs is not None for future in runner.run(inputs))


if __name__ == "__main__":
    use_only("x86")
    sys.exit(main())
