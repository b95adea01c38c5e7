"""Other libraries' linear cross entropies: the same mean loss of (N, D) hidden, (V, D) weight and (N,) labels.

One function per peer. It imports the peer, which raises where that is not installed, and returns named losses. A torch
loss becomes a timed forward or training step by `TorchStep`.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Losses = dict[str, Callable[..., Any]]
QUACK_CHUNKS = (2048, 4096, 8192)  # tokens
LIGER_CHUNK_FACTORS = (8, 16)  # of its default chunk, which holds as many logits as hidden has elements

# --- JAX: losses of (hidden, weight, labels), with the weight as (D, V) -----------------------------------------------


def tokamax() -> Losses:
    """The library's implementations for GPUs, with its own layout of the weight; products take hidden's dtype."""
    op = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss

    def loss(implementation, hidden, weight, labels):
        weight = weight.astype(hidden.dtype)
        return op(hidden, labels, weight, reduction="mean", implementation=implementation)

    return {f"tokamax {name}": functools.partial(loss, name) for name in ("xla", "chunked_xla")}


# --- torch: losses of (hidden, weight, labels) ------------------------------------------------------------------------


def torch_full_logits() -> Losses:
    """The logits in full, their loss in float32, op by op and compiled."""
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    torch.compiler.reset()  # after 8 shapes it would run eagerly

    def loss(hidden, weight, labels):
        return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)

    return {"torch eager, full logits": loss, "torch.compile, full logits": torch.compile(loss, dynamic=False)}


def liger() -> Losses:
    """The library's default, larger chunks where the version has them, a float32 sum of dW, and Hopper kernels."""
    function = importlib.import_module(
        "liger_kernel.ops.fused_linear_cross_entropy"
    ).LigerFusedLinearCrossEntropyFunction
    # autograd.Function.apply takes no keywords: all defaults are passed, by position.
    parameters = list(inspect.signature(function.forward).parameters.values())[4:]

    def loss(options, hidden, weight, labels):
        return function.apply(hidden, weight, labels, *(options.get(p.name, p.default) for p in parameters))[0]

    options = {"Liger": {}, "Liger, float32 dW sum": {"accum_dtype": importlib.import_module("torch").float32}}
    if any(p.name == "chunk_mem_const" for p in parameters):
        options |= {f"Liger, {factor}× chunks": {"chunk_mem_const": factor} for factor in LIGER_CHUNK_FACTORS}
    losses = {name: functools.partial(loss, chosen) for name, chosen in options.items()}

    def hopper(hidden, weight, labels):  # imported here, so that its failure, without CUTLASS's package, is a row
        module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
        return module.liger_fused_linear_cross_entropy_sm90(hidden, weight, labels)

    return losses | {"Liger CuTe SM90": hopper}


def quack() -> Losses:
    """Hopper kernels that keep exponentials scaled by tile, for several chunks of tokens.

    The library makes a key of all that a kernel's epilogue captures, and refuses a logger, which torch's compiler
    captures for it: a logger's name and level are its key.
    """
    logger_class: Any = logging.Logger
    logger_class.__quack_semantic_key__ = lambda logger: (logger.name, logger.level)
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return {f"QuACK, chunk {tokens:,}": functools.partial(function, chunk_size=tokens) for tokens in QUACK_CHUNKS}


def cut_cross_entropy() -> Losses:
    """The library's default, which leaves out small gradients, and the loss without that filter."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return {"CCE": function, "CCE, no filter": functools.partial(function, filter_eps=None)}


def trl_log_probs() -> Callable[..., Any]:
    """Log-probabilities (N,) of (hidden, weight, labels), with the chunks that the library's trainers take."""
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    return lambda hidden, weight, labels: function.apply(hidden, weight, None, labels, 1.0, 32768, None, 1.0, ())[0]


JAX_PEERS: dict[str, Callable[[], Losses]] = {"tokamax": tokamax}
TORCH_PEERS: dict[str, Callable[[], Losses]] = {
    "torch": torch_full_logits,
    "liger": liger,
    "quack": quack,
    "cce": cut_cross_entropy,
}
_CUTE = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
PACKAGES = {
    "torch": ("torch", "triton"),
    "liger": ("liger-kernel", *_CUTE),
    "quack": ("quack-kernels", *_CUTE),
    "cce": ("cut-cross-entropy",),
}


# --- torch's inputs, times and memory ---------------------------------------------------------------------------------


def to_torch(x: Any) -> Any:
    """A copy on torch's GPU, or on the CPU, through the host."""
    torch = importlib.import_module("torch")
    if x.dtype == jnp.bfloat16:  # torch.from_numpy knows no bfloat16: its bits travel
        y = torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    else:
        y = torch.from_numpy(np.array(x))
    return y.to("cuda" if on_gpu(torch) else "cpu")


class TorchInputs(NamedTuple):
    """The arrays of a shape as leaves of torch's graph."""

    hidden: Any
    weight: Any
    labels: Any


def on_gpu(torch) -> bool:
    """Whether torch's rows run on the GPU that JAX's run on."""
    return jax.default_backend() == "gpu" and torch.cuda.is_available()


def torch_inputs(hidden: jax.Array, weight: jax.Array, labels: jax.Array, what: str) -> TorchInputs:
    """Copies, through the host, with gradients for what `what` trains."""
    return TorchInputs(
        to_torch(hidden).requires_grad_(what in ("both", "frozen_head")),
        to_torch(weight).requires_grad_(what in ("both", "frozen_trunk")),
        to_torch(labels).long(),
    )


class TorchStep:
    """One torch loss on one shape's inputs: forward alone, and forward with backward."""

    def __init__(self, loss: Callable[..., Any], inputs: TorchInputs):
        self.torch = importlib.import_module("torch")
        self.loss, self.inputs = loss, inputs
        self.on_gpu = on_gpu(self.torch)

    def forward(self):
        """Runs the loss without gradients: some peers make them whenever an input asks for them."""
        with self.torch.no_grad(), self._mixed_precision():
            return self.loss(self.inputs.hidden.detach(), self.inputs.weight.detach(), self.inputs.labels)

    def both(self):
        """Into fresh gradients."""
        self._drop_gradients()
        with self._mixed_precision():
            loss = self.loss(*self.inputs)
        loss.backward()
        return loss.detach()

    def wait(self, _=None) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def extra_mib(self, run: Callable[[], Any]) -> float | None:
        """The peak of what torch allocates in one warm run, less what it held before and less the gradients."""
        if not self.on_gpu:
            return None
        self._drop_gradients()
        self.wait()
        cuda = self.torch.cuda
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        run()
        self.wait()
        gradients = [x.grad for x in self.inputs if x.grad is not None]
        return (cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in gradients)) / 2**20

    def weight_gradient(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the last run's dW, in float64."""
        index = self.torch.from_numpy(rows).to(self.inputs.weight.device)
        return self.inputs.weight.grad[index].double().cpu().numpy()

    def free(self) -> None:
        """Gives cached memory back to the device, for JAX."""
        self._drop_gradients()
        gc.collect()
        if self.on_gpu:
            self.torch.cuda.empty_cache()

    def _drop_gradients(self) -> None:
        for x in self.inputs:
            x.grad = None

    def _mixed_precision(self):
        """A float32 weight trains under autocast; bf16 needs none."""
        if self.inputs.weight.dtype == self.inputs.hidden.dtype:
            return contextlib.nullcontext()
        return self.torch.autocast(self.inputs.weight.device.type, dtype=self.inputs.hidden.dtype)
