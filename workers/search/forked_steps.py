"""The native steps of a search, each written to run alone in a forked child of `forkserver`: propose, build, measure.

Arguments and results are plain values. A step may hang, crash or leak as it likes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

from tuning_db.trials import Workload, trace_digest
from workers.graph import elementary
from workers.graph.pipeline import pass_context
from workers.graph.work import constants_of
from workers.search.candidates import Built, Candidate, Features, Measurement, canonical_trace
from workers.search.cost_model import CostModel
from workers.search.sketches import register_rule_broken
from workers.search.space import Space
from workers.search.templates.integer import register_intrinsics
from workers.search.templates.knobs import Config, Cpu, Template

_pool = np.empty(0, dtype=np.float32)
#: Types of weights whose copies are read in turns.
_WEIGHTS: Final = ("float32", "int8")
#: Numbers in a cache line: TVM takes no tensor that begins within one.
_LINE: Final = 16
#: Copies of a kernel's weights at most: small ones stay in a cache within a model as well.
MAX_COPIES: Final = 512
#: Samples of one candidate that are this close to each other are believed.
_AGREEMENT: Final = 1.05
#: How many times the samples wanted are taken at most to find some that agree.
_EXTRA: Final = 3


def fill_pool(size: str) -> None:
    """Have so many bytes of numbers at hand, which forked children share: making them takes longer than measuring."""
    global _pool
    numbers = np.random.default_rng(0).random(int(size) // 4 + _LINE, dtype=np.float32)
    begin = (-numbers.ctypes.data % (4 * _LINE)) // 4
    _pool = numbers[begin : begin + int(size) // 4]


def to_tvm_workload(workload: Workload) -> ms.database.Workload:
    return ms.database.Workload.from_json([workload.structural_hash, workload.module])


def schedule_of(workload: Workload, trace: str, *, seed: int = 1) -> tvm.s_tir.Schedule:
    """The workload's module with the trace applied, its postprocessing included."""
    register_intrinsics(trace)
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


def schedule_configs(workload: Workload, template: Template, cpu: Cpu, configs: Sequence[Config]) -> list[str | None]:
    """The trace of each choice of the workload's template, None for one that the template cannot be applied with."""
    module = to_tvm_workload(workload).mod
    traces: list[str | None] = []
    for config in configs:
        schedule = tvm.s_tir.Schedule(module, seed=1, error_render_level="fast")
        try:
            template.schedule(schedule, dict(workload.geometry or {}), config, cpu)
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
    cpu: Cpu,
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
        (breaking if register_rule_broken(candidate.sch, cpu) else keeping).setdefault(trace_digest(trace), trace)
    return [*keeping.values(), *breaking.values()]


