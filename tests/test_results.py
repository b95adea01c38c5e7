"""What losses, ops and models return: trees with names."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from liger_jax.losses.policy import PolicyOutput
from liger_jax.losses.preference import DPOOutput
from liger_jax.losses.unpaired import KTOOutput
from liger_jax.ops import LossMetrics

TYPES = (DPOOutput, KTOOutput, PolicyOutput, LossMetrics)
types = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)


def make(kind):
    """A result with 0, 1, 2 and so on in its fields."""
    return kind(**{field.name: jnp.full(2, i) for i, field in enumerate(dataclasses.fields(kind))})


@types
def test_a_result_goes_through_jit_and_tree_map(kind):
    result = make(kind)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(result)
    assert type(doubled) is kind
    expected = kind(**{name: 2 * value for name, value in result.items()})
    chex.assert_trees_all_equal(doubled, expected)
    chex.assert_trees_all_equal_structs(doubled, result)


@types
def test_a_path_in_a_result_has_the_field_s_name(kind):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(make(kind))]
    assert sorted(paths) == sorted(f".{field.name}" for field in dataclasses.fields(kind))


@types
def test_a_result_cannot_be_changed_but_replaced(kind):
    result, name = make(kind), dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(result, name, 1)
    other = dataclasses.replace(result, **{name: jnp.full(2, 9)})
    chex.assert_trees_all_equal(getattr(other, name), jnp.full(2, 9))
    chex.assert_trees_all_equal(getattr(result, name), jnp.zeros(2, int))


@types
def test_fields_are_given_by_name_and_unknown_ones_are_refused(kind):
    fields = dict(make(kind).items())
    for arguments, named in ((tuple(fields.values()), {}), ((), fields | {"nothing": jnp.zeros(2)})):
        with pytest.raises((TypeError, ValueError)):
            kind(*arguments, **named)


def test_margins_and_accuracy_compare_the_rewards_of_each_pair():
    chosen, rejected = jnp.array([1.0, 0.5, -1.0, 2.0]), jnp.array([0.0, 0.5, -0.5, 1.0])
    output = DPOOutput(losses=jnp.zeros(4), chosen_rewards=chosen, rejected_rewards=rejected)
    chex.assert_trees_all_close(output.margins, jnp.array([1.0, 0.0, -0.5, 1.0]))
    chex.assert_trees_all_close(output.accuracy, jnp.array(0.5))  # a tie is no success
