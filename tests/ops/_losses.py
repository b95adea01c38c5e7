"""One set of cases for both losses: over logits, and over hidden states and a head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax import cross_entropy, fused_linear_cross_entropy
from tests.ops.references import cross_entropy as logits_reference
from tests.ops.references import linear_cross_entropy as linear_reference

IGNORE = -100


@dataclasses.dataclass
class Case:
    """Inputs in float64; token_weights are 0 and labels IGNORE where a token does not count."""

    hidden: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    labels: np.ndarray
    token_weights: np.ndarray
    class_weights: np.ndarray

    @property
    def counts(self):
        return self.labels != IGNORE


def make_case(rng, n=37, d=19, v=53, scale=1.0, ignored=0.2):
    labels = rng.integers(0, v, n)
    labels[rng.uniform(size=n) < ignored] = IGNORE
    if n and ignored < 1:
        labels[0] = rng.integers(0, v)
    return Case(
        hidden=scale * rng.standard_normal((n, d)),
        weight=rng.standard_normal((v, d)),
        bias=rng.standard_normal(v),
        labels=labels,
        token_weights=rng.uniform(0.5, 2.0, n),
        class_weights=rng.uniform(0.5, 2.0, v),
    )


@dataclasses.dataclass(frozen=True)
class Op:
    """A loss as a function of its differentiable inputs, and its oracle."""

    name: str

    def inputs(self, case):
        if self.name == "cross_entropy":
            return [case.hidden @ case.weight.T + case.bias]
        return [case.hidden, case.weight, case.bias]

    def __call__(self, inputs, labels, **options):
        if self.name == "cross_entropy":
            return cross_entropy(*inputs, labels=labels, **options)
        hidden, weight, bias = inputs
        return fused_linear_cross_entropy(hidden, weight, labels, bias=bias, **options)

    def oracle(self, case, cotangents=None, token_weights=True, class_weights=False, **options):
        """Value and gradients by the inputs, then by the token weights, in float64."""
        with jax.enable_x64(True):
            inputs = [jnp.asarray(x, jnp.float64) for x in self.inputs(case)]
            weights = case.token_weights if token_weights else np.ones(len(case.labels))
            weights = jnp.asarray(np.where(case.counts, weights, 0.0))
            classes = jnp.asarray(case.class_weights) if class_weights else None
            labels = jnp.asarray(np.where(case.counts, case.labels, 0))

            def value(inputs, weights):
                if self.name == "cross_entropy":
                    loss = logits_reference.cross_entropy(inputs[0], labels, weights, classes, **options)
                else:
                    hidden, weight, bias = inputs
                    loss = linear_reference.linear_cross_entropy(
                        hidden, weight, labels, weights, bias, classes, **options
                    )
                return loss if cotangents is None else jnp.sum(loss * jnp.asarray(cotangents))

            result = value_and_grad(value, (0, 1))(inputs, weights)
            value, (grads, weight_grads) = jax.tree.map(np.asarray, result)
            return value, [*grads, np.where(case.counts, weight_grads, 0.0)]


CROSS_ENTROPY = Op("cross_entropy")
FUSED = Op("fused_linear_cross_entropy")


def arrays(xs, dtype=jnp.float32):
    return [jnp.asarray(x, dtype) for x in xs]


def value_and_grad(function, argnums=0, has_aux=False):
    """jax.value_and_grad as one program: operations one by one would be a compilation each."""
    return jax.jit(jax.value_and_grad(function, argnums, has_aux))


def relative_error(value, truth, floor=0.0):
    """max|value − truth| / max(|truth|, floor), absolute where the truth is 0; NaN anywhere is an error of infinity."""
    value, truth = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    if not value.size:
        return 0.0
    scale = max(np.max(np.abs(truth)), floor)
    error = np.max(np.abs(value - truth)) / (scale if scale > 1e-12 else 1.0)
    return np.inf if np.isnan(error) else error


def rms_error(value, truth):
    value, truth = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    return np.sqrt(np.mean((value - truth) ** 2))
