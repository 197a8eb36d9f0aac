"""`python -m workers.tuning JOB ATTEMPT PARENT`: one attempt at one job, in a process of its own that may die.

Upload → ONNX with bound shapes, quantized if the key says so → Relax → tasks → search → library → check and timing in a
fresh process → published.
The supervisor that started it owns heartbeats, cancelling and the verdict when this process dies without one.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import structlog

from tuning_db.blobs import BlobStore
from tuning_db.catalog import Health, Roof
from tuning_db.errors import (
    AccuracyTooLow,
    BlobCorrupt,
    BuildFailed,
    CheckFailed,
    DatabaseUnavailable,
    DeviceLost,
    InvalidRequest,
    LoadFailed,
    NotFound,
    NoValidCandidate,
    QuantizationFailed,
    StaleAttempt,
    StorageFull,
    TuningFailed,
    UnsupportedOption,
    kind_of,
)
from tuning_db.jobs import Claim, Job, JobError
from tuning_db.keys import ArtifactKey, DimensionRange, Json, TensorSpec, to_json
from tuning_db.layout import blob_dir
from tuning_db.pieces import Slab
from tuning_db.store import TuningStore
from workers.devices.identity import UnusableDevice
from workers.devices.lane import lane_of
from workers.processes import RETRY, bound_memory, die_with_parent
from workers.said import last_line
from workers.search.candidates import SKETCHES
from workers.search.forkserver import ChildFailed, ForkServer, ServerDied
from workers.search.intrinsics import preload
from workers.search.templates.knobs import Cpu, Gpu, Template
from workers.settings import Settings

if TYPE_CHECKING:
    import tvm

    from workers.frontend.onnx_import import Imported, Selected
    from workers.graph.memory import MemoryPlan
    from workers.packaging.reference import Comparison
    from workers.search.candidates import Choice, Operator
    from workers.search.guards import Guard
    from workers.search.lanes import LocalBuilder
    from workers.search.records import Records

_log = structlog.get_logger()

MANIFEST_VERSION: Final = 1
#: The library with another variant of some operators, until one of the two is chosen.
SECOND: Final = "second"
_CHECK_TIMEOUT_S: Final = 300.0
#: Of a comparison whose times nobody asks for.
UNTIMED: Final[Mapping[str, Any]] = {"rounds": 1, "min_sample_s": 0.0}
#: A board that is lost while libraries are checked on it says nothing of them.
_BOARDS_TRIED: Final = 3


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What a search came to, over all attempts at the job."""

    choices: Mapping[str, Choice]  #: by operator
    second: Mapping[str, Choice]  #: with the next best variant where that is nearly as fast; empty if nowhere
    trials: int
    failures: int
    elapsed_s: float
    ended_by: str
    guard: Mapping[str, Json]  #: what became of its trials' measuring, and how the device was meanwhile

    @property
    def measured(self) -> int:
        """Operators whose choice was measured, by this job or an earlier one."""
        return sum(choice.trial is not None for choice in self.choices.values())

    def candidates(self) -> list[tuple[str, Mapping[str, Choice]]]:
        """The libraries to be compared as wholes."""
        return [("tuned", self.choices), *([(SECOND, self.second)] if self.second else [])]

    def variants(self) -> dict[str, int]:
        """How many operators are computed in which way."""
        return dict(Counter(choice.variant.name for choice in self.choices.values()))


@dataclass(frozen=True, slots=True)
class Made:
    """The libraries of a job, by label, before one of them is chosen."""

    libraries: dict[str, str]  #: paths
    graphs: Mapping[str, Mapping[str, Json]]  #: by path, what the manifest's `graph` tells of a library
    outcome: SearchOutcome
    threads: int  #: of the CPU, for it or for the engines that a GPU is compared with
    slabs: tuple[Slab | None, ...] | None = None  #: of a range, where an item lies in each output


@dataclass(frozen=True, slots=True)
class Quantized:
    """What quantization left of a model."""

    model: Path  #: QuantizeLinear and DequantizeLinear around its operators, or integer operators, or float16 weights
    fp32: Path  #: the same model as the quantizer read it, shapes bound
    calibration: Path | None
    told: dict[str, Json]  #: what the manifest says of it


