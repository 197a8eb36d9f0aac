"""Models taken apart into kernels, each kernel under many choices of its template, run one by one and compared.

A kernel is compiled as the build step does it; what calls them is read from the emitted Relax function and carried out
here, so that no choice costs a whole library. The few operators that may lie between kernels are numpy's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
import tvm
from numpy.typing import NDArray
from onnx import ModelProto
from tvm import relax, s_tir, tirx
from tvm.ir.expr import GenericConst

from tests.workers.conftest import Host, lower
from tuning_db.keys import TensorSpec
from workers.graph import elementary, pipeline
from workers.graph.blocked import BlockedGraph
from workers.graph.computations import Computation, variants
from workers.packaging import reference
from workers.search.templates.knobs import Config, Cpu, template_of
from workers.search.templates.registry import TEMPLATES

Array = NDArray[Any]

AVX512 = Cpu(lanes=16, registers=32, l1_bytes=32 << 10, l2_bytes=1 << 20, threads=2)
AVX2 = Cpu(lanes=8, registers=16, l1_bytes=32 << 10, l2_bytes=1 << 19, threads=2)
NEON = Cpu(lanes=4, registers=32, l1_bytes=64 << 10, l2_bytes=1 << 20, threads=4)
CPUS = (AVX512, AVX2, NEON)
BLOCK = 16


@dataclass(frozen=True)
class Taken:
    """A model that the blocked pass has read."""

    model: Path  #: its shapes bound: what the reference runs
    inputs: tuple[TensorSpec, ...]
    graph: BlockedGraph

    def computations(self) -> dict[str, Computation]:
        """By the kernel's name, in the order of the calls."""
        return self.graph.emit(plain)[1]


def take(model: ModelProto, host: Host, folder: Path, *, signed: bool = False, half: bool = False) -> Taken:
    """Import, simplify, divide into kernels."""
    inputs, imported = lower(model, host, folder)
    with host.target, pipeline.pass_context():
        simplified = pipeline.simplify()(imported.module)
    return Taken(imported.bound, inputs, BlockedGraph(simplified, BLOCK, signed=signed, half=half))


def plain(computation: Computation) -> tuple[str, tirx.PrimFunc]:
    """The first variant, as it is."""
    return next(iter(variants(computation, rounding=True).items()))


def scheduled(function: tirx.PrimFunc, config: Config, cpu: Cpu) -> s_tir.Schedule:
    """A variant under one choice of the template that it is made for. The function may be changed by it."""
    found = template_of(function)
    assert found is not None
    name, geometry = found
    schedule = s_tir.Schedule(function, seed=1, error_render_level="fast")
    TEMPLATES[name].schedule(schedule, geometry, config, cpu)
    return schedule


def choices(function: tirx.PrimFunc, cpu: Cpu, count: int, seed: int) -> list[Config]:
    """The template's first guess and others at random, `count` in all where there are as many."""
    found = template_of(function)
    assert found is not None
    name, geometry = found
    configs = TEMPLATES[name].configs(geometry, cpu)
    assert configs, f"template {name!r} has no choice for {geometry} on {cpu}"
    others = random.Random(seed).sample(range(1, len(configs)), min(count, len(configs)) - 1)
    return [configs[0], *(configs[number] for number in sorted(others))]


def check(
    taken: Taken, host: Host, *, cpu: Cpu = AVX512, count: int = 3, seed: int = 0,
    quanta: Mapping[str, float] | None = None, exact: bool = False, as_written: bool = False,
) -> int:  # fmt: skip
    """Every variant of every kernel of the model computes what ONNX Runtime does, under `count` choices each.

    Outputs named in `quanta` may differ by that much, and in few places, `exact` ones in nothing; with `quanta`, or if
    asked for, ONNX Runtime runs the graph as it is written. The number of emissions run. AssertionError says which
    output differs, and under which choices.
    """
    emissions = []
    functions: dict[str, tirx.PrimFunc] = {}
    for choose in _choosers(taken, cpu, count, seed):
        module, computations = taken.graph.emit(choose)
        names = {name: f"{name}_{choose.number(computation)}" for name, computation in computations.items()}
        emissions.append((module, names, choose))
        for variable, function in module.functions.items():
            if isinstance(function, tirx.PrimFunc):
                # What the importer has written as a function stays as it is.
                name = names.setdefault(variable.name_hint, variable.name_hint)
                functions[name] = function.with_attr("global_symbol", name)
    # Less TVM's comparison of every argument with its buffer, a fifth of all that LLVM would do: `_run` compares them.
    usual = pipeline.pass_context()
    config = {**usual.config, "tirx.disable_assert": True}
    with tvm.transform.PassContext(opt_level=usual.opt_level, config=config):
        library = tvm.compile(elementary.lower_module(tvm.IRModule(functions)), target=host.target)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if quanta or as_written:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(taken.model, options, providers=["CPUExecutionProvider"])
    example = reference.example_inputs(taken.inputs, seed)
    wanted = session.run(None, example)
    outputs = [output.name for output in session.get_outputs()]
    for module, names, choose in emissions:
        kernels = {name: library[own] for name, own in names.items()}
        got = _run(module, kernels, [example[spec.name] for spec in taken.inputs])
        for name, a, b in zip(outputs, wanted, got, strict=True):
            if quanta and name in quanta:
                apart = np.abs(a.astype("float64") - b) / quanta[name]
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                assert apart.max() < 1.01, f"{name} is {apart.max():.1f} quanta apart with {choose.said} for {cpu}"
                assert np.count_nonzero(apart > 0.5) <= max(1, 0.05 * a.size), f"{name} differs in too many places"
                continue
            if exact:
                np.testing.assert_array_equal(b, a, f"{name} with {choose.said} for {cpu}")
                continue
            [entry] = reference.compare([a], [b], [name])
            assert entry["ok"], f"{entry['problem']} with {choose.said} for {cpu}"
    return len(emissions)


