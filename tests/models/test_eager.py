"""Outside of jit a second call of the same shapes compiles nothing."""

import jax.numpy as jnp
import pytest
from flax import nnx

from liger_jax.models import AutoModelForCausalLM
from tests._compilations import compilations
from tests.models._hugging_face import COMMITTED, GOLDEN
from tests.ops._oracle import first

FAMILIES = first(1, ("gemma3", *(case for case in COMMITTED if case != "gemma3")))  # it has a pattern of layers


def loss(model, ids):
    return model(ids, labels=ids).loss


@pytest.mark.parametrize("scan_layers", first(1, [True, False]), ids=["scan", "unrolled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_call_and_its_gradient_compile_nothing(family, scan_layers, rng):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / family, scan_layers=scan_layers)
    ids = jnp.asarray(rng.integers(1, 29, (1, 8)), jnp.int32)
    found = []
    for call in (loss, nnx.grad(loss)):
        call(model, ids)
        with compilations() as programs:
            call(model, ids)
        found.append(len(programs))
    assert found == [0, 0]


@pytest.mark.parametrize("family", [pytest.param(case, marks=pytest.mark.full) for case in COMMITTED])
def test_a_second_generation_compiles_nothing(family, rng):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / family)
    prompts = jnp.asarray(rng.integers(1, 29, (1, 4)), jnp.int32)
    generate = lambda: model.generate(prompts, max_new_tokens=3, eos_token_id=())
    generate()
    with compilations() as programs:
        generate()
    assert not programs
