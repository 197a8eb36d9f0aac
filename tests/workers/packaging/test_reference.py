"""The numerical check: what it accepts of TVM, and that nothing wrong passes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from tests.workers.conftest import Compiled, Host, compile_model, differences
from tests.workers.frontend.test_onnx_model import branching, celu, folded_determinant, scaled
from tests.workers.models import conv_bn_relu, make_model, matmuls, normal, port
from tuning_db.keys import TensorSpec
from workers.packaging import baselines
from workers.packaging.reference import (
    TOLERANCE,
    Comparison,
    compare,
    example_inputs,
    forgive_rounding,
    run,
)
from workers.packaging.running import time_in_turns

QUICK: dict[str, Any] = {"threads": 1, "rounds": 1, "min_sample_s": 1e-4}


def gemm() -> ModelProto:
    return make_model(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5, beta=2.0, transB=1)],
        [port("x", 3, 8)],
        [port("y", 3, 5)],
        {"w": normal(5, 8), "b": normal(5, seed=1)},
    )


def softmax_of_opset_11(axis: int | None) -> ModelProto:
    attributes = {} if axis is None else {"axis": axis}
    return make_model(
        [helper.make_node("Softmax", ["x"], ["y"], **attributes)],
        [port("x", 2, 3, 4)],
        [port("y", 2, 3, 4)],
        opset=11,
    )


def reduction(operator: str, opset: int) -> ModelProto:
    """Two axes of four: as an attribute, or as an initializer where the operator set has it so."""
    as_input = opset >= 18
    attributes: dict[str, Any] = {"keepdims": 0} | ({} if as_input else {"axes": [1, 3]})
    node = helper.make_node(operator, ["p", "axes"] if as_input else ["p"], ["y"], **attributes)
    return make_model(
        [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Add", ["a", "one"], ["p"]), node],
        [port("x", 2, 3, 4, 5)],
        [port("y", 2, 4)],
        {"axes": np.array([1, 3]), "one": np.ones(1, dtype=np.float32)}
        if as_input
        else {"one": np.ones(1, dtype=np.float32)},
        opset=opset,
    )


def twin_convolutions() -> ModelProto:
    """Two convolutions with weights of the same shape and different values (tvm-ffi#645)."""
    return make_model(
        [
            helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["a", "w2"], ["y"], pads=[1, 1, 1, 1]),
        ],
        [port("x", 1, 8, 6, 6)],
        [port("y", 1, 8, 6, 6)],
        {"w1": normal(8, 8, 3, 3, seed=1), "w2": normal(8, 8, 3, 3, seed=2)},
    )


def integers() -> ModelProto:
    return make_model(
        [helper.make_node("ArgMax", ["x"], ["y"], axis=1, keepdims=0)],
        [port("x", 4, 9)],
        [port("y", 4, dtype=TensorProto.INT64)],
    )


def several_outputs() -> ModelProto:
    """Outputs of different types, one of them used inside the graph too, in an order of their own."""
    return make_model(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("ReduceSum", ["r"], ["s"], keepdims=0),
            helper.make_node("Greater", ["x", "s"], ["g"]),
            helper.make_node("Cast", ["r"], ["i"], to=TensorProto.INT32),
        ],
        [port("x", 3, 4)],
        [port("s"), port("g", 3, 4, dtype=TensorProto.BOOL), port("r", 3, 4), port("i", 3, 4, dtype=TensorProto.INT32)],
    )


def several_inputs() -> ModelProto:
    """Inputs in an order that is not that of their first use, one of them used by nobody."""
    return make_model(
        [helper.make_node("Sub", ["b", "a"], ["d"]), helper.make_node("Mul", ["d", "c"], ["y"])],
        [port("a", 2, 3), port("unused", 7), port("b", 2, 3), port("c", 2, 3)],
        [port("y", 2, 3)],
    )


def odd_names() -> ModelProto:
    """Names that are no identifiers, two of which differ only in what an identifier cannot hold."""
    return make_model(
        [helper.make_node("Sub", ["in/put:0", "in.put:0"], ["ausgänge [1]"])],
        [port("in/put:0", 2, 3), port("in.put:0", 2, 3)],
        [port("ausgänge [1]", 2, 3)],
    )


