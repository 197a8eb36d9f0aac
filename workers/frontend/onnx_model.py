"""Reads an untrusted ONNX file: what it declares, what it is called in a key, and whether we can compile it.

Only `onnx` and NumPy are needed here, so that the API's inspector starts quickly and runs without TVM. Nothing in this
file opens any file to read but the one it is given: tensors with external data get it from the archive that they came
in, or are refused before their bytes are looked for.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from tuning_db.catalog import PortSpec
from tuning_db.errors import InvalidModel, InvalidRequest, ShapeMismatch, UnsupportedOperator, UnsupportedOption
from tuning_db.keys import TensorSpec, sha256_json, to_json
from workers.frontend import archives
from workers.frontend.archives import shown
from workers.frontend.operators import CONTRIBUTED, SUPPORTED, SUPPORTED_OPSETS
from workers.frontend.weights import LARGE_BYTES, PACKED, WeightsFile, separable
from workers.said import first_line

#: Element types of graph inputs and outputs; the rest (strings, sequences, bfloat16, …) are refused by name.
_DTYPES: Final[Mapping[int, str]] = {
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.INT8: "int8",
    TensorProto.INT16: "int16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.UINT8: "uint8",
    TensorProto.UINT16: "uint16",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
    TensorProto.BOOL: "bool",
}

#: Operators whose outputs are constant of nothing.
_RANDOM: Final = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)

#: Inputs that shapes of results are made of, by their places.
SHAPES_FROM: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Expand", "OneHot", "Pad", "Reshape", "Split", "Squeeze", "Tile", "TopK", "Unsqueeze"), (1,)),
    **dict.fromkeys(
        (f"Reduce{of}" for of in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")),
        (1,),
    ),
    "ConstantOfShape": (0,),
    "NonMaxSuppression": (2, 3, 4),
    "Range": (0, 1, 2),
    "Resize": (2, 3),
}
#: Inputs whose numbers decide how long a result is, by their places.
_LENGTHS_FROM: Final[Mapping[str, tuple[int, ...]]] = {
    "Compress": (1,), "NonZero": (0,), "Unique": (0,),
}  # fmt: skip
#: The operator whose result is as long as the numbers make it, and is compiled nevertheless (`selection`).
SELECTING: Final = "NonMaxSuppression"
#: Operators that tell of a tensor's shape or type, or of a sequence's length, and of no numbers in it.
_SHAPES_ONLY: Final = frozenset({"CastLike", "EyeLike", "OptionalHasElement", "SequenceLength", "Shape", "Size"})

#: A dimension's symbol. Exporters also write "?", "-1" or nothing for an unknown size; those bind independently.
_SYMBOL = re.compile(r"[A-Za-z_][\w.:/ +*-]*")


#: Of a model, functions written out; the largest that people deploy have a quarter of it.
MOST_NODES: Final = 50_000
#: Functions that call each other.
_DEEPEST: Final = 100
#: No protobuf message is longer.
_MOST_PROTOBUF_BYTES: Final = (1 << 31) - 1
_TOO_LONG: Final = (
    "the model is longer than 2 GiB, where protobuf ends; save it with its weights in a file beside it "
    "(onnx.save_model with save_as_external_data=True), and send both as one zip or tar"
)

_TYPED_DATA: Final = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

#: What stands in the place of a tensor's bytes that were left out: their digest as `_hash_tensor` makes it.
_LEFT_OUT: Final = "tunery.digest"


def load(path: Path, *, leave_out_from_bytes: int | None = None) -> ModelProto:
    """Parse the file and check it against ONNX's rules. InvalidModel says what is wrong with it.

    The file is the model, or a zip or tar of it and its data files (`archives`), whose bytes are taken in: the same
    model comes out, with the same digest, as if it had been saved as one file. Of tensors in data files that are as
    large as `leave_out_from_bytes` or larger only the digest is kept, so that memory does not grow with them.
    """
    return _load(path, leave_out_from_bytes, None)


def load_apart(path: Path, folder: Path, large_bytes: int = LARGE_BYTES) -> ModelProto:
    """As `load`, but weights of `large_bytes` and more come to lie in a file in `folder` (`weights`), wherever they
    were."""
    apart = WeightsFile(folder, large_bytes)
    model = _load(path, None, apart)
    for tensor in model.graph.initializer:
        if tensor.HasField("raw_data") and apart.takes(tensor, len(tensor.raw_data)):
            apart.take(tensor, [tensor.raw_data])
    # A message keeps the memory of what it held.
    lean = ModelProto()
    lean.CopyFrom(model)
    return lean


def _load(path: Path, leave_out_from_bytes: int | None, apart: WeightsFile | None) -> ModelProto:
    with archives.opened(path) as archive:
        if archive is None:
            if path.stat().st_size > _MOST_PROTOBUF_BYTES:
                raise InvalidModel(_TOO_LONG)
            return _parse(path.read_bytes(), None)
        member = archive.model()
        if member.size_bytes > _MOST_PROTOBUF_BYTES:
            raise InvalidModel(_TOO_LONG)
        files = _DataFiles(archive, posixpath.dirname(member.name), leave_out_from_bytes, apart)
        return _parse(member.read(), files)


def _parse(data: bytes, files: _DataFiles | None) -> ModelProto:
    if not data:
        raise InvalidModel("the file is empty")
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError:
        raise InvalidModel("the file is not an ONNX model: it does not parse (truncated, or another format)") from None
    if not model.graph.node or not model.graph.output or not model.opset_import:
        raise InvalidModel("the file is not an ONNX model: it holds no graph, no output or no operator set")
    outside: list[TensorProto] = []
    messages = list(_messages(model))
    for message in messages:
        _check_text(message)
    _check_size(model)
    for message in messages:
        if not isinstance(message, TensorProto):
            continue
        if message.data_location == TensorProto.EXTERNAL:
            if files is None:
                raise InvalidModel(
                    f"tensor {shown(message.name)} keeps its data in another file; send the model and its data files "
                    "as one zip or tar (the tunery command and client do), or save the model as one file "
                    "(onnx.save_model with save_as_external_data=False)"
                )
            outside.append(message)
        elif message.external_data:
            raise InvalidModel(f"tensor {shown(message.name)} names a data file, and says that it is in none")
    entries = []
    for tensor in outside:
        # ONNX's checker looks for data files by itself, wherever they are said to be: it is shown tensors of nothing.
        entries.append((_entries_of(tensor), list(tensor.dims)))
        tensor.dims[:] = [0]
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = b""
    try:
        onnx.checker.check_model(model.SerializeToString() if outside else data)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise InvalidModel(f"the file is not a valid ONNX model: {first_line(error)}") from None
    named = Counter(node.name for node in model.graph.node if node.name)
    if (twice := next((name for name, count in named.items() if count > 1), None)) is not None:
        # ONNX Runtime, the reference, takes none.
        raise InvalidModel(f"two nodes are called {shown(twice)}; give each node a name of its own, or none")
    if files is not None:
        weights = {id(tensor): tensor for tensor in model.graph.initializer}
        for tensor, (entry, dims) in zip(outside, entries, strict=True):
            tensor.dims[:] = dims
            files.fill(tensor, entry, is_weight=id(tensor) in weights)
    return model


def _check_size(model: ModelProto) -> None:
    """InvalidModel for one that comes to more than `MOST_NODES` once the bodies of its functions stand where they are
    called: functions that call each other twice double with every one."""
    functions = {(function.domain, function.name, function.overload): function for function in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}

    def size(nodes: Iterable[NodeProto], calling: tuple[tuple[str, str, str], ...]) -> int:
        total = 0
        for node in nodes:
            called = (node.domain, node.op_type, node.overload)
            total += 1
            if called in functions:
                if called in calling:
                    raise InvalidModel(f"function {shown(node.op_type)} calls itself")
                if len(calling) == _DEEPEST:
                    raise InvalidModel(f"functions call each other more than {_DEEPEST} deep")
                if called not in sizes:
                    sizes[called] = size(functions[called].node, (*calling, called))
                total += sizes[called]
            total += sum(size(graph.node, calling) for graph in subgraphs(node))
        return total

    if size(model.graph.node, ()) > MOST_NODES:
        raise InvalidModel(f"the model comes to more than {MOST_NODES} nodes once its functions are written out")


def _entries_of(tensor: TensorProto) -> dict[str, str]:
    """Where a tensor's data is said to be. InvalidModel if it is said twice, or if there is data inside too."""
    name = shown(tensor.name)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if len(entries) < len(tensor.external_data):
        raise InvalidModel(f"tensor {name} says twice where its data is")
    if not entries.get("location"):
        raise InvalidModel(f"tensor {name} keeps its data in another file and does not say in which")
    if tensor.HasField("raw_data") or any(getattr(tensor, field) for field in _TYPED_DATA):
        raise InvalidModel(f"tensor {name} has data inside and in another file; keep one of them")
    return entries


