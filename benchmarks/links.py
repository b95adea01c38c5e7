"""What the collectives of a training step take beside its products, from bytes and datasheets alone.

    python -m benchmarks.links [--model llama-3-8b] [--tokens 8192] [--name links]

Nothing is compiled or run. Both times are the least that the datasheets allow: products at the peak of 16-bit dense
arithmetic, bytes at the rate of the links, one after the other. Layers are recomputed in the backward, parameters and
gradients are sent in bfloat16. So a layer's parameters are gathered twice and its gradients scattered once over fsdp,
and over tensor positions are gathered 6 times and scattered 5 times: `collectives` reads these numbers in a
compiled program. Over sequence a whole row's keys and values are gathered twice, and their gradients scattered once.

A GPU sends 450 GB/s over NVLink (900 in both directions), and hosts of eight are joined by eight links of 50 GB/s each
(400 Gbit/s). A v5p chip sends 600 GB/s over its six links (4,800 Gbit/s).
"""

import argparse
import dataclasses
import math

from benchmarks import _measure
from liger_jax.pallas_kernels.devices import GPUS, TPUS
from liger_jax.planner.architectures import architecture
from liger_jax.training.meshes import in_words

HOST = 8
NVLINK, BETWEEN_HOSTS, V5P_LINKS = 450e9, 8 * 50e9, 600e9  # bytes a second: of a GPU, of a host, of a chip
GATHERED, SCATTERED = 2, 1  # a layer's parameters, in a step whose layers are recomputed
ACTIVATIONS = 6 + 5  # collectives of a layer's activations over tensor
KEYS = 2 + 1  # collectives of a layer's keys and values over sequence
MESHES = (
    {"fsdp": 2},
    {"tensor": 2},
    {"sequence": 2},
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"tensor": 8},
    {"sequence": 8},
    {"fsdp": 64},
    {"fsdp": 8, "tensor": 8},
    {"fsdp": 8, "sequence": 8},
    {"fsdp": 512},
    {"fsdp": 64, "tensor": 8},
    {"fsdp": 64, "sequence": 8},
    {"fsdp": 8, "sequence": 8, "tensor": 8},
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a step on each device."""

    compute: float  # of the products
    parameters: float  # of the collectives of fsdp, and of sequence where it splits parameters, too
    keys: float  # of sequence's other collectives
    activations: float  # of tensor's collectives

    @property
    def share(self) -> float:
        """Collectives beside the products: below 1 they can be hidden, if nothing waits for them."""
        return (self.parameters + self.keys + self.activations) / self.compute


def seconds(size: float, devices: int, others: int, platform: str) -> float:
    """The time of a collective whose whole has `size` bytes.

    `size`: bytes of what is gathered, or of what is scattered. `devices`: that take part. `others`: devices along the
    axes inside of this one, which are its neighbours in a host. `platform`: "gpu" or "tpu". Returns the time of the
    slower of the links inside hosts and between them.
    """
    share = lambda n: size * (n - 1) / n
    if platform == "tpu":
        return share(devices) / V5P_LINKS
    hosts = max(1, devices * others // HOST)
    inside = share(devices) / NVLINK
    # All groups of a host, `others` of them at a time, share its links to other hosts.
    return max(inside, others * share(hosts) / BETWEEN_HOSTS)


def predicted(model: str, mesh: dict[str, int], tokens: int, platform: str) -> Prediction:
    """The times of a step.

    `model`: as the planner takes it. `mesh`: sizes of "fsdp", "sequence" and "tensor"; a tensor axis is inside of a
    host. `tokens`: of each device, in one row; the devices of a tensor axis have as many rows in common, and those of a
    sequence axis have shards of one row. `platform`: "gpu" for H200s, "tpu" for v5p.
    """
    described = architecture(model)
    config = described.config
    tensor, sequence = mesh.get("tensor", 1), mesh.get("sequence", 1)
    holders, row = mesh.get("fsdp", 1) * sequence, tokens * sequence
    table = config.vocab_size * config.hidden_size
    tables = table * (1 if config.tie_word_embeddings else 2)
    layers = described.num_parameters - tables
    # Forward, backward twice, and the layers' forward again; the head's products are four, too.
    products = 8 * (layers + table) * tokens
    attention = 8 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens * row
    v5p = TPUS["v5p"]
    peak = GPUS["h200"].peak_flops if platform == "gpu" else 2 * v5p.macs * v5p.cores * v5p.ghz * 1e9
    of_parameters = 0.0
    if holders > 1:
        sent = GATHERED + SCATTERED
        of_parameters = sent * seconds(2 * (layers + tables) / tensor, holders, tensor, platform)
    of_keys = 0.0
    if sequence > 1:
        keys = 2 * 2 * config.num_key_value_heads * config.head_dim * row  # of `tensor` rows, 1 / tensor of the heads
        of_keys = KEYS * config.num_hidden_layers * seconds(keys, sequence, tensor, platform)
    of_activations = 0.0
    if tensor > 1:
        rows = 2 * tokens * tensor * config.hidden_size
        of_activations = ACTIVATIONS * config.num_hidden_layers * seconds(rows, tensor, 1, platform)
    return Prediction((products + attention) / peak, of_parameters, of_keys, of_activations)


def table(model: str, tokens: int) -> str:
    """The table for both kinds of devices."""
    axes = ["fsdp", "sequence", "tensor"]
    header = ["devices", "mesh", "products, ms", *(f"{axis}, ms" for axis in axes), "share", "v5p: products", *axes]
    rows = []
    for mesh in MESHES:
        row = [str(math.prod(mesh.values())), f"`{in_words(mesh)}`"]
        for platform in ("gpu", "tpu"):
            prediction = predicted(model, mesh, tokens, platform)
            times = prediction.compute, prediction.parameters, prediction.keys, prediction.activations
            row += [f"{1e3 * time:.0f}" for time in times]
            row.append(f"{prediction.share:.0%}")
        rows.append(row)
    return _measure.table([*header, "share"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links")
    parser.add_argument("--model", default="llama-3-8b", help="as the planner takes it")
    parser.add_argument("--tokens", type=int, default=8192, help="of each device, in one row or in its shard of one")
    parser.add_argument("--name", help="of a file under results/")
    arguments = parser.parse_args()
    text = f"{arguments.model}, a row of {arguments.tokens} tokens for each device, by the datasheets\n\n"
    text += table(arguments.model, arguments.tokens)
    _measure.show_or_save(arguments.name, text)


if __name__ == "__main__":
    main()