def constant_output() -> ModelProto:
    return make_model(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["w"], ["n"])],
        [port("x", 2, 3)],
        [port("y", 2, 3), port("n", 4)],
        {"w": normal(4)},
    )


def input_as_output() -> ModelProto:
    return make_model(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Identity", ["x"], ["same"])],
        [port("x", 2, 3)],
        [port("y", 2, 3), port("same", 2, 3)],
    )


def negative_indices() -> ModelProto:
    """Gather with indices from the end (tvm#20217): 0 and 1 from the examples become -1 and 0."""
    return make_model(
        [
            helper.make_node("Sub", ["i", "one"], ["shifted"]),
            helper.make_node("Gather", ["table", "shifted"], ["y"], axis=0),
        ],
        [port("i", 5, dtype=TensorProto.INT64)],
        [port("y", 5, 4)],
        {"one": np.array([1]), "table": normal(6, 4)},
    )


def half_precision() -> ModelProto:
    return make_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [port("x", 4, 16, dtype=TensorProto.FLOAT16)],
        [port("y", 4, 8, dtype=TensorProto.FLOAT16)],
        {"w": normal(16, 8).astype(np.float16)},
    )


def sums() -> ModelProto:
    return make_model(
        [helper.make_node("Sum", ["x", "w", "x"], ["y"])], [port("x", 2, 3)], [port("y", 2, 3)], {"w": normal(3)}
    )


MODELS: dict[str, Callable[[], ModelProto]] = {
    "matmuls": matmuls,
    "gemm": gemm,
    "softmax-11": lambda: softmax_of_opset_11(None),  # tvm#20183
    "softmax-11-axis-1": lambda: softmax_of_opset_11(1),
    "softmax-11-axis-2": lambda: softmax_of_opset_11(2),
    "reduce-mean-13": lambda: reduction("ReduceMean", 13),
    "reduce-mean-18": lambda: reduction("ReduceMean", 18),  # tvm#18072
    "reduce-log-sum-exp-18": lambda: reduction("ReduceLogSumExp", 18),
    "reduce-sum-square-18": lambda: reduction("ReduceSumSquare", 18),
    "twin-convolutions": twin_convolutions,
    "integers": integers,  # tvm#17835
    "several-outputs": several_outputs,
    "several-inputs": several_inputs,
    "odd-names": odd_names,
    "constant-output": constant_output,
    "input-as-output": input_as_output,
    "negative-indices": negative_indices,
    "half-precision": half_precision,
    "sums": sums,
    "known-branch": branching,
    "known-other-branch": lambda: branching(False),
    "own-function": scaled,
    "standard-function": celu,
    "folded-determinant": folded_determinant,
}


def check(compiled: Compiled) -> dict[str, Any]:
    result = run(Comparison(str(compiled.reference), {"it": str(compiled.untuned)}, compiled.inputs, **QUICK))
    verdict: Any = result["checks"]
    checked: dict[str, Any] = verdict["it"]
    return checked


@pytest.mark.parametrize("name", MODELS)
def test_agreement(name: str, host: Host, tmp_path: Path) -> None:
    """A model compiled without tuning gives what ONNX Runtime gives, on three inputs."""
    compiled = compile_model(MODELS[name](), host, tmp_path)
    verdict = check(compiled)
    assert verdict["problem"] is None
    assert verdict["ok"] is True
    assert verdict["samples"] == 3
    assert 0 <= verdict["max_abs_diff"] < 1e-2


#: What takes NaN as ONNX Runtime does, though TVM's own Relu and Sign (tvm#19572) and Min (tvm#19540) do not.
_KEEP_NAN = ("Abs", "Neg", "Exp", "Sqrt", "Sigmoid", "Tanh", "Erf", "LeakyRelu", "Relu", "Sign", "Min", "Max", "Clip")
#: What does not.
_LOSE_NAN = ("ArgMin", "ReduceMin")


