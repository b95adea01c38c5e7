"""The experiments on memory: kernels are found in compiled programs by name, and trials bracket what fits."""

import pytest

from benchmarks import pods, small_card
from benchmarks._memory import both, kernels_in, named

# Lines of programs that were compiled for an H200 and for a TPU. What the test does not read is cut off.
PROGRAM = r"""
  %pallas_call.70 = (bf16[2048,1024]{1,0}, f32[528,1024]{1,0}) custom-call(%wrapped_add), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/transpose(jvp(rms_norm_backward))/pallas_call" stack_frame_id=3}
  %mpmd_map.14 = (f32[32,2048]{1,0}) custom-call(%fusion.18), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/jvp()/shard_map/fused_linear_cross_entropy_statistics/mpmd_map" scheduling_name="mpmd_map.14"}
  %fwd.3 = f32[8,128] custom-call(%copy.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/jvp()/while/body/closed_call/rms_norm_forward/pallas_call"}
  %splash.2 = bf16[8,2048,128] custom-call(%iota.80), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block_q": 512
}}, metadata={op_name="jit(step)/jit(_splash_attention)/splash_mha_fwd_residuals/pallas_call" stack_frame_id=165}
  %pad.9 = bf16[2048,1024] pad(%p.1, %c.2), padding=0_0x0_0, metadata={op_name="jit(step)/jvp()/swiglu_forward/pallas_call"}
  %sort.1 = s32[4] custom-call(%p.3), custom_call_target="AssumeGatherIndicesInBound", metadata={op_name="jit(step)/softmax_forward/pallas_call"}
"""  # noqa: E501  # a line of a program is one line


def test_kernels_are_the_custom_calls_of_pallas_by_their_names():
    """Operations that prepare a kernel's arguments do not count, nor do other custom calls."""
    ours = ["fused_linear_cross_entropy_statistics", "rms_norm_backward", "rms_norm_forward"]
    assert kernels_in(PROGRAM) == [*ours, "splash_mha_fwd_residuals"]
    assert kernels_in(PROGRAM.replace("custom_call_target", "target")) == []


class Kept(dict):
    """Figures that are all there."""

    def compiled(self, spec):
        return self.get(named(spec))


def test_a_program_without_a_kernel_that_is_chosen_is_named():
    norms = ["rms_norm_backward", "rms_norm_forward"]
    of_loss = ["fused_linear_cross_entropy_logit_gradients", "fused_linear_cross_entropy_statistics"]
    runs = both(pods.spec_of("llama-3-8b", "h200:8"))
    whole = Kept({named(runs["logits"]): {"kernels": norms}, named(runs["fused"]): {"kernels": of_loss + norms}})
    assert pods.missing(whole) == []
    whole[named(runs["fused"])] = {"kernels": [*of_loss[1:], *norms]}
    assert pods.missing(whole) == [f"llama-3-8b on h200:8, fused: {of_loss[0]} not in the compiled program"]
    whole[named(runs["fused"])] = {"kernels": None}  # refused for its memory: there is no program
    assert pods.missing(whole) == []


class Trials:
    """Steps that fit up to a batch."""

    def __init__(self, fits_to, predicted):
        self.fits_to, self.values = fits_to, {"h200, fused:512": {"batch": predicted}}

    def __getitem__(self, key):
        return self.values.get(key)

    def make(self, key, function, spec, device_bytes):
        return self.values.setdefault(key, {"peak": 1 if spec["batch"] <= self.fits_to else None})


@pytest.mark.parametrize("fits_to, told", [(17, "17"), (18, "18"), (16, "16"), (30, "≥ 19"), (15, "15"), (9, None)])
def test_the_largest_batch_is_measured_around_what_was_predicted_in_three_trials(fits_to, told):
    figures = Trials(fits_to, predicted=17)
    small_card.measure(figures, "fused:512", "h200", 2**37)
    tried = small_card.trials(figures, "fused:512")
    assert len(tried) <= 3
    best = small_card.largest_measured(tried)
    assert best == (told and (int(told.removeprefix("≥ ")), told))
