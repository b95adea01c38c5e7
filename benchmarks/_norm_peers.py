"""Other libraries' normalisations, as functions of torch tensors: rows, scale, and for layer_norm a bias.

One function per peer. It imports the peer, which raises where that is not installed, and returns its ops by our names.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

EPS = 1e-6
Ops = dict[str, Callable[..., Any]]


def torch_ops() -> Ops:
    functional = importlib.import_module("torch").nn.functional

    def rms_norm(x, scale):
        return functional.rms_norm(x, scale.shape, scale, EPS)

    def fused_add_rms_norm(x, residual, scale):
        added = x + residual
        return rms_norm(added, scale), added

    def layer_norm(x, scale, bias):
        return functional.layer_norm(x, scale.shape, scale, bias, EPS)

    return {"rms_norm": rms_norm, "fused_add_rms_norm": fused_add_rms_norm, "layer_norm": layer_norm}


def torch_compiled() -> Ops:
    compile_op = importlib.import_module("torch").compile
    return {name: compile_op(op, dynamic=False) for name, op in torch_ops().items()}


def liger() -> Ops:
    """Its Triton kernels."""
    of = lambda module, name: getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply
    rms = of("rms_norm", "LigerRMSNormFunction")
    fused = of("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    layer = of("layer_norm", "LigerLayerNormFunction")
    # Not in place: the cotangents are used again.
    return {
        "rms_norm": lambda x, scale: rms(x, scale, EPS, 0.0, "llama", False),
        "fused_add_rms_norm": lambda x, residual, scale: fused(x, residual, scale, EPS, 0.0, "llama", False),
        "layer_norm": lambda x, scale, bias: layer(x, scale, bias, EPS),
    }


def liger_cute() -> Ops:
    """Its kernels in CUTLASS's language."""
    of = lambda name: getattr(importlib.import_module(f"liger_kernel.ops.backends._cutedsl.{name}"), f"{name}_cutedsl")
    rms, fused, layer = of("rms_norm"), of("fused_add_rms_norm"), of("layer_norm")
    return {
        "rms_norm": lambda x, scale: rms(x, scale, EPS),
        "fused_add_rms_norm": lambda x, residual, scale: fused(x, residual, scale, EPS),
        "layer_norm": lambda x, scale, bias: layer(x, scale, bias, EPS),
    }


def quack() -> Ops:
    rmsnorm = importlib.import_module("quack").rmsnorm
    return {
        "rms_norm": lambda x, scale: rmsnorm(x, scale, eps=EPS),
        "fused_add_rms_norm": lambda x, residual, scale: rmsnorm(x, scale, residual=residual, eps=EPS, prenorm=True),
    }


PEERS: dict[str, tuple[str, Callable[[], Ops]]] = {
    "torch": ("torch eager", torch_ops),
    "compile": ("torch.compile", torch_compiled),
    "liger": ("Liger, Triton", liger),
    "liger-cute": ("Liger, CuTe", liger_cute),
    "quack": ("QuACK", quack),
}
PACKAGES = ("torch", "triton", "liger-kernel", "quack-kernels")


def calls(
    op: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any], direction: str
) -> Callable[[], Any]:
    """The forward without a graph, or the backward alone, of an op on JAX arrays that torch shares."""
    torch = importlib.import_module("torch")
    tensors, cotangents = ([torch.from_dlpack(x) for x in arrays] for arrays in (inputs, cotangents))
    if direction == "forward":

        def forward():
            with torch.no_grad():
                return op(*tensors)

        return forward
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = op(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return lambda: torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)


def wait(_: Any) -> None:
    cuda = importlib.import_module("torch").cuda
    if cuda.is_available():
        cuda.synchronize()
