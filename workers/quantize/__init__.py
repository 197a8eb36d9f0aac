"""Quantization: to int8 by ONNX Runtime's quantizer, by samples, or of weights to fp16; what each costs."""