class _Chooser:
    """Schedules each computation by its own variant and choice, and remembers which."""

    def __init__(self, options: Mapping[Computation, Sequence[tuple[str, Config]]], turn: int, cpu: Cpu) -> None:
        self._options = options
        self._turn = turn
        self._cpu = cpu
        self.said: list[str] = []

    def number(self, computation: Computation) -> int:
        """Of the option that is taken."""
        return self._turn % len(self._options[computation])

    def __call__(self, computation: Computation) -> tuple[str, tirx.PrimFunc]:
        name, config = self._options[computation][self.number(computation)]
        self.said.append(f"{name} {dict(config)}")
        # Made anew for each schedule, which changes in place what it is given.
        function = variants(computation, rounding=True)[name]
        return name, scheduled(function, config, self._cpu).mod["main"]


def _choosers(taken: Taken, cpu: Cpu, count: int, seed: int) -> Iterator[_Chooser]:
    """As many as it takes to see every choice of every computation once."""
    options = {
        computation: [
            (name, config)
            for name, function in variants(computation, rounding=True).items()
            for config in choices(function, cpu, count, seed)
        ]
        for computation in taken.computations().values()
    }
    for turn in range(max(map(len, options.values()), default=0)):
        yield _Chooser(options, turn, cpu)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


#: Operators of TVM's that may lie between kernels.
_BETWEEN: Final[Mapping[str, Callable[..., Array]]] = {
    "reshape": lambda call, x: x,
    "permute_dims": lambda call, x: x.transpose([int(axis) for axis in call.attrs.axes]),
    "nn.relu": lambda call, x: np.maximum(x, 0),
    "nn.softmax": lambda call, x: _softmax(x),
    "matmul": lambda call, x, y: x @ y,
    "add": lambda call, x, y: x + y,
    "multiply": lambda call, x, y: x * y,
    "divide": lambda call, x, y: x / y,
    "quantize": lambda call, x, scale, zero: np.clip(np.rint(x / scale) + zero, 0, 255).astype(zero.dtype),
}


def _run(module: tvm.ir.IRModule, kernels: Mapping[str, Any], inputs: Sequence[Array]) -> list[Array]:
    """Carry out the calls of `main`."""
    main = module["main"]
    values: dict[Any, Any] = dict(zip(main.params, inputs, strict=True))

    def evaluate(expression: Any) -> Any:
        if isinstance(expression, relax.Var):
            return values[expression]
        if isinstance(expression, GenericConst):
            return expression.value.numpy()
        if isinstance(expression, relax.Tuple):
            return [evaluate(field) for field in expression.fields]
        if isinstance(expression, relax.TupleGetItem):
            return evaluate(expression.tuple_value)[expression.index]
        assert isinstance(expression, relax.Call), expression
        operator = expression.op.name.removeprefix("relax.")
        if operator == "split":
            ends = [int(end) for end in expression.attrs.indices_or_sections]
            return np.split(evaluate(expression.args[0]), ends, int(expression.attrs.axis))
        shape = [int(size) for size in expression.ty.shape]
        if operator in _BETWEEN:
            read = [evaluate(a) for a in expression.args if not isinstance(a, relax.ShapeExpr)]
            return np.asarray(_BETWEEN[operator](expression, *read)).reshape(shape)
        assert operator == "call_tir", f"{operator} is left to TVM"
        # What is not written must not look right by chance.
        dtype = np.dtype(str(expression.ty.dtype))
        result = tvm.runtime.tensor(np.full(shape, np.nan if dtype.kind == "f" else 77, dtype))
        arguments = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in evaluate(expression.args[1])]
        declared = [(tuple(map(int, p.ty.shape)), str(p.ty.dtype)) for p in module[expression.args[0]].params]
        assert declared == [(tuple(a.shape), str(a.dtype)) for a in (*arguments, result)]
        kernels[expression.args[0].name_hint](*arguments, result)
        return result.numpy()

    for block in main.body.blocks:
        for binding in block.bindings:
            values[binding.var] = evaluate(binding.value)
    result = evaluate(main.body.body)
    return result if isinstance(result, list) else [result]
