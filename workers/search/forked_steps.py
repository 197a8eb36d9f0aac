"""The native steps of a search, each written to run alone in a forked child of `forkserver`: propose, build, featurize.
`sampling` has the one that measures.

Arguments and results are plain values. A step may hang, crash or leak as it likes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from tuning_db.trials import Workload, trace_digest
from workers.graph import elementary
from workers.graph.pipeline import pass_context
from workers.graph.work import constants_of
from workers.linker import arch_of, linker_for
from workers.search.candidates import Built, Candidate, Features, canonical_trace
from workers.search.cost_model import CostModel
from workers.search.intrinsics import use_only
from workers.search.sketches import register_rule_broken
from workers.search.space import Space
from workers.search.templates.dot import register_intrinsics
from workers.search.templates.gpu_fragments import register_fragments
from workers.search.templates.knobs import Config, Cpu, Gpu, Template

#: Types of weights whose copies are read in turns.
_WEIGHTS: Final = ("float32", "float16", "int8")
#: What the trace of a sketch for tensor cores names that is TVM's.
_CUDA_INTRINSIC: Final = '"wmma_'


def to_tvm_workload(workload: Workload) -> ms.database.Workload:
    return ms.database.Workload.from_json([workload.structural_hash, workload.module])


def schedule_of(workload: Workload, trace: str, *, seed: int = 1) -> tvm.s_tir.Schedule:
    """The workload's module with the trace applied, its postprocessing included."""
    register_intrinsics(trace)
    register_fragments(trace)
    if _CUDA_INTRINSIC in trace:
        use_only("cuda")
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


def schedule_configs(
    workload: Workload, template: Template[Any], machine: Cpu | Gpu, configs: Sequence[Config]
) -> list[str | None]:
    """The trace of each choice of the workload's template, None for one that the template cannot be applied with."""
    module = to_tvm_workload(workload).mod
    traces: list[str | None] = []
    for config in configs:
        schedule = tvm.s_tir.Schedule(module, seed=1, error_render_level="fast")
        try:
            template.schedule(schedule, dict(workload.geometry or {}), config, machine)
        except Exception:  # whatever a primitive refuses, in TVM's own kinds of error
            traces.append(None)
        else:
            traces.append(canonical_trace(schedule.trace.as_json()))
    return traces


def propose(
    target_json: str,
    workload: Workload,
    space: Space,
    parents: Sequence[tuple[str, tuple[float, ...]]],
    model: CostModel | None,
    machine: Cpu | Gpu,
    count: int,
    seed: int,
) -> list[str]:
    """Up to `count` traces, best first as far as `model` can tell; they may have been measured before.

    Without a model the space is sampled; with one, MetaSchedule's evolutionary search (Ansor, OSDI 2020) breeds from
    the samples and `parents`, traces with their seconds, and picks a few at random beside the best (epsilon-greedy).
    What breaks the register rule (`sketches`) comes last: it is only worth a trial where nothing keeps it.
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
    if model is not None:
        for trace, run_s in parents:
            commit_record(database, workload, trace, run_s, target)
    # MetaSchedule's default would be a random model too, with a seed that nobody can set.
    ranking = model.to_tvm() if model is not None else ms.cost_model.RandomModel(seed=seed)
    context.pre_tuning(count, count, context.generate_design_space(), database, ranking)
    keeping: dict[str, str] = {}
    breaking: dict[str, str] = {}
    for candidate in context.generate_measure_candidates() or ():
        trace = canonical_trace(candidate.sch.trace.as_json())
        # Of a GPU's, MetaSchedule itself has dropped what no block of threads can hold.
        broken = isinstance(machine, Cpu) and register_rule_broken(candidate.sch, machine)
        (breaking if broken else keeping).setdefault(trace_digest(trace), trace)
    return [*keeping.values(), *breaking.values()]


def build(target_json: str, candidate: Candidate, folder: str) -> Built:
    """Compile one candidate into a shared library under `folder`, and extract the features of a sketch."""
    target = tvm.target.Target(json.loads(target_json))
    schedule = schedule_of(candidate.workload, candidate.trace)
    features = None if candidate.config is not None else extract_features(target, candidate.workload, schedule)
    with pass_context():
        packed = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(schedule.mod)
        executable = tvm.compile(elementary.lower_module(packed), target=target)
    arguments = arguments_of(schedule)
    return Built(
        library=str(link(executable.mod, Path(folder) / file_stem(candidate), arch_of(target_json))),
        arguments=arguments,
        features=features,
        weights=tuple(index for index in constants_of(schedule.mod["main"]) if arguments[index][0] in _WEIGHTS),
    )


def arguments_of(schedule: tvm.s_tir.Schedule) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dtype and shape of each argument of the scheduled function."""
    return tuple(
        (str(argument.dtype), tuple(int(size) for size in argument.shape))
        for argument in ms.arg_info.ArgInfo.from_entry_func(schedule.mod)
    )


def file_stem(candidate: Candidate) -> str:
    """What the candidate's files are called, but for their kinds."""
    return f"{candidate.workload.digest[:12]}-{candidate.digest[:20]}"


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


def link(module: tvm.runtime.Module, path: Path, arch: str = platform.machine()) -> Path:
    """Link the module's object file by the plain linker: the runner needs no C library start-up and no archive."""
    object_file, library = path.with_suffix(".o"), path.with_suffix(".so")
    module.write_to_file(str(object_file), "o")
    linker_for(arch).link(library, [object_file])
    object_file.unlink()
    return library
