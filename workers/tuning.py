"""`python -m workers.tuning JOB ATTEMPT PARENT`: one attempt at one job, in a process of its own that may die.

Upload → ONNX with bound shapes → Relax → tasks → search → library → check and timing in a fresh process → published.
The supervisor that started it owns heartbeats, cancelling and the verdict when this process dies without one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog

from tuning_db.blobs import BlobStore
from tuning_db.errors import (
    BlobCorrupt,
    BuildFailed,
    CheckFailed,
    DatabaseUnavailable,
    InvalidRequest,
    LoadFailed,
    NotFound,
    NoValidCandidate,
    StaleAttempt,
    StorageFull,
    TuningFailed,
)
from tuning_db.jobs import Claim, Job, JobError
from tuning_db.keys import ArtifactKey, Json, to_json
from tuning_db.layout import blob_dir
from tuning_db.store import TuningStore
from workers.processes import RETRY, bound_memory, die_with_parent
from workers.search.forkserver import ChildFailed, ForkServer, ServerDied
from workers.settings import Settings

_log = structlog.get_logger()

MANIFEST_VERSION: Final = 1
_CHECK_TIMEOUT_S: Final = 300.0
_PROFILE_TIMEOUT_S: Final = 120.0
#: An operator without a reduction is left as fusion made it unless it takes this share of the untuned time.
_TRIVIAL_SHARE: Final = 0.02


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
        self.started_s = time.monotonic()

    def report(self, type: str, data: Mapping[str, Json]) -> None:
        self.store.append_event(self.claim, type, data)

    def stage(self, name: str, message: str) -> None:
        _log.info("stage", job=self.claim.job_id, stage=name, message=message)
        self.report("stage", {"stage": name, "message": message})

    def run(self) -> None:
        """Raises TuningFailed or InvalidRequest when the job cannot be done, StaleAttempt when it is no longer ours."""
        self._check_toolchain()
        # TVM is imported here and not above: what refuses a job early does so without waiting for it.
        import tvm

        from workers.frontend.onnx_import import import_onnx
        from workers.graph import pipeline, tasks
        from workers.packaging import library
        from workers.search import forked_steps
        from workers.search.candidates import Measurement, Operator
        from workers.search.lanes import LocalBuilder, LocalRunner
        from workers.search.records import Records
        from workers.search.scheduler import Scheduler, SearchResult
        from workers.search.space import SPACES

        search = self.job.spec.search
        threads = self.key.device.cores
        target = tvm.target.Target(json.loads(self.key.target))
        intrinsics = "x86" if self.key.device.arch == "x86_64" else "arm_cpu"
        with ForkServer(forked_steps.preload(intrinsics)) as server:
            self.stage("import", f"reading the model with {', '.join(map(str, self.key.inputs))}")
            model = self.store.model(self.key.model)
            imported = import_onnx(self.blobs.path_verified(model.blob), self.key.inputs, self.scratch)
            reference = self.scratch / "reference.onnx"
            reference.write_bytes(imported.bound.SerializeToString())

            self.stage("graph", f"{imported.nodes_before} nodes, {imported.nodes_after} after folding")
            with target, pipeline.pass_context(self.key.options.opt_level):
                module = pipeline.before_tuning(target)(imported.module)
            found = tasks.extract(module)
            untuned = self.scratch / "untuned.so"
            library.compile_library(module, target, untuned)
            kernel_s = self._profile(server, untuned, threads)

            records = Records(self.store, self.claim, self.key.record_scope())
            workloads = records.adopt([task.module for task in found])
            total_s = sum(kernel_s.get(name, 0.0) for task in found for name in task.functions)
            operators, functions = [], {}
            for task, workload in zip(found, workloads, strict=True):
                untuned_s = statistics.fmean([kernel_s.get(name, 0.0) for name in task.functions])
                share = untuned_s * task.calls / total_s if total_s else 0.0
                if task.has_reduction or share >= _TRIVIAL_SHARE:
                    operators.append(Operator(task.name, workload, task.calls, untuned_s))
                    functions[workload.digest] = task.functions
            self.stage("search", f"{len(operators)} of {len(found)} operators, {search.trials} trials at most")
            result = SearchResult(0, 0, 0.0, "none")
            before = self.job.trials_measured
            searched_s, failures = self._searched_before()
            if search.tuner != "none" and operators:
                with LocalBuilder(server, self.key.target, workers=threads) as builder:
                    scheduler = Scheduler(
                        server=server,
                        target=self.key.target,
                        space=SPACES[search.tuner],
                        builder=builder,
                        runner=LocalRunner(server, Measurement(threads=threads)),
                        records=records,
                        report=self.report,
                        operators_at_once=threads,
                    )
                    result = scheduler.run(operators, search, trials_before=before, elapsed_before_s=searched_s)
                if before + result.trials > 0 and all(records.best(o.workload.digest) is None for o in operators):
                    raise NoValidCandidate(
                        f"none of {before + result.trials} candidates could be built and run; "
                        "the job's trial events say why for each"
                    )
            chosen = records.chosen(operators)
            self.stage("build", f"{len(chosen)} of {len(operators)} operators have a schedule that beats the default")
            expected = [name for digest in chosen for name in functions[digest]]
            tuned = self.scratch / "tuned.so"
            if chosen:
                scheduled = library.apply_schedules(module, records.database(operators, target), target, expected)
                library.compile_library(scheduled, target, tuned)

        self.stage("check", "comparing with ONNX Runtime in a fresh process")
        libraries = {"untuned": str(untuned)} | ({"tuned": str(tuned)} if chosen else {})
        verdict = self._compare(reference, libraries, threads)
        label = self._pick(verdict)
        latency = {
            name: {"median_s": statistics.median(samples), "samples_s": samples}
            for name, samples in verdict["samples_s"].items()
        }
        # Without a schedule the library is the untuned one, and its latency is the tuned latency too.
        latency.setdefault("tuned", latency["untuned"])
        digest, size = self.blobs.put(Path(libraries[label]))
        self.stage("publish", f"{label} library, {latency[label]['median_s'] * 1e3:.3f} ms")
        manifest: dict[str, Json] = {
            "manifest_version": MANIFEST_VERSION,
            "entry": "main",
            "inputs": to_json(self.key.inputs),
            "outputs": to_json(imported.outputs),
            "format": "tvm-relax-vm-so",
            "variant": label,
            "latency": to_json(latency),
            "check": verdict["checks"][label],
            "graph": {"nodes_before": imported.nodes_before, "nodes_after": imported.nodes_after, "tasks": len(found)},
            "records": {"tuned_tasks": len(operators), "applied": len(chosen) if label == "tuned" else 0},
            "search": {
                **_as_dict(to_json(search)),
                "trials_measured": before + result.trials,
                "failed_trials": failures + result.failures,
                "elapsed_s": round(searched_s + result.elapsed_s, 2),
                "ended_by": result.reason,
            },
            "attempt": self.claim.attempt,
            "elapsed_s": round(time.monotonic() - self.started_s, 2),
        }
        self.store.publish(self.claim, (digest, size), latency[label]["median_s"], manifest)

    def _check_toolchain(self) -> None:
        """A job waits in its queue while a worker is upgraded: what it was promised must be what builds it."""
        from workers import toolchain
        from workers.devices import local_cpu

        identity, target = local_cpu.probe()
        here = replace(self.key, device=identity, target=target, toolchain=toolchain.current())
        differences = self.key.diff(here)
        if differences:
            raise BuildFailed(
                "this worker is not what the job was submitted for: "
                f"{'; '.join(map(str, differences))}; submit the job again"
            )

    def _profile(self, server: ForkServer, library: Path, threads: int) -> dict[str, float]:
        """Seconds of each kernel of the untuned library. LoadFailed if it does not run on any of the examples."""
        from workers.packaging.profile import profile
        from workers.packaging.reference import INTEGER_RANGES

        for integers in INTEGER_RANGES:
            try:
                kernel_s: dict[str, float] = server.call(
                    profile, str(library), self.key.inputs, threads, 7, integers, deadline_s=_PROFILE_TIMEOUT_S
                )
            except ServerDied:
                raise
            except ChildFailed as failure:
                last = failure
            else:
                return kernel_s
        raise LoadFailed(f"the untuned library does not run on this device: {last}") from last

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

    def _compare(self, reference: Path, libraries: Mapping[str, str], threads: int) -> dict[str, Any]:
        from workers.packaging.reference import Comparison

        spec = self.scratch / "comparison.json"
        spec.write_text(Comparison(str(reference), libraries, self.key.inputs, threads).to_json())
        try:
            done = subprocess.run(
                [sys.executable, "-m", "workers.packaging.reference", str(spec), str(os.getpid())],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_TIMEOUT_S, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"the library was still being compared after {_CHECK_TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
            raise LoadFailed(f"loading and comparing the library ended with {how}: {lines[-1][:300] if lines else ''}")
        verdict: dict[str, Any] = json.loads(done.stdout)
        if "refused" in verdict:
            raise CheckFailed(
                f"ONNX Runtime itself cannot run the model on example inputs (standard normal floats, integers from "
                f"0 to 2), so nothing can be compared: {verdict['refused']}"
            )
        return verdict

    def _pick(self, verdict: Mapping[str, Any]) -> str:
        """The faster of the libraries that agree with the reference. CheckFailed if the tuned one does not agree."""
        label = "tuned" if "tuned" in verdict["checks"] else "untuned"
        check = verdict["checks"][label]
        if not check["ok"]:
            raise CheckFailed(f"the {label} library does not agree with ONNX Runtime: {check['problem']}")
        if check["outputs_without_finite_values"]:
            names = ", ".join(map(repr, check["outputs_without_finite_values"]))
            self.report("warning", {"message": f"no finite value of {names} was compared: there was none"})
        medians = {name: statistics.median(samples) for name, samples in verdict["samples_s"].items()}
        if label == "tuned" and verdict["checks"]["untuned"]["ok"] and medians["untuned"] < medians["tuned"]:
            return "untuned"
        return label


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
    except TuningFailed as error:
        store.fail(claim, JobError(error.kind, str(error)))
    except InvalidRequest as error:
        store.fail(claim, JobError(_kind_of(error), str(error)))
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


def _kind_of(error: InvalidRequest) -> str:
    """`UnsupportedOperator` → ``unsupported-operator``."""
    name = type(error).__name__
    return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # TVM's destructors can hang at exit; everything is stored by now.
    os._exit(code)
