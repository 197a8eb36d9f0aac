"""Cutting a module into tasks."""

from __future__ import annotations

from pathlib import Path

import tvm
from onnx import ModelProto, helper
from tvm.script import ir as I  # noqa: N812 - TVMScript's own spelling
from tvm.script import relax as R  # noqa: N812
from tvm.script import tirx as T  # noqa: N812

from tests.workers.conftest import Compiled, Host, lower, run_pipeline
from tests.workers.models import make_model, normal, port
from workers.graph import tasks
from workers.graph.tasks import Task


def extract(model: ModelProto, host: Host, folder: Path) -> list[Task]:
    return tasks.extract(run_pipeline(lower(model, host, folder)[1], host))


def stack(*sizes: int) -> ModelProto:
    """Convolutions of 8 channels in a row, one after the other on images of these sizes, max-pooled in between."""
    nodes, weights, previous = [], {}, "x"
    for index, size in enumerate(sizes):
        weights[f"w{index}"] = normal(8, 8, 3, 3, seed=index)
        nodes.append(helper.make_node("Conv", [previous, f"w{index}"], [f"c{index}"], pads=[1, 1, 1, 1]))
        previous = f"c{index}"
        if index + 1 < len(sizes) and sizes[index + 1] != size:
            nodes.append(helper.make_node("MaxPool", [previous], [f"p{index}"], kernel_shape=[2, 2], strides=[2, 2]))
            previous = f"p{index}"
    nodes.append(helper.make_node("Sigmoid", [previous], ["y"]))
    return make_model(nodes, [port("x", 1, 8, sizes[0], sizes[0])], [port("y", 1, 8, sizes[-1], sizes[-1])], weights)


def test_equal_kernels_are_one_task(host: Host, tmp_path: Path) -> None:
    """Layers of the same shapes are one task with as many calls, whatever their weights; other shapes are others."""
    found = extract(stack(8, 8, 8, 4), host, tmp_path)
    convolutions = [task for task in found if "conv2d" in task.name]
    # The first two of size 8 are alike, the third one too; the last is smaller and has the sigmoid fused into it.
    assert [task.calls for task in convolutions] == [3, 1]
    assert sum(task.calls for task in found) == 5


def test_order_and_names(host: Host, tmp_path: Path) -> None:
    """Tasks come in the order of their first call, each named by a kernel of the module."""
    _, imported = lower(stack(8, 4), host, tmp_path)
    module = run_pipeline(imported, host)
    found = tasks.extract(module)
    assert ["pool" in task.name for task in found] == [False, True, False]
    names = {variable.name_hint for variable in module.functions}
    assert {name for task in found for name in task.functions} <= names


def test_reduction(host: Host, tmp_path: Path) -> None:
    """A task knows whether it reduces, which is what makes it worth tuning."""
    found = extract(
        make_model(
            [
                helper.make_node("MatMul", ["x", "w"], ["a"]),
                helper.make_node("Transpose", ["a"], ["t"], perm=[1, 0]),
                helper.make_node("Concat", ["t", "t"], ["y"], axis=0),
            ],
            [port("x", 4, 8)],
            [port("y", 8, 4)],
            {"w": normal(8, 4)},
        ),
        host,
        tmp_path,
    )
    assert [task.has_reduction for task in found] == [True, *[False] * (len(found) - 1)]
    assert len(found) > 1


def test_kernels_that_nobody_calls(conv: Compiled) -> None:
    """A function that an inference does not call is no task."""
    extra = {tvm.ir.GlobalVar("unused"): conv.module[tasks.extract(conv.module)[0].name], **conv.module.functions}
    assert len(tasks.extract(tvm.ir.IRModule(extra))) == len(tasks.extract(conv.module)) == 1


@I.ir_module
class Twins:
    """Two kernels that are equal but for the names in them, called three times."""

    @T.prim_func(private=True, s_tir=True)
    def one(a: T.Buffer((T.int64(4),), "float32"), b: T.Buffer((T.int64(4),), "float32")):  # noqa: N805
        for i in range(T.int64(4)):
            with T.sblock("double"):
                v = T.axis.remap("S", [i])
                b[v] = a[v] * T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def two(c: T.Buffer((T.int64(4),), "float32"), d: T.Buffer((T.int64(4),), "float32")):  # noqa: N805
        for j in range(T.int64(4)):
            with T.sblock("double"):
                w = T.axis.remap("S", [j])
                d[w] = c[w] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):  # noqa: N805
        cls = Twins
        with R.dataflow():
            y = R.call_tir(cls.one, (x,), out_ty=R.Tensor((4,), "float32"))
            z = R.call_tir(cls.two, (y,), out_ty=R.Tensor((4,), "float32"))
            w = R.call_tir(cls.one, (z,), out_ty=R.Tensor((4,), "float32"))
            R.output(w)
        return w


def test_functions_that_differ_in_names_only(host: Host) -> None:
    """Kernels that are equal but for names are one task, which lists them all and counts their calls together."""
    [task] = tasks.extract(Twins)
    assert (task.functions, task.calls, task.has_reduction) == (["one", "two"], 3, False)
