"""One training step on several GPUs: tokens a second beside one GPU's, and what each GPU held beside the plan.

    python -m benchmarks.scaling [--devices 4] [--cases weak:llama-3.2-1b:4x2048:fsdp=4 …] [--seconds 150]
                                 [--workers 4] [--profile] [--peers] [--name scaling]
    python -m benchmarks.scaling --platform cpu --devices 4 --cases weak:config.json:1x64:fsdp=2,tensor=2
    CUDA_VISIBLE_DEVICES=0 python -m benchmarks.scaling --distributed 127.0.0.1:45671,0/2 --cases …   # and 1, and 1/2

A case is HOW:MODEL[@LAYERS][+unrolled][+full]:ROWSxLENGTH:MESH. "weak" gives one GPU the rows of the case and n GPUs
n times as many; its ratio is a GPU's tokens/s over those of one that is alone, and 1 is the best. "strong" gives n GPUs
the rows of one; its ratio is over one GPU's tokens/s, and n is the best. Weights, AdamW's state and computation are
bfloat16, and layers are recomputed in the backward where MODEL is followed by "+full". A case may also be
loss:TOKENSxWIDTHxVOCABULARY:tensor=N, the fused loss and its gradients with the head split over n GPUs: strong;
"loss+fast:" is in that mode.

A warm GPU under load is up to a tenth slower than one that begins. So one GPU alone is timed right before each case
and right behind it, and the ratio is to the mean of both; a step of more than 1.5 s is timed once before. Cases with
the larger plan come later. `--workers` programs are compiled at a time, and nothing is while steps are timed. Every
case ends with its line, so that a run that is cut off keeps what it has. Cases that would begin after `--seconds` are
named, and left out. Several processes time the cases alone, without one GPU beside them, and the first one speaks. A
GPU's peak is the most that its allocator ever held. So it is told only of a case that raises it, on the last GPU of
its mesh.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _measure
from benchmarks._device_trace import Share, profiled
from benchmarks._scaling_cases import Case, chosen, default_cases, run_of
from benchmarks._scaling_loss import LossCase, program_of
from liger_jax.models.hugging_face import config_json
from liger_jax.pallas_kernels.devices import GPUS
from liger_jax.planner.compilers import memory_of
from liger_jax.planner.devices import GIB, here
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import make_mesh
from liger_jax.planner.step import Run, training_step
from liger_jax.training import compiler_options, processes

HEADER = ["case", "GPUs", "tokens/s", "of one GPU", "ms a step", "compile, s", "plan, GiB", "compiled, GiB"]
HEADER += ["peak, GiB", "collectives", "of it exposed"]
ENOUGH = 1.5  # seconds of steps that are timed


@dataclasses.dataclass
class Prepared:
    """A compiled step."""

    case: Case | LossCase  # what is measured
    plan: int | None  # bytes on each device by the planner, or `None` for a loss alone
    step: Callable[[Any, Any], tuple[Any, Any]]  # takes what `fill` made, and returns the same and what to wait for
    fill: Callable[[], tuple[Any, Any]]  # makes the step's state and its batch
    mesh: Any  # its devices
    seconds: float  # that tracing, lowering and compiling took
    needed: int  # bytes on each device, by the compiler


def prepared(case: Case | LossCase, run: Run | None, devices: list[Any]) -> Prepared:
    """The step of a case, compiled for these devices."""
    if isinstance(case, LossCase) or run is None:
        return _prepared_loss(case, devices)
    mesh = make_mesh(devices[: case.count], run.mesh)
    options: dict[str, Any] = dict(scan_layers=case.scan)
    if devices[0].platform == "cpu":  # the loss has other buffers there
        options["kernels"] = dataclasses.replace(run.kernels(), memory_budget_bytes=None)
    step, arguments = training_step(run, mesh, **options)

    def filled():
        """Random weights: products of constants take less power, and are faster than a model's."""
        params, moments = arguments[0]
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        random = [0.02 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
        moments = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), moments)
        return jax.tree.unflatten(structure, random), moments

    make = jax.jit(filled, out_shardings=jax.tree.map(lambda x: x.sharding, arguments[0]))

    def fill():
        shape = case.batch, case.seq
        tokens = jax.random.randint(jax.random.key(1), shape, 0, run.model.config.vocab_size, jnp.int32)
        return make(), run.layout.place(tokens, mesh)

    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = step.trace(*arguments).lower().compile(compiler_options(mesh))
    seconds = time.perf_counter() - start
    return Prepared(case, estimate(run).total, program, fill, mesh, seconds, memory_of(program).total)


