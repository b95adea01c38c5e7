"""What the fused linear cross-entropy still asks of `_kernels` and `_device`, in the form that it had."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from liger_jax.ops._checks import current_precision as current_precision
from liger_jax.ops._device import described as described
from liger_jax.ops._device import device_of as device_of
from liger_jax.ops._device import memory_of_device as memory_of_device
from liger_jax.ops._kernels import Choice, Kernels
from liger_jax.ops._kernels import Implementation as Implementation


def choose(
    op: str, kernels: Mapping[str, Any], defaults: Mapping[str, tuple[str, ...]], *inputs: Any, **case: Any
) -> str:
    """The name that `Kernels.choose` chooses."""
    return Kernels(op, kernels, defaults).choose(*inputs, **case).name


def bind(op: str, kernels: Mapping[str, Any], choice: str, function: str) -> Callable[..., Any]:
    """The function of the module that `choose` named."""
    return functools.partial(_run, Choice(op, choice, kernels[choice.partition(":")[0]]), function)


def _run(choice: Choice, function: str, *arrays: Any, **options: Any) -> Any:
    kernel = choice.kernel(function, **options)
    return kernel.run(*kernel.guarded(*arrays))
