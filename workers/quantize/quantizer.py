"""From fp32 ONNX with bound shapes to int8: static with QuantizeLinear and DequantizeLinear (QDQ), or dynamic.

The work is ONNX Runtime's quantizer's. Activations become uint8 with a zero point, weights int8 around zero: the kinds
that `vpdpbusd` multiplies, and that ONNX Runtime's own kernels are fastest for. (`vpdpbusd` exists with VNNI; where a
CPU has AVX2 alone, ONNX Runtime's kernels may saturate in pairs of products, its documentation says.)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import ModelProto
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static

from tuning_db.errors import InvalidRequest
from workers.frontend.operators import QUANTIZED
from workers.quantize.exclusions import meant_by
from workers.quantize.request import SOURCE, Recipe
from workers.quantize.samples import Sample, Samples

#: How the range of a tensor is chosen from its values, by the name users give.
METHODS: Final = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}


def quantize(model: ModelProto, recipe: Recipe, samples: Samples | None, target: Path) -> ModelProto:
    """Write the quantized model to `target`, in a folder of its own, and return it.

    `model` is normalised, shapes inferred, every node named. The same model, recipe and samples give the same bytes.
    Raises InvalidRequest for an exclusion that names no node, for a graph that nothing can be quantized in, and for
    static quantization without samples.
    """
    refuse_quantized(model, "int8")
    excluded = _excluded(model, recipe.exclude)
    source = target.with_name(SOURCE)
    onnx.save_model(model, source)
    with _quiet():
        if recipe.method is None:
            quantize_dynamic(
                source,
                target,
                per_channel=recipe.per_channel,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=excluded,
            )
        else:
            if samples is None:
                raise InvalidRequest(
                    "static int8 needs calibration data: upload samples of the model's inputs, or ask for dynamic",
                    field="quantization.calibration",
                )
            quantize_static(
                source,
                target,
                _Reader(samples),
                quant_format=QuantFormat.QDQ,
                per_channel=recipe.per_channel,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=excluded,
                calibrate_method=METHODS[recipe.method],
                extra_options={
                    # One sample after the other, whatever the method: otherwise all tensors of all samples are kept.
                    "CalibStridedMinMax": 1,
                    # Most activations are not around zero: a symmetric range would waste half of them.
                    "CalibTensorRangeSymmetric": False,
                    "CalibPercentile": recipe.percentile,
                },
            )
    quantized = onnx.load(target)
    if not {node.op_type for node in quantized.graph.node} & QUANTIZED:
        raise InvalidRequest(
            "int8: the model holds no operator that can be quantized, or all of them are excluded",
            field="quantization.scheme",
        )
    return quantized


def refuse_quantized(model: ModelProto, scheme: str) -> None:
    """Raises InvalidRequest for a model that is in integers already."""
    if {node.op_type for node in model.graph.node} & QUANTIZED:
        raise InvalidRequest(
            f"{scheme}: the model is quantized already; ask for the scheme 'none', which leaves it as it is",
            field="quantization.scheme",
        )


class _Reader:
    """Samples in the quantizer's interface: it asks for a range of them, then for one after the other."""

    def __init__(self, samples: Samples) -> None:
        self._count = len(samples)
        self._stream: Iterator[Sample] = iter(samples)
        self._left = 0

    def __len__(self) -> int:
        return self._count

    def set_range(self, start_index: int, end_index: int) -> None:
        self._left = end_index - start_index  # ranges come in order and touch each other

    def get_next(self) -> dict[str, Any] | None:
        if not self._left:
            return None
        self._left -= 1
        return next(self._stream)


def _excluded(model: ModelProto, exclude: Sequence[str]) -> list[str]:
    """What the quantizer is to be told of the nodes that are meant."""
    # Before it looks at exclusions, the dynamic quantizer takes products with a bias apart, and calls them so.
    apart = {node.name: f"{node.name}_MatMul" for node in model.graph.node if node.op_type == "Gemm"}
    meant = meant_by(model, exclude)
    return [*meant, *(apart[n] for n in meant if n in apart)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer advises on its own preprocessing, which ours replaces, through the root logger."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
