"""Calls every op and a model of every family with random arguments, as a user calls them, and checks the numbers.

    python -m tests.fuzz --seconds 240 --seed 7 --platform gpu

A line for each thing that is wrong says how to repeat its case. Without any, the exit code is 0.
"""

import argparse
import collections
import itertools
import os
import secrets
import sys


def main() -> int:
    flags = _flags()
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[flags.platform]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a device
    if flags.platform == "cpu":  # what runs once need not be fast: as in tests/conftest.py
        flags_of_xla = ("force_host_platform_device_count=4", "backend_optimization_level=0")
        os.environ["XLA_FLAGS"] = " ".join(f"--xla_{flag}" for flag in flags_of_xla)
    from tests.fuzz import run  # JAX reads the environment when it is imported

    names = tuple(flags.names or run.DRAWN)
    numbers = iter([flags.only]) if flags.only is not None else itertools.count(flags.start, flags.step)
    counts, misses = collections.Counter(), 0
    print(f"inputs: --platform {flags.platform} --seed {flags.seed}", flush=True)
    for number, name, found in run.fuzz(flags.seed, numbers, names, flags.platform, flags.seconds):
        counts[name] += 1
        misses += len(found)
        repeat = f"python -m tests.fuzz --platform {flags.platform} --seed {flags.seed} --only {number}"
        repeat += f" --names {' '.join(flags.names)}" if flags.names else ""
        for sentence in found:
            print(f"{name}: {sentence}\n    {repeat}", flush=True)
    print(
        f"{misses} misses in {sum(counts.values())} cases: {', '.join(f'{n} {c}' for n, c in sorted(counts.items()))}"
    )
    return 1 if misses else 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="after which no new case begins")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of all choices and numbers")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("--only", type=int, help="the number of the only case to run")
    parser.add_argument("--names", nargs="*", help="ops and families to draw; all by default")
    parser.add_argument("--start", type=int, default=0, help="the first case's number")
    parser.add_argument("--step", type=int, default=1, help="the distance of cases' numbers: of several processes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
