"""The experiments on several devices: collectives are read in programs, cases are named by texts, times add up."""

import jax
import numpy as np
import pytest

from benchmarks import links
from benchmarks._collectives import by_kind, collectives, product_flops
from benchmarks._device_trace import shares
from benchmarks._scaling_cases import Case, chosen, default_cases
from benchmarks._scaling_loss import LossCase, program_of

# Of programs that were compiled for GPUs and for CPUs. What the test does not read is cut off.
PROGRAM = """
%region_1.2 (arg.1: (bf16[8,4])) -> (bf16[8,4]) {
  %arg.1 = (bf16[8,4]{1,0}) parameter(0)
  %part.1 = bf16[8,4]{1,0} get-tuple-element(%arg.1), index=0
  %all-gather-start.1 = (bf16[8,4]{1,0}, bf16[32,4]{1,0}) all-gather-start(%part.1), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, metadata={op_name="layer/all_gather"}
  %all-gather-done.1 = bf16[32,4]{1,0} all-gather-done(%all-gather-start.1)
  %dot.1 = bf16[32,16]{1,0} dot(%all-gather-done.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduce-scatter.1 = bf16[8,16]{1,0} reduce-scatter(%dot.1), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, to_apply=%add
}

%fused.1 (p.1: bf16[2,3,5], p.2: bf16[2,5,7]) -> bf16[2,3,7] {
  %p.1 = bf16[2,3,5]{2,1,0} parameter(0)
  %p.2 = bf16[2,5,7]{2,1,0} parameter(1)
  ROOT %dot.2 = bf16[2,3,7]{2,1,0} dot(%p.1, %p.2), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

%condition.1 (arg.2: (bf16[8,4])) -> pred[] {
  %constant.1 = s32[] constant(7)
  ROOT %less.1 = pred[] compare(%i.1, %constant.1), direction=LT
}

ENTRY %main.1 (x.1: bf16[8,4]) -> f32[] {
  %x.1 = bf16[8,4]{1,0} parameter(0)
  %while.1 = (bf16[8,4]{1,0}) while(%x.1), condition=%condition.1, body=%region_1.2, backend_config={"known_trip_count":{"n":"31"}}
  %while.2 = (bf16[8,4]{1,0}) while(%x.1), condition=%condition.1, body=%region_1.2
  %fusion.1 = bf16[2,3,7]{2,1,0} fusion(%a.1, %b.1), kind=kOutput, calls=%fused.1
  %sum.1 = f32[10]{0} all-reduce(%y.1), replica_groups={{0,1}}, to_apply=%add
  %y.1 = f32[10]{0} constant(0)
  %alone.1 = f32[10]{0} all-reduce(%y.1), replica_groups={{0},{1}}, to_apply=%add
}
"""  # noqa: E501  # a line of a program is one line


def test_collectives_are_counted_with_their_loops():
    found = collectives(PROGRAM)
    told = [(each.kind, each.devices, each.bytes, each.runs) for each in found]
    gathered, scattered = ("all-gather", 4, 2 * 32 * 4), ("reduce-scatter", 4, 2 * 32 * 16)
    of_loops = [(*each, runs) for runs in (31, 7) for each in (gathered, scattered)]
    assert told == [*of_loops, ("all-reduce", 2, 40, 1)]
    assert found[0].source == "layer/all_gather" and found[0].largest == 32 * 4
    assert found[0].sent == 31 * 256 * 3 / 4 and found[-1].sent == 2 * 40 / 2
    assert by_kind(found, layers=19) == [
        ["a layer", "reduce-scatter", "4", "2", f"{2 * 1024 * 3 / 4 / 2**20:.1f}"],
        ["a layer", "all-gather", "4", "2", "0.0"],
        ["the rest", "all-reduce", "2", "1", "0.0"],
    ]


def test_products_are_counted_with_their_loops_and_their_batches():
    assert product_flops(PROGRAM) == 38 * 2 * 32 * 4 * 16 + 2 * 2 * 3 * 5 * 7


