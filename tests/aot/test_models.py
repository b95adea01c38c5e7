"""What compiled programs of models hold, read in the programs for devices that are not there."""

import pytest

from tests.aot.process import run

pytestmark = [pytest.mark.aot, pytest.mark.full]


def test_the_two_gradients_of_a_tied_head_share_one_array():
    """The head's is a float32 product, rounded; tokens' rows, summed in float32, are scattered into it."""
    script = r"""
import re
import jax, jax.numpy as jnp
from flax import nnx
from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.planner.compilers import compile_for, gpu_devices
device = gpu_devices("h200")[0]
config = LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
                     num_attention_heads=4, tie_word_embeddings=True)
make = lambda: LlamaForCausalLM(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
graph, params = nnx.split(nnx.eval_shape(make))
leaves, tree = jax.tree.flatten(params)
assert [leaf.shape for leaf in leaves].count((4096, 256)) == 1

def gradient(tokens, *leaves):
    loss = lambda params: nnx.merge(graph, params)(tokens, labels=tokens).loss
    return jax.grad(loss)(jax.tree.unflatten(tree, leaves))

types = [((2, 256), jnp.int32), *((leaf.shape, leaf.dtype) for leaf in leaves)]
text = compile_for(gradient, types, device, "gpu").as_text()
entry = text[text.index("ENTRY"):]
tables = [line for line in entry.splitlines() if re.search(r"= \(?(bf16|f32)\[4096,256\]", line)]
tables = [line for line in tables if not re.search(r" (parameter|bitcast|get-tuple-element|tuple)\(", line)]
assert [re.search(r"= \(?(bf16|f32)", line)[1] for line in tables] == ["f32", "bf16", "bf16"], tables
assert "scatter" in tables[2], tables
for earlier, later in zip(tables, tables[1:]):
    name = re.match(r"\s*(%\S+)", earlier)[1]
    assert re.search(re.escape(name) + r"[,)]", later), tables
assert re.search(r"scatter\S* = f32\[512,256\]", text), "equal tokens are not summed in float32"
"""
    run("gpu", script)


def test_gates_that_are_made_again_take_the_memory_of_half_of_them():
    """In arrays (N, F): Triton's pass runs over gate, up and dh of a half, Hopper's over gate and up and one more."""
    script = r"""
import jax, jax.numpy as jnp
from liger_jax import gated_mlp
from liger_jax.planner.compilers import compile_for, gpu_devices
device = gpu_devices("h200")[0]
n, d, f = 16384, 896, 4864
types = [(shape, jnp.bfloat16) for shape in ((n, d), (d, f), (d, f), (f, d), (n, d))]
for kernel in ("triton", "mosaic_gpu"):
    def gradients(x, gate_kernel, up_kernel, down_kernel, dy):
        op = lambda *inputs: gated_mlp(*inputs, recomputed=True, implementation=kernel)
        return jax.vjp(op, x, gate_kernel, up_kernel, down_kernel)[1](dy)

    memory = compile_for(gradients, types, device, "gpu").memory_analysis()
    beside = 2 * n * d * 2 + 6 * d * f * 2  # sums of x's gradient; halves of kernels and of their gradients
    assert 1.5 * n * f * 2 <= memory.temp_size_in_bytes <= 1.5 * n * f * 2 + beside, (kernel, memory)
"""
    run("gpu", script)


@pytest.mark.parametrize(
    "kind, target, is_packed",
    [
        ("tpu", "v5e", True),
        ("gpu", "h200", False),
        ("gpu", "h200", True),
        pytest.param("gpu", "a100-80g", True, marks=pytest.mark.targets),
    ],
)
def test_no_scores_of_all_tokens_exist_in_a_compiled_model(kind, target, is_packed):
    """Packed rows run in kernels; padded rows of one document in cuDNN where it is installed, else in ours."""
    script = f"""
import re
import jax, jax.numpy as jnp
from flax import nnx
from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.planner.compilers import compile_for, {kind}_devices
device = {kind}_devices("{target}")[0]
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2)
make = lambda: LlamaForCausalLM(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
graph, params = nnx.split(nnx.eval_shape(make))
leaves, tree = jax.tree.flatten(params)

def gradient(tokens, ids, *leaves):
    padding = dict(segment_ids=ids) if {is_packed} else dict(token_mask=ids)
    loss = lambda params: nnx.merge(graph, params)(tokens, labels=tokens, **padding).loss
    return jax.grad(loss)(jax.tree.unflatten(tree, leaves))

types = [((1, 1536), jnp.int32)] * 2 + [(leaf.shape, leaf.dtype) for leaf in leaves]
text = compile_for(gradient, types, device, "{kind}").as_text()
assert re.search(r"\\[(\\d+,)*1536,(\\d+,)*256\\]", text), "the tokens' own arrays are not found"
assert not re.search(r"\\[(\\d+,)*1536,(\\d+,)*1536(,|\\])", text)
if "{kind}" == "tpu":
    assert len(set(re.findall(r"splash_m[hq]a\\w*", text))) >= 2, "splash attention's kernels, forward and backward"
elif {is_packed}:
    assert "causal_attention_forward" in text and "causal_attention_key_gradients" in text
"""
    run(kind, script)


