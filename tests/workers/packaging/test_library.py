"""Applying records to a module, and compiling it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm
from onnx import helper
from tvm import relax
from tvm.s_tir import meta_schedule as ms

from tests.workers.conftest import Compiled, Host, compile_model
from tests.workers.models import make_model, matmuls, normal, port
from tuning_db.errors import BuildFailed
from tuning_db.trials import Workload
from workers.graph import pipeline, tasks
from workers.packaging import library, profile
from workers.packaging.reference import Comparison, run
from workers.search import forked_steps
from workers.search.forkserver import ForkServer
from workers.search.space import Space


def called(module: tvm.ir.IRModule) -> list[str]:
    """The kernels and built-ins that an inference calls, in order."""
    names: list[str] = []

    def visit(expression: relax.Expr) -> None:
        if isinstance(expression, relax.Call) and expression.op == tvm.ir.Op.get("relax.call_tir"):
            names.append(expression.args[0].name_hint)

    relax.analysis.post_order_visit(module["main"].body, visit)
    return names


def argument_shapes(kernel: tvm.tirx.PrimFunc) -> list[list[int]]:
    return [[int(size) for size in info.shape] for info in ms.arg_info.ArgInfo.from_prim_func(kernel)]


@pytest.fixture(scope="module")
def tuned(conv: Compiled, conv_workload: Workload, host: Host, server: ForkServer) -> ms.database.MemoryDatabase:
    """A database with one schedule of `conv`'s computation that packs its weights."""
    for seed in range(1, 6):
        traces = server.call(
            forked_steps.propose, host.target_json, conv_workload, Space(), [], None, host.cpu, 8, seed, deadline_s=120
        )
        packing = [trace for trace in traces if "layout_transform" in trace.lower() or "TransformLayout" in trace]
        if packing:
            break
    else:
        pytest.fail("no sampled schedule packs the weights")
    schedule = forked_steps.schedule_of(conv_workload, packing[0])
    database = ms.database.MemoryDatabase()
    database.commit_tuning_record(
        ms.database.TuningRecord(
            schedule.trace,
            database.commit_workload(forked_steps.to_tvm_workload(conv_workload).mod),
            [1e-6],
            host.target,
            ms.arg_info.ArgInfo.from_entry_func(schedule.mod),
        )
    )
    return database


def test_weights_are_packed_at_compile_time(
    conv: Compiled, tuned: ms.database.MemoryDatabase, host: Host, tmp_path: Path
) -> None:
    """With a schedule that changes the weights' layout, an inference still calls one kernel, and gives the same."""
    [task] = tasks.extract(conv.module)
    assert called(conv.module) == task.functions
    applied = library.apply_schedules(conv.module, tuned, host.target, task.functions)
    assert len(called(applied)) == 1
    packed = applied[called(applied)[0]]
    before, after = argument_shapes(conv.module[task.name]), argument_shapes(packed)
    assert after[0] == before[0]
    assert after[-1] == before[-1]
    assert after[1] != before[1]
    path = tmp_path / "tuned.so"
    library.compile_library(applied, host.target, path)
    comparison = Comparison(
        str(conv.reference), {"tuned": str(path)}, conv.inputs, threads=1, rounds=1, min_sample_s=1e-4
    )
    checks = run(comparison)["checks"]
    assert isinstance(checks, dict)
    verdict = checks["tuned"]
    assert isinstance(verdict, dict)
    assert verdict["problem"] is None


def test_packing_moves_the_transform_out_of_the_inference(
    conv: Compiled, tuned: ms.database.MemoryDatabase, host: Host
) -> None:
    """Without the packing pass the same schedule costs a layout transform at run time: the pass is what saves it."""
    with host.target, tuned, pipeline.pass_context():
        applied = relax.transform.MetaScheduleApplyDatabase()(conv.module)
        unpacked = relax.transform.SplitLayoutRewritePreproc()(applied)
    assert len(called(unpacked)) > 1
    assert len(called(pipeline.pack_weights()(applied))) == 1


def test_record_that_is_not_taken(conv: Compiled, tuned: ms.database.MemoryDatabase, host: Host) -> None:
    """A kernel that should have a record and is left without one fails the build (tvm#10183, tvm#18224)."""
    [task] = tasks.extract(conv.module)
    with pytest.raises(BuildFailed, match=r"1 of 1 kernels did not take their record \(fused_conv2d"):
        library.apply_schedules(conv.module, ms.database.MemoryDatabase(), host.target, task.functions)
    with pytest.raises(BuildFailed, match=r"1 of 2 kernels .* \(another\)"):
        library.apply_schedules(conv.module, tuned, host.target, [*task.functions, "another"])


def test_records_of_another_pipeline(conv: Compiled, tuned: ms.database.MemoryDatabase, host: Host) -> None:
    """Records do not fit a module that was lowered by other passes, and that is an error, not an untuned library."""
    with host.target, pipeline.pass_context():
        other = tvm.transform.Sequential(
            [
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
            ]
        )(conv.imported.module)
    expected = [name for name in called(other) if "conv2d" in name]
    assert len(expected) == 1
    with pytest.raises(BuildFailed, match="different pipelines"):
        library.apply_schedules(other, tuned, host.target, expected)


def test_library_that_cannot_be_written(conv: Compiled, host: Host, tmp_path: Path) -> None:
    """What the compiler or the linker says becomes the message of one error."""
    with pytest.raises(BuildFailed, match="did not compile"):
        library.compile_library(conv.module, host.target, tmp_path / "missing" / "it.so")


def test_profile(host: Host, server: ForkServer, tmp_path: Path) -> None:
    """Each kernel that an inference calls has a time of its own, under its name in the module."""
    compiled = compile_model(matmuls(), host, tmp_path)
    found = server.call(profile.profile, str(compiled.untuned), compiled.inputs, 1, 3, deadline_s=60)
    kernels = {name for task in tasks.extract(compiled.module) for name in task.functions}
    assert kernels <= set(found)
    assert all(found[name] > 0 for name in kernels)


def test_profile_of_calls_of_one_kernel(host: Host, server: ForkServer, tmp_path: Path) -> None:
    """A kernel that is called twice is timed by the call, not by the inference."""
    model = make_model(
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])],
        [port("x", 8, 8)],
        [port("y", 8, 8)],
        {"w": normal(8, 8)},
    )
    compiled = compile_model(model, host, tmp_path)
    [task] = tasks.extract(compiled.module)
    assert task.calls == 2
    found = server.call(profile.profile, str(compiled.untuned), compiled.inputs, 1, 3, deadline_s=60)
    assert set(task.functions) <= set(found)
