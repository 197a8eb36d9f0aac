"""Carries blocked layouts through a whole graph, and fuses what surrounds each heavy operator into its computation.

Convolutions, and what follows from them, are taken out of a Relax function as calls of computations from
`workers.graph.computations`, with elementwise operators before and behind them as prologue and epilogue, and constants
in the order that the layout wants. Layouts are changed only where a blocked tensor meets an operator that is not ours,
or leaves the graph. What lies in between stays Relax, for TVM's own lowering.

Which operators end up in one kernel is decided by dominance, as in TVM's FuseOps: an operator is fused into the one
before it when nothing else needs what lies between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.ir.expr import GenericConst

from workers.graph.computations import (
    BatchMatmul,
    Computation,
    Convolution,
    Copy,
    Dense,
    Pointwise,
    Pooling,
    View,
    pack_weights,
)  # fmt: skip
from workers.graph.folding import channel_vector, fold_affine, merge_affine, shifted
from workers.graph.half import is_half
from workers.graph.integer import IntegerConvolution, IntegerDense
from workers.graph.integer_nodes import FEW_CHANNELS, IntegerNodes, integer_convolution, integer_dense
from workers.graph.integer_nodes import Integers as _Integers
from workers.graph.layout import NONE, Slots
from workers.graph.nodes import Blocked as _Blocked
from workers.graph.nodes import Group as _Group
from workers.graph.nodes import Node as _Node
from workers.graph.nodes import array_of as _array
from workers.graph.nodes import averages_pixels as _averages_pixels
from workers.graph.nodes import dtype_of as _dtype
from workers.graph.nodes import fits_pool as _fits_pool
from workers.graph.nodes import four as _four
from workers.graph.nodes import is_depthwise as _is_depthwise
from workers.graph.nodes import is_float as _is_float
from workers.graph.nodes import is_nchw as _is_nchw
from workers.graph.nodes import number_of as _number
from workers.graph.nodes import pair as _pair
from workers.graph.nodes import pool_window_of as _pool_window
from workers.graph.nodes import rewritten
from workers.graph.nodes import shape_of as _shape
from workers.graph.nodes import size_of as _hw
from workers.graph.nodes import window_of as _window
from workers.graph.parts import Fused, Window
from workers.graph.pointwise import OPERATORS, VALUE, Program, Ref, Step
from workers.graph.quantized import Grid, folded, grid_of

Array = NDArray[Any]

#: The name of the chosen computation of an operator, and its function: scheduled, or plain for cutting tasks.
Choose = Callable[[Computation], tuple[str, tvm.tirx.PrimFunc]]

#: Steps that one kernel takes in at most: beyond, expressions are computed anew too often.
_MAX_STEPS: Final = 24
#: Operations of a kernel's chain (`Program.size`): three transcendental functions of each other are beyond it.
_MAX_SIZE: Final = 1000
#: A tensor of more is left to TVM, whose indices are 64 bits wide. Padded it may be twice as large.
_MAX_ELEMENTS: Final = 2**30
#: Attribute of a function that is a kernel of ours: its name, which TVM's passes do not keep.
KERNEL_ATTR: Final = "tunery.kernel"
#: Operators that give uint8 and are ours where their data is blocked.
_ON_BYTES: Final = frozenset({"quantize", "nn.max_pool2d", "concat", "reshape"})
#: TVM's pattern of what is never fused with anything.
_OPAQUE: Final = 8


@dataclass(frozen=True, slots=True)
class _Product:
    """What a product of batches of matrices reads."""

    batch: int
    rows: int
    length: int
    columns: int
    left: Any
    left_view: View
    right: Any
    right_view: View


class BlockedGraph(IntegerNodes):
    """`main` of a module, read and divided into kernels. `emit` writes it with the kernels that it is given."""

    def __init__(self, module: tvm.ir.IRModule, block: int, *, signed: bool = False, half: bool = False) -> None:
        """NotBlockable if `main` is not one dataflow block of static shapes. `signed`: whether products of integers are
        of data less 128, as `sdot` wants it. `half`: whether weights all of which are numbers of float16 are kept so.
        """
        self.block = block
        self.half = half
        super().__init__(module, block, signed=signed)
        self._products: dict[int, _Product] = {}
        self._merged_heads: dict[int, int] = {}  #: by the anchor of a product, the heads that its result is made of
        for node in self._nodes:
            if node.index not in self._group_of:
                self._consider(node)
        self._prologues = self._find_prologues()

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the graph is ours."""
        return not self._group_of

    def emit(self, choose: Choose) -> tuple[tvm.ir.IRModule, dict[str, Computation]]:
        """The module with kernels as `choose` gives them, and the computation of each kernel's name."""
        emission = _Emission(self, choose)
        module = emission.module()
        return module, emission.computations

    # Division into kernels

    def _consider(self, node: _Node) -> None:
        """Begin a kernel at this node if it is one of ours."""
        operator, arguments = node.operator, node.arguments
        if not (_is_float(node.variable) or (operator in _ON_BYTES and _dtype(node.variable) == "uint8")):
            return
        if not self._is_addressable(node):
            return
        integers = self._integers_of(node)
        if integers is None and operator in ("matmul", "nn.conv2d"):
            self._fold_weights(node)
        if integers is not None:
            self._integers[node.index] = integers
            group = _Group(node.index, [*integers.absorbed, node.index])
            self._grow(group, node.variable, node.index + 1, rows=integers.rows)
            self._settle(group, blocked=not integers.rows)
        elif operator == "dequantize":
            self._consider_dequantized(node)
        elif operator == "matmul" and _is_dense(node) and not self._is_blocked(arguments[0]):
            group = _Group(node.index, [node.index])
            self._grow(group, node.variable, node.index + 1, rows=True)
            self._settle(group, blocked=False)
        elif operator == "matmul" and (product := self._product(node)) is not None:
            self._products[node.index] = product
            group = _Group(node.index, [node.index])
            self._grow(group, node.variable, node.index + 1, rows=True, numbers_only=True)
            self._merge_heads(group)
            self._settle(group, blocked=False)
        elif operator in _ANCHORS:
            if not _ANCHORS[operator](self, node):
                return
            group = _Group(node.index, [node.index])
            self._grow(group, node.variable, node.index + 1)
            self._settle(group)
        elif operator == "concat":
            if _is_channel_concat(node) and all(map(self._is_blocked, arguments[0].fields)):
                self._settle(_Group(node.index, [node.index]))
        elif operator == "reshape":
            if self._is_blocked(arguments[0]) and _drops_pixels(arguments[0], node):
                self._settle(_Group(node.index, [node.index]))
            else:
                self._shuffle(node)
        elif operator in OPERATORS and len(node.shape) in (2, 4):
            first, through = self._first(node)
            if first is not None:
                group = _Group(None, [], first=first)
                self._grow(group, first, node.index, through=through)
                if group.members:
                    self._settle(group)

    def _first(self, node: _Node) -> tuple[Any, _Node | None]:
        """What a group without an anchor starts from that begins at this node, and what dequantizes it before."""
        for argument in node.arguments:
            if self._is_blocked(argument) and _shape(argument) == node.shape:
                return argument, None
            dequantized = self._dequantized(argument)
            if dequantized is not None and dequantized.shape == node.shape:
                source = dequantized.arguments[0]
                if self._is_blocked(source):
                    return source, dequantized
        return None, None

    def _consider_dequantized(self, node: _Node) -> None:
        """Where no kernel reads the integers themselves, the real numbers are made by one of their own, which a
        convolution may take in as its prologue."""
        source = node.arguments[0]
        if self._dequantized(node.variable) is not None and self._is_blocked(source) and self._may_end_at(node):
            group = _Group(None, [], first=source)
            self._grow(group, source, node.index + 1, through=node)
            self._settle(group)

    def _fold_weights(self, node: _Node) -> None:
        """Weights that are int8 in the graph, for an operator that is computed in float32 after all."""
        weight = self._node(node.arguments[1])
        constant = None if weight is None else folded(weight.value)
        if constant is not None:
            node.arguments[1] = relax.const(constant)

    def _is_addressable(self, node: _Node) -> bool:
        """Whether everything that is read and written is so small that the 32-bit indices of our kernels reach it."""
        tensors = [node.variable, *(a for a in node.arguments if isinstance(a, relax.Var | GenericConst))]
        for shape in map(_shape, tensors):
            blocks = [-(-size // self.block) * self.block if axis == 1 else size for axis, size in enumerate(shape)]
            if math.prod(blocks) > _MAX_ELEMENTS:
                return False
        return True

    def _settle(self, group: _Group, *, blocked: bool = True) -> None:
        for index in group.members:
            self._group_of[index] = group
        if blocked:
            self._blocked.add(group.last)

    def _shuffle(self, node: _Node) -> None:
        """A shuffle of channels, three operators by its usual spelling, renames slots and moves nothing."""
        chain = [node]
        while len(chain) < 3:
            uses = chain[-1].uses
            if len(uses) != 1 or uses[0] < 0:
                return
            chain.append(self._nodes[uses[0]])
        if [n.operator for n in chain] != ["reshape", "permute_dims", "reshape"]:
            return
        source = node.arguments[0]
        before, apart, after = _shape(source), chain[0].shape, chain[2].shape
        axes = [int(axis) for axis in chain[1].attributes.axes]
        if (
            self._is_blocked(source)
            and len(before) == 4
            and before == after
            and len(apart) == 5
            and apart[0] == before[0]
            and apart[3:] == before[2:]
            and axes == [0, 2, 1, 3, 4]
        ):
            self._settle(_Group(chain[0].index, [n.index for n in chain]))

    def _grow(
        self, group: _Group, value: Any, begin: int, *, rows: bool = False, numbers_only: bool = False,
        through: _Node | None = None,
    ) -> None:  # fmt: skip
        """Take in elementwise nodes from `begin` on, as far as everything that reads a part of them is taken in too.

        They are what comes of `value`: the anchor's, or what a group without anchor starts from, which others may read.
        Of plain `rows` only the number and the length matter: how they are divided over leading axes does not. Where a
        node `through` dequantizes the value, it is the first step.
        """
        shape = _as_rows(_shape(value)) if rows else _shape(value)
        inside: dict[Any, Ref] = {value: VALUE}
        steps: list[Step] = []
        operands: list[Any] = []
        taken: list[_Node] = []
        fused = 0  #: of those taken
        if through is not None:
            inside = {through.variable: ("step", 0)}
            steps, taken = [Step("dequantize", (VALUE, *self._numbers(through)))], [through]
            if self._may_end_at(through):
                group.members, group.steps, fused = [through.index], list(steps), 1
        spread = group.anchor is not None and self._nodes[group.anchor].operator == "nn.conv2d_transpose"
        for node in self._nodes[begin : begin + 4 * _MAX_STEPS]:
            if not any(a in inside for a in node.arguments if isinstance(a, relax.Var)):
                continue
            if rows and node.operator == "reshape" and _as_rows(node.shape) == shape:
                inside[node.variable] = inside[node.arguments[0]]
            else:
                found = None
                if node.operator in OPERATORS and node.index not in self._group_of and len(steps) < _MAX_STEPS:
                    found = self._step(node, shape, inside, operands, len(steps), constants_only=spread, rows=rows)
                added, absorbed = ([], []) if found is None else found
                if numbers_only and any(kind == "input" for step in added for kind, _ in step.arguments):
                    added = []
                if Program((*steps, *added)).size > _MAX_SIZE:
                    added = []
                if not added:
                    # What it reads stays visible outside: nothing more can be taken in unless that was the last taken.
                    break
                steps += added
                taken += absorbed
                inside[node.variable] = ("step", len(steps) - 1)
            taken.append(node)
            if self._is_closed(group, value, taken) and self._may_end_at(node):
                group.members += [n.index for n in taken[fused:]]
                group.steps, group.operands, fused = list(steps), list(operands), len(taken)

    def _is_closed(self, group: _Group, value: Any, taken: Sequence[_Node]) -> bool:
        """Whether only the last node taken is read from outside. What a group without anchor starts from may be."""
        indices = {node.index for node in taken}
        hidden = list(taken[:-1])
        anchor = self._node(value)
        if group.anchor is not None and anchor is not None:
            hidden.append(anchor)
        return all(use in indices for node in hidden for use in node.uses)

    def _step(
        self, node: _Node, shape: tuple[int, ...], inside: dict[Any, Ref], operands: list[Any], count: int, *,
        constants_only: bool, rows: bool,
    ) -> tuple[list[Step], list[_Node]] | None:  # fmt: skip
        """The node as a step behind `count` others, with those that dequantize what it reads, and the nodes that these
        stand for; None if it cannot be one. New operands are added."""
        if (_as_rows(node.shape) if rows else node.shape) != shape:
            return None
        if node.operator in ("quantize", "dequantize"):
            grid = grid_of(node.arguments, _dtype(node.variable if node.operator == "quantize" else node.arguments[0]))
            if grid is None or grid.dtype != "uint8" or node.arguments[0] not in inside:
                return None
            return [Step(node.operator, (inside[node.arguments[0]], *self._numbers(node)))], []
        if not _is_float(node.variable):
            return None
        fits = _matches_rows if rows else _broadcasts
        references: list[Ref] = []
        added: list[Any] = []
        steps: list[Step] = []
        absorbed: list[_Node] = []
        for argument in node.arguments:
            if isinstance(argument, relax.Var) and argument in inside:
                references.append(inside[argument])
                continue
            number = _number(argument)
            if number is not None:
                references.append(("number", number))
                continue
            if not fits(argument, shape) or (constants_only and not isinstance(argument, GenericConst)):
                return None
            place: Ref = ("input", len(operands) + len(added))
            dequantized = self._dequantized(argument)
            if dequantized is None:
                references.append(place)
                added.append(argument)
            else:
                steps.append(Step("dequantize", (place, *self._numbers(dequantized))))
                references.append(("step", count + len(steps) - 1))
                added.append(dequantized.arguments[0])
                absorbed.append(dequantized)
        if node.operator == "leakyrelu":
            references.append(("number", float(node.attributes.alpha)))
        operands += added
        return [*steps, Step(node.operator, tuple(references))], absorbed

    @staticmethod
    def _numbers(node: _Node) -> list[Ref]:
        """What a step that quantizes or dequantizes is given beside its value."""
        quantizes = node.operator == "quantize"
        grid = grid_of(node.arguments, _dtype(node.variable if quantizes else node.arguments[0]))
        assert grid is not None
        numbers = [grid.scale, grid.zero, *(grid.bounds if quantizes else ())]
        return [("number", float(number)) for number in numbers]

    def _product(self, node: _Node) -> _Product | None:
        """A product of two batches of matrices that are both computed, if it is one of ours."""
        left, right = node.arguments
        shapes = _shape(left), _shape(right), node.shape
        if isinstance(left, GenericConst) or isinstance(right, GenericConst) or len({len(s) for s in shapes}) > 1:
            return None
        if len(node.shape) < 3 or not shapes[0][:-2] == shapes[1][:-2] == node.shape[:-2]:
            return None
        if not _is_float(left) or not _is_float(right):
            return None
        if -(-node.shape[-1] // self.block) * self.block > 2 * node.shape[-1]:
            return None  # most of what is computed would be thrown away
        return _Product(
            math.prod(node.shape[:-2]), node.shape[-2], shapes[0][-1], node.shape[-1],
            *self._view(left, shapes[0]), *self._view(right, shapes[1]),
        )  # fmt: skip

    def _view(self, expression: Any, shape: tuple[int, ...]) -> tuple[Any, View]:
        """The tensor in which a batch of matrices really lies, and how: attention's heads are cut from rows."""
        node = self._node(expression)
        if node is None or node.operator != "permute_dims" or len(shape) != 4 or node.attributes.axes is None:
            return expression, View()
        axes = [int(axis) for axis in node.attributes.axes]
        if axes == [0, 1, 3, 2]:
            return node.arguments[0], View(0, True)
        source = self._node(node.arguments[0])
        if axes not in ([0, 2, 1, 3], [0, 2, 3, 1]) or source is None or source.operator != "reshape":
            return expression, View()
        _, _, heads, size = source.shape
        before = _shape(source.arguments[0])
        if self._is_blocked(source.arguments[0]) or len(before) < 2 or before[-1] != heads * size:
            return expression, View()
        if source.index in self._group_of:
            # Of a single head, the reshape may be the last part of a kernel: what it reads is not seen outside.
            return expression, View()
        rows, begin = self._columns_of(source.arguments[0])
        if begin % size or _shape(rows)[-1] % size or self._is_blocked(rows):
            return source.arguments[0], View(heads, axes == [0, 2, 3, 1])
        beside = _shape(rows)[-1] // size
        return rows, View(heads, axes == [0, 2, 3, 1], begin // size, 0 if beside == heads else beside)

    def _columns_of(self, expression: Any) -> tuple[Any, int]:
        """The rows that this is a part of, if they are split into columns, and which column it begins with."""
        node = self._node(expression)
        if node is None or not isinstance(node.value, relax.TupleGetItem):
            return expression, 0
        split = self._node(node.value.tuple_value)
        if split is None or split.operator != "split":
            return expression, 0
        rows = split.arguments[0]
        if int(split.attributes.axis) % len(_shape(rows)) != len(_shape(rows)) - 1:
            return expression, 0
        before = list(split.variable.ty.fields)[: node.value.index]
        return rows, sum(int(part.shape.values[-1]) for part in before)

    def _merge_heads(self, group: _Group) -> None:
        """Where the results of all heads are only laid beside each other in rows, they are written there at once."""
        last = self._nodes[group.last]
        chain = [last]
        while len(chain) < 3:
            uses = chain[-1].uses
            if len(uses) != 1 or uses[0] < 0:
                return
            chain.append(self._nodes[uses[0]])
        _, permuted, joined = chain
        if permuted.operator != "permute_dims" or joined.operator != "reshape" or len(last.shape) != 4:
            return
        _, heads, rows, size = last.shape
        axes = [int(axis) for axis in permuted.attributes.axes or ()]
        assert group.anchor is not None
        product = self._products[group.anchor]
        if (
            rows == product.rows
            and axes == [0, 2, 1, 3]
            and _as_rows(joined.shape) == (last.shape[0] * rows, heads * size)
        ):
            group.members += [permuted.index, joined.index]
            self._merged_heads[group.anchor] = heads

    def _find_prologues(self) -> dict[int, _Group]:
        """Groups without an anchor that only one computation reads, which takes them in: by that one's anchor."""
        found: dict[int, _Group] = {}
        for group in {id(g): g for g in self._group_of.values()}.values():
            if group.anchor is not None:
                continue
            uses = self._nodes[group.last].uses
            reader = self._nodes[uses[0]] if len(uses) == 1 and uses[0] >= 0 else None
            if (
                reader is not None
                and reader.operator == "nn.conv2d"
                and reader.index in self._group_of
                and reader.arguments[0].same_as(self._nodes[group.last].variable)
                and Program(tuple(merge_affine(group.steps, group.operands, _shape(group.first)[1])[0])).is_cheap
            ):
                found[reader.index] = group
        return found


class _Emission:
    """One writing of a graph."""

    def __init__(self, graph: BlockedGraph, choose: Choose) -> None:
        self._graph = graph
        self._choose = choose
        self._builder = relax.BlockBuilder()
        self._values: dict[Any, Any] = {}  #: variable of the graph → expression, or _Blocked
        self._functions: dict[Computation, tuple[str, Any]] = {}
        self._as_plain: dict[Any, Any] = {}
        self._as_blocked: dict[tuple[Any, Slots], _Blocked] = {}
        self._names: dict[str, int] = {}
        self.computations: dict[str, Computation] = {}

    def module(self) -> tvm.ir.IRModule:
        graph = self._graph
        main = graph._module["main"]
        absorbed = {id(group) for group in graph._prologues.values()}
        with self._builder.function("main", list(main.params), attrs=dict(main.attrs) if main.attrs else {}):
            with self._builder.dataflow():
                for node in graph._nodes:
                    group = graph._group_of.get(node.index)
                    if group is None:
                        if graph._reads_weights(node):
                            continue
                        constant = folded(node.value)
                        self._values[node.variable] = (
                            self._builder.emit(self._rewrite(node.value)) if constant is None else relax.const(constant)
                        )
                    elif id(group) not in absorbed and node.index == group.last:
                        self._values[node.variable] = self._kernel(group)
                result = self._builder.emit_output(self._rewrite(main.body.body))
            self._builder.emit_func_output(result)
        module = self._builder.get()
        for variable, function in graph._module.functions.items():
            if variable.name_hint != "main":
                module[variable] = function
        return module

    # Expressions that are not ours

    def _rewrite(self, expression: Any) -> Any:
        return rewritten(expression, self._plain)

    def _plain(self, variable: Any) -> Any:
        value = self._values.get(variable, variable)
        if not isinstance(value, _Blocked):
            return value
        if variable not in self._as_plain:
            slots, (h, w) = value.slots, value.size
            move = Copy(
                "plain", value.shape[0], slots.count, h, w, slots.block, (slots.blocks,), 0, not slots.is_in_order,
                dtype=value.dtype,
            )  # fmt: skip
            table = np.array(slots.slot_of, "int32") if move.table else None
            plain = self._call(move, [value.variable], table=table)
            if len(value.shape) != 4:
                plain = self._builder.emit(relax.op.reshape(plain, value.shape))
            self._as_plain[variable] = plain
        return self._as_plain[variable]

    # Kernels

    def _call(
        self, computation: Computation, data: Sequence[Any], *, weight: Array | None = None,
        table: Array | None = None, others: Sequence[Any] = (),
    ) -> Any:  # fmt: skip
        if computation not in self._functions:
            variant, function = self._choose(computation)
            stem = _stem(computation)
            number = self._names[stem] = self._names.get(stem, -1) + 1
            name = f"{stem}_{number}"
            function = function.with_attr({"global_symbol": name, "op_pattern": _OPAQUE, KERNEL_ATTR: name})
            self._functions[computation] = (variant, self._builder.add_func(function, name))
            self.computations[name] = computation
        variant, function_name = self._functions[computation]
        arguments = list(data)
        if weight is not None:
            packed = pack_weights(computation, variant, weight)
            if isinstance(computation, Convolution | Dense | Pooling) and computation.weight_dtype == "float16":
                packed = packed.astype(np.float16)
            arguments.append(relax.const(packed))
        if table is not None:
            arguments.append(relax.const(table))
        arguments += others
        result = relax.TensorType(computation.result_shape, computation.dtype)
        return self._builder.emit(relax.op.call_tir(function_name, relax.Tuple(arguments), result))

    def _blocked(self, expression: Any, slots: Slots | None) -> _Blocked:
        """A tensor of the graph in blocked layout, with these slots if they are given."""
        value = self._values.get(expression, expression)
        shape = _shape(expression)
        if isinstance(value, _Blocked):
            if slots is None or value.slots == slots:
                return value
        elif slots is None:
            slots = Slots.in_order(shape[1], self._graph.block)
        assert slots is not None
        key = (expression, slots)
        if key in self._as_blocked:
            return self._as_blocked[key]
        (h, w) = (shape[2], shape[3]) if len(shape) == 4 else (1, 1)
        if isinstance(value, _Blocked):
            move = Copy(
                "remap", shape[0], shape[1], h, w, slots.block, (value.slots.blocks,), slots.blocks, True,
                dtype=value.dtype,
            )  # fmt: skip
            where = value.slots.slot_of
            table = np.array([where[c] if c != NONE else NONE for c in slots.channels], "int32")
            variable = self._call(move, [value.variable], table=table)
        else:
            move = Copy(
                "block", shape[0], shape[1], h, w, slots.block, (), slots.blocks, not slots.is_in_order,
                dtype=_dtype(expression),
            )  # fmt: skip
            if len(shape) != 4:
                value = self._builder.emit(relax.op.reshape(value, (*shape, 1, 1)))
            variable = self._call(move, [value], table=np.array(slots.channels, "int32") if move.table else None)
        self._as_blocked[key] = _Blocked(variable, slots, shape)
        return self._as_blocked[key]

    def _kernel(self, group: _Group) -> Any:
        nodes = self._graph._nodes
        shape = nodes[group.last].shape
        if group.anchor is None:
            data = self._blocked(group.first, None)
            fused, others = self._fuse(group, data.slots, shape)
            computation: Computation = Pointwise(
                shape[0], data.slots.blocks, *data.size, self._graph.block, (1, 1), fused, data.dtype
            )
            return _Blocked(self._call(computation, [data.variable], others=others), data.slots, shape)
        node = nodes[group.anchor]
        integers = self._graph._integers.get(node.index)
        if integers is not None and integers.weights is not None:
            if integers.rows:
                return integer_dense(self, group, node, integers, integers.weights, shape)
            return integer_convolution(self, group, node, integers, integers.weights, shape)
        if node.index in self._graph._products:
            return self._matmul(group, self._graph._products[node.index], shape)
        if node.operator == "matmul" and group.last not in self._graph._blocked:
            return self._dense(group, node, shape)
        if node.operator == "reshape" and len(group.members) == 3:
            data = self._blocked(node.arguments[0], None)
            groups, size = node.shape[1], node.shape[2]
            new_name = [size_index * groups + g for g in range(groups) for size_index in range(size)]
            return _Blocked(data.variable, data.slots.renamed(new_name), shape)
        if node.operator == "reshape":
            data = self._blocked(node.arguments[0], None)
            return _Blocked(data.variable, data.slots, shape)
        if node.operator == "concat":
            parts = [self._blocked(part, None) for part in node.arguments[0].fields]
            slots = Slots.joined(part.slots for part in parts)
            blocks = tuple(part.slots.blocks for part in parts)
            move = Copy(
                "concat", shape[0], slots.count, shape[2], shape[3], slots.block, blocks, slots.blocks,
                dtype=parts[0].dtype,
            )  # fmt: skip
            return _Blocked(self._call(move, [part.variable for part in parts]), slots, shape)
        if node.operator == "image.resize2d":
            data = self._blocked(node.arguments[0], None)
            fused, others = self._fuse(group, data.slots, shape)
            scale = (shape[2] // data.size[0], shape[3] // data.size[1])
            point = Pointwise(shape[0], data.slots.blocks, *data.size, self._graph.block, scale, fused)
            return _Blocked(self._call(point, [data.variable], others=others), data.slots, shape)
        if node.operator in ("nn.max_pool2d", "nn.avg_pool2d", "mean"):
            return self._pool(group, node, integers, shape)
        if node.operator == "nn.conv2d_transpose":
            return self._transposed(group, node, shape)
        if node.operator == "nn.conv2d" and _is_depthwise(node):
            return self._depthwise(group, node, shape)
        return self._convolution(group, node, shape)

    def _pool(self, group: _Group, node: _Node, integers: _Integers | None, shape: tuple[int, ...]) -> _Blocked:
        if integers is None:
            data = self._blocked(node.arguments[0], None)
            fused, others = self._fuse(group, data.slots, shape)
        else:
            # An average of integers lies on their grid as they do.
            assert isinstance(integers.grid, Grid)
            data = self._blocked(integers.source, None)
            first = Step("dequantize", (VALUE, ("number", integers.grid.scale), ("number", float(integers.grid.zero))))
            fused, others = self._fuse(
                group, data.slots, shape, None, [first, *shifted(group.steps)], list(group.operands)
            )
        if node.operator == "mean":
            kind, window, count = "average", Window(data.size), False
        else:
            kind = "max" if node.operator == "nn.max_pool2d" else "average"
            window, count = _pool_window(node), bool(node.attributes.count_include_pad)
        pool = Pooling(
            kind, shape[0], data.slots.blocks, *data.size, self._graph.block, window, count, Fused(), fused,
            data.dtype, 0 if integers is None else integers.zero,
        )  # fmt: skip
        return _Blocked(self._call(pool, [data.variable], others=others), data.slots, shape)

    def _depthwise(self, group: _Group, node: _Node, shape: tuple[int, ...]) -> _Blocked:
        pre, data, before = self._prologue(node)
        kind, scale, shift, steps, operands = self._folded(group, node, shape[1])
        fused, others = self._fuse(group, data.slots, shape, shift, steps, operands)
        weight = _array(node.arguments[1]) * scale.reshape(-1, 1, 1, 1)
        pool = Pooling(
            "depthwise", shape[0], data.slots.blocks, *data.size, self._graph.block, _window(node), False, pre, fused,
            data.dtype, weight_dtype=kind,
        )  # fmt: skip
        packed = data.slots.fill(weight[:, 0].astype("float32"))
        variable = self._call(pool, [data.variable], weight=packed, others=[*before, *others])
        return _Blocked(variable, data.slots, shape)

    def _convolution(self, group: _Group, node: _Node, shape: tuple[int, ...]) -> _Blocked:
        block = self._graph.block
        weight = _array(node.arguments[1]).astype("float64")
        groups, window = 1, Window()
        if node.operator == "matmul":
            weight = weight.T[:, :, None, None]
        else:
            groups, window = int(node.attributes.groups), _window(node)
        source = node.arguments[0]
        channels = _shape(source)[1]
        pre, data, before = Fused(), None, list[Any]()
        if groups > 1 or channels > FEW_CHANNELS or self._graph._is_blocked(source):
            pre, data, before = self._prologue(node)
        kind, scale, shift, steps, operands = self._folded(group, node, shape[1])
        weight = (weight * scale.reshape(-1, 1, 1, 1)).astype("float32")
        aligned = groups > 1 and (channels // groups) % block == 0 and (shape[1] // groups) % block == 0
        out = self._wanted_slots(operands, shape)
        if groups == 1 or (aligned and data is not None and data.slots.is_in_order):
            if out is None or groups > 1:
                out = Slots.in_order(shape[1], block)
        elif out is None:
            out = Slots.by_group(shape[1], groups, block)
        fused, others = self._fuse(group, out, shape, shift, steps, operands)
        table = None
        if data is None:
            conv = Convolution(
                shape[0], 1, *_hw(_shape(source)), out.blocks, block, channels, window, 1, 0, channels, pre, fused,
                weight_dtype=kind,
            )  # fmt: skip
            arranged = out.fill(weight)
            inputs = [self._plain(source)]
        else:
            inputs = [data.variable]
            if groups == 1:
                arranged = data.slots.fill(out.fill(weight), axis=1)
            elif aligned and data.slots.is_in_order:
                arranged = weight
            else:
                arranged, table = _gathered(weight, groups, data.slots, out)
            conv = Convolution(
                shape[0], data.slots.blocks, *data.size, out.blocks, block, data.slots.used, window,
                groups if table is None else 1, 0 if table is None else table.shape[1], 0, pre, fused, data.dtype,
                kind,
            )  # fmt: skip
        variable = self._call(conv, inputs, weight=arranged, table=table, others=[*before, *others])
        return _Blocked(variable, out, shape)

    def _dense(self, group: _Group, node: _Node, shape: tuple[int, ...]) -> Any:
        """Rows of plain data times constant weights, to plain rows."""
        block = self._graph.block
        weight = _array(node.arguments[1]).T.astype("float64")
        outputs, length = weight.shape
        slots = Slots.in_order(outputs, block)
        rows = math.prod(node.shape[:-1])
        kind, scale, shift, steps, operands = self._folded(group, node, outputs)
        if shift is not None:
            steps = [Step("add", (VALUE, ("input", len(operands)))), *shifted(steps)]
            operands = [*operands, shift]
        fused, inputs = self._fuse_rows(steps, operands, slots, rows)
        dense = Dense(rows, length, outputs, block, fused, kind)
        data = self._rows_of(node.arguments[0], rows)
        arranged = slots.fill((weight * scale.reshape(-1, 1)).astype("float32"))[:, :, None, None]
        result = self._call(dense, [data], weight=arranged, others=inputs)
        return self._reshaped(result, (rows, outputs), shape)

    def _fuse_rows(
        self, steps: Sequence[Step], operands: Sequence[Any], slots: Slots, rows: int
    ) -> tuple[Fused, list[Any]]:
        """A program over plain rows, and its operands: vectors in blocks, or as many rows."""
        inputs, shapes, dtypes = [], [], []
        for operand in operands:
            dtypes.append("float32" if isinstance(operand, np.ndarray) else _dtype(operand))
            if isinstance(operand, GenericConst | np.ndarray):
                vector = slots.vector(channel_vector(operand, slots.count).astype("float32"))
                inputs.append(relax.const(vector))
                shapes.append(tuple(vector.shape))
            else:
                inputs.append(self._rows_of(operand, rows))
                shapes.append((rows, slots.count))
        return Fused(Program(tuple(steps)), tuple(shapes), tuple(dtypes)), inputs

    def _rows_of(self, expression: Any, rows: int) -> Any:
        """A tensor as so many plain rows."""
        before = _shape(expression)
        return self._reshaped(self._plain(expression), before, (rows, math.prod(before) // rows))

    def _matmul(self, group: _Group, product: _Product, shape: tuple[int, ...]) -> Any:
        assert group.anchor is not None
        result = View(self._graph._merged_heads.get(group.anchor, 0))
        batch, rows, length, columns = product.batch, product.rows, product.length, product.columns
        matmul = BatchMatmul(
            batch, rows, length, columns, self._graph.block, product.left_view, product.right_view, result,
            Fused(Program(tuple(group.steps))),
        )  # fmt: skip
        left = self._reshaped(
            self._plain(product.left), _shape(product.left), product.left_view.shape(batch, rows, length)
        )
        right = self._reshaped(
            self._plain(product.right), _shape(product.right), product.right_view.shape(batch, length, columns)
        )
        return self._reshaped(self._call(matmul, [left, right]), matmul.result_shape, shape)

    def _reshaped(self, expression: Any, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
        return expression if before == after else self._builder.emit(relax.op.reshape(expression, after))

    def _transposed(self, group: _Group, node: _Node, shape: tuple[int, ...]) -> _Blocked:
        """By a convolution of stride 1 whose channels hold strides[0] × strides[1] pixels for each of the data's, and
        by spreading these; one of stride 1 needs no spreading.

        Row s·q + r of the whole result is the sum over t of weight[s·t + r] · data[q - t].
        """
        block = self._graph.block
        _, data, _ = self._prologue(node)
        phases = _pair(node.attributes.strides)
        window, start = _window_of_transposed(node)
        kind, scale, shift, steps, operands = self._folded(group, node, shape[1])
        weight = _array(node.arguments[1]).astype("float64").transpose(1, 0, 2, 3)
        weight = _by_phases(weight * scale.reshape(-1, 1, 1, 1), phases).astype("float32")
        out = Slots.in_order(shape[1], block)
        count = math.prod(phases)
        # Channels that fill up their blocks are kept together: vectors are then spread whole.
        apart = out.blocks * block <= 1.5 * shape[1]
        if apart:
            weight = weight.transpose(1, 0, 2, 3, 4)
            slots = Slots.joined([out] * count)
        else:
            slots = Slots.in_order(count * shape[1], block)
        weight = weight.reshape(-1, *weight.shape[2:])

        def repeated(operand: Any) -> Array:
            vector = channel_vector(operand, shape[1])
            return np.tile(vector, count) if apart else np.repeat(vector, count)

        virtual = (shape[0], count * shape[1], *window.extent(*data.size))
        fused, others = self._fuse(
            group, slots, virtual, None if shift is None else repeated(shift), steps, [repeated(o) for o in operands]
        )
        conv = Convolution(
            shape[0], data.slots.blocks, *data.size, slots.blocks, block, data.slots.used, window, 1, 0, 0,
            Fused(), fused, weight_dtype=kind,
        )  # fmt: skip
        arranged = data.slots.fill(slots.fill(weight), axis=1)
        variable = self._call(conv, [data.variable], weight=arranged, others=others)
        if count > 1:
            move = Copy(
                "spread", shape[0], shape[1], *virtual[2:], block, (slots.blocks,), out.blocks, False, phases, apart,
                start, (shape[2], shape[3]), conv.dtype,
            )  # fmt: skip
            variable = self._call(move, [variable])
        return _Blocked(variable, out, shape)

    def _folded(
        self, group: _Group, node: _Node, channels: int
    ) -> tuple[str, Array, Array | None, list[Step], list[Any]]:
        """The type that the weights are stored in, and then as `fold_affine`. Nothing is multiplied to numbers of
        float16, which would have to be rounded once more."""
        if self._graph.half and is_half(_array(node.arguments[1])):
            return "float16", np.ones(channels), None, *merge_affine(group.steps, group.operands, channels)
        return "float32", *fold_affine(group.steps, group.operands, channels)

    # What is fused

    def _prologue(self, node: _Node) -> tuple[Fused, _Blocked, list[Any]]:
        """The program in front of a computation, the data that it starts from, and its other inputs."""
        group = self._graph._prologues.get(node.index)
        if group is None:
            return Fused(), self._blocked(node.arguments[0], None), []
        data = self._blocked(group.first, None)
        fused, others = self._fuse(group, data.slots, _shape(group.first))
        return fused, data, others

    def _fuse(
        self, group: _Group, slots: Slots, shape: tuple[int, ...], shift: Array | None = None,
        steps: Sequence[Step] | None = None, operands: Sequence[Any] | None = None,
    ) -> tuple[Fused, list[Any]]:  # fmt: skip
        """The group's program over a value with these slots, and its operands in that layout."""
        if steps is None or operands is None:
            steps, operands = merge_affine(group.steps, group.operands, shape[1])
        if shift is not None:
            steps = [Step("add", (VALUE, ("input", len(operands)))), *shifted(steps)]
            operands = [*operands, shift]
        if NONE in slots.channels and not Program(tuple(steps)).keeps_padding_finite:
            steps = [*steps, Step("masked", (("step", len(steps) - 1), ("input", len(operands))))]
            operands = [*operands, np.ones(shape[1])]
        inputs, shapes, dtypes = [], [], []
        for operand in operands:
            dtypes.append("float32" if isinstance(operand, np.ndarray) else _dtype(operand))
            if isinstance(operand, GenericConst | np.ndarray):
                vector = slots.vector(channel_vector(operand, shape[1]).astype("float32"))
                inputs.append(relax.const(vector))
                shapes.append(tuple(vector.shape))
            else:
                value = self._blocked(operand, slots)
                inputs.append(value.variable)
                shapes.append(value.shape5)
        return Fused(Program(tuple(steps)), tuple(shapes), tuple(dtypes)), inputs

    def _wanted_slots(self, operands: Sequence[Any], shape: tuple[int, ...]) -> Slots | None:
        """The slots of a blocked tensor that the result is combined with: written alike, neither need be moved."""
        for operand in operands:
            if isinstance(operand, relax.Var) and _shape(operand) == shape:
                value = self._values.get(operand)
                if isinstance(value, _Blocked):
                    return value.slots
        return None


# Reading


def _broadcasts(expression: Any, shape: tuple[int, ...]) -> bool:
    """Whether it is a vector of channels, or a float tensor that stretches over pixels at most."""
    if isinstance(expression, GenericConst):
        array = _array(expression)
        if array.dtype != np.float32 or array.ndim > len(shape):
            return False
        aligned = (1,) * (len(shape) - array.ndim) + array.shape
        return aligned[1] == shape[1] and math.prod(aligned) == shape[1]
    if not isinstance(expression, relax.Var) or not _is_float(expression):
        return False
    other = _shape(expression)
    if other == shape:
        return True
    return len(other) == len(shape) == 4 and other[:2] == shape[:2] and other[2:] == (1, 1)


# Which operators begin a kernel


def _takes_convolution(graph: BlockedGraph, node: _Node) -> bool:
    a = node.attributes
    return (
        isinstance(node.arguments[1], GenericConst)
        and _is_float(node.arguments[0])
        and _array(node.arguments[1]).dtype == np.float32
        and _is_nchw(node)
        and not (int(a.groups) > 1 and _is_depthwise(node) and node.shape[1] != int(a.groups))
    )


def _takes_transposed(graph: BlockedGraph, node: _Node) -> bool:
    a = node.attributes
    return (
        isinstance(node.arguments[1], GenericConst)
        and _is_float(node.arguments[0])
        and (str(a.data_layout), str(a.kernel_layout)) == ("NCHW", "IOHW")
        and int(a.groups) == 1
        and _pair(a.dilation) == (1, 1)
        and min(_window_of_transposed(node)[0].padding) >= 0
    )


def _window_of_transposed(node: _Node) -> tuple[Window, tuple[int, int]]:
    """The window of the convolution of stride 1 that a transposed one is made of, and how many of the pixels that it
    is spread to are left out at the beginning of rows and columns. Negative padding: it cannot be made so."""
    a = node.attributes
    kernel: list[int] = []
    before: list[int] = []
    behind: list[int] = []
    start: list[int] = []
    for size, result, taps, stride, cut in zip(
        _hw(_shape(node.arguments[0])), _hw(node.shape), _array(node.arguments[1]).shape[2:], _pair(a.strides),
        _four(a.padding)[:2], strict=True,
    ):  # fmt: skip
        kernel.append(-(-taps // stride))
        start.append(cut % stride)
        before.append(kernel[-1] - 1 - cut // stride)
        behind.append(-(-(result + start[-1]) // stride) - size - before[-1] + kernel[-1] - 1)
    return Window((kernel[0], kernel[1]), padding=(before[0], before[1], behind[0], behind[1])), (start[0], start[1])


def _by_phases(weight: Array, phases: tuple[int, int]) -> Array:
    """[o, i, kh, kw] of a transposed convolution → [o, phases, i, th, tw] of the convolution that makes all phases."""
    outputs, inputs, *taps = weight.shape
    padded = [(0, -size % step) for size, step in zip(taps, phases, strict=True)]
    weight = np.pad(weight, [(0, 0), (0, 0), *padded])
    (rows, columns), (height, width) = phases, (weight.shape[2] // phases[0], weight.shape[3] // phases[1])
    weight = weight.reshape(outputs, inputs, height, rows, width, columns)[:, :, ::-1, :, ::-1]
    return weight.transpose(0, 3, 5, 1, 2, 4).reshape(outputs, rows * columns, inputs, height, width)


def _takes_pool(graph: BlockedGraph, node: _Node) -> bool:
    return graph._is_blocked(node.arguments[0]) and _fits_pool(node)


def _takes_mean(graph: BlockedGraph, node: _Node) -> bool:
    return graph._is_blocked(node.arguments[0]) and _averages_pixels(node)


def _takes_resize(graph: BlockedGraph, node: _Node) -> bool:
    a = node.attributes
    before, after = _shape(node.arguments[0]), node.shape
    return (
        graph._is_blocked(node.arguments[0])
        and str(a.layout) == "NCHW"
        and str(a.method) == "nearest_neighbor"
        and (str(a.coordinate_transformation_mode), str(a.rounding_method)) == ("asymmetric", "floor")
        and all(big % small == 0 for big, small in zip(after[2:], before[2:], strict=True))
    )


def _takes_matmul(graph: BlockedGraph, node: _Node) -> bool:
    data, weight = node.arguments
    return graph._is_blocked(data) and isinstance(weight, GenericConst) and len(node.shape) == 2 == _array(weight).ndim


_ANCHORS: Final[dict[str, Callable[[BlockedGraph, _Node], bool]]] = {
    "nn.conv2d": _takes_convolution,
    "nn.conv2d_transpose": _takes_transposed,
    "nn.max_pool2d": _takes_pool,
    "nn.avg_pool2d": _takes_pool,
    "mean": _takes_mean,
    "image.resize2d": _takes_resize,
    "matmul": _takes_matmul,
}


def _is_dense(node: _Node) -> bool:
    """Rows times constant weights, [outputs] a whole number of blocks or the rows too few to matter."""
    data, weight = node.arguments
    return (
        isinstance(weight, GenericConst)
        and _array(weight).ndim == 2
        and _array(weight).dtype == np.float32
        and _is_float(data)
        and len(_shape(data)) >= 2
    )


def _as_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape[:-1]), shape[-1]) if shape else ()


def _matches_rows(expression: Any, shape: tuple[int, ...]) -> bool:
    """Whether it is a constant for each place in a row, or as many rows of the same length."""
    if isinstance(expression, GenericConst):
        array = _array(expression)
        return array.dtype == np.float32 and array.size == shape[-1] and array.shape[-1:] == shape[-1:]
    return isinstance(expression, relax.Var) and _is_float(expression) and _as_rows(_shape(expression)) == shape


def _is_channel_concat(node: _Node) -> bool:
    axis = node.attributes.axis
    return axis is not None and int(axis) == 1 and len(node.shape) == 4


def _drops_pixels(data: Any, node: _Node) -> bool:
    """[n, c, 1, 1] → [n, c]."""
    before = _shape(data)
    return len(before) == 4 and before[2:] == (1, 1) and node.shape == before[:2]


def _gathered(weight: Array, groups: int, data: Slots, out: Slots) -> tuple[Array, Array]:
    """Weights [out slots, reads, kh, kw] and the table [out blocks, reads] of the slots that each block reads.

    A block of the result reads the channels of every group that one of its own channels is of.
    """
    per_group, out_per_group = weight.shape[1], weight.shape[0] // groups
    chosen: list[list[int]] = []
    for block in range(out.blocks):
        channels = [c for c in out.channels[block * out.block : (block + 1) * out.block] if c != NONE]
        of_block = sorted({channel // out_per_group for channel in channels})
        chosen.append([g * per_group + i for g in of_block for i in range(per_group)])
    reads = max(len(c) for c in chosen)
    table = np.zeros((out.blocks, reads), "int32")
    arranged = np.zeros((len(out.channels), reads, *weight.shape[2:]), "float32")
    for block, channels in enumerate(chosen):
        table[block, : len(channels)] = [data.slot_of[c] for c in channels]
        for lane in range(out.block):
            channel = out.channels[block * out.block + lane]
            if channel == NONE:
                continue
            start = channels.index(channel // out_per_group * per_group)
            arranged[block * out.block + lane, start : start + per_group] = weight[channel]
    return arranged, table


def _stem(computation: Computation) -> str:
    """What a kernel is called, before its number."""
    if isinstance(computation, Convolution):
        height, width = computation.window.kernel
        return f"conv{height}x{width}"
    if isinstance(computation, IntegerConvolution):
        height, width = computation.window.kernel
        return f"int8_conv{height}x{width}"
    if isinstance(computation, Pointwise):
        operators = {step.operator for step in computation.epilogue.program.steps}
        if operators == {"quantize", "dequantize"}:
            return "requantize"
        return operators.pop() if operators in ({"quantize"}, {"dequantize"}) else "pointwise"
    if isinstance(computation, IntegerDense):
        return "int8_dense"
    if isinstance(computation, Dense | BatchMatmul):
        return "dense" if isinstance(computation, Dense) else "matmul"
    if isinstance(computation, Pooling):
        if computation.in_integers:
            return "int8_depthwise"
        return {"depthwise": "depthwise", "max": "max_pool", "average": "average_pool"}[computation.kind]
    return computation.kind
