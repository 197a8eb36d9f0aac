"""PyTorch programs made into ONNX, in the process that the API starts for that."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest

from tests.workers.frontend.frameworks import convert, inspect, write

needs_torch = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "onnxscript")),
    reason="PyTorch is not installed; pip install '.[torch]'",
)

#: Saves the programs that the tests take, each under its name.
PROGRAMS = """
import sys
import torch

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, states, scale):
        hidden = self.layer(states * scale)
        return {"pooled": hidden.mean(1), "hidden": hidden}

class Unknown(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)

batch = torch.export.Dim("batch", min=1, max=8)
folder = sys.argv[1]
torch.manual_seed(0)
torch.export.save(torch.export.export(
    Attention().eval(), (torch.randn(2, 8, 32), torch.tensor(1.5)), dynamic_shapes=({0: batch}, None)
), f"{folder}/attention.pt2")
torch.export.save(torch.export.export(Unknown(), (torch.rand(3),)), f"{folder}/unknown.pt2")
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(PROGRAMS, tmp_path_factory.mktemp("programs"))


@needs_torch
def test_program_becomes_onnx(programs: Path, tmp_path: Path) -> None:
    """Attention with an open batch: the arguments' names and the keys of the outputs are what users feed and get, and
    the conversion has compared the numbers with PyTorch's."""
    target = tmp_path / "model.onnx"
    assert convert(programs / "attention.pt2", target) == {"ok": True}
    answer = inspect(target)
    assert [port["name"] for port in answer["inputs"]] == ["states", "scale"]
    assert [port["name"] for port in answer["outputs"]] == ["pooled", "hidden"]
    batch, *rest = answer["inputs"][0]["shape"]
    assert isinstance(batch, str)
    assert rest == [8, 32]
    onnx.checker.check_model(target, full_check=True)


@needs_torch
def test_operator_without_onnx_is_named(programs: Path, tmp_path: Path) -> None:
    """What PyTorch's exporter cannot write is refused with the operator's name and the node's."""
    error = convert(programs / "unknown.pt2", tmp_path / "model.onnx")["error"]
    assert error["type"] == "UnsupportedOperator"
    assert error["operator"].endswith("bessel_j0.default")
    assert "bessel_j0" in error["node"]