def _prepared_loss(case: Any, devices: list[Any]) -> Prepared:
    """The same of a loss alone, whose inputs stay as they are."""
    function, types, make = program_of(case, devices)
    start = time.perf_counter()
    program = function.trace(*types).lower().compile()
    seconds = time.perf_counter() - start

    def fill():
        hidden, weight, labels = make()
        return (hidden, weight), labels

    step = lambda state, labels: (state, program(*state, labels))
    return Prepared(case, None, step, fill, types[0].sharding.mesh, seconds, memory_of(program).total)


def timed(step: Prepared, profile: bool) -> tuple[float, list[Share]]:
    """Milliseconds of a step, and each GPU's shares by a profile if it is asked for."""
    with jax.set_mesh(step.mesh):
        state, tokens = step.fill()

        def steps(count: int) -> Any:
            nonlocal state
            loss = None
            for _ in range(count):
                state, loss = step.step(state, tokens)
            return loss

        def seconds(count: int) -> float:
            start = time.perf_counter()
            jax.block_until_ready(steps(count))
            return time.perf_counter() - start

        seconds(1)
        ms = 1e3 * seconds(1)
        if ms < 1e3 * ENOUGH:
            count = min(50, max(3, round(1e3 * ENOUGH / ms)))
            ms = 1e3 * seconds(count) / count
        return ms, profiled(lambda: steps(3)) if profile else []


