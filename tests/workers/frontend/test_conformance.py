"""A sample of the ONNX standard's operator tests: every case that import or build once got wrong, and one in sixty."""

from __future__ import annotations

import pytest

from benchmarks.onnx_conformance import PASS, REFUSED, Case, Result, load_cases, run_cases

#: Cases that TVM's importer, kernels or our memory plan answered wrongly, or could not run, and that pass now.
MENDED = """
    attention_23_boolmask_fullymasked_row_nan_robustness_expanded
    attention_23_fullymasked_qk_matmul_output_mode3_zero_expanded
    attention_24_fullymasked_qk_matmul_output_mode3_zero_expanded
    attention_24_qk_matmul_output_mode3_softmax_precision_expanded
    attention_4d_causal_nonpad_negative_offset_structural_empty_expanded
    attention_causal_boolmask_nan_robustness_expanded attention_local_window_gqa_rank4_mask_expanded
    batchnorm_epsilon_training_mode batchnorm_example_training_mode bitshift_left_int32_negative_shift
    bitshift_left_int32_shift_ge_width convtranspose_output_shape dropout_default_mask dropout_default_mask_ratio
    isinf_negative isinf_positive layer_normalization_2d_axis0 layer_normalization_2d_axis1
    layer_normalization_2d_axis_negative_1 layer_normalization_2d_axis_negative_2
    layer_normalization_3d_axis0_epsilon layer_normalization_3d_axis1_epsilon layer_normalization_3d_axis2_epsilon
    layer_normalization_3d_axis_negative_1_epsilon layer_normalization_3d_axis_negative_2_epsilon
    layer_normalization_3d_axis_negative_3_epsilon layer_normalization_4d_axis0 layer_normalization_4d_axis1
    layer_normalization_4d_axis2 layer_normalization_4d_axis3 layer_normalization_4d_axis_negative_1
    layer_normalization_4d_axis_negative_2 layer_normalization_4d_axis_negative_3
    layer_normalization_4d_axis_negative_4 layer_normalization_default_axis mish mish_expanded
    mod_float_edge_cases_fmod_0_float16 mod_float_edge_cases_fmod_0_float32 mod_float_edge_cases_fmod_0_float64
    resize_downsample_scales_cubic resize_downsample_scales_cubic_A_n0p5_exclude_outside
    resize_downsample_scales_cubic_align_corners resize_downsample_scales_cubic_antialias
    resize_downsample_scales_linear resize_downsample_scales_linear_antialias
    resize_downsample_sizes_cubic_antialias resize_downsample_sizes_linear_antialias spacetodepth_crd_mode_example
    training_dropout_zero_ratio_mask causal_conv_with_state_with_bias center_crop_pad_crop dynamicquantizelinear
    dynamicquantizelinear_expanded nllloss_NCd1d2_with_weight_reduction_mean
    nllloss_NCd1d2_with_weight_reduction_mean_expanded pow_types_int64_int64 reduce_max_bool_inputs
    resize_downsample_scales_linear_align_corners resize_downsample_scales_linear_half_pixel_symmetric
    rms_normalization_4d_axis0 sce_mean_weight sce_mean_weight_expanded linear_attention_gated
""".split()  # noqa: SIM905 - a list of names reads worse

#: Cases that were wrong and are refused by name.
REFUSED_BY_NAME = """
    sequence_model3 training_dropout training_dropout_default training_dropout_default_mask training_dropout_mask
""".split()  # noqa: SIM905 - a list of names reads worse


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    cases = {case.name.removeprefix("test_"): case for case in load_cases()}
    chosen: dict[str, Case] = {name: cases[name] for name in (*MENDED, *REFUSED_BY_NAME)}
    chosen |= {name: cases[name] for name in sorted(cases)[::60]}
    found = run_cases(list(chosen.values()), with_runtime=False)
    return dict(zip(chosen, found, strict=True))


def test_nothing_is_wrong(results: dict[str, Result]) -> None:
    """No case is answered wrongly, crashes, hangs or fails after import; what is refused is refused with a reason."""
    bad = {name: (r.verdict, r.detail) for name, r in results.items() if r.verdict not in (PASS, REFUSED)}
    assert not bad
    assert all(result.detail for result in results.values() if result.verdict == REFUSED)


def test_mended_cases_pass(results: dict[str, Result]) -> None:
    """Every case that was once wrong and was mended passes."""
    assert {name: results[name].detail for name in MENDED if results[name].verdict != PASS} == {}


def test_what_cannot_be_right_names_its_operator(results: dict[str, Result]) -> None:
    """Cases that were once wrong and cannot be compiled are refused with their operator's name."""
    for name in REFUSED_BY_NAME:
        assert results[name].verdict == REFUSED
        assert results[name].refused_operator
