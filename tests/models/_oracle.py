"""LLaMA written again from its equations, in whatever precision its parameters have."""

import jax
import jax.numpy as jnp


def llama_loss(config, params, tokens):
    """Mean of −log p(token | those before); `params` as `nnx.to_pure_dict` of a scanned model's state."""
    model = params["model"]
    x = model["embed_tokens"][tokens]
    layers = model["layers"]
    for i in range(config.num_hidden_layers):
        x = _layer(config, jax.tree.map(lambda leaf, i=i: leaf[i], layers), x)
    x = _norm(x, model["norm"]["scale"], config)
    logits = x @ (model["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]).T
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))


def _layer(config, layer, x):
    project = lambda block, name, y: y @ layer[block][f"{name}_proj"]["kernel"]
    y = _norm(x, layer["input_layernorm"]["scale"], config)
    x = x + project("self_attn", "o", _attention(config, *(project("self_attn", name, y) for name in "qkv")))
    y = _norm(x, layer["post_attention_layernorm"]["scale"], config)
    gate = project("mlp", "gate", y)
    return x + project("mlp", "down", gate / (1 + jnp.exp(-gate)) * project("mlp", "up", y))


def _norm(x, scale, config):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps) * scale


def _attention(config, q, k, v):
    length, width = q.shape[1], config.head_dim
    q, k, v = (y.reshape(*y.shape[:2], -1, width) for y in (q, k, v))
    q, k = _turned(q, config), _turned(k, config)
    shared = config.num_attention_heads // config.num_key_value_heads  # query heads on one key head
    out = []
    for head in range(config.num_attention_heads):
        scores = jnp.einsum("bth,bsh->bts", q[:, :, head], k[:, :, head // shared]) / width**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        out.append(jax.nn.softmax(scores) @ v[:, :, head // shared])
    return jnp.concatenate(out, axis=-1)


def _turned(x, config):
    """Pairs (x_i, x_{i + H/2}) as complex numbers, turned by position·theta^(−2i/H)."""
    half = config.head_dim // 2
    angles = jnp.arange(x.shape[1])[:, None] * config.rope_theta ** (-jnp.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)[None, :, None, :]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)
