"""A PyTorch program (`torch.export.save`, .pt2) as ONNX, by PyTorch's own exporter, compared with PyTorch's numbers.

PyTorch reads such a file by turning its text into code and its objects back from pickles. What would do so with
anything but tensors, operators and sizes is looked for before it is loaded, and refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning_db.errors import InvalidModel, UnsupportedOperator
from workers.frontend import archives
from workers.frontend.archives import Archive, shown
from workers.packaging.reference import compare

_OPSET: Final = 20

#: Functions that a program may call: operators of PyTorch's own, and arithmetic on sizes.
_TARGET: Final = re.compile(
    r"torch\.ops\.(?:aten|prims|prim|higher_order)(?:\.[A-Za-z0-9]\w*|\._(?!_)\w+){1,2}|torch\.sym_[a-z]\w*"
    r"|_operator\.(?:add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    r"|math\.(?:ceil|floor|trunc|sqrt)"
)
#: Names become arguments and attributes in generated code, and sizes are read by an evaluator.
_NAME: Final = re.compile(r"[\w.]*", re.ASCII)
_NAMES: Final = frozenset({"name", "parameter_name", "buffer_name", "tensor_constant_name", "input_name"})
_SIZE_TOKENS: Final = re.compile(
    r"\s|[-+*/%(),]|[<>=!]=?|&|\||~|\d+(?:\.\d+)?|'[\w.+-]*'"
    r"|(?:[a-z]{1,3}\d+|Symbol|Integer|Rational|Float|Add|Mul|Pow|Max|Min|Mod|PythonMod|CleanDiv|FloorDiv|CeilDiv"
    r"|ModularIndexing|Where|PowByNatural|IntTrueDiv|FloatTrueDiv|ToFloat|TruncToInt|FloorToInt|CeilToInt|RoundToInt"
    r"|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|True|False|true|false|int_oo|oo"
    r"|positive|nonnegative|negative|nonzero|zero|integer|real|finite|precision|evaluate)(?!\w)",
    re.ASCII,
)
#: In the description of nested inputs these name a class or a module to import.
_IMPORTS: Final = ("__enum__", "default_factory")

_RANDOM_SEED: Final = 0


def convert(path: Path, target: Path) -> None:
    """Write the program as ONNX. Inputs keep their names, and so do outputs that are values of a dictionary."""
    with archives.opened(path) as archive:
        if archive is None:
            raise InvalidModel("the file is not a PyTorch program: it is no archive")
        screen(archive)

    import torch

    load = torch.load
    # Whatever torch.export asks for: tensors are read from pickles, and no other objects.
    torch.load = lambda *given, **named: load(*given, **{**named, "weights_only": True})
    with path.open("rb") as file:
        program = torch.export.load(file)
    try:
        exported = torch.onnx.export(
            program, dynamo=True, opset_version=_OPSET, output_names=_output_names(program), verbose=False
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise _refusal(error) from error
    exported.save(target, external_data=False)
    problem = disagreement(program, target)
    if problem is not None:
        raise InvalidModel(
            f"as PyTorch's exporter writes it in ONNX, the program gives other numbers than in PyTorch: {problem}; "
            "export it to ONNX yourself, with other options, and compare"
        )


def screen(archive: Archive) -> None:
    """InvalidModel or UnsupportedOperator for a program that holds more than tensors, operators and sizes."""
    texts = [
        name
        for name in archive.members
        if re.search(r"(?:^|/)models/[^/]+\.json$", name) or name == "serialized_exported_program.json"
    ]
    if len(texts) != 1:
        raise InvalidModel(f"the archive holds {len(texts)} PyTorch programs; send one with one program")
    for name in archive.members:
        if re.search(r"/(?:custom_obj|opaque_obj)_|/aotinductor/", name):
            raise InvalidModel(
                f"the program holds {shown(name)}, an object of Python or compiled code; "
                "export it from a module whose parameters and buffers are tensors"
            )
    try:
        text = archive.members[texts[0]].read().decode()
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidModel("the file is not a PyTorch program: its description is no JSON") from None
    if any(word in text for word in _IMPORTS):
        raise InvalidModel(
            "the program's inputs or outputs are described by classes of Python; "
            "export it from a function of tensors, lists and dictionaries"
        )
    for index, entry in enumerate(_dictionaries(document)):
        called = entry.get("target")
        if "inputs" in entry and isinstance(called, str) and _TARGET.fullmatch(called) is None:
            raise UnsupportedOperator(
                f"operator {shown(called)} cannot be compiled: it is not one of PyTorch's own; "
                "export the program without it",
                operator=called[:120], node=str(entry.get("name") or index), opset=0,
            )  # fmt: skip
        for key, value in entry.items():
            if key in _NAMES and isinstance(value, str) and not _is_name(value):
                raise InvalidModel(f"the program calls something {shown(value)}, which is no name")
            if key == "expr_str" and not (isinstance(value, str) and _is_size(value)):
                raise InvalidModel(f"the program has the size {shown(str(value))}, which is no arithmetic")


def _is_name(text: str) -> bool:
    """Of a tensor, `p_layer__weight` among them, or of an attribute within a module; none of Python's own."""
    return _NAME.fullmatch(text) is not None and not any(
        part.startswith("__") and part.endswith("__") for part in text.split(".")
    )


