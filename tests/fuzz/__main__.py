"""python -m tests.fuzz --seconds 240 --seed 7 [--platform gpu]"""

import argparse
import collections
import itertools
import os
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("--only", type=int)
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--verbose", action="store_true")
    flags = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[flags.platform]
    if flags.platform == "cpu":
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
    from tests.fuzz import run

    names = tuple(flags.names or run.DRAWN)
    numbers = itertools.count() if flags.only is None else iter([flags.only])
    counts, failed, last = collections.Counter(), 0, time.monotonic()
    for number, name, found in run.fuzz(flags.seed, numbers, names, flags.platform, flags.seconds):
        counts[name] += 1
        if flags.verbose:
            print(number, name, round(time.monotonic() - last, 2), flush=True)
        last = time.monotonic()
        for sentence in found:
            failed += 1
            print(f"MISS {name}: {sentence}\n    --seed {flags.seed} --only {number}", flush=True)
    print(sum(counts.values()), dict(counts), "misses", failed)
    return bool(failed)


sys.exit(main())
