"""The ONNX operators that can be compiled, as tables, so that refusing a model needs no TVM.

A test compares `IMPORTED` with the importer of the installed TVM. `Attention` is not in it: TVM's converter is of
Microsoft's operator of that name, and the standard's has a body of simpler ones.
"""

from __future__ import annotations

from typing import Final

#: Operator sets that are accepted, first and last.
SUPPORTED_OPSETS: Final = (7, 28)

#: Operators of which a quantized graph holds at least one.
QUANTIZED: Final = frozenset(
    {
        "ConvInteger", "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeLinear", "MatMulInteger",
        "QLinearConv", "QLinearMatMul", "QuantizeLinear",
    }
)  # fmt: skip

#: What ONNX Runtime's quantizer computes, or hands on, in int8 where it may; a test compares it with the installed one.
QUANTIZABLE: Final = frozenset(
    """
    Add ArgMax AveragePool BatchNormalization Clip Concat Conv ConvTranspose CumSum Flatten Gather GatherElements Gemm
    GlobalAveragePool InstanceNormalization LSTM LayerNormalization LeakyRelu MatMul MaxPool Mul Pad Relu Reshape Resize
    Sigmoid Slice Softmax Split Squeeze TopK Transpose Unsqueeze Where
    """.split()  # noqa: SIM905
)

#: What TVM 0.27's importer converts.
IMPORTED: Final = frozenset(
    """
    Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization
    BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Clip Compress Concat ConcatFromSequence
    Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Dropout
    DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu
    Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization
    HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less
    LessOrEqual Log LogSoftmax LpPool MatMul MatMulInteger Max MaxPool MaxRoiPool MaxUnpool Mean
    MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression NonZero Not OneHot Optional OptionalGetElement
    OptionalHasElement Or PRelu Pad Pow QuantizeLinear RMSNormalization Range Reciprocal ReduceL1 ReduceL2
    ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
    Resize RoiAlign Round Scatter ScatterElements ScatterND Selu SequenceAt SequenceConstruct SequenceEmpty
    SequenceErase SequenceInsert SequenceLength Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus
    Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose
    Trilu Unique Unsqueeze Upsample Where Xor
    """.split()  # noqa: SIM905 - a list of 140 quoted names reads worse
)

#: What it lacks and our rewrites write as others, where their attributes and constants allow it.
REWRITTEN: Final = frozenset(
    "ConvInteger CumProd GRU LSTM LpNormalization QLinearConv QLinearMatMul RNN ReverseSequence".split()  # noqa: SIM905
)

SUPPORTED: Final = IMPORTED | REWRITTEN

#: Operators of ONNX Runtime's own, beside the standard's, that its quantizer writes and our rewrites write as others.
CONTRIBUTED: Final = frozenset(
    f"com.microsoft.{name}"
    for name in (
        "DynamicQuantizeLSTM", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat",
        "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid",
    )
)  # fmt: skip
