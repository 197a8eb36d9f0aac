"""The table of operators against the importer that it describes."""

from __future__ import annotations

import onnx
import pytest
from tvm.relax.frontend.onnx import onnx_frontend

from workers.frontend.normalise import REWRITES
from workers.frontend.onnx_model import has_function_body
from workers.frontend.operators import IMPORTED, REWRITTEN, SUPPORTED_OPSETS

STANDARD = frozenset(schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == "")


def test_table_is_what_the_importer_converts() -> None:
    """The table holds the standard operators that the installed TVM converts, and no other.

    Its `Attention` is Microsoft's.
    """
    converted = {name for name, converter in onnx_frontend._get_convert_map().items() if converter is not None}
    assert (converted & STANDARD) - {"Attention"} == IMPORTED


def test_what_is_rewritten_has_a_rewrite() -> None:
    """What the importer lacks and is promised all the same has a rewrite, and the importer does lack it."""
    assert REWRITES.keys() >= REWRITTEN
    assert not REWRITTEN & IMPORTED


def test_operator_sets() -> None:
    """No operator set is promised that the installed onnx does not know."""
    assert SUPPORTED_OPSETS[0] < SUPPORTED_OPSETS[1] <= onnx.defs.onnx_opset_version()


@pytest.mark.parametrize(
    ("name", "opset", "expected"),
    [("Celu", 17, True), ("Swish", 24, True), ("Swish", 21, False), ("LSTM", 17, False), ("NoSuch", 17, False)],
)
def test_function_bodies(name: str, opset: int, expected: bool) -> None:
    """An operator has a body from the operator set on that defines it by others."""
    assert has_function_body(name, opset) is expected