def _is_size(text: str) -> bool:
    at = 0
    while at < len(text):
        found = _SIZE_TOKENS.match(text, at)
        if found is None:
            return False
        at = found.end()
    return True


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in the document, at any depth."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield found
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)


def _output_names(program: Any) -> list[str] | None:
    """The keys where the outputs are a dictionary of tensors; None leaves PyTorch's own names."""
    from torch.utils import _pytree as pytree

    spec = program.call_spec.out_spec
    if spec is None:
        return None
    nested = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if not isinstance(nested, dict) or not all(isinstance(value, int) for value in nested.values()):
        return None
    by_place = sorted(nested.items(), key=lambda item: item[1])
    return [str(name) for name, _ in by_place]


def _refusal(error: BaseException) -> InvalidModel | UnsupportedOperator:
    """What PyTorch's exporter could not do, from the errors that it chained."""
    said = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(str(cause))
        cause = cause.__cause__
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", "\n".join(said))
    node = re.search(r"translating node %(\w+)", "\n".join(said))
    if missing is not None:
        operator = f"{missing[1]}.{missing[2]}"
        name = node[1] if node else ""
        return UnsupportedOperator(
            f"operator {operator} (node {name!r}) cannot be compiled: PyTorch's exporter has no ONNX for it; "
            "write the module without it",
            operator=operator, node=name, opset=_OPSET,
        )  # fmt: skip
    reason = next((line for text in reversed(said) for line in text.splitlines() if line.strip()), "no reason given")
    return InvalidModel(f"PyTorch's exporter cannot write the program as ONNX: {reason.strip()[:300]}")


def disagreement(program: Any, model: Path) -> str | None:
    """Where ONNX Runtime, on the model, differs from PyTorch on the program: on the inputs that it was exported with,
    and on random ones of the same shapes. None if nowhere."""
    import onnxruntime
    import torch
    from torch.utils import _pytree as pytree

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    given, spec = pytree.tree_flatten(program.example_inputs)
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    drawn = [
        torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in given
    ]
    module = program.module()
    for leaves in (given, drawn):
        arguments, named = pytree.tree_unflatten(leaves, spec)
        with torch.no_grad():
            wanted = _arrays(pytree.tree_leaves(module(*arguments, **named)))
        inputs = [port.name for port in session.get_inputs()]
        feeds = dict(zip(inputs, _arrays(leaves), strict=True))
        names = [port.name for port in session.get_outputs()]
        for entry in compare(wanted, session.run(None, feeds), names):
            if not entry["ok"]:
                return f"output {entry['output']!r}: {entry['problem']}"
    return None


def _arrays(values: Sequence[Any]) -> list[NDArray[Any]]:
    return [np.asarray(value.detach().cpu().numpy()) for value in values if hasattr(value, "detach")]