def not_a_number() -> ModelProto:
    """Rows with NaN in their middle, read by every one of these operators."""
    bounds = {"low": np.array(-0.5, np.float32), "high": np.array(0.5, np.float32)}
    more = {"Min": ["x"], "Max": ["x"], "Clip": ["low", "high"]}
    rows = {"ArgMin": {"axis": 1}, "ReduceMin": {"axes": [1]}}
    nodes = [helper.make_node("Mul", ["x", "w"], ["m"])]
    outputs = []
    for operator in (*_KEEP_NAN, *_LOSE_NAN):
        nodes.append(helper.make_node(operator, ["m", *more.get(operator, [])], [operator], **rows.get(operator, {})))
        dtype = TensorProto.INT64 if operator == "ArgMin" else TensorProto.FLOAT
        outputs.append(port(operator, 2, 1 if operator in rows else 3, dtype=dtype))
    weights = {"w": np.array([1, np.nan, 2], dtype=np.float32), **bounds}
    return make_model(nodes, [port("x", 2, 3)], outputs, weights)


def test_not_a_number(host: Host, tmp_path: Path) -> None:
    """Where TVM and ONNX Runtime disagree about NaN the library is refused (tvm#19572, tvm#19540); NaN in the same
    places is agreement."""
    found = dict(differences(not_a_number(), host, tmp_path))
    assert tuple(found) == _LOSE_NAN


def wrong_convolution() -> ModelProto:
    model = conv_bn_relu()
    weights = model.graph.initializer[0]
    weights.raw_data = normal(16, 8, 3, 3, seed=77).tobytes()
    return model


def test_another_models_library(conv: Compiled, host: Host, tmp_path: Path) -> None:
    """A library with other weights (numbers that changed, as in tvm#17947) is refused, and the output is named with
    both differences."""
    other = compile_model(wrong_convolution(), host, tmp_path)
    comparison = Comparison(
        str(conv.reference), {"right": str(conv.untuned), "wrong": str(other.untuned)}, conv.inputs, **QUICK
    )
    checks: Any = run(comparison)["checks"]
    assert checks["right"]["ok"] is True
    assert checks["wrong"]["ok"] is False
    assert checks["wrong"]["problem"].startswith("output 'y': differs by ")
    assert checks["wrong"]["max_abs_diff"] > 1e-2


def compare_one(wanted: NDArray[Any], got: NDArray[Any]) -> dict[str, Any]:
    [entry] = compare([wanted], [got], ["y"])
    return dict(entry)


REFERENCE = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, 4.0]], dtype=np.float32)


def changed(value: float) -> NDArray[np.float32]:
    array = REFERENCE.copy()
    array[1, 0] = value
    return array


@pytest.mark.parametrize(
    ("wanted", "got", "problem"),
    [
        (REFERENCE, changed(1e-3), "differs by 0.001"),
        (REFERENCE, -REFERENCE, "differs by 8"),
        (REFERENCE, REFERENCE.astype(np.float64), "library is float64"),
        (REFERENCE, REFERENCE.reshape(3, 2), r"library is float32\[3, 2\]"),
        (REFERENCE, REFERENCE[:, :1], "reference is float32"),
        (REFERENCE, changed(np.nan), "NaN"),
        (changed(np.nan), REFERENCE, "NaN"),
        (REFERENCE, changed(np.inf), "infinities"),
        (changed(np.inf), changed(-np.inf), "infinities"),
        (changed(np.inf), changed(3.4e38), "infinities"),
        # A detector's probabilities where there is nothing: zeros in their place are within any bound made for 1.
        (REFERENCE * np.float32(1e-5), REFERENCE * np.float32(0), "differ by 100%"),
        (np.array([1, 2]), np.array([1, 3]), "1 of 2 elements differ"),
        (np.array([1, 2]), np.array([1, 2], dtype=np.int32), "library is int32"),
        (np.array([True, False]), np.array([True, True]), "1 of 2 elements differ"),
    ],
)
def test_differences(wanted: NDArray[Any], got: NDArray[Any], problem: str) -> None:
    """A difference of value, dtype, shape, NaN or infinity is refused and described."""
    entry = compare_one(wanted, got)
    assert entry["ok"] is False
    assert re.search(problem, entry["problem"]), entry["problem"]


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        (REFERENCE, REFERENCE + np.float32(1e-5)),
        (REFERENCE * np.float32(1000), REFERENCE * np.float32(1000.01)),
        (REFERENCE * np.float32(1e-5), REFERENCE * np.float32(1.01e-5)),
        (REFERENCE * np.float32(1e-8), -REFERENCE * np.float32(1e-8)),
        (changed(np.nan), changed(np.nan)),
        (changed(-np.inf), changed(-np.inf)),
        (np.array([1, 2]), np.array([1, 2])),
        (np.zeros((0, 3), dtype=np.float32), np.zeros((0, 3), dtype=np.float32)),
        (np.float32(2).reshape(()), np.float32(2).reshape(())),
        (np.array([-0.0], dtype=np.float32), np.array([0.0], dtype=np.float32)),
    ],
)
def test_no_difference(wanted: NDArray[Any], got: NDArray[Any]) -> None:
    """Rounding within the tolerance, and NaN and infinities in the same places, are no difference."""
    assert compare_one(wanted, got)["ok"] is True


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tolerance_follows_the_magnitude(dtype: str) -> None:
    """The tolerance is relative to the largest output, and to 1 for smaller ones."""
    large, small = np.array([100.0, 1.0], dtype=dtype), np.array([0.001, 0.0], dtype=dtype)
    assert compare_one(large, large)["tolerance"] == pytest.approx(100 * TOLERANCE[dtype])
    assert compare_one(small, small)["tolerance"] == TOLERANCE[dtype]


