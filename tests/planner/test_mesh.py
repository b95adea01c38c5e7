"""Plans of runs on meshes: what each axis splits, and what is refused."""

import pytest

from liger_jax.planner import defaults, plan
from liger_jax.planner.advice import largest
from liger_jax.planner.estimate import DYNAMIC, STATIC, estimate, logits_bytes, moment_bytes
from liger_jax.planner.mesh import mesh_sizes, meshes
from liger_jax.planner.planning import make_run
from liger_jax.planner.searching import runs_on_meshes

LLAMA = dict(model="llama-3-8b", batch=8, seq=4096, device="h200:8")


def parts(**changes):
    return estimate(make_run(**LLAMA | changes)).bytes_of


def test_parameters_and_state_are_split_over_both_axes():
    whole, both = parts(), parts(mesh=dict(fsdp=4, tensor=2))
    for name in ("parameters", "optimizer state", "gradients"):
        assert both[name] == pytest.approx(whole[name], rel=1e-3)
    alone = parts(mesh=dict(tensor=8))
    assert alone["parameters"] == pytest.approx(whole["parameters"], rel=1e-3)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_what_layers_keep_is_split_by_positions_heads_or_width(remat):
    """Twice as many sequences, whose devices have half of everything; keys' heads that are not enough are repeated."""
    whole, both = parts(remat=remat), parts(mesh=dict(fsdp=4, tensor=2), remat=remat)
    for name in ("layer inputs", "attention", "feed-forward"):
        assert both[name] == pytest.approx(whole[name], rel=1e-6)
    one_row = dict(model="llama-3-8b", batch=1, seq=4096, remat=remat)
    repeated = estimate(make_run(**one_row, device="h200:16", mesh=dict(tensor=16))).bytes_of["attention"]
    split = estimate(make_run(**one_row, device="h200:8", mesh=dict(tensor=8))).bytes_of["attention"]
    assert repeated > split / 2 if remat != "full" else repeated == split == 0


def test_a_tensor_axis_gathers_whole_rows_of_three_arrays():
    """A sublayer's input and the gradients of its input and result, of eight rows rather than one."""
    one, gathered = (make_run(**LLAMA | dict(mesh=mesh)).layer.worked_on for mesh in (None, dict(tensor=8)))
    assert gathered - one == 3 * 7 * 4096 * 4096 * 2


def test_logits_are_split_by_the_vocabulary():
    both = [plan(**LLAMA | dict(mesh=mesh)).estimates["logits"].loss_bytes for mesh in (None, dict(tensor=8))]
    hidden = 2 * 2 * 4096 * 4096  # of a row, and its gradient
    logits, cast = 8 * 4096 * 128256, 2 * 128256 * 4096  # of a row; and the head in bfloat16
    assert both[0] == hidden + logits + cast
    # Whole rows of all eight sequences beside a device's positions of them, its part of their logits and of the head.
    assert both[1] == 8 * hidden + hidden + logits + cast // 8


def test_adapters_are_split_with_their_matrices():
    options = dict(lora=16, optimizer="sgd")
    whole, split = parts(**options)["parameters"], parts(**options, mesh=dict(tensor=8))["parameters"]
    base = make_run(**LLAMA | options).model.num_parameters * 2 // 8
    assert split < whole  # on fsdp every device has the adapters whole
    # One of an adapter's two matrices is split: of q, k, v, gate and up that of the outputs, else that of the inputs.
    outputs, inputs = 4096 + 2 * 1024 + 2 * 14336, 4096 + 14336
    own = 5 * 4096 + outputs / 8 + inputs / 8 + 2 * 4096
    assert split - base == pytest.approx(4 * 32 * 16 * own, rel=0.01)


def test_the_devices_of_a_tensor_axis_share_a_batch():
    assert make_run(**LLAMA | dict(batch=None, device="h200:32", mesh=dict(fsdp=4, tensor=8))).batch == 8
    assert make_run(**LLAMA | dict(batch=1, mesh=dict(tensor=8))).tokens == 4096
    with pytest.raises(
        ValueError, match="batch=6 is not divisible by the 4 groups of devices of 'h200:8'.*Pass batch=4"
    ):
        make_run(**LLAMA | dict(batch=6, mesh=dict(fsdp=4, tensor=2)))


