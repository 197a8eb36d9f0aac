"""The native steps of a search, each written to run alone in a forked child of `forkserver`: propose, build, measure.

Arguments and results are plain values. A step may hang, crash or leak as it likes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from tuning_db.trials import Workload, trace_digest
from workers.graph.pipeline import pass_context
from workers.search.candidates import Built, Candidate, Features, Measurement, canonical_trace
from workers.search.cost_model import CostModel
from workers.search.space import Space


def preload(intrinsics: str) -> tuple[str, ...]:
    """What a fork server needs for these steps, on a device whose tensor intrinsics are in module `intrinsics`."""
    return (f"workers.search.intrinsics:use_only:{intrinsics}", __name__)


def to_tvm_workload(workload: Workload) -> ms.database.Workload:
    return ms.database.Workload.from_json([workload.structural_hash, workload.module])


def schedule_of(workload: Workload, trace: str, *, seed: int = 1) -> tvm.s_tir.Schedule:
    """The workload's module with the trace applied, its postprocessing included."""
    schedule = tvm.s_tir.Schedule(to_tvm_workload(workload).mod, seed=seed, error_render_level="fast")
    tvm.s_tir.schedule.Trace.apply_json_to_schedule(json.loads(trace), schedule)
    return schedule


def commit_record(
    database: ms.database.Database, workload: Workload, trace: str, run_s: Sequence[float], target: tvm.target.Target
) -> None:
    """Hand a stored outcome to MetaSchedule as its own tuning record."""
    schedule = schedule_of(workload, trace)
    database.commit_tuning_record(
        ms.database.TuningRecord(
            schedule.trace,
            database.commit_workload(to_tvm_workload(workload).mod),
            list(run_s),
            target,
            ms.arg_info.ArgInfo.from_entry_func(schedule.mod),
        )
    )


def propose(
    target_json: str,
    workload: Workload,
    space: Space,
    measured: Sequence[tuple[str, tuple[float, ...]]],
    model: CostModel | None,
    count: int,
    seed: int,
) -> list[str]:
    """Up to `count` traces that are not in `measured`, best first as far as `model` can tell.

    `measured` holds traces with their seconds, an empty tuple for one that failed. Without a model the space is
    sampled; with one, MetaSchedule's evolutionary search (Ansor, OSDI 2020) breeds from the samples and the best
    measured, and picks a few at random beside the best (epsilon-greedy).
    """
    target = tvm.target.Target(json.loads(target_json))
    tvm_workload = to_tvm_workload(workload)
    context = ms.TuneContext(
        tvm_workload.mod,
        target=target,
        space_generator=space.generator,
        search_strategy=space.strategy(count, guided=model is not None),
        task_name="main",
        rand_state=seed,
        num_threads=1,
        logger=None,
    )
    database = ms.database.MemoryDatabase()
    known = {trace_digest(trace) for trace, _ in measured}
    if model is not None:
        for trace, run_s in sorted((m for m in measured if m[1]), key=lambda m: min(m[1]))[: space.parents]:
            commit_record(database, workload, trace, run_s, target)
    # The strategy does not know what was measured before this process, and offers it again: ask for that many more.
    wanted = count + (min(len(known), space.parents) if model is not None else 0)
    # MetaSchedule's default would be a random model too, with a seed that nobody can set.
    ranking = model.to_tvm() if model is not None else ms.cost_model.RandomModel(seed=seed)
    context.pre_tuning(wanted, wanted, context.generate_design_space(), database, ranking)
    traces: dict[str, str] = {}
    for candidate in context.generate_measure_candidates() or ():
        trace = canonical_trace(candidate.sch.trace.as_json())
        digest = trace_digest(trace)
        if digest not in known:
            traces.setdefault(digest, trace)
    return list(traces.values())[:count]


def build(target_json: str, candidate: Candidate, folder: str) -> Built:
    """Compile one candidate into a shared library under `folder`, and extract its features."""
    target = tvm.target.Target(json.loads(target_json))
    schedule = schedule_of(candidate.workload, candidate.trace)
    features = extract_features(target, candidate.workload, schedule)
    with pass_context():
        executable = tvm.compile(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(schedule.mod), target=target)
    name = f"{candidate.workload.digest[:12]}-{candidate.digest[:20]}"
    return Built(
        library=str(link(executable.mod, Path(folder) / name)),
        arguments=tuple(
            (str(argument.dtype), tuple(int(size) for size in argument.shape))
            for argument in ms.arg_info.ArgInfo.from_entry_func(schedule.mod)
        ),
        features=features,
    )


def featurize(target_json: str, candidates: Sequence[Candidate]) -> list[Features | None]:
    """Features of candidates whose outcome is known already, in their order."""
    target = tvm.target.Target(json.loads(target_json))
    return [extract_features(target, c.workload, schedule_of(c.workload, c.trace)) for c in candidates]


def extract_features(target: tvm.target.Target, workload: Workload, schedule: tvm.s_tir.Schedule) -> Features | None:
    """One row for each buffer store, or None where the extractor finds no store."""
    context = ms.TuneContext(to_tvm_workload(workload).mod, target=target, num_threads=1, task_name="main")
    candidate = ms.MeasureCandidate(schedule, ms.arg_info.ArgInfo.from_entry_func(schedule.mod))
    [found] = ms.feature_extractor.PerStoreFeature().extract_from(context, [candidate])
    features = cast(Features, found.numpy().astype("float32"))
    return features if features.size else None


def link(module: tvm.runtime.Module, path: Path) -> Path:
    """Link the module's object file by the plain linker: the runner needs no C library start-up and no archive."""
    object_file, library = path.with_suffix(".o"), path.with_suffix(".so")
    module.write_to_file(str(object_file), "o")
    subprocess.run(["ld", "-shared", "-o", str(library), str(object_file)], check=True, capture_output=True)  # noqa: S607
    object_file.unlink()
    return library


def measure(built: Built, measurement: Measurement) -> tuple[float, ...]:
    """Seconds of one call, `measurement.repeat` samples. The caller sees to it that nothing else is running."""
    os.environ["TVM_NUM_THREADS"] = str(measurement.threads)
    module = tvm.runtime.load_module(built.library)
    device = tvm.cpu()
    generator = np.random.default_rng(0)
    arguments = [random_tensor(generator, dtype, shape) for dtype, shape in built.arguments]
    evaluator = module.time_evaluator(
        "main", device, number=1, repeat=measurement.repeat, min_repeat_ms=int(measurement.min_repeat_s * 1000)
    )
    return tuple(float(sample) for sample in evaluator(*arguments).results)


def random_tensor(generator: np.random.Generator, dtype: str, shape: Sequence[int]) -> Any:
    """Floats in [0, 1), integers 0: valid as an index into anything, and the time of integer code does not depend
    on its values."""
    if dtype.startswith("float"):
        data = np.asarray(generator.random(shape)).astype(dtype)
    else:
        data = np.zeros(shape, dtype="uint8" if dtype == "bool" else dtype).astype(dtype)
    return tvm.runtime.tensor(data)