def judged(got: NDArray[Any], fp32: NDArray[Any] | None, wanted: NDArray[Any]) -> tuple[dict[str, Any], list[Any]]:
    """What becomes of the entry of one output of one sample, and what is told of the output."""
    entries = compare([wanted], [got], ["y"])
    told = forgive_rounding([entries], [[wanted]], [[got]], None if fp32 is None else [[fp32]])
    return entries[0], told


def test_rounding_of_a_quantized_library() -> None:
    """A quantized library may be off by whole quanta as long as it is as near to fp32 as ONNX Runtime's run is, or,
    where there is no fp32, near enough to that; an output of another kind, NaN or too much noise stays a problem."""
    fp32 = normal(1000) * 8
    wanted = np.round(fp32 * 16) / 16
    got = wanted.copy()
    got[::50] += 1 / 16  # a quantum, in two of a hundred elements
    entry, [told] = judged(got, fp32, wanted)
    assert entry["ok"]
    assert "problem" not in entry
    assert entry["max_abs_diff"] > entry["tolerance"]
    assert told["sqnr_db"] < told["reference_sqnr_db"] < told["sqnr_db"] + 1
    assert judged(got, None, wanted)[0]["ok"]
    got[::5] += 1 / 16
    entry, _ = judged(got, fp32, wanted)
    assert not entry["ok"]
    assert re.search(r"differs by .*; its noise is \d+\.\d dB above what quantization allows", entry["problem"])
    assert not judged(wanted + 1, None, wanted)[0]["ok"]
    assert judged((wanted > 0).astype(np.uint8), None, wanted)[0]["problem"].startswith("reference is float32")
    spoilt = got.copy()
    spoilt[3] = np.nan
    assert not judged(spoilt, fp32, wanted)[0]["ok"]
    bytes_, indices = np.arange(100, dtype=np.uint8), np.arange(100)
    assert judged(bytes_ + np.uint8(1), None, bytes_)[0]["ok"]
    assert not judged(indices + 1, None, indices)[0]["ok"]


def test_exact_reference_stays_exact() -> None:
    """Where quantization costs nothing, nothing is forgiven."""
    wanted = np.arange(8, dtype=np.float32)
    assert not judged(wanted + np.float32(0.5), wanted, wanted)[0]["ok"]


def test_number_of_outputs() -> None:
    """A library with another number of outputs is never taken for equal."""
    with pytest.raises(ValueError, match="argument 3 is shorter"):
        compare([REFERENCE, REFERENCE], [REFERENCE], ["a", "b"])


def test_example_inputs() -> None:
    """Examples are the same for the same seed; integers can be divided by, and index as short an axis as is asked."""
    specs = [TensorSpec("x", "float16", (4, 5)), TensorSpec("i", "int64", (9,)), TensorSpec("m", "bool", (3,))]
    one, two, other = example_inputs(specs, 0), example_inputs(specs, 0), example_inputs(specs, 1)
    assert {name: (str(array.dtype), array.shape) for name, array in one.items()} == {
        "x": ("float16", (4, 5)), "i": ("int64", (9,)), "m": ("bool", (3,)),
    }  # fmt: skip
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not np.array_equal(one["x"], other["x"])
    assert set(one["i"].tolist()) == {1, 2}
    assert set(example_inputs(specs, 0, (0, 1))["i"].tolist()) == {0}