def test_the_devices_of_a_sequence_axis_have_their_positions_of_each_row():
    shared = make_run(**LLAMA | dict(batch=2, mesh=dict(fsdp=2, sequence=4)))
    assert (shared.batch_devices, shared.positions, shared.tokens) == (2, 1024, 1024)
    padded = make_run(**LLAMA | dict(batch=3, seq=4001, mesh=dict(sequence=4, tensor=2)))
    assert (padded.positions, padded.tokens) == (1002, 3006)  # 4,001 are padded to 4,008, eight equal parts
    assert make_run(**LLAMA | dict(batch=None, device="h200:32", mesh=dict(fsdp=4, sequence=8))).batch == 8
    with pytest.raises(
        ValueError, match="batch=3 is not divisible by the 2 groups of devices of 'h200:8'.*Pass batch=2"
    ):
        make_run(**LLAMA | dict(batch=3, mesh=dict(fsdp=2, sequence=4)))


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_row_over_several_devices_is_as_much_for_each_as_a_short_row(remat):
    """Parameters, state and what layers keep are sharded as on fsdp; attention holds all keys of the row beside it."""
    alone = estimate(make_run(**LLAMA | dict(batch=8, seq=4096, remat=remat)))
    shared = estimate(
        make_run(**LLAMA | dict(batch=2, seq=16384, model="llama-3.1-8b", mesh=dict(fsdp=2, sequence=4), remat=remat))
    )
    names = {*STATIC, *DYNAMIC} - {"one layer's work", "copies of parameters"}
    for name in names if alone.peak == shared.peak else names - {"gradients", "loss"}:
        assert shared.bytes_of[name] == pytest.approx(alone.bytes_of[name], rel=1e-3), name
    keys = 4 * 2 * 8 * 128 * 16384  # keys, values and their gradients, in bfloat16, of a whole row
    work = [
        make_run(**LLAMA | changes).layer.worked_on
        for changes in (
            dict(batch=8, seq=4096, remat=remat),
            dict(model="llama-3.1-8b", batch=2, seq=16384, mesh=dict(fsdp=2, sequence=4), remat=remat),
        )
    ]
    assert work[1] - work[0] == keys


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model="qwen2.5-7b", mesh=dict(tensor=8)), "do not divide num_attention_heads=28. The nearest .* is 4"),
        (dict(mesh=dict(fsdp=2, tensor=2)), "mesh='fsdp=2,tensor=2' has 4 devices, and the target has 8"),
    ],
)
def test_what_a_tensor_axis_does_not_take_is_told(changes, message):
    with pytest.raises(ValueError, match=message):
        make_run(**LLAMA | changes)


def test_meshes_are_tried_by_what_they_send():
    tensors = lambda count: [[mesh.get("tensor", 1) for mesh in alike] for alike in meshes(count, 2048)]
    assert tensors(8) == [[1], [2], [4], [8]] and tensors(6) == [[1], [2]]
    assert meshes(1, 131072) == [[{"data": 1, "fsdp": 1}]]
    long = [[mesh.get("sequence", 1) for mesh in alike] for alike in meshes(16, 16384)]
    assert long == [[1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4], [1, 2]]
    found = runs_on_meshes("qwen2.5-7b", device="h200:8", batch=4, seq=1024)
    assert [run.mesh for run in found] == [
        {"data": 1, "fsdp": 4, "tensor": 2},
        {"data": 1, "fsdp": 2, "tensor": 4},
    ]  # a batch of 4 has no 8 parts, and 28 heads neither
    with pytest.raises(ValueError, match="batch=3 is not divisible by the 8 devices"):
        runs_on_meshes("qwen2.5-7b", device="h200:8", batch=3, seq=1024)


def test_long_rows_are_split_over_as_few_devices_as_give_all_of_them_work():
    found = runs_on_meshes("llama-3.1-8b", device="h200:16", batch=2, seq=65536)
    sizes = [(run.mesh["fsdp"], run.sequence, run.tensor) for run in found]
    assert sizes == [(2, 8, 1), (2, 4, 2), (2, 2, 4), (2, 1, 8)]
    alone = runs_on_meshes("llama-3.1-8b", device="h200:16", batch=16, seq=65536)
    assert [run.sequence for run in alone] == [1] * 4  # rows that are enough stay whole


def test_advice_keeps_the_tensor_axis():
    given = dict(mesh=dict(fsdp=4, tensor=2), remat="full", micro_batches=1)
    too_much = plan(**LLAMA | dict(batch=64, seq=8192, device="a100-40g:8") | given)
    found = too_much.changes_to_fit()
    assert not too_much.fits and found and all(change.run.tensor == 2 for change in found)


def test_advice_keeps_the_sequence_axis():
    long = dict(model="llama-3.1-8b", batch=1, seq=131072, device="a100-40g:8", mesh=dict(sequence=8), remat="none")
    found = plan(**long).changes_to_fit()
    assert found and all(change.run.sequence == 8 and change.run.positions == 16384 for change in found)


def test_sizes_of_axes_and_meshes_worth_a_try():
    assert mesh_sizes({"fsdp": 4, "tensor": 2}, 8) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert mesh_sizes(None, 8) == {"data": 1, "fsdp": 8}
    assert meshes(4, 512) == [[{"data": 1, "fsdp": n} | ({"tensor": 4 // n} if n < 4 else {})] for n in (4, 2, 1)]
    assert meshes(2, 8192)[0] == [{"data": 1, "fsdp": 2}, {"data": 1, "fsdp": 1, "sequence": 2}]


def test_defaults_and_bytes_of_a_run():
    assert defaults.param_dtype(None, "bfloat16") == "float32" and defaults.param_dtype(16, "bfloat16") == "bfloat16"
    assert [defaults.batch(unit) for unit in (1, 3, 16)] == [8, 9, 16]
    assert moment_bytes("adamw8bit", "float32") == 2.03125  # two codes, and two float32 scales for 256 of them
    assert logits_bytes(4096, 152_064, bytes_per_logit=12) / 2**30 == pytest.approx(6.96, abs=0.005)
    assert largest(lambda n: n * n <= 50) == 7