def test_a_step_of_generate_copies_nothing_of_the_cache():
    """In its loop the cache is written in place, and a kernel reads it where it is."""
    script = r"""
import re
import jax, jax.numpy as jnp
from flax import nnx
from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.planner.compilers import compile_for, gpu_devices
device = gpu_devices("h200")[0]
config = LlamaConfig(vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=3,
                     num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024)
make = lambda: LlamaForCausalLM(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, scan_layers=False,
                                rngs=nnx.Rngs(0))
graph, params = nnx.split(nnx.eval_shape(make))
leaves, tree = jax.tree.flatten(params)

def generated(prompts, *leaves):
    model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    return model.generate(prompts, max_new_tokens=256, eos_token_id=())

types = [((16, 256), jnp.int32), *((leaf.shape, leaf.dtype) for leaf in leaves)]
text = compile_for(generated, types, device, "gpu").as_text()
loops = re.findall(r" while\(.*body=(%?[\w.]+)", text)
assert len(loops) == 1, loops
body = text[text.index(f"\n{loops[0]} "):]
body = body[:body.index("\n}")].splitlines()
ofs = [line for line in body if re.match(r"\s*(ROOT )?\S+ = bf16\[(3,)?16,511,2,64\]", line)]
made = [line for line in ofs if not re.search(r" (get-tuple-element|parameter|bitcast)\(", line)]
assert len(made) == 6 and all("dynamic_update_slice_fusion" in line for line in made), made
assert not [line for line in body if re.search(r"\[[\d,]*\b511,[\d,]*64\b[\d,]*\]\S* (copy|transpose|slice)", line)]
kernels = [line for line in body if "__gpu$xla.gpu.triton" in line and "decode_attention" in line]
assert len(kernels) == 3 and all("bf16[3,16,511,2,64]" in line for line in kernels), kernels
"""
    run("gpu", script)


def test_a_loop_over_layers_runs_each_kernel_of_its_forward_once():
    """XLA of jaxlib 0.11, not of 0.10 and 0.12, would fuse a call with the writing of its results, and run it again."""
    script = r"""
import re
import jax, jax.numpy as jnp
from liger_jax import causal_attention, grouped_matmul
from liger_jax.planner.compilers import compile_for, gpu_devices
device = gpu_devices("h200")[0]

def attend(x, w, ids):
    q = (x @ w).reshape(2, 512, 4, 64)
    return causal_attention(q, q, q, segment_ids=ids, implementation="mosaic_gpu").reshape(x.shape)

def multiply(x, w, ids):
    y = grouped_matmul(x.reshape(1024, 256), w[None] * jnp.ones((2, 1, 1), w.dtype), ids, implementation="mosaic_gpu")
    return jax.nn.gelu(y).reshape(x.shape)

ids, sizes = ((2, 512), jnp.int32), ((2,), jnp.int32)
for layer, integers, name in (attend, ids, "causal_attention_forward"), (multiply, sizes, "grouped_matmul_product"):
    def gradients(x, w, integers):
        loss = lambda w: jax.lax.scan(lambda x, w: (layer(x, w, integers) @ w, None), x, w)[0].astype(jnp.float32).sum()
        return jax.grad(loss)(w)

    types = ((2, 512, 256), jnp.bfloat16), ((4, 256, 256), jnp.bfloat16), integers
    text = compile_for(gradients, types, device, "gpu").as_text()
    forward = re.findall(rf'custom_call_target="mosaic_gpu.*?/jvp\(.*?{name}', text)
    assert len(forward) == 1, (name, len(forward))
"""
    run("gpu", script)
