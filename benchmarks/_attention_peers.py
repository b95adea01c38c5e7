"""Other packages' causal attention, forward and backward: torch's variable-length and flex attention, and tokamax's.

What is not installed, or does not run, says so and has no time.
"""

import dataclasses
import functools
import importlib
import inspect
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Shape = tuple[int, int, int, int, int]  # B, T, Q, K, H


def tokamax(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None, softcap: float | None) -> jax.Array:
    """tokamax's Mosaic kernel for Hopper; packed rows would be a (T, T) mask."""
    attend = importlib.import_module("tokamax").dot_product_attention
    near = None if window is None else (window - 1, 0)
    return attend(
        q, k, v, is_causal=True, local_window_size=near, logits_soft_cap=softcap, implementation="mosaic"
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TorchCase:
    """Attention of a kind, "varlen" or "flex"; ids are (B, T)."""

    kind: str
    shape: Shape
    ids: np.ndarray | None
    window: int | None


def torch_times(cases: Sequence[TorchCase]) -> list[float | str]:
    """Milliseconds of each case, or why there are none."""
    times = []
    for case in cases:
        try:
            times.append(torch_ms(case))
        except Exception as error:  # of many kinds: missing, too old, out of memory, not compiled
            times.append(f"torch {case.kind}, {case.shape}: {type(error).__name__}: {str(error)[:200]}")
    return times


def torch_ms(case: TorchCase) -> float:
    """Milliseconds of the output and all gradients."""
    torch = importlib.import_module("torch")
    batch, length, query_heads, kv_heads, width = case.shape
    make = lambda heads: torch.randn(
        batch, length, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    q, k, v = make(query_heads), make(kv_heads), make(kv_heads)
    attend = (_varlen if case.kind == "varlen" else _flex)(torch, case)
    dout = torch.randn_like(q).detach()

    def run():
        return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    return _event_ms(torch, run)


def _varlen(torch: Any, case: TorchCase) -> Callable[..., Any]:
    """Flash attention over all segments of the batch, laid end to end."""
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    (batch, length, query_heads, _, width), window = case.shape, case.window
    ids = np.zeros((batch, length), int) if case.ids is None else case.ids
    begins = np.concatenate([np.ones((batch, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    ends = np.append(np.flatnonzero(begins), batch * length)
    ends_of, longest = torch.tensor(ends, device="cuda", dtype=torch.int32), int(np.diff(ends).max())
    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" in parameters:
        options: dict[str, Any] = dict(window_size=(-1 if window is None else window - 1, 0))
    elif window is None:
        options = dict(is_causal=True)
    else:
        raise ValueError("this torch's varlen_attn has no windows")
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    flat = lambda x: x.reshape(batch * length, x.shape[2], width)
    return lambda q, k, v: varlen_attn(
        flat(q), flat(k), flat(v), ends_of, ends_of, longest, longest, **options
    ).reshape(batch, length, query_heads, width)


def _flex(torch: Any, case: TorchCase) -> Callable[..., Any]:
    """Flex attention, compiled for its mask. The mask's blocks are found beforehand."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    (batch, length), ids, window = case.shape[:2], case.ids, case.window
    places = torch.zeros((batch, length), dtype=torch.int32) if ids is None else torch.tensor(ids)
    places = places.to("cuda")

    def sees(b, _, query, key):
        near = query >= key
        if window is not None:
            near = near & (query - key < window)
        return near & (places[b, query] == places[b, key])

    mask = flex.create_block_mask(sees, None if ids is None and window is None else batch, None, length, length)
    attend = torch.compile(functools.partial(flex.flex_attention, block_mask=mask, enable_gqa=True), dynamic=False)
    heads_first = lambda x: x.transpose(1, 2)
    return lambda q, k, v: heads_first(attend(heads_first(q), heads_first(k), heads_first(v)))


def _event_ms(torch: Any, run: Callable[[], Any], iterations: int = 12) -> float:
    """The median time between events around each run."""
    times = []
    for _ in range(3 + iterations):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])
