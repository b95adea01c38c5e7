"""The TPU compiler's final schedule of splash attention's kernels, read without a TPU.

    python -m benchmarks.attention_schedule [--cases v6e:8192]

It compares blocks of 512 and a backward of two kernels with the sizes that `splash.block_sizes` chooses. A step of the
grid that computes counts as its bundles, or as its products at the published peak if these take longer; a step that is
skipped counts as the bundles outside of the computation. Copies from HBM are not counted, but for the pieces of dq.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks import tpu_schedule
from benchmarks.tpu_schedule import FINAL_SCHEDULE
from liger_jax.pallas_kernels.devices import TPUS

HEADS, WIDTH, LENGTHS = 8, 128, (2048, 8192)
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}


def compile_program(generation: str, length: str, what: str) -> None:
    """Compiles a program, in a process of its own because libtpu reads its settings once."""
    from tests.aot import targets

    os.environ.update(targets.ENVIRONMENT)
    import functools

    import jax
    import jax.numpy as jnp

    from liger_jax import causal_attention
    from liger_jax.pallas_kernels.attention import splash
    from liger_jax.planner.compilers import compile_for, tpu_devices

    if what == "before":
        splash._MOST_PIECES = 0  # no fused backward
    sizes = splash.block_sizes(int(length), None, splash.whole_length(int(length), None)[1])

    def step(q, k, v, ids, do):
        attend = functools.partial(causal_attention, segment_ids=ids, implementation="splash")
        out, backward = jax.vjp(attend, q, k, v)
        return out, backward(do)

    q, k = ((1, int(length), heads, WIDTH) for heads in (HEADS, HEADS // 4))
    types = ((q, jnp.bfloat16), (k, jnp.bfloat16), (k, jnp.bfloat16), (q[:2], jnp.int32), (q, jnp.bfloat16))
    compile_for(step, types, tpu_devices(generation)[0], "tpu")
    kv_block = {"fwd": sizes.block_kv, "dkv": sizes.block_kv_dkv, "dq": sizes.block_kv_dq}
    print(json.dumps({"q_block": sizes.block_q, "kv_block": kv_block, "is_fused": sizes.use_fused_bwd_kernel}))


def cycles(directory: pathlib.Path, part: str, generation: str, length: int, sizes: dict) -> float:
    """A head's cycles in a kernel."""
    from liger_jax.pallas_kernels.attention.splash import num_blocks

    core, kv_block, q_block = TPUS[generation], sizes["kv_block"][part], sizes["q_block"]
    (path,) = (
        path for path in directory.glob(f"*splash_mha_{part}_*-final_bundles.txt") if "schedule" not in path.name
    )
    (slots_path,) = directory.glob(f"*splash_mha_{part}_*-final_hlo-static-per-bundle-utilization.txt")
    bundles = tpu_schedule._bundles(path)
    units, _, slots = tpu_schedule._slots(slots_path)
    (loop,) = tpu_schedule._loops(bundles)
    guarded = tpu_schedule._guarded(bundles)
    has_products = lambda first, last: any(row[units.index("MXU")] for row in slots[first:last])
    inside = {i for first, last in guarded for i in range(first, last)}
    beside = sum(i not in inside for i in range(loop.first, loop.last + 1))
    computing = sum(last - first for first, last in guarded if has_products(first, last))
    products = 5 if part == "dkv" and sizes["is_fused"] else PRODUCTS[part]
    ideal = products * q_block * kv_block * WIDTH / core.macs
    steps = (length // q_block) * (length // kv_block)
    found = steps * beside + num_blocks(length, None, q_block, kv_block) * max(computing, ideal)
    if part == "dkv" and sizes["is_fused"]:
        pieces = length // kv_block
        found += (pieces > 1) * 2 * pieces * length * WIDTH / (core.bandwidth / 1e9) * core.ghz  # read, to be summed
    return found


def row(generation: str, length: int) -> list[str]:
    """A case's line: thousands of cycles a head, before and now."""
    found = {}
    for what in ("before", "now"):
        with tempfile.TemporaryDirectory() as directory:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.attention_schedule", "--compile", generation, str(length), what],
                env=os.environ
                | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={directory} {FINAL_SCHEDULE}"},
                capture_output=True,
                text=True,
                check=True,
            )
            sizes = json.loads(done.stdout.splitlines()[-1])
            parts = ["fwd", "dkv"] if sizes["is_fused"] else ["fwd", "dkv", "dq"]
            found[what] = [cycles(pathlib.Path(directory), part, generation, length, sizes) for part in parts]
    (forward, *before), (_, *now) = found["before"], found["now"]
    numbers = [f"{x / 1e3:.0f}" for x in (forward, sum(before), sum(now))]
    return [generation, str(length), *numbers, f"{sum(now) / sum(before):.2f}", str(sizes["kv_block"]["dkv"])]


def main() -> None:
    parser = argparse.ArgumentParser()
    cases = [f"{generation}:{length}" for generation in ("v5e", "v6e") for length in LENGTHS]
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_program(*args.compile)
        return
    import importlib.metadata

    from benchmarks._measure import save, table

    header = ["core", "T", "forward", "backward of two kernels", "backward of one", "ratio", "keys in a block of it"]
    title = (
        f"# Splash attention's schedules, not measurements\n\nBy libtpu {importlib.metadata.version('libtpu')}; no TPU "
        f"was there. Thousands of cycles of a query head, packed rows of width {WIDTH} in bfloat16,\n"
        "blocks of 512 queries."
    )
    lines = [row(generation, int(length)) for generation, length in (case.split(":") for case in args.cases)]
    save("attention_schedule", title + "\n\n" + table(header, lines))


if __name__ == "__main__":
    main()
