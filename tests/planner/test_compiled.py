"""What the planner compiles for devices that are not there."""

import json

import pytest

from tests.aot.process import run

TINY = dict(
    model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
pytestmark = pytest.mark.aot


def compiled(script, *arguments, platform="gpu"):
    """The last line, as JSON, that a script prints where the compilers are."""
    return json.loads(run(platform, script, *arguments).splitlines()[-1])


PLAN = """
import json, math, re, sys
from benchmarks._memory import kernels_in
from liger_jax.planner import compile_run
from liger_jax.planner.compilers import without_cudnn
from liger_jax.planner.estimate import estimate
from liger_jax.planner.planning import make_run
from tests.ops._oracle import sent
model, batch, seq, device, options = sys.argv[1:]
run = make_run(model, batch=int(batch), seq=int(seq), device=device, **json.loads(options))
found = compile_run(run)
text = found.program.as_text() if found.program else ""
memory = found.program.memory_analysis() if found.program else None
print(json.dumps(dict(
    total=found.total, arguments=found.arguments, estimate=estimate(run).total, parts=estimate(run).bytes_of,
    memory=run.target.memory_bytes, refused=found.program is None,
    host_arguments=memory and memory.host_argument_size_in_bytes,
    host_temporaries=memory and memory.host_temp_size_in_bytes,
    kernels=kernels_in(text), without_cudnn=without_cudnn(),
    float32=sorted({math.prod(map(int, dims.split(","))) for dims in re.findall(r"\\bf32\\[([\\d,]+)\\]", text)}),
    sent=sorted(sent(text)), mode=run.loss_plan().mode, slice=run.loss_plan().chunk_size,
)))
"""


EXPLICIT = """
import json
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from liger_jax import ops
from liger_jax.planner import compilers
from liger_jax.planner.devices import target
from liger_jax.planner.mesh import make_mesh
from tests.ops._oracle import sent
mesh = make_mesh(compilers.devices_of(target("h200:2")), dict(data=1, fsdp=2), AxisType.Explicit)
batch = P(("data", "fsdp"))
typed = lambda shape, spec, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
loss = lambda x, scale, head, labels: ops.fused_linear_cross_entropy(ops.rms_norm(x, scale), head, labels)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(
        typed((4, 512, 1024), batch, jnp.bfloat16), typed((1024,), P(), jnp.bfloat16),
        typed((32000, 1024), P("fsdp"), jnp.float32), typed((4, 512), batch, jnp.int32),
    ).lower(lowering_platforms=("cuda",)).compile()
text = program.as_text()
names = "rms_norm_forward", "rms_norm_backward", "fused_linear_cross_entropy_statistics"
print(json.dumps(dict(kernels=[name for name in names if name in text], sent=sorted({n for _, n in sent(text)}))))
"""


@pytest.mark.full
def test_ops_on_an_explicit_mesh_of_gpus_run_our_kernels_and_send_no_activations():
    found = compiled(EXPLICIT)
    assert len(found["kernels"]) == 3
    of_a_device, head = 2 * 512 * 1024, 32000 * 1024
    assert not {of_a_device, 2 * of_a_device} & set(found["sent"])
    rows = {n for n in found["sent"] if n > 1024}  # slices of the head and of its gradient, of whole rows
    assert rows and all(n % 1024 == 0 and n < head // 2 for n in rows)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


# By default aot/test_ahead_of_time.py has our kernels on a mesh of GPUs, planner/test_estimate.py what was compiled,
# and ops/test_sliced_head.py the head in slices.
@pytest.fixture(scope="module")
def packed_step(tmp_path_factory):
    """The compiled step of a tiny model on packed rows, for eight H200s along "fsdp"."""
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return compiled(PLAN, path, 8, 256, "h200:8", '{"packed": true}')


@pytest.mark.full
def test_a_sharded_packed_step_compiled_for_gpus_calls_our_kernels_and_holds_its_share_of_the_state(packed_step):
    found = packed_step
    assert {"fused_linear_cross_entropy_statistics", "rms_norm_forward", "rms_norm_backward"} <= set(found["kernels"])
    attention = {f"causal_attention_{name}" for name in ("forward", "query_gradient", "key_gradients")}
    assert attention <= set(found["kernels"])
    static = found["parts"]["parameters"] + found["parts"]["optimizer state"]
    assert found["arguments"] == pytest.approx(static, rel=0.01)


@pytest.mark.full
def test_a_sharded_step_sends_its_head_in_slices_and_holds_no_float32_array_as_large_as_the_head(packed_step):
    found, width = packed_step, 256
    head, part = 4096 * width, found["slice"] * width
    assert (TINY["vocab_size"], TINY["hidden_size"]) == (4096, width)
    assert found["mode"] == "lean" and part < head
    assert head not in found["float32"]
    assert {("all-gather", part), ("reduce-scatter", part // 8)} <= {tuple(pair) for pair in found["sent"]}


@pytest.mark.full
def test_a_step_that_a_tpu_has_no_memory_for_is_a_number_and_no_error():
    found = compiled(PLAN, "qwen2-0.5b", 16, 2048, "v5e", '{"loss": "logits"}', platform="tpu")
    assert found["refused"] and found["total"] > found["memory"]


@pytest.mark.full
def test_micro_batches_save_memory_as_estimated():
    where = "qwen2-0.5b", 16, 2048, "h200"
    options = dict(remat="none", loss="logits")
    without, found = (compiled(PLAN, *where, json.dumps(options | more)) for more in ({}, {"micro_batches": 4}))
    assert found["total"] < without["total"]
    assert found["estimate"] == pytest.approx(found["total"], rel=0.1)


@pytest.mark.full
def test_the_loss_has_memory_for_the_columns_that_an_adapter_of_the_head_adds(tiny):
    """In float32 nothing is copied, so that the loss's budget is exact: a column that it did not count is refused."""
    options = dict(lora=3, lora_targets=["q_proj", "lm_head"], param_dtype="float32", dtype="float32", packed=True)
    assert compiled(PLAN, tiny, 2, 64, "h200", json.dumps(options))["total"]


@pytest.mark.full
@pytest.mark.parametrize(
    "options, kind, part",
    [
        ({"state_memory": "host"}, "host_arguments", "optimizer state"),
        ({"remat": "offload"}, "host_temporaries", "layer inputs"),
    ],
    ids=["optimizer state", "layer inputs"],
)
def test_what_lies_on_the_host_leaves_the_gpu(options, kind, part, tiny):
    larger = dict(vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    tiny.write_text(json.dumps(TINY | larger))
    without, found = (compiled(PLAN, tiny, 8, 1024, "h200", json.dumps(more)) for more in ({}, options))
    assert found[kind] == pytest.approx(without["parts"][part], rel=0.01)
    # The rest is on its way: both moments of a table alone are 0.17 of the state.
    assert without["total"] - found["total"] > 0.75 * found[kind]


@pytest.mark.full
@pytest.mark.parametrize("loss", ["fused", "logits"])
@pytest.mark.parametrize(
    "model, batch, seq, remat",
    [
        ("qwen2-0.5b", 8, 512, "full"),
        ("qwen2-0.5b", 8, 512, "none"),
        ("qwen2-1.5b", 2, 4096, "dots"),
        ("qwen2-0.5b", 8, 2048, 12),
        ("llama-3.2-1b", 8, 2048, "full"),
    ],
)
def test_estimate_is_within_10_percent_of_what_is_compiled_for_an_h200(model, batch, seq, remat, loss):
    found = compiled(PLAN, model, batch, seq, "h200", json.dumps(dict(remat=remat, loss=loss)))
    if found["without_cudnn"] and model == "llama-3.2-1b":  # without cuDNN, XLA's attention is its peak
        pytest.skip(found["without_cudnn"])
    assert found["estimate"] == pytest.approx(found["total"], rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    "model, batch, seq, device, options",
    [
        ("qwen2-0.5b", 8, 512, "h200", dict(remat="none")),
        ("llama-3.2-1b", 8, 2048, "h200", {}),
        pytest.param("qwen2-0.5b", 8, 2048, "a100-80g", {}, marks=pytest.mark.targets),
        pytest.param("qwen2-0.5b", 8, 2048, "t4", dict(dtype="float16"), marks=pytest.mark.targets),
        ("llama-3.2-1b", 2, 8192, "h200:8", dict(mesh=dict(fsdp=2, sequence=4))),
        ("llama-3.2-1b", 2, 8192, "h200:8", dict(mesh=dict(fsdp=2, sequence=2, tensor=2), remat="none")),
    ],
)
def test_estimate_of_packed_rows_is_within_10_percent_of_what_is_compiled(model, batch, seq, device, options):
    found = compiled(PLAN, model, batch, seq, device, json.dumps(options | dict(packed=True)))
    assert found["estimate"] == pytest.approx(found["total"], rel=0.1)
    assert ("causal_attention_forward" in found["kernels"]) == (device != "t4")


@pytest.mark.full
@pytest.mark.parametrize(
    "model, batch, seq, device, options",
    [
        ("qwen2-0.5b", 8, 2048, "v6e", dict(loss="logits")),
        *(
            pytest.param(*case, marks=pytest.mark.targets)
            for case in (
                ("llama-3.2-1b", 4, 2048, "v5p", dict(remat="none")),
                ("qwen2-1.5b", 8, 4096, "v5p:2x2x1", dict(remat="dots")),
                ("llama-3.2-3b", 8, 4096, "v6e:2x2", dict(loss="logits")),
                ("llama-3.2-1b", 1, 32768, "v6e:2x2", dict(mesh=dict(sequence=4))),
            )
        ),
    ],
)
def test_estimate_is_within_10_percent_of_what_is_compiled_for_tpus(model, batch, seq, device, options):
    found = compiled(PLAN, model, batch, seq, device, json.dumps(options), platform="tpu")
    assert found["estimate"] == pytest.approx(found["total"], rel=0.1)


MIXTURE = dict(
    model_type="olmoe", vocab_size=8192, hidden_size=1024, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=8, num_experts=32, num_experts_per_tok=4, max_position_embeddings=4096,
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "devices, options",
    [
        (2, dict(mesh=dict(expert=2))),
        (4, dict(mesh=dict(fsdp=2, expert=2))),
        (4, dict(mesh=dict(fsdp=2, tensor=2))),
        (4, dict(mesh=dict(expert=2, tensor=2))),
        (2, dict(mesh=dict(fsdp=2))),
    ],
)
def test_estimate_of_a_mixture_on_a_mesh_is_within_10_percent_of_what_is_compiled(devices, options, tiny):
    """Rows of experts that devices share are most of what a layer works on.

    Parameters of all layers, transposed to be gathered, would be a sixth of the whole.
    """
    tiny.write_text(json.dumps(MIXTURE))
    found = compiled(PLAN, tiny, 8, 2048, f"h200:{devices}", json.dumps(options))
    assert found["estimate"] == pytest.approx(found["total"], rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [dict(fsdp=4), dict(fsdp=2, tensor=2)], ids=str)
def test_estimate_of_a_dense_model_on_a_mesh_is_within_6_percent_of_what_is_compiled(mesh, tiny):
    """Parameters gathered for a second layer, or tiles where a device of a tensor axis has too few positions for them,
    would be more than that.
    """
    larger = dict(vocab_size=8192, hidden_size=1024, intermediate_size=8192, max_position_embeddings=8192)
    tiny.write_text(json.dumps(TINY | larger | dict(num_attention_heads=8)))
    seq = 8192 if "tensor" in mesh else 512
    found = compiled(PLAN, tiny, 8, seq, "h200:4", json.dumps(dict(mesh=mesh)))
    assert found["estimate"] == pytest.approx(found["total"], rel=0.06)
