"""The oracle: each token's divergence and cross-entropy from whole logits, in the dtype of the arguments."""

import jax
import jax.numpy as jnp


def logits(hidden, weight, bias=None, *, scale=1.0, softcap=None, temperature=1.0):
    """z (N, V) of hidden (N, D) and weight (V, D)."""
    u = hidden @ weight.T
    u = u if bias is None else u + bias
    u = u if softcap is None else softcap * jnp.tanh(u / softcap)
    return scale * u / temperature


def divergence(student, teacher, *, kind, beta=0.5, log_softmax=jax.nn.log_softmax):
    """D (N,) of logits (N, V)."""
    if kind == "cosine":
        dot = lambda x, y: jnp.sum(x * y, axis=1)
        square = dot(student, student) * dot(teacher, teacher)
        cosine = dot(student, teacher) / jnp.sqrt(jnp.where(square == 0, 1.0, square))
        return 1.0 - jnp.where(square == 0, 0.0, cosine)  # logits of zeros have distance 1 from all
    log_p, log_q = log_softmax(student), log_softmax(teacher)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "forward_kl":
        return jnp.sum(q * (log_q - log_p), axis=1)
    if kind == "reverse_kl":
        return jnp.sum(p * (log_p - log_q), axis=1)
    if kind == "tvd":
        return 0.5 * jnp.sum(jnp.abs(p - q), axis=1)
    log_m = jnp.logaddexp(jnp.log1p(-beta) + log_p, jnp.log(beta) + log_q)
    return jnp.sum(beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m), axis=1)


def cross_entropy(student, labels):
    """(N,) of logits (N, V) and labels (N,)."""
    return -jnp.take_along_axis(jax.nn.log_softmax(student), labels[:, None], axis=1)[:, 0]


def topk_divergence(student, token_ids, log_probs, *, tail, log_softmax=jax.nn.log_softmax):
    """D (N,) of logits (N, V) from the teacher's log-probabilities (N, K) of these tokens."""
    log_p = jnp.take_along_axis(log_softmax(student), token_ids, axis=1)
    q, used = jnp.exp(log_probs), log_probs != -jnp.inf
    divergence = jnp.sum(jnp.where(used, q * (jnp.where(used, log_probs, 0.0) - log_p), 0.0), axis=1)
    if tail == "ignore":
        return divergence
    rest, p_rest = 1.0 - jnp.sum(q, axis=1), 1.0 - jnp.sum(jnp.where(used, jnp.exp(log_p), 0.0), axis=1)
    return divergence + rest * (jnp.log(rest) - jnp.log(p_rest))
