"""What functions have to do at least, by hand-counted examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tvm
from onnx import TensorProto, helper

from tests.workers.conftest import Host, lower, run_pipeline, workload_of
from tests.workers.models import make_model, normal, port
from tuning_db.trials import Workload
from workers.graph import pipeline, tasks
from workers.graph.operators import Model
from workers.graph.work import Work, constants_of, work_of


def test_functions_of_tvms(host: Host, tmp_path: Path) -> None:
    """Operations are those of the values, bytes those that loops reach: of a table only the rows that are taken."""
    model = make_model(
        [
            helper.make_node("Gather", ["table", "rows"], ["taken"]),
            helper.make_node("MatMul", ["taken", "matrix"], ["y"]),
            helper.make_node("Softmax", ["z"], ["s"], axis=-1),
        ],
        [helper.make_tensor_value_info("rows", TensorProto.INT64, [16]), port("z", 8, 32)],
        [port("y", 16, 8), port("s", 8, 32)],
        {"table": normal(1000, 64), "matrix": normal(64, 8)},
    )
    _, imported = lower(model, host, tmp_path)
    found = {
        task.name.rstrip("0123456789"): (work_of(task.module), constants_of(task.module["main"]))
        for task in tasks.extract(run_pipeline(imported, host))
    }
    assert found["take"] == (Work(0, 4 * 16 * 64 * 2 + 8 * 16, 4 * 16 * 64), (0,))
    assert found["matmul"] == (Work(2 * 16 * 64 * 8, 4 * (16 * 64 + 64 * 8 + 16 * 8), 4 * 64 * 8), (1,))
    softmax, constants = found["softmax"]
    assert (softmax.bytes, softmax.constant_bytes, constants) == (2 * 4 * 8 * 32, 0, ())
    assert softmax.flops >= 3 * 8 * 32


def test_operators_know_their_work(host: Host, tmp_path: Path) -> None:
    """A dense layer of ours reads its weights, a product of two computed tensors has none."""
    model = make_model(
        [helper.make_node("Gemm", ["x", "w"], ["d"], transB=1), helper.make_node("MatMul", ["p", "q"], ["m"])],
        [port("x", 1, 64), port("p", 2, 16, 32), port("q", 2, 32, 16)],
        [port("d", 1, 128), port("m", 2, 16, 16)],
        {"w": normal(128, 64)},
    )
    _, imported = lower(model, host, tmp_path)
    with host.target, pipeline.pass_context():
        simplified = pipeline.simplify()(imported.module)

    def adopt(modules: Sequence[tvm.ir.IRModule]) -> list[Workload]:
        return [workload_of(module) for module in modules]

    operators = Model(simplified, host.target, host.cpu.lanes, True).extract(adopt)
    [dense] = [o for o in operators if o.variants[0].name == "dense"]
    [product] = [o for o in operators if o.variants[0].name == "matmul"]
    assert dense.flops == 2 * 64 * 128
    assert dense.constant_bytes == 4 * 64 * 128
    assert dense.bytes == 4 * (64 + 64 * 128 + 128)
    assert (product.flops, product.constant_bytes) == (2 * 2 * 16 * 32 * 16, 0)
    assert product.bytes == 4 * 2 * (16 * 32 + 32 * 16 + 16 * 16)