def test_time_in_turns() -> None:
    """Each caller gives the samples asked for, and is called before it is timed."""
    calls: list[str] = []
    samples = time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, 1e-9)
    assert {label: len(taken) for label, taken in samples.items()} == {"a": 3, "b": 3}
    assert calls == ["a", "a", "b", "b", *["a", "b"] * 3]


def test_fresh_process(conv: Compiled, tmp_path: Path) -> None:
    """Started as a command it prints one JSON object, and runs TVM on the threads asked for."""
    spec = tmp_path / "comparison.json"
    comparison = Comparison(str(conv.reference), {"untuned": str(conv.untuned)}, conv.inputs, **{**QUICK, "threads": 2})
    spec.write_text(comparison.to_json())
    assert Comparison.from_json(spec.read_text()) == comparison
    done = subprocess.run(
        [sys.executable, "-m", "workers.packaging.reference", str(spec), str(os.getpid())],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["checks"]["untuned"]["ok"] is True
    engines = {engine for engine, version in baselines.available().items() if version is not None}
    assert set(answer["samples_s"]) == {"untuned", *engines}
    assert answer["engines"] == {name: {"version": baselines.available()[name]} for name in engines}
    assert all(sample > 0 for samples in answer["samples_s"].values() for sample in samples)
    program = (
        "import sys, tvm; from workers.packaging.reference import *; "
        "run(Comparison.from_json(Path(sys.argv[1]).read_text())); print(tvm.runtime.num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(spec)],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.split() == ["2"]


def gather_of_one_row() -> ModelProto:
    return make_model(
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [port("i", 4, dtype=TensorProto.INT64)],
        [port("y", 4, 8)],
        {"table": normal(1, 8)},
    )


def integer_division() -> ModelProto:
    return make_model(
        [helper.make_node("Div", ["a", "b"], ["y"])],
        [port("a", 6, dtype=TensorProto.INT64), port("b", 6, dtype=TensorProto.INT64)],
        [port("y", 6, dtype=TensorProto.INT64)],
    )


@pytest.mark.parametrize("model", [gather_of_one_row(), integer_division()], ids=["gather", "division"])
def test_integers_that_the_model_can_take(model: ModelProto, host: Host, tmp_path: Path) -> None:
    """Examples are found that index a table of one row, and that can be divided by."""
    compiled = compile_model(model, host, tmp_path)
    result: Any = run(Comparison(str(compiled.reference), {"it": str(compiled.untuned)}, compiled.inputs, **QUICK))
    assert result["checks"]["it"]["ok"], result["checks"]["it"]["problem"]


def test_a_model_that_takes_none_of_our_examples(host: Host, tmp_path: Path) -> None:
    """When ONNX Runtime itself refuses every example, that is said, and not that the library were bad."""
    model = make_model(
        [helper.make_node("Gather", ["table", "j"], ["y"]), helper.make_node("Add", ["i", "far"], ["j"])][::-1],
        [port("i", 4, dtype=TensorProto.INT64)],
        [port("y", 4, 8)],
        {"table": normal(2, 8), "far": np.array(100)},
    )
    compiled = compile_model(model, host, tmp_path)
    result: Any = run(Comparison(str(compiled.reference), {"it": str(compiled.untuned)}, compiled.inputs, **QUICK))
    assert "out of data bounds" in result["refused"]
    assert "checks" not in result


def test_outputs_of_which_nothing_was_compared(host: Host, tmp_path: Path) -> None:
    """An output that is NaN throughout agrees, and the verdict says that no value of it was compared."""
    model = make_model(
        [helper.make_node("Sqrt", ["minus"], ["nan"]), helper.make_node("Add", ["x", "nan"], ["y"]),
         helper.make_node("Relu", ["x"], ["z"])],
        [port("x", 4)], [port("y", 4), port("z", 4)], {"minus": np.full(4, -1.0, dtype=np.float32)},
    )  # fmt: skip
    compiled = compile_model(model, host, tmp_path)
    result: Any = run(Comparison(str(compiled.reference), {"it": str(compiled.untuned)}, compiled.inputs, **QUICK))
    assert result["checks"]["it"]["ok"]
    assert result["checks"]["it"]["outputs_without_finite_values"] == ["y"]