def peer(case: Case) -> dict[str, Any]:
    """Milliseconds and peak of Hugging Face's model with Liger's kernels on as many GPUs, under FSDP2."""
    model = run_of(case, "h100").model
    family = model.family
    values = config_json.write(model.config, family.config_fixed, family.__name__, "bfloat16")
    fields = dict(values=values, rows=case.rows, seq=case.seq, recomputed=case.remat != "none")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={case.count}"]
    command = [*torchrun, "-m", "benchmarks._fsdp_peer", json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return dict(failure=done.stderr.splitlines()[-1] if done.stderr else "no message")
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


class Table:
    """Rows that are printed as they come."""

    def __init__(self, name: str | None, command: str):
        self.name, self.command, self.rows = name, command, []
        self.alone: dict[Any, float] = {}  # tokens a second of each case on one GPU
        self.peaks: dict[Any, int] = {}

    def add(self, row: list[str]) -> None:
        """Prints a row, and writes the table so far."""
        print("| " + " | ".join(row) + " |", flush=True)
        self.rows.append(row)
        if self.name:
            text = _measure.heading(self.command) + "\n" + _measure.table(HEADER, self.rows)
            _measure.RESULTS.mkdir(parents=True, exist_ok=True)
            (_measure.RESULTS / f"{self.name}.md").write_text(text, encoding="utf8")

    def measured(self, step: Prepared, ms: float, found: list[Share]) -> None:
        """Adds a step that was timed. One GPU's is added once, and then is what others are compared with."""
        case, tokens = step.case, 1e3 * step.case.batch * step.case.seq / ms
        if case.count == 1:
            is_known = case in self.alone
            self.alone[case] = tokens
            if is_known:
                return
        most = lambda name: f"{max(getattr(share, name) for share in found):.1%}" if found else "–"
        row = [case.name, str(case.count), f"{tokens:,.0f}", self.ratio(case, tokens), f"{ms:.1f}"]
        row += [f"{step.seconds:.0f}", "–" if step.plan is None else f"{step.plan / GIB:.2f}"]
        row += [f"{step.needed / GIB:.2f}"]
        self.add([*row, self.raised(step.mesh.local_devices[-1]), most("sending"), most("exposed")])

    def ratio(self, case: Case | LossCase, tokens: float) -> str:
        """The tokens a second over one GPU's: those of each GPU in weak scaling, of all together in strong scaling."""
        alone = self.alone.get(case.alone)  # none with several processes
        if alone is None or case.count == 1:
            return "–"
        return f"{tokens / alone / (case.count if case.how == 'weak' else 1):.3f}"

    def raised(self, device: Any) -> str:
        """A device's peak, if the last case has raised it."""
        before, peak = self.peaks.get(device, 0), (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        self.peaks[device] = peak
        return f"{peak / GIB:.2f}" if peak > before else "–"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--devices", type=int, help="GPUs of the default cases (default: all)")
    parser.add_argument(
        "--cases", nargs="+", help="HOW:MODEL:ROWSxLENGTH:MESH (default: each axis, alone and in pairs)"
    )
    parser.add_argument("--seconds", type=float, default=600, help="no case begins after so many")
    parser.add_argument("--workers", type=int, default=1, help="programs that are compiled at a time")
    parser.add_argument("--profile", action="store_true", help="also the collectives' share of a GPU's time")
    parser.add_argument("--peers", action="store_true", help="also Hugging Face with Liger under torch's FSDP2")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu", help="on CPUs, a trial of the program")
    parser.add_argument("--distributed", help="this process's place, as the commands take it")
    parser.add_argument("--name", help="of a file under results/")
    arguments = parser.parse_args()
    begun = time.monotonic()
    left = lambda: arguments.seconds - (time.monotonic() - begun)
    if arguments.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={arguments.devices or 2}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        jax.config.update("jax_platforms", "cpu")
    table = Table(arguments.name, " ".join(["python -m benchmarks.scaling", *sys.argv[1:]]))
    if arguments.distributed is not None:
        processes.begin(arguments.distributed)
        if not processes.is_first():
            sys.stdout, arguments.name = open(os.devnull, "w"), None
    print(_measure.table(HEADER, []), end="", flush=True)
    if arguments.peers:  # before JAX takes the GPUs
        peers(table, arguments.cases or default_cases(arguments.devices or 2), left)
    devices, target = jax.devices(), here()
    count = len(devices) if processes.are_several() else min(arguments.devices or len(devices), len(devices))
    device = target.name if target is not None and target.name in GPUS else "h100"
    cases = chosen(arguments.cases or default_cases(count), count, device)
    runs, compiled = dict(cases), {}
    waiting = [case for case in runs if case.count > 1] or list(runs)
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        while waiting and left() > 0:
            some, before = [], len(compiled)
            while waiting and len(compiled) - before < arguments.workers:
                some.append(case := waiting.pop(0))
                both = (case,) if processes.are_several() else (case.alone, case)
                new = [each for each in dict.fromkeys(both) if each not in compiled]
                compiled |= {each: pool.submit(prepared, each, runs[each], devices) for each in new}
            concurrent.futures.wait(compiled.values())  # while a step is timed, nothing is compiled
            for case in some:
                try:
                    alone = None if processes.are_several() else compiled[case.alone].result()
                    in_turn(table, alone, compiled[case].result(), arguments.profile)
                except Exception as error:  # such as no memory: the other cases go on
                    print(f"failed: {case.name}: {' '.join(str(error).split())[:300]}", flush=True)
    for case in waiting:
        print(f"left out: {case.name}", flush=True)
    return processes.end(0)


def in_turn(table: Table, alone: Prepared | None, step: Prepared, profile: bool) -> None:
    """Times a step, and before and behind it the same on one GPU, if that is there."""
    if alone is None:
        return table.measured(step, *timed(step, profile))
    before, _ = timed(alone, False)
    if step.case.count == 1:
        return table.measured(alone, before, [])
    ms, shares = timed(step, profile)
    behind = timed(alone, False)[0] if before < 1e3 * ENOUGH else before
    table.measured(alone, (before + behind) / 2, [])
    return table.measured(step, ms, shares)


def peers(table: Table, texts: list[str], left: Callable[[], float]) -> None:
    """The rows of Hugging Face's models with Liger's kernels: on one GPU, and under FSDP2."""
    absent = [name for name in ("torch", "transformers", "liger_kernel") if importlib.util.find_spec(name) is None]
    if absent:
        print(f"skipped: Hugging Face with Liger: {', '.join(absent)} not installed", flush=True)
        return
    ours = map(Case.of, (text for text in texts if not text.startswith("loss")))
    of_fsdp = [case for case in ours if case.scan and {name for name, _ in case.mesh} == {"fsdp"}]
    for case in dict.fromkeys(each for pair in of_fsdp for each in (pair.alone, pair)):
        name = f"Hugging Face + Liger, FSDP2: {case.name}"
        if left() <= 0:
            print(f"left out: {name}", flush=True)
            continue
        measured = peer(case)
        if "failure" in measured:
            print(f"failed: {name}: {measured['failure']}", flush=True)
            continue
        tokens = 1e3 * case.batch * case.seq / measured["ms"]
        if case.count == 1:
            table.alone[case] = tokens
        row = [name, str(case.count), f"{tokens:,.0f}", table.ratio(case, tokens), f"{measured['ms']:.1f}"]
        table.add([*row, "–", "–", "–", f"{measured['peak'] / GIB:.2f}", "–", "–"])
    table.alone.clear()  # what follows is ours


if __name__ == "__main__":
    sys.exit(main())
