"""Tests of quantization."""