def test_what_another_kernel_hides_of_a_collective_is_not_exposed():
    kernels = [("gemm", 0, 10), ("ncclDevKernel_AllGather", 5, 14), ("ncclDevKernel_ReduceScatter", 12, 18)]
    found = shares([*kernels, ("gemm", 16, 17), ("gemm", 19, 20)])
    assert found == pytest.approx((13 / 20, 7 / 20, 1 / 20))


def test_a_case_is_told_by_a_text():
    case = Case.of("strong:llama-3-8b@8+full:8x2048:fsdp=2,tensor=2")
    assert (case.layers, case.remat, case.scan, case.count, case.batch) == (8, "full", True, 4, 8)
    weak = Case.of("weak:llama-3.2-1b+unrolled:4x2048:fsdp=2")
    assert (weak.batch, weak.alone.batch, weak.scan, weak.remat) == (8, 4, False, "none")
    assert case.alone == Case.of("weak:llama-3-8b@8+full:8x2048:fsdp=1")
    for text in ("weak:llama-3.2-1b:4x2048", "weak:llama-3.2-1b:4:fsdp=2", "some:llama-3.2-1b:4x2048:fsdp=2"):
        with pytest.raises(ValueError, match="case="):
            Case.of(text)


@pytest.mark.parametrize("count", [4, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 8))])
def test_the_default_cases_run_or_say_why_not(count, capsys):
    cases = chosen(default_cases(count), count, "h100")
    printed = capsys.readouterr().out
    assert [case.count for case, _ in cases] == sorted(case.count for case, _ in cases)
    assert all(case.alone in dict(cases) for case, _ in cases)
    assert "skipped: " not in printed
    by_eight_layers = [run for case, run in cases if isinstance(case, Case) and case.layers]
    assert by_eight_layers and all(
        run is not None and run.model.config.num_hidden_layers == 8 for run in by_eight_layers
    )


def test_a_loss_is_told_by_its_sizes():
    case = LossCase.of("loss:8192x4096x128256:tensor=2")
    assert (case.batch, case.width, case.vocab, case.count, case.alone.count) == (8192, 4096, 128256, 2, 1)
    for text in ("loss:8192x4096:tensor=2", "loss:8192x4096x128256:fsdp=2", "loss:8192x4096x128257:tensor=2"):
        with pytest.raises(ValueError, match="case="):
            LossCase.of(text)


def test_a_split_loss_of_the_benchmark_equals_a_whole_one(devices):
    case = LossCase.of("loss:32x16x64:tensor=2")
    found, alone = (program(*make()) for program, _, make in (program_of(each, devices) for each in (case, case.alone)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        x, y = (np.asarray(each, np.float32) for each in (x, y))
        np.testing.assert_allclose(x, y, atol=2e-2 * np.abs(y).max())


def test_times_are_bytes_over_the_slower_links():
    parameters = 8030261248
    found = links.predicted("llama-3-8b", {"fsdp": 2}, 8192, "gpu")
    assert found.parameters == pytest.approx(3 * 2 * (parameters - 65 * 4096) / 2 / 450e9, rel=1e-3)
    products = 8 * 7.5e9 * 8192 + 8 * 32 * 4096 * 8192**2  # matrices without the embedding, and attention
    assert found.activations == 0 and found.compute == pytest.approx(products / 989e12, rel=0.01)
    # Over hosts the eight links between them are slower than NVLink. A host's groups share them.
    within, over = (links.predicted("llama-3-8b", {"fsdp": n}, 8192, "gpu") for n in (8, 64))
    assert over.parameters / within.parameters == pytest.approx(450 / 400, rel=0.02)
    both = links.predicted("llama-3-8b", {"fsdp": 8, "tensor": 8}, 8192, "gpu")
    assert both.parameters == pytest.approx(over.parameters, rel=0.02)
    rows = 2 * 8192 * 8 * 4096
    assert both.activations == pytest.approx(32 * 11 * rows * 7 / 8 / 450e9)
