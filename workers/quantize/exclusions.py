"""The nodes that int8 and fp16 can leave in fp32, by name: which there are, and which of them somebody means.

Exclusions name nodes of the model once functions are inlined and constants folded, which needs ONNX Runtime. What the
inspector can tell without it, from the model as it was uploaded, is what cannot be the name of such a node.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from onnx import ModelProto

from tuning_db.errors import InvalidRequest
from workers.frontend.archives import shown
from workers.frontend.inlining import inline_functions
from workers.frontend.operators import QUANTIZABLE

#: What ONNX Runtime calls a Gemm that has taken in a transposition or a sum is the Gemm's name and this.
_TRANSFORMED: Final = "_transformed"
#: What it calls a node that it makes of some without a name.
_FUSED: Final = re.compile("/[A-Za-z]+Fusion")


def name_nodes(model: ModelProto) -> None:
    """Call each node without a name, or with that of an earlier one, by its first output: exclusions need names."""
    seen: set[str] = set()
    for node in model.graph.node:
        if not node.name or node.name in seen:
            node.name = next(name for name in node.output if name)
        seen.add(node.name)


def nodes(model: ModelProto) -> list[tuple[str, str]]:
    """Name and operator of each node that int8 computes otherwise, in the graph's order, those of constants left out.

    `model` is as it was uploaded; its nodes are named here.
    """
    name_nodes(model)
    constant = {tensor.name for tensor in model.graph.initializer} | {""}
    found = []
    for node in model.graph.node:
        if node.op_type == "Constant" or constant.issuperset(node.input):
            constant.update(node.output)
        elif node.domain in ("", "ai.onnx") and node.op_type in QUANTIZABLE:
            found.append((str(node.name), str(node.op_type)))
    return found


def check(model: ModelProto, exclude: Sequence[str]) -> None:
    """InvalidRequest for a name in `exclude` that no node can have. `model` has its shapes bound.

    What ONNX Runtime fuses has the name of one of its parts before a slash or an ending: such names are let pass, and
    `meant_by` knows.
    """
    names = set(_names(model))
    unknown = [name for name in exclude if not any(part in names for part in _parts(name))]
    if not unknown:
        return
    # Bodies of functions have nodes of their own, whose names reports tell.
    names.update(_names(inline_functions(model)))
    for name in unknown:
        if not any(part in names for part in _parts(name)):
            raise _no_node(name, names, "the model has no node {}")


def meant_by(model: ModelProto, exclude: Sequence[str]) -> list[str]:
    """The nodes of the normalised model that are meant; what ONNX Runtime fused keeps the name of one of its parts,
    as in ``dense/MatMulAddFusion``. InvalidRequest for a name that is of none."""
    names = [node.name for node in model.graph.node]
    found = []
    for name in exclude:
        fused = re.compile(re.escape(name) + f"({_FUSED.pattern})+")
        meant = [n for n in names if n == name or fused.fullmatch(n)]
        if not meant:
            raise _no_node(name, names, "there is no node {} once constants and BatchNormalization are folded")
        found += meant
    return found


def _names(model: ModelProto) -> Iterator[str]:
    """What a node may be called: its own name, which may be empty, or, if it cannot be told by that, its first
    output's."""
    for node in model.graph.node:
        yield from (str(name) for name in (node.name, *node.output[:1]))


def _parts(name: str) -> Iterator[str]:
    """The name, and what it may have been before nodes were fused: of nodes without a name nothing is before the
    slash."""
    yield name
    yield from (name[:place] for place, letter in enumerate(name) if letter == "/" and place)
    if _TRANSFORMED in name:
        yield name.partition(_TRANSFORMED)[0]
    if _FUSED.match(name):
        yield ""


def _no_node(name: str, names: Iterable[str], problem: str) -> InvalidRequest:
    close = difflib.get_close_matches(name, sorted(names), n=3)
    hint = f"did you mean {', '.join(map(shown, close))}?" if close else "`tunery inspect MODEL --nodes` lists them"
    return InvalidRequest(f"quantization.exclude: {problem.format(shown(name))}; {hint}", field="quantization.exclude")