class _DataFiles:
    """The members of an archive as the files that tensors keep their data in."""

    def __init__(
        self, archive: archives.Archive, folder: str, leave_out_from_bytes: int | None, apart: WeightsFile | None
    ) -> None:
        self._members = archive.members
        self._folder = folder
        # What is inside is handed from one library to the next as one message.
        self._inside_bytes = archive.model().size_bytes
        self._leave_out_from_bytes = leave_out_from_bytes
        self._apart = apart
        # Tensors may share bytes. That many may not: reading would take for ever what is short to write.
        shared_bytes = 4 * sum(member.size_bytes for member in archive.members.values()) + (1 << 20)
        self._left_bytes = min(shared_bytes, archives.MOST_BYTES)

    def fill(self, tensor: TensorProto, entries: Mapping[str, str], *, is_weight: bool) -> None:
        """Give the tensor its bytes, or its digest alone, or have it say where they lie now. InvalidModel if they are
        not there. `is_weight` says whether it is one of the graph's initializers."""
        name, location = shown(tensor.name), shown(entries["location"])
        inside = archives.inner_path(entries["location"])
        if inside is None:
            raise InvalidModel(
                f"tensor {name} keeps its data in {location}, which is not a path inside the archive; "
                "name data files relative to the model's folder"
            )
        member = self._members.get(posixpath.join(self._folder, inside))
        if member is None:
            raise InvalidModel(
                f"tensor {name} keeps its data in {location}, which the archive does not hold beside the model; "
                f"it holds {archives.listed(list(self._members))}"
            )
        numbers = {}
        for key in ("offset", "length"):
            text = entries.get(key, "")
            if text and re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) is None:
                raise InvalidModel(
                    f"tensor {name}: the {key} of its data is {shown(text)}, which is no number of bytes"
                )
            numbers[key] = int(text) if text else None
        offset = numbers["offset"] or 0
        length = numbers["length"]
        length = member.size_bytes - offset if length is None else length
        if length < 0 or offset + length > member.size_bytes:
            raise InvalidModel(
                f"tensor {name} keeps its data at {offset} of {location}, {max(length, 0)} bytes long, "
                f"and that file has {member.size_bytes} bytes"
            )
        wanted = _bytes_of(tensor)
        if length != wanted:
            raise InvalidModel(f"tensor {name} has {length} bytes of data in {location}, and needs {wanted}")
        self._left_bytes -= length
        if self._left_bytes < 0:
            raise InvalidModel(
                "the model's tensors share the bytes of their data files more than four times over, "
                f"or are longer than {archives.MOST_BYTES >> 30} GiB together"
            )
        chunks = member.chunks(offset, length)
        large = self._leave_out_from_bytes is not None and length >= self._leave_out_from_bytes
        if self._apart is not None and is_weight and self._apart.takes(tensor, length):
            self._apart.take(tensor, chunks)
        elif large and separable(tensor):
            digest = _tensor_hash(tensor)
            for chunk in chunks:
                digest.update(chunk)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key=_LEFT_OUT, value=digest.hexdigest())
        else:
            self._inside_bytes += length
            if self._inside_bytes > _MOST_PROTOBUF_BYTES:
                raise InvalidModel(
                    "more than 2 GiB of the model has to be handled in one piece: keep its weights as initializers of "
                    "the graph"
                )
            tensor.raw_data = b"".join(chunks)