def build(target_json: str, candidate: Candidate, folder: str) -> Built:
    """Compile one candidate into a shared library under `folder`, and extract the features of a sketch."""
    target = tvm.target.Target(json.loads(target_json))
    schedule = schedule_of(candidate.workload, candidate.trace)
    features = None if candidate.config is not None else extract_features(target, candidate.workload, schedule)
    with pass_context():
        packed = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(schedule.mod)
        executable = tvm.compile(elementary.lower_module(packed), target=target)
    arguments = tuple(
        (str(argument.dtype), tuple(int(size) for size in argument.shape))
        for argument in ms.arg_info.ArgInfo.from_entry_func(schedule.mod)
    )
    name = f"{candidate.workload.digest[:12]}-{candidate.digest[:20]}"
    return Built(
        library=str(link(executable.mod, Path(folder) / name)),
        arguments=arguments,
        features=features,
        weights=tuple(index for index in constants_of(schedule.mod["main"]) if arguments[index][0] in _WEIGHTS),
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


def measure(built: Built, measurement: Measurement, hopeless_s: float | None = None) -> tuple[float, ...]:
    """Seconds of one call, `measurement.repeat` samples, or one alone where that is above `hopeless_s` already.

    While samples disagree more are taken, up to `_EXTRA` times as many, and the fastest are kept: what else runs on the
    machine makes a sample longer, never shorter. The caller sees to it that nothing of ours does.
    """
    [sampler] = _samplers([built], measurement)
    while not sampler.is_settled(measurement.repeat, hopeless_s):
        sampler.sample()
    return sampler.fastest(measurement.repeat)


def measure_in_turn(candidates: Sequence[Built], measurement: Measurement) -> list[tuple[float, ...]]:
    """Seconds of one call of each, in rounds over all of them: what disturbs the machine for a while disturbs them all
    alike, so that they can be compared better than when each is measured at a time of its own. `measurement.repeat`
    samples of each are kept, the fastest of `_EXTRA` times as many."""
    samplers = _samplers(candidates, measurement)
    for _ in range(_EXTRA * measurement.repeat - 1):
        for sampler in samplers:
            sampler.sample()
    return [sampler.fastest(measurement.repeat) for sampler in samplers]


@dataclass(slots=True)
class _Sampler:
    """One loaded candidate and the seconds of one call that were seen, in their order.

    Each call reads another copy of the weights. Within a model a kernel's weights were last read an inference ago, and
    all others' since: measured with weights that are still in a cache, an algorithm that reads four times as many
    (Winograd's) looks faster than it will be.
    """

    function: Any
    arguments: list[list[Any]]  #: in turns
    seconds: list[float]
    number: int = 1  #: calls of one sample

    def sample(self) -> None:
        function, arguments, turns = self.function, self.arguments, len(self.arguments)
        start_s = time.perf_counter()
        for call in range(self.number):
            function(*arguments[call % turns])
        self.seconds.append((time.perf_counter() - start_s) / self.number)

    def fastest(self, count: int) -> tuple[float, ...]:
        """In the order measured."""
        kept = sorted(range(len(self.seconds)), key=self.seconds.__getitem__)[:count]
        return tuple(self.seconds[number] for number in sorted(kept))

    def is_settled(self, count: int, hopeless_s: float | None) -> bool:
        if hopeless_s is not None and self.seconds[0] > hopeless_s and len(self.seconds) == 1:
            return True
        fastest = self.fastest(count)
        agree = len(fastest) == count and max(fastest) <= _AGREEMENT * min(fastest)
        return agree or len(self.seconds) >= _EXTRA * count


def _samplers(candidates: Sequence[Built], measurement: Measurement) -> list[_Sampler]:
    """With one sample each."""
    os.environ["TVM_NUM_THREADS"] = str(measurement.threads)
    # Bound to cores, threads wait for whatever else runs there, while another core may be idle.
    os.environ["TVM_BIND_THREADS"] = "0"
    generator = np.random.default_rng(0)
    samplers = []
    for built in candidates:
        module = tvm.runtime.load_module(built.library)
        sampler = _Sampler(module["main"], _arguments(built, generator), [])
        # The first samples also find how many calls the others need to be long enough.
        sampler.sample()
        while (total_s := sampler.seconds.pop() * sampler.number) < measurement.min_repeat_s:
            grow = min(100.0, 1.2 * measurement.min_repeat_s / max(total_s, 1e-9))
            sampler.number = max(sampler.number + 1, math.ceil(sampler.number * grow))
            sampler.sample()
        sampler.seconds.append(total_s / sampler.number)
        samplers.append(sampler)
    return samplers


def _arguments(built: Built, generator: np.random.Generator) -> list[list[Any]]:
    """The arguments of one call after another: all the same, but for the weights."""
    fixed = {
        index: random_tensor(generator, *tensor)
        for index, tensor in enumerate(built.arguments)
        if index not in built.weights
    }
    # In numbers of the pool, which are as long as four bytes.
    sizes = {
        index: -(-math.prod(shape) // (1 if dtype == "float32" else 4))
        for index, (dtype, shape) in enumerate(built.arguments)
        if index in built.weights
    }
    # Every copy begins in a cache line of its own.
    strides = {index: -(-size // _LINE) * _LINE for index, size in sizes.items()}
    one_copy = sum(strides.values())
    copies = max(1, min(MAX_COPIES, _pool.size // one_copy)) if one_copy else 1
    if not one_copy or one_copy > _pool.size:
        missing = {index: random_tensor(generator, *built.arguments[index]) for index in built.weights}
        return [[(fixed | missing)[index] for index in range(len(built.arguments))]]
    turns = []
    place = 0
    for _ in range(copies):
        weights = {}
        for index in built.weights:
            dtype, shape = built.arguments[index]
            numbers = _pool[place : place + sizes[index]].view(dtype)[: math.prod(shape)].reshape(shape)
            weights[index] = tvm.runtime.from_dlpack(numbers)
            place += strides[index]
        turns.append([(fixed | weights)[index] for index in range(len(built.arguments))])
    return turns


def random_tensor(generator: np.random.Generator, dtype: str, shape: Sequence[int]) -> Any:
    """Floats in [0, 1), integers 0: valid as an index into anything, and the time of integer code does not depend
    on its values."""
    if dtype.startswith("float"):
        data = np.asarray(generator.random(shape, dtype=np.float32)).astype(dtype)
    else:
        data = np.zeros(shape, dtype="uint8" if dtype == "bool" else dtype).astype(dtype)
    return tvm.runtime.tensor(data)