class Attempt:
    """One attempt, with everything that it needs."""

    def __init__(self, settings: Settings, store: TuningStore, blobs: BlobStore, claim: Claim, scratch: Path) -> None:
        self.settings = settings
        self.store = store
        self.blobs = blobs
        self.claim = claim
        self.scratch = scratch
        self.job: Job = store.job(claim.job_id)
        self.key: ArtifactKey = self.job.spec.key
        self.lane = lane_of(settings)
        self.started_s = time.monotonic()

    def report(self, type: str, data: Mapping[str, Json]) -> None:
        self.store.append_event(self.claim, type, data)

    def stage(self, name: str, message: str) -> None:
        _log.info("stage", job=self.claim.job_id, stage=name, message=message)
        self.report("stage", {"stage": name, "message": message})

    def warn(self, message: str) -> None:
        self.report("warning", {"message": message})

    def run(self) -> None:
        """Raises TuningFailed or InvalidRequest when the job cannot be done, StaleAttempt when it is no longer ours."""
        with self._maker() as make:
            self._check_toolchain()
            from workers.frontend.onnx_import import HEAD, WHOLE, import_parts
            from workers.frontend.onnx_model import refuse_selecting
            from workers.packaging.reference import Rest

            if self.key.range is not None and self.lane.board(self.key, _CHECK_TIMEOUT_S) is not None:
                raise UnsupportedOption(
                    "a range of sizes is not available on boards in this version; ask for `shapes`", field="inputs"
                )
            stored = self.store.model(self.key.model)
            path = self.blobs.path_verified(stored.blob)
            quantized = None
            if self.key.quantization.scheme != "none":
                quantized = self._quantize(path)
                path = quantized.model
            imports: dict[str, Imported] = {}
            for function, inputs in self.key.functions().items():
                self.stage("import", f"reading the model with {', '.join(map(str, inputs))}")
                parts = import_parts(path, inputs, self.scratch)
                if parts.selected is None:
                    imports[function] = parts.functions[WHOLE]
                else:
                    refuse_selecting(
                        self.key.quantization.scheme, self.key.device.kind, ranged=self.key.range is not None
                    )
                    imports |= parts.functions
            self.stage("graph", f"{parts.nodes_before} nodes, {parts.nodes_after} after folding")
            made = make(imports, parts.selected)

        self.stage("check", "comparing with ONNX Runtime in a fresh process")
        libraries = made.libraries
        comparisons: dict[str, Comparison] = {}
        if parts.selected is not None:
            head = imports.get(HEAD)
            rest = Rest(str(parts.selected.rest), None if head is None else [spec.name for spec in head.outputs])
            comparisons[WHOLE] = replace(self._comparison(parts.bound, inputs, libraries, made.threads), rest=rest)
        for part, imported in imports.items():
            reference = imported.bound
            if quantized is not None and self.key.quantization.scheme == "fp16":
                reference = quantized.fp32
            comparison = self._comparison(reference, imported.inputs, libraries, made.threads, quantized)
            comparisons[part] = replace(comparison, function=part)
            if parts.selected is not None:
                comparisons[part] = replace(comparisons[part], **UNTIMED)
        verdicts = dict(zip(comparisons, self._compare(list(comparisons.values())), strict=True))
        verdict = combined(list(verdicts.values()))
        if parts.selected is not None:
            verdict = {**verdicts[WHOLE], "checks": verdict["checks"]}
        outcome = self._settle(verdict, libraries, made.outcome)
        label = self._pick(verdict, outcome)
        latency = _latencies(verdict["samples_s"], verdict["parts_s"])
        told_range = None
        if self.key.range is not None:
            told_range = self._range(self.key.range, made, verdicts, label, swapped=outcome is not made.outcome)
            told_range["checked_between"] = self._check_between(
                self.key.range, told_range, path, libraries[label], made.threads
            )
        digest, size = self.blobs.put(Path(libraries[label]))
        self.stage("publish", f"{label} library, {latency[label]['median_s'] * 1e3:.3f} ms")
        manifest: dict[str, Json] = {
            "manifest_version": MANIFEST_VERSION,
            "entry": function,
            "inputs": to_json(inputs),
            "outputs": to_json(parts.told_outputs()),
            "range": told_range,
            "format": "tvm-relax-vm-so",
            "variant": label,
            "latency": to_json(latency),
            "engines": verdict["engines"],
            "check": verdict["checks"][label],
            "quantization": None if quantized is None else quantized.told,
            "graph": {
                "nodes_before": parts.nodes_before,
                "nodes_after": parts.nodes_after,
                **made.graphs[libraries[label]],
            },
            "records": {
                "tuned_tasks": outcome.measured,
                "applied": outcome.measured if label == "tuned" else 0,
                "variants": to_json(outcome.variants()) if label == "tuned" else {},
            },
            "search": {
                **_as_dict(to_json(self.job.spec.search)),
                "trials_measured": outcome.trials,
                "failed_trials": outcome.failures,
                "elapsed_s": round(outcome.elapsed_s, 2),
                "ended_by": outcome.ended_by,
                "guard": to_json(outcome.guard),
            },
            "attempt": self.claim.attempt,
            "elapsed_s": round(time.monotonic() - self.started_s, 2),
        }
        self.store.publish(self.claim, (digest, size), latency[label]["median_s"], manifest)

    @contextmanager
    def _maker(self) -> Iterator[Callable[[Mapping[str, Imported], Selected | None], Made]]:
        """What makes the libraries for a device of this kind. What differs by kind is behind it."""
        search = self.job.spec.search
        if self.key.device.kind == "cuda":
            # Reading these takes a quarter of a minute, and only sketches need them.
            intrinsics = "cuda" if search.tuner in ("auto", SKETCHES) else ""
            make = self._make_for_gpu
        else:
            intrinsics = "x86" if self.key.device.arch == "x86_64" else "arm_cpu"
            make = self._make_for_cpu
        measures = search.trials > 0
        # The server imports TVM, and so does this process: both at once.
        with ForkServer(preload(intrinsics if measures else "", measures=measures)) as server:
            yield partial(make, server)

    def _make_for_cpu(self, server: ForkServer, imports: Mapping[str, Imported], selected: Selected | None) -> Made:
        """The untuned library, and one or two with the schedules that a search has found. Each has a function for each
        of `imports`, whose operators are searched together, and the one that joins them, if they are parts."""
        import tvm

        from workers.devices.local_cpu import cpu_of, host_cores
        from workers.devices.targets import with_options
        from workers.graph import pipeline
        from workers.graph.memory import together as planned_together
        from workers.graph.operators import Model
        from workers.graph.selected import joined
        from workers.packaging import library
        from workers.search.candidates import together
        from workers.search.lanes import LocalBuilder
        from workers.search.records import Records
        from workers.search.templates.registry import TEMPLATES

        target_json = with_options(self.key.target, self.key.options)
        target = tvm.target.Target(json.loads(target_json))
        cpu = cpu_of(self.key.device)
        with target, pipeline.pass_context(self.key.options.opt_level):
            simplified = {name: pipeline.simplify()(imported.module) for name, imported in imports.items()}
            untuned_modules = {name: pipeline.lower_operators()(module) for name, module in simplified.items()}

        def compiled(parts: Mapping[str, tvm.ir.IRModule], path: Path) -> MemoryPlan:
            module = library.merge(parts)
            if selected is not None:
                module = joined(module, imports, selected)
            plans = library.compile_functions(module, target, path)
            # Of a range the manifest tells of the largest batch, of parts of a model what all come to.
            return planned_together(plans.values()) if selected is not None else plans[list(imports)[-1]]

        slabs = None if self.key.range is None else self._prove(untuned_modules, imports, self.key.range)
        untuned = self.scratch / "untuned.so"
        libraries = {"untuned": str(untuned)}
        plans = {str(untuned): compiled(untuned_modules, untuned)}
        records = Records(self.store, self.claim, self.key.record_scope())
        half = self.key.quantization.scheme == "fp16"
        models = {
            name: Model(module, target, cpu.lanes, self.key.options.winograd, cpu.dot, half)
            for name, module in simplified.items()
        }
        operators, names = together({name: model.extract(records.adopt) for name, model in models.items()})

        search = self.job.spec.search
        self.stage("search", f"{len(operators)} operators, {search.trials} trials at most")
        build = partial(LocalBuilder, server, target_json, workers=host_cores())
        outcome = self._search(server, target_json, cpu, TEMPLATES, build, operators, records)
        self.stage("build", f"{outcome.measured} of {len(operators)} operators have a measured schedule")
        for label, choices in outcome.candidates():
            path = self.scratch / f"{label}.so"
            libraries[label] = str(path)
            modules = {
                name: model.assemble({own: choices[common] for own, common in names[name].items()})
                for name, model in models.items()
            }
            plans[str(path)] = compiled(modules, path)
        # Of a model in parts the first, where the weights are.
        main = next(iter(models.values() if selected is not None else reversed(models.values())), None)
        told: dict[str, Json] = {
            "operators": len(operators),
            "quantized_sums": None if main is None else main.integer_sums(),
            **({"weights": main.weight_types()} if half and main is not None else {}),
            "kernels_before": plans[str(untuned)].kernels.total(),
        }
        graphs = {path: {**told, **_reported(plan)} for path, plan in plans.items()}
        return Made(libraries, graphs, outcome, cpu.threads, slabs)

    def _prove(
        self, modules: Mapping[str, tvm.ir.IRModule], imports: Mapping[str, Imported], dimension: DimensionRange
    ) -> tuple[Slab | None, ...]:
        """Where the items lie in each output. UnsupportedOption if it cannot be shown that the model, lowered for each
        point, keeps them apart, or if they do not lie alike at all points."""
        from workers.graph.rows import RowsMixed, prove

        try:
            proved = {
                size: prove(module, dimension.axes, size)
                for size, module in zip(dimension.points, modules.values(), strict=True)
                if size > 1
            }
        except RowsMixed as error:
            raise UnsupportedOption(
                f"one library cannot serve a range of this model, as it could not be shown that it computes each item "
                f"of a batch by itself: {error}; ask for `shapes`",
                field="inputs",
            ) from None
        largest = dimension.points[-1]
        slabs = proved[largest]
        *_, last = imports.values()
        for size, imported in zip(dimension.points, imports.values(), strict=True):
            here = proved.get(size, slabs)  # of one item nothing is proved
            for output, whole, slab, found in zip(imported.outputs, last.outputs, slabs, here, strict=True):
                shape = list(whole.shape)
                if slab is not None:
                    shape[slab.axis] = size * slab.length
                if list(output.shape) != shape or found != slab:
                    raise UnsupportedOption(
                        f"one library cannot serve a range of this model: output {output.name!r} of a batch of {size} "
                        f"is {list(output.shape)}, which is no part of {list(whole.shape)} for {largest}; "
                        "ask for `shapes`",
                        field="inputs",
                    )
        return slabs

    def _make_for_gpu(self, server: ForkServer, imports: Mapping[str, Imported], selected: Selected | None) -> Made:
        """The untuned library, of TVM's default schedules, and one or two with those that a search has found, if it
        was asked for."""
        import tvm

        from workers.devices.local_cpu import host_cores
        from workers.devices.local_gpu import gpu_of
        from workers.graph.gpu_model import GpuModel
        from workers.packaging import gpu_library
        from workers.search import gpu_steps
        from workers.search.lanes import LocalBuilder
        from workers.search.records import Records
        from workers.search.templates.gpu_registry import GPU_TEMPLATES

        assert selected is None, "run refuses it"
        target = tvm.target.Target(json.loads(self.key.target))
        options = self.key.options
        half = self.key.quantization.scheme == "fp16"
        kernels = gpu_library.kernels(
            imports["main"].module, target, half=half, keep_float32=half, opt_level=options.opt_level
        )
        modules = {"untuned": gpu_library.schedule_the_rest(kernels.module, target)}
        records = Records(self.store, self.claim, self.key.record_scope())
        model = GpuModel(kernels.module, target)
        operators = model.extract(records.adopt)
        search = self.job.spec.search
        self.stage("search", f"{len(operators)} operators, {search.trials} trials at most")
        build = partial(
            LocalBuilder, server, self.key.target, workers=host_cores(), timeout_s=60.0, step=gpu_steps.build,
            options=(options.fast_math, self._headers(server)),
        )  # fmt: skip
        outcome = self._search(
            server, self.key.target, gpu_of(self.key.device), GPU_TEMPLATES, build, operators, records
        )
        self.stage(
            "build",
            f"machine code for {self.key.device.arch}; {outcome.measured} of {len(operators)} operators have a "
            "measured schedule",
        )
        if outcome.measured:
            modules |= {label: model.assemble(choices) for label, choices in outcome.candidates()}
        libraries: dict[str, str] = {}
        graphs: dict[str, dict[str, Json]] = {}
        for label, module in modules.items():
            path = libraries[label] = str(self.scratch / f"{label}.so")
            cubins = gpu_library.compile_library(module, target, Path(path), fast_math=options.fast_math)
            graphs[path] = {
                "operators": len(operators),
                "quantized_sums": None if kernels.sums is None else kernels.sums.told(),
                "kernels": sum(len(cubin.kernels) for cubin in cubins),
                "machine_code": [{"arch": cubin.arch, "bytes": cubin.size_bytes} for cubin in cubins],
            }
        return Made(libraries, graphs, outcome, host_cores())

    def _headers(self, server: ForkServer) -> str | None:
        """What a search's kernels include, compiled once; None where that is not wanted, or NVRTC does not."""
        from workers.search import gpu_steps

        if not self.job.spec.search.trials:
            return None
        path = str(self.scratch / "headers.pch")
        arguments = (path, self.key.device.arch, self.key.options.fast_math)
        try:
            server.call_retrying(gpu_steps.precompile_headers, *arguments, deadline_s=60.0)
        except ChildFailed as failure:
            self.warn(f"candidates compile more slowly: headers were not precompiled: {failure}")
            return None
        return path

    def _quantize(self, model: Path) -> Quantized:
        """The model as the key asks for it. QuantizationFailed, or AccuracyTooLow before any search."""
        import onnxruntime

        from workers.quantize.request import SOURCE, Recipe, Request, quantize_apart

        config = self.key.quantization
        calibration = None
        if config.calibration is not None:
            try:
                calibration = self.blobs.path_verified(self.store.calibration(config.calibration).blob)
            except (NotFound, BlobCorrupt) as error:
                raise QuantizationFailed(
                    f"the uploaded calibration data is not there any more ({error}); upload it again",
                    kind="calibration-lost",
                ) from None
        folder = self.scratch / "quantized"
        folder.mkdir()
        target = folder / "quantized.onnx"
        samples = None if calibration is None else str(calibration)
        report = quantize_apart(
            Request(str(model), self.key.inputs, Recipe.of(config), str(target), samples),
            folder,
            lambda sentence: self.stage("quantize", sentence),
        )
        if report is not None:
            # Also of a job that ends here: whoever wants to know what to leave out needs it.
            self.report("quantization", report)
        wanted_db = self.job.spec.min_sqnr_db
        if report is not None and wanted_db is not None and (problem := inaccuracy(config.scheme, report, wanted_db)):
            raise AccuracyTooLow(problem)
        told = config.to_json()
        if config.scheme == "int8":
            told["quantizer"] = f"onnxruntime {onnxruntime.__version__}"
        told |= {"min_sqnr_db": wanted_db, "report": report}
        return Quantized(target, folder / SOURCE, calibration, told)

    def _search(
        self, server: ForkServer, target: str, machine: Cpu | Gpu, templates: Mapping[str, Template[Any]],
        make_builder: Callable[[], LocalBuilder], operators: Sequence[Operator], records: Records,
    ) -> SearchOutcome:  # fmt: skip
        """Search, or go by what is known already, and say how each operator is to be compiled."""
        from workers.devices.local_cpu import host_cores
        from workers.devices.roof import caches
        from workers.search.scheduler import Scheduler

        search = self.job.spec.search
        before = self.job.trials_measured
        searched_s, failures = self._searched_before()
        with make_builder() as builder, closing(self.lane.runner(server, self.key, self.scratch, self.warn)) as runner:
            scheduler = Scheduler(
                server=server,
                target=target,
                machine=machine,
                templates=templates,
                builder=builder,
                runner=runner,
                records=records,
                report=self.report,
                roof=self._roof() if search.trials else None,
                last_cache_bytes=caches(self.key.device.cache_bytes)[2],
                operators_at_once=host_cores(),
            )
            result = scheduler.run(operators, search, trials_before=before, elapsed_before_s=searched_s)
            outcome = SearchOutcome(
                scheduler.choice(),
                scheduler.second_choice(),
                before + result.trials,
                failures + result.failures,
                searched_s + result.elapsed_s,
                result.reason,
                self._guarded(runner.guard),
            )
        if outcome.trials > 0 and operators and not outcome.measured:
            raise NoValidCandidate(
                f"none of {outcome.trials} candidates could be built and run; the job's trial events say why for each"
            )
        return outcome

    def _guarded(self, guard: Guard) -> dict[str, Json]:
        """Keep how each slot was, and tell it."""
        now = dt.datetime.now(dt.UTC)
        slots = {
            slot.removeprefix("@") or platform.node(): replace(guard.latest[slot], reference_s=level.reference_s)
            for slot, level in guard.level.items()
        }
        found = [
            Health(slot, was.reference_s, was.reference_s, was.temperature_c, was.khz, was.governor, now)
            for slot, was in slots.items()
        ]
        self.store.put_health(self.key.device, found)
        return {
            "repeated": guard.repeated,
            "unsettled": guard.unsettled,
            "cooled_s": guard.cooled_s,
            "slots": to_json(slots),
        }

    def _settle(self, verdict: dict[str, Any], libraries: dict[str, str], outcome: SearchOutcome) -> SearchOutcome:
        """Keep the better of the two tuned libraries, by the whole model's time, and forget the other."""
        if SECOND not in libraries:
            return outcome
        path, check, samples = libraries.pop(SECOND), verdict["checks"].pop(SECOND), verdict["samples_s"].pop(SECOND)
        first_s, second_s = statistics.median(verdict["samples_s"]["tuned"]), statistics.median(samples)
        if not check["ok"] or (verdict["checks"]["tuned"]["ok"] and first_s <= second_s):
            return outcome
        libraries["tuned"], verdict["checks"]["tuned"], verdict["samples_s"]["tuned"] = path, check, samples
        swapped = sum(outcome.second[name] != choice for name, choice in outcome.choices.items())
        self.stage(
            "check",
            f"{swapped} operators are better computed another way within the model: "
            f"{second_s * 1e3:.3f} ms instead of {first_s * 1e3:.3f} ms",
        )
        return replace(outcome, choices=outcome.second)

    def _roof(self) -> Roof | None:
        """The device's roof: measured once, then known. Without it no operator counts as fast as it can be."""
        from workers.devices import roof

        known, measure = self.store.roof(self.key.device), self.lane.roof(self.key)
        if known is not None or measure is None:
            return known
        self.stage("roof", "measuring what this device can do at most")
        try:
            found = measure()
        except roof.RoofNotMeasured as error:
            self.warn(str(error))
            return None
        measured = Roof(
            found.flops_per_s, found.bytes_per_s, found.flops_per_s_one_thread,
            dt.datetime.now(dt.UTC), self.key.toolchain,
        )  # fmt: skip
        self.store.put_roof(self.key.device, measured)
        return measured

    def _check_toolchain(self) -> None:
        """A job waits in its queue while a worker is upgraded: what it was promised must be what builds it."""
        try:
            identity, target = self.lane.probe()
        except UnusableDevice as error:
            raise DeviceLost(f"the device was there when the worker started: {error}") from None
        here = replace(self.key, device=identity, target=target, toolchain=self.lane.toolchain())
        differences = self.key.diff(here)
        if differences:
            raise BuildFailed(
                "this worker is not what the job was submitted for: "
                f"{'; '.join(map(str, differences))}; submit the job again"
            )

    def _searched_before(self) -> tuple[float, int]:
        """Seconds of search and failed trials of earlier attempts, from the events that they left."""
        elapsed_s, failures, after = 0.0, 0, 0
        while events := self.store.events(self.claim.job_id, after=after):
            after = events[-1].seq
            for event in events:
                if event.type == "progress":
                    elapsed_s = max(elapsed_s, float(str(event.data["elapsed_s"])))
                failures += event.type == "trial" and event.data["outcome"] != "measured"
        return elapsed_s, failures

    def _range(
        self,
        dimension: DimensionRange,
        made: Made,
        verdicts: Mapping[str, Mapping[str, Any]],
        label: str,
        *,
        swapped: bool,
    ) -> dict[str, Json]:
        """What a manifest says of a range: all that running the library takes, and the latencies at each point.
        `swapped`: the second library took the place of the tuned one."""
        points: list[Json] = []
        for size, (function, verdict) in zip(dimension.points, verdicts.items(), strict=True):
            samples = dict(verdict["samples_s"])
            second = samples.pop(SECOND, None)
            if swapped:
                samples["tuned"] = second
            latency = _latencies(samples)
            points.append(
                {
                    "size": size,
                    "function": function,
                    "latency_s": latency[label]["median_s"],
                    "latency": to_json(latency),
                }
            )
        return {
            "low": dimension.low,
            "high": dimension.high,
            "axes": list(dimension.axes),
            "outputs": to_json(made.slabs),
            "points": points,
        }

    def _check_between(
        self, dimension: DimensionRange, told: Mapping[str, Json], path: Path, library: str, threads: int
    ) -> list[Json]:
        """The sizes between the points, and behind them, at which the library, run in pieces, agrees with the
        reference. CheckFailed if it does not at one of them: the points alone cannot show that a model computes with
        the size itself."""
        from workers.frontend import weights
        from workers.frontend.onnx_import import bound_model

        comparisons = []
        for size in dimension.between():
            inputs = dimension.at(self.key.inputs, size)
            reference = weights.write(bound_model(path, inputs, self.scratch), self.scratch)
            comparison = self._comparison(reference, inputs, {"ranged": library}, threads)
            comparisons.append(replace(comparison, range=told, **UNTIMED))  # latencies were measured at the points
        for size, verdict in zip(dimension.between(), self._compare(comparisons), strict=True):
            check = verdict["checks"]["ranged"]
            if not check["ok"]:
                raise CheckFailed(
                    f"at a size of {size}, which is no point, the library does not agree with ONNX Runtime: "
                    f"{check['problem']}; the model computes with the size itself: ask for `shapes` instead of a range"
                )
        return list(dimension.between())

    def _comparison(
        self, reference: Path, inputs: Sequence[TensorSpec], libraries: Mapping[str, str], threads: int,
        quantized: Quantized | None = None,
    ) -> Comparison:  # fmt: skip
        from workers.packaging.on_gpu import OnGpu
        from workers.packaging.reference import Comparison

        board = self.lane.board(self.key, _CHECK_TIMEOUT_S)
        gpu = OnGpu(_as_dict(to_json(self.key.device))) if self.key.device.kind == "cuda" else None
        comparison = Comparison(str(reference), libraries, tuple(inputs), threads, board=board, gpu=gpu)
        if quantized is None:
            return comparison
        calibration = None if quantized.calibration is None else str(quantized.calibration)
        scheme = self.key.quantization.scheme
        # With fp16 the fp32 model is the reference itself.
        fp32 = str(quantized.fp32) if scheme == "int8" else None
        return replace(comparison, fp32=fp32, calibration=calibration, scheme=scheme)

    def _compare(self, comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
        """The verdict on each. CheckFailed, DeviceLost or LoadFailed where there is none on one of them."""
        if not comparisons:
            return []
        spec, board = self.scratch / "comparisons.jsonl", comparisons[0].board
        for left in reversed(range(1 if board is None else _BOARDS_TRIED)):
            try:
                timeout_s = len(comparisons) * (_CHECK_TIMEOUT_S + (0 if board is None else board.patience_s))
                verdicts = compared(comparisons, spec, timeout_s, self.warn)
                break
            except LoadFailed as error:
                # What a board says of a library is in the verdict: here the board was lost.
                if board is None:
                    raise
                if not left:
                    raise DeviceLost(f"{_BOARDS_TRIED} boards were lost in the check; {error}") from None
                self.warn(f"checked again, on the next board: {error}")
        for verdict in verdicts:
            if "refused" in verdict:
                raise CheckFailed(
                    f"ONNX Runtime itself cannot run the model on example inputs (standard normal floats, integers "
                    f"from 0 to 2), so nothing can be compared: {verdict['refused']}"
                )
            if "lost" in verdict:
                raise DeviceLost(verdict["lost"])
            if "failed" in verdict:
                raise LoadFailed(verdict["failed"])
        return verdicts

    def _pick(self, verdict: Mapping[str, Any], outcome: SearchOutcome) -> str:
        """The faster of the libraries that agree with the reference. CheckFailed if the tuned one does not agree."""
        label = "tuned" if "tuned" in verdict["checks"] else "untuned"
        check = verdict["checks"][label]
        if not check["ok"]:
            raise CheckFailed(disagreement(label, check["problem"], outcome.variants()))
        if check["outputs_without_finite_values"]:
            names = ", ".join(map(repr, check["outputs_without_finite_values"]))
            self.warn(f"no finite value of {names} was compared: there was none")
        # On a busy machine a library of many short parallel kernels waits for cores in most of its samples, and its
        # median says nothing: what else runs makes a sample longer, never shorter.
        fastest_s = {name: min(samples) for name, samples in verdict["samples_s"].items()}
        if label == "tuned" and self.key.quantization.scheme == "fp16":
            return label  # TVM's own lowering keeps all weights in float32: half their bytes is what was asked for
        if label == "tuned" and verdict["checks"]["untuned"]["ok"] and fastest_s["untuned"] < fastest_s["tuned"]:
            return "untuned"
        return label


def compared(
    comparisons: Sequence[Comparison], spec: Path, timeout_s: float, warn: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The verdicts of a fresh process on comparisons on one device, written to `spec`. LoadFailed if there are none.

    Where engines besides ONNX Runtime are installed, one of them may have crashed it, or have taken all of its time:
    then it is asked again without them.
    """
    from workers.packaging import baselines, gpu_baselines

    try:
        return _verdicts(comparisons, spec, timeout_s)
    except LoadFailed as error:
        if comparisons[0].board is not None:
            raise
        others = baselines.optional() if comparisons[0].gpu is None else list(gpu_baselines.installed())
        if not others:
            raise
        why = str(error)
    warn(f"compared again without {' and '.join(others)}: {why}")
    without = f"with it, or another one, {why}"
    return _verdicts([replace(comparison, without=without) for comparison in comparisons], spec, timeout_s)


def _verdicts(comparisons: Sequence[Comparison], spec: Path, timeout_s: float) -> list[dict[str, Any]]:
    spec.write_text("".join(f"{comparison.to_json()}\n" for comparison in comparisons))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "workers.packaging.reference", str(spec), str(os.getpid())],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"the library was still being compared after {timeout_s:g} s") from None
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        raise LoadFailed(f"loading and comparing the library ended with {how}: {last_line(done.stderr)}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def combined(verdicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The verdicts on several functions of the same libraries as one: of each library the first check that fails, and
    as its time that of one inference by every function."""
    first, *others = verdicts
    if not others:
        return first
    checks = {
        label: next((each["checks"][label] for each in verdicts if not each["checks"][label]["ok"]), check)
        for label, check in first["checks"].items()
    }
    samples = {
        label: [sum(taken) for taken in zip(*(each["samples_s"][label] for each in verdicts), strict=False)]
        for label in first["samples_s"]
        if all(label in each["samples_s"] for each in others)
    }
    engines: dict[str, Any] = {}
    for each in verdicts:  # where one of the functions has no time, there is none
        engines |= {
            name: told for name, told in each["engines"].items() if "unavailable" in told or name not in engines
        }
    return {"checks": checks, "samples_s": samples, "parts_s": {}, "engines": engines}


def _latencies(
    samples_s: Mapping[str, Sequence[float]],
    parts_s: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """What a manifest tells of each library's and engine's time, and of its parts."""
    return {
        name: _latency(samples) | {part: _latency(taken) for part, taken in parts_s.get(name, {}).items()}
        for name, samples in samples_s.items()
    }


def _latency(samples_s: Sequence[float]) -> dict[str, Json]:
    return {"median_s": statistics.median(samples_s), "samples_s": list(samples_s)}


def _reported(plan: MemoryPlan) -> dict[str, Json]:
    """How many kernels an inference of the library calls, and what their tensors take."""
    return {
        "kernels": plan.kernels.total(),
        "layout_transforms": plan.layout_transforms,
        "integer_kernels": plan.integer_kernels,
        "quantizing_kernels": plan.quantizing_kernels,
        "concatenations_by_placing": plan.concatenations,
        "intermediates_bytes": {"planned": plan.planned_bytes, "unplanned": plan.unplanned_bytes},
    }


def inaccuracy(scheme: str, report: Mapping[str, Any], min_sqnr_db: float) -> str | None:
    """What is wrong with a quantized model of which an output has less than `min_sqnr_db`, and what to do about it;
    None where none has."""
    low = [o for o in report["outputs"] if o["sqnr_db"] is not None and o["sqnr_db"] < min_sqnr_db]
    if not low:
        return None
    worst = min(low, key=lambda output: output["sqnr_db"])
    layers = [layer["node"] for layer in report["layers"][:3]]
    hint = f"; the layers that lose most are {', '.join(map(repr, layers))}: leave some out with quantization.exclude"
    return (
        f"{scheme} keeps {worst['sqnr_db']:.1f} dB of output {worst['output']!r} on {report['samples']} samples, "
        f"and quantization.min_sqnr_db is {min_sqnr_db:g}{hint if layers else ''}"
    )


def disagreement(label: str, problem: str, variants: Mapping[str, int]) -> str:
    """What is wrong with a library whose operators are computed by so many of each of the `variants`, and what to do
    where one of them may be why."""
    message = f"the {label} library does not agree with ONNX Runtime: {problem}"
    rounding = sum(count for name, count in variants.items() if name.startswith("winograd"))
    if not rounding:
        return message
    return (
        f"{message}; {rounding} of its {sum(variants.values())} operators are computed by Winograd's algorithm, which "
        "rounds more: ask for a library without it (`--no-winograd`, or options.winograd: false)"
    )


def _as_dict(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict)
    return value


def main(arguments: Sequence[str]) -> int:
    """Exit status 0: the job has ended in the store, well or not; 3: it is no longer ours; 4: try it again, for what
    failed was not the job; else this process broke."""
    claim = Claim(arguments[0], int(arguments[1]))
    die_with_parent(int(arguments[2]))
    bound_memory()
    settings = Settings()
    store = TuningStore(settings.database_url)
    blobs = BlobStore(blob_dir(settings.data_dir))
    try:
        with tempfile.TemporaryDirectory(prefix="tunery-job-") as scratch:
            Attempt(settings, store, blobs, claim, Path(scratch)).run()
    except StaleAttempt as error:
        _log.warning("stale", job=claim.job_id, attempt=claim.attempt, message=str(error))
        return 3
    except (TuningFailed, InvalidRequest) as error:
        store.fail(claim, JobError(kind_of(error), str(error)))
    except (NotFound, BlobCorrupt) as error:
        store.fail(
            claim, JobError("model-lost", f"the uploaded model is not there any more ({error}); upload it again")
        )
    except MemoryError:
        store.fail(
            claim, JobError("out-of-memory", "the model needs more memory with these shapes than this worker has")
        )
    except (DatabaseUnavailable, StorageFull, ServerDied) as error:
        _log.error("attempt lost", job=claim.job_id, attempt=claim.attempt, message=str(error))
        return RETRY
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # TVM's destructors can hang at exit; everything is stored by now.
    os._exit(code)