def weights_bytes(model: ModelProto) -> int:
    """How many bytes the graph's weights take, wherever they are."""
    return sum(_bytes_of(tensor) for tensor in model.graph.initializer if tensor.data_type != TensorProto.STRING)


def _bytes_of(tensor: TensorProto) -> int:
    """How many bytes a tensor's elements take in a data file."""
    if any(size < 0 for size in tensor.dims):
        raise InvalidModel(f"tensor {shown(tensor.name)} has the shape {list(tensor.dims)}")
    try:
        if tensor.data_type == TensorProto.STRING:
            raise KeyError
        itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        raise InvalidModel(
            f"tensor {shown(tensor.name)} has the element type number {tensor.data_type}, "
            "which is not kept in data files"
        ) from None
    count = math.prod(tensor.dims)
    name = TensorProto.DataType.Name(tensor.data_type)
    bits = (2 if "INT2" in name else 4) if tensor.data_type in PACKED else 8 * itemsize
    return int((count * bits + 7) // 8)


def inputs_of(model: ModelProto) -> tuple[PortSpec, ...]:
    """True inputs only: IR version 3 lists weights among them."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_port(value, "input") for value in model.graph.input if value.name not in weights)


def outputs_of(model: ModelProto) -> tuple[PortSpec, ...]:
    return tuple(_port(value, "output") for value in model.graph.output)


def opset_of(model: ModelProto) -> int:
    """The version of the default operator set."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def model_digest(model: ModelProto) -> str:
    """Names graph and weights, as a Merkle hash from the outputs up.

    Producer, doc strings, node names, names of inner tensors, the order of independent nodes, dead nodes and the
    spelling of a tensor's bytes (raw or typed) do not change it; input and output names do, for users feed by them.
    """
    values = _Values({"": "absent"})
    for port in inputs_of(model):
        values[port.name] = sha256_json(["input", port.name, port.dtype, list(port.shape)])
    _hash_graph(model.graph, values)
    return sha256_json(
        [
            "onnx",
            to_json(sorted((entry.domain or "ai.onnx", int(entry.version)) for entry in model.opset_import)),
            [[p.name, p.dtype, list(p.shape)] for p in inputs_of(model)],
            [[p.name, p.dtype, values[p.name]] for p in outputs_of(model)],
            to_json(sorted((f.domain, f.name, f.overload, _hash_function(f)) for f in model.functions)),
        ]
    )


def name_of(node: NodeProto) -> str:
    """What messages call a node: exporters need not give it a name."""
    return str(node.name or node.output[0])


def unsupported(operator: str, node: str, opset: int, why: str) -> UnsupportedOperator:
    """The error to raise for a node. `why` ends the sentence, with its punctuation: what is not done, what to do."""
    message = f"operator {operator} (node {node!r}, opset {opset}) cannot be compiled{why}"
    return UnsupportedOperator(message, operator=operator, node=node, opset=opset)


def check_one_piece(model: ModelProto, scheme: str) -> None:
    """InvalidRequest for a model that the quantizer, which wants it in one piece, cannot read."""
    size_bytes = weights_bytes(model)
    if size_bytes > _MOST_PROTOBUF_BYTES:
        raise InvalidRequest(
            f"the model's weights have {size_bytes} bytes, and what is longer than 2 GiB cannot be made {scheme} by "
            'this version; use "none"',
            field="quantization.scheme",
        )


def selecting(graph: GraphProto, opset: int) -> NodeProto | None:
    """The graph's NonMaxSuppression, if it has one. UnsupportedOperator for a second one."""
    found = [node for node in graph.node if node.op_type == SELECTING and node.domain in ("", "ai.onnx")]
    if len(found) > 1:
        raise unsupported(
            SELECTING, name_of(found[1]), opset,
            f": one is done in a model, and {name_of(found[0])!r} is another; end the model before them",
        )  # fmt: skip
    return found[0] if found else None


def selects(model: ModelProto) -> bool:
    """Whether the model has a NonMaxSuppression, in a function of its own or in a loop too."""
    return any(isinstance(message, NodeProto) and message.op_type == SELECTING for message in _messages(model))


def refuse_selecting(scheme: str, device_kind: str, *, ranged: bool) -> None:
    """UnsupportedOption for what is not done of a model that selects boxes."""
    for refused, what, field in (
        (device_kind == "cuda", "on GPUs", "device"),
        (scheme != "none", f"as {scheme}", "quantization.scheme"),
        (ranged, "for a range of sizes", "inputs"),
    ):
        if refused:
            raise UnsupportedOption(
                f"a model with {SELECTING}, whose results are as long as the data make them, cannot be compiled {what} "
                "by this version; end the model before it, and do it in the program that runs the library",
                field=field,
            )


def check_operators(model: ModelProto, *, folded: bool = False, known: Set[str] = SUPPORTED) -> None:
    """UnsupportedOperator for the first operator that cannot be compiled, with its node and opset.

    A node that depends on constants and shapes alone is folded before import, whatever its operator, and an operator
    with a standard or local definition is replaced by it. Of a model in which that is done, `folded`, every operator
    must be one of `known`: those of the importer, once the rewrites are done too. A shape that depends on the numbers
    of an input is no shape.
    """
    opset = opset_of(model)
    if not SUPPORTED_OPSETS[0] <= opset <= SUPPORTED_OPSETS[1]:
        raise InvalidModel(
            f"operator set {opset} is not one of {SUPPORTED_OPSETS[0]} to {SUPPORTED_OPSETS[1]}; "
            "convert the model with onnx.version_converter.convert_version"
        )
    local = {(function.domain, function.name) for function in model.functions}
    constant = {tensor.name for tensor in model.graph.initializer} | {""}
    _check_nodes(model.graph.node, constant, local, opset, folded, known)
    if not folded:
        _check_shapes(model.graph, opset)


def _check_nodes(
    nodes: Iterable[NodeProto],
    constant: set[str],
    local: Set[tuple[str, str]],
    opset: int,
    folded: bool,
    known: Set[str],
) -> None:
    """`constant` names what is known before the model runs; what the nodes make of it is added."""
    for node in nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain == "" and node.op_type in known:
            if node.op_type in ("Constant", "Shape", "Size") or constant.issuperset(reads(node)):
                constant.update(node.output)
            continue
        if not folded:
            if f"{domain}.{node.op_type}" in CONTRIBUTED:
                continue
            if node.op_type not in _RANDOM and constant.issuperset(reads(node)):
                constant.update(node.output)
                continue
            if domain == "" and node.op_type == "If" and node.input[0] in constant:
                continue  # replaced by the branch that is taken
            if domain == "" and (node.op_type == "Scan" or (node.op_type == "Loop" and node.input[0] in constant)):
                # Written out step by step: of a loop, the number of the step is a constant, and that it goes on.
                body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
                told = [*body.initializer, *(body.input[:2] if node.op_type == "Loop" else ())]
                _check_nodes(body.node, constant | {value.name for value in told}, local, opset, folded, known)
                continue
            if (domain, node.op_type) in local or (domain == "" and has_function_body(node.op_type, opset)):
                continue
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        raise unsupported(name, name_of(node), opset, "; export the model without it, or fold it into constants")


def _check_shapes(graph: GraphProto, opset: int) -> None:
    """UnsupportedOperator for a node whose result's shape is what somebody feeds.

    Only what is certain counts: of functions, and of operators that hold graphs, nobody looks at what they give.
    """
    selecting(graph, opset)
    stored = {tensor.name for tensor in graph.initializer}
    fed = {value.name: value.name for value in graph.input if value.name not in stored}
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in SUPPORTED or node.op_type in _SHAPES_ONLY:
            continue
        for places, what, advice in (
            (SHAPES_FROM, "the shape of its result", "make {!r} a constant of the model"),
            (
                _LENGTHS_FROM, "how long its result is",
                "end the model before it, and do it in the program that runs the library",
            ),
        ):  # fmt: skip
            given = [node.input[place] for place in places.get(node.op_type, ()) if place < len(node.input)]
            name = next((name for name in given if name in fed), None)
            if name is not None:
                raise unsupported(
                    node.op_type, name_of(node), opset,
                    f": {what} depends on the numbers in input {fed[name]!r}; {advice.format(name)}",
                )  # fmt: skip
        source = next((fed[name] for name in node.input if name in fed), None)
        if source is not None:
            fed.update(dict.fromkeys(node.output, source))


def reads(node: NodeProto) -> set[str]:
    """The tensors that a node depends on, those included that its subgraphs take from outside."""
    names = set(node.input)
    for graph in subgraphs(node):
        inner = {name for inside in graph.node for name in reads(inside)} | {value.name for value in graph.output}
        own = {value.name for value in (*graph.input, *graph.initializer)}
        names |= inner - own - {name for inside in graph.node for name in inside.output}
    return names


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs among the node's attributes, themselves and not copies."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def has_function_body(op_type: str, opset: int) -> bool:
    """Whether the standard defines the operator by simpler ones, so that it can be inlined before import."""
    try:
        schema = onnx.defs.get_schema(op_type, max_inclusive_version=opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def bind(model: ModelProto, inputs: Sequence[TensorSpec]) -> None:
    """Write the bound shapes into the model and infer all others. ShapeMismatch if the model contradicts them.

    Changes `model`. Weights listed among the inputs stop being inputs.
    """
    bound = {spec.name: spec for spec in inputs}
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in list(model.graph.input):
        if value.name in weights:
            model.graph.input.remove(value)
            continue
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        for size in bound[value.name].shape:
            shape.dim.add().dim_value = size
    del model.graph.value_info[:]
    stored = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for value in model.graph.output:
        # What the exporter wrote of outputs was for other inputs; inference writes it again where a node makes them.
        value.type.tensor_type.ClearField("shape")
        passed_on = bound[value.name].shape if value.name in bound else stored.get(value.name)
        if passed_on is not None:
            value.type.tensor_type.shape.SetInParent()
            for size in passed_on:
                value.type.tensor_type.shape.dim.add().dim_value = size
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise ShapeMismatch(
            f"the model does not accept {', '.join(map(str, inputs))}: {first_line(error)}",
            field=f"inputs.{inputs[0].name}.shape" if len(inputs) == 1 else "inputs",
        ) from None
    model.CopyFrom(inferred)


def _port(value: ValueInfoProto, what: str) -> PortSpec:
    if value.type.WhichOneof("value") != "tensor_type":
        raise InvalidModel(f"{what} {value.name!r} is not a tensor; sequences, maps and optionals cannot be compiled")
    tensor = value.type.tensor_type
    if tensor.elem_type not in _DTYPES:
        known = tensor.elem_type in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(tensor.elem_type).lower() if known else f"number {tensor.elem_type}"
        raise InvalidModel(f"{what} {value.name!r} has element type {name}, which cannot be compiled")
    return PortSpec(value.name, _DTYPES[tensor.elem_type], tuple(_dimension(d) for d in tensor.shape.dim))


def _dimension(dim: Any) -> int | str | None:
    if dim.WhichOneof("value") == "dim_value":
        return int(dim.dim_value) if dim.dim_value > 0 else None
    return str(dim.dim_param) if _SYMBOL.fullmatch(dim.dim_param) else None


def _messages(message: Message) -> Iterator[Message]:
    """The message and all that it holds at any depth: functions, subgraphs and training information too."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in (value,) if isinstance(value, Message) else value:
                yield from _messages(inner)


def _check_text(message: Message) -> None:
    """Protobuf hands out text that is not UTF-8 as bytes, and ONNX's checker stumbles over it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            for text in (value,) if isinstance(value, str | bytes) else value:
                if isinstance(text, bytes):
                    raise InvalidModel(f"the file is not a valid ONNX model: a {field.full_name} is not UTF-8 text")


class _Values(dict[str, str]):
    """The hash of each tensor in scope, by its name; `depth` counts the graphs around the scope's."""

    depth: int = 0

    def __missing__(self, name: str) -> str:
        # ONNX's checker does not look for the outputs of functions and subgraphs.
        raise InvalidModel(f"the file is not a valid ONNX model: nothing produces the tensor {name!r}")


def _hash_graph(graph: GraphProto, values: _Values) -> None:
    """Add the hash of every tensor of `graph` to `values`, which holds its inputs and the enclosing scope."""
    for tensor in graph.initializer:
        values[tensor.name] = _hash_tensor(tensor)
    for sparse in graph.sparse_initializer:
        values[sparse.values.name] = sha256_json(
            ["sparse", list(sparse.dims), _hash_tensor(sparse.values), _hash_tensor(sparse.indices)]
        )
    for node in graph.node:
        digest = _hash_node(node, values)
        for index, name in enumerate(node.output):
            if name:  # what a node leaves out is not what others leave out of their inputs
                values[name] = sha256_json(["output", digest, index])


def _hash_node(node: NodeProto, values: _Values) -> str:
    return sha256_json(
        [
            "node",
            "" if node.domain == "ai.onnx" else node.domain,
            node.op_type,
            [values[name] for name in node.input],
            len(node.output),
            to_json(sorted((a.name, _hash_attribute(a, values)) for a in node.attribute)),
            # What has none keeps the digest that it had before this was looked at.
            *([node.overload] if node.overload else []),
        ]
    )


def _hash_attribute(attribute: AttributeProto, values: _Values) -> str:
    # One that stands for an attribute of the function around it says only which, whatever its type.
    kind = AttributeProto.UNDEFINED if attribute.ref_attr_name else attribute.type
    if kind == AttributeProto.TENSOR:
        return _hash_tensor(attribute.t)
    if kind == AttributeProto.GRAPH:
        return _hash_subgraph(attribute.g, values)
    if kind == AttributeProto.GRAPHS:
        return sha256_json(["graphs", *(_hash_subgraph(g, values) for g in attribute.graphs)])
    plain = AttributeProto()
    plain.CopyFrom(attribute)
    plain.ClearField("doc_string")
    return hashlib.sha256(plain.SerializeToString(deterministic=True)).hexdigest()


def _hash_subgraph(graph: GraphProto, outer: _Values) -> str:
    values = _Values(outer)
    values.depth = outer.depth + 1
    # Within a loop of a loop, the inputs of both bodies are in scope.
    within = [values.depth] if values.depth > 1 else []
    for index, value in enumerate(graph.input):
        values[value.name] = sha256_json(["subgraph input", index, *within])
    _hash_graph(graph, values)
    return sha256_json(["subgraph", len(graph.input), [values[value.name] for value in graph.output]])


def _hash_function(function: FunctionProto) -> str:
    values = _Values({"": "absent"})
    values.update((name, sha256_json(["function input", index])) for index, name in enumerate(function.input))
    nodes = GraphProto(node=function.node)
    _hash_graph(nodes, values)
    return sha256_json(
        [
            "function",
            len(function.input),
            to_json(sorted((entry.domain or "ai.onnx", int(entry.version)) for entry in function.opset_import)),
            sorted(function.attribute),
            to_json(sorted((a.name, _hash_attribute(a, values)) for a in function.attribute_proto)),
            [values[name] for name in function.output],
        ]
    )


def _tensor_hash(tensor: TensorProto) -> hashlib._Hash:
    """The hash of a tensor before its elements come."""
    return hashlib.sha256(f"{tensor.data_type}{list(tensor.dims)}".encode())


def _hash_tensor(tensor: TensorProto) -> str:
    if tensor.data_location == TensorProto.EXTERNAL:
        # `load` lets no tensor pass that says so itself.
        (left_out,) = tensor.external_data
        return str(left_out.value)
    digest = _tensor_hash(tensor)
    if tensor.data_type == TensorProto.STRING:
        for item in tensor.string_data:
            digest.update(len(item).to_bytes(8, "little") + item)
    else:
        try:
            array = numpy_helper.to_array(tensor)
        except (ValueError, KeyError, TypeError, NotImplementedError):
            raise InvalidModel(
                f"tensor {tensor.name!r} holds data that does not fit its type and shape {list(tensor.dims)}"
            ) from None
        digest.update(array.tobytes())
    return digest.hexdigest()


def operator_counts(nodes: Iterable[NodeProto]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts
