"""Quantization to int8 by ONNX Runtime's quantizer, calibrated on the user's samples, and what it costs in accuracy."""
