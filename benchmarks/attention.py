"""Causal attention by kernel, forward and backward: the evidence behind `ops.causal_attention`'s defaults.

    python -m benchmarks.attention [--parts cases errors lengths] [--chunks] [--pictures docs]

Cases: each row is measured against cuDNN's causal attention of the same shape, which knows no segments and no softcap.
Errors: RMS against float32 over that of plain XLA in bfloat16, of the output and the three gradients.
Lengths: 32,768 tokens in rows of growing length, by kind of mask, and torch's and tokamax's attention where they are
installed; drawn, too. `--chunks` adds XLA's chunks of queries, which take minutes to compile.

Packed rows have a boundary with probability 1/mean at each position, so that short and long documents mix; the visible
share is that of the causal pairs. TFLOP/s count seven products over visible pairs: two forward, five backward. Times
are kernels' alone (CUPTI), and torch's between events. Temporaries are the compiler's, without cuDNN's workspace.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _attention_peers as peers
from benchmarks import _figures
from benchmarks._measure import heading, in_own_process, program_ms, save, table, versions
from liger_jax import Segments, causal_attention
from liger_jax.pallas_kernels.attention.intervals import intervals
from tests.ops.references import attention as reference

SEED = 6  # its packed rows have about as many visible pairs as the mean row
TOKENS = 32768  # of each length
LENGTHS = (512, 2048, 8192, 32768)
CHUNK_LENGTHS, FLEX_LENGTHS = (2048, 8192), (8192,)  # for programs that take long to compile
OURS = ("mosaic_gpu", "triton")
COLORS = {
    "mosaic_gpu": "#2e75b6", "triton": "#7e57c2", "cudnn": "#60a917", "xla": "#c00000",
    "torch varlen": "#d98e04", "torch flex": "#8d6e63", "tokamax": "#607d8b",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """Shape and mask."""

    name: str
    shape: tuple[int, int, int, int, int]  # B, T, Q, K, H
    mean: int | None = None
    window: int | None = None
    softcap: float | None = None

    @property
    def mask(self) -> dict[str, Any]:
        """The arguments of `causal_attention` that say what is visible, without the ids."""
        return dict(window=self.window, softcap=self.softcap)

    def ids(self) -> jax.Array | None:
        """Segment ids (B, T)."""
        if self.mean is None:
            return None
        boundaries = np.random.default_rng(SEED).random(self.shape[:2]) < 1 / self.mean
        return jnp.asarray(1 + np.cumsum(boundaries, axis=1), jnp.int32)

    def visible_share(self) -> float:
        """The share of the causal pairs that the mask lets see each other; ids do not come back here."""
        length, ids = self.shape[1], self.ids()
        visible = intervals(length, None if ids is None else Segments.of(ids), self.window)
        return float(np.mean(np.asarray(visible.until - visible.first + 1, np.float64))) / ((length + 1) / 2)

    def tflops(self, ms: float) -> float:
        """Achieved over what is visible."""
        batch, length, query_heads, _, width = self.shape
        pairs = batch * query_heads * self.visible_share() * length * (length + 1) / 2
        return 7 * 2 * width * pairs / ms / 1e9

    def inputs(self) -> list[jax.Array]:
        """q, k, v and the output's cotangent."""
        batch, length, query_heads, kv_heads, width = self.shape
        keys = jax.random.split(jax.random.key(1), 4)
        heads = query_heads, kv_heads, kv_heads, query_heads
        return [
            jax.random.normal(key, (batch, length, n, width), jnp.bfloat16) for key, n in zip(keys, heads, strict=True)
        ]

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of `inputs`."""
        return jax.eval_shape(self.inputs)


CASES = (
    Case("one segment", (8, 2048, 32, 8, 64)),
    Case("one segment", (2, 8192, 32, 8, 64)),
    Case("one segment", (2, 8192, 32, 8, 128)),
    Case("one segment", (1, 16384, 32, 8, 128)),
    Case("softcap 50", (2, 8192, 32, 8, 128), softcap=50.0),
    Case("packed, mean 512", (8, 2048, 32, 8, 64), mean=512),
    Case("packed, mean 512", (8, 2048, 14, 2, 64), mean=512),
    Case("packed, mean 512", (2, 8192, 32, 8, 64), mean=512),
    Case("packed, mean 512", (2, 8192, 32, 8, 128), mean=512),
    Case("packed, mean 4,096", (1, 32768, 32, 8, 128), mean=4096),
    Case("window 1,024", (2, 8192, 32, 8, 128), window=1024),
    Case("softcap 50, window 4,096", (2, 8192, 8, 4, 256), window=4096, softcap=50.0),
)
MASKS = {"one segment": {}, "packed, mean 512": dict(mean=512), "window 1,024": dict(window=1024)}


def value_and_gradients(attend: Callable[..., jax.Array], q, k, v, dout, ids=None) -> tuple[jax.Array, ...]:
    """Four arrays; the cotangent takes the output's dtype."""
    out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
    return out, *pullback(dout.astype(out.dtype))


def lowered(case: Case, kernel: str, mask: dict[str, Any] | None = None, has_ids: bool = True) -> Any:
    """The program of a case, or None where the kernel does not take it, with the reason printed."""
    if kernel == "tokamax":
        attend = lambda q, k, v, ids: peers.tokamax(q, k, v, **case.mask)
    else:
        attend = functools.partial(causal_attention, **(case.mask if mask is None else mask), implementation=kernel)
    ids = case.ids() if has_ids else None
    ids = None if ids is None else jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    try:
        return jax.jit(functools.partial(value_and_gradients, attend)).lower(*case.types(), ids)
    except (ValueError, ImportError, NotImplementedError, ExceptionGroup) as error:
        print(f"{case.name} {case.shape}, {kernel}: {str(error)[:200]}")
        return None


def compiled(programs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Each (key, program) that could be lowered. They are compiled side by side, while the next ones are lowered."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {key: pool.submit(compile_one, key, program) for key, program in programs if program is not None}
        results = {key: future.result() for key, future in futures.items()}
    return {key: program for key, program in results.items() if program is not None}


def compile_one(key: Any, program: Any) -> Any:
    """None where the compiler gives up, with the reason printed."""
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError as error:
        print(f"{key}: {str(error)[:200]}")
        return None


def ms_of(program: Any, case: Case, has_ids: bool = True) -> float:
    """NaN where there is no program."""
    if program is None:
        return math.nan
    return program_ms(program, *case.inputs(), case.ids() if has_ids else None)


def show(value: float, digits: int = 2) -> str:
    """A dash for a value that is missing."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def programs_of_cases() -> Iterator[tuple[Any, Any]]:
    """The programs by case and kernel; "causal" is cuDNN without the mask."""
    for case in CASES:
        yield (case, "causal"), lowered(case, "cudnn", mask={}, has_ids=False)
        for kernel in OURS:
            yield (case, kernel), lowered(case, kernel)
        if case.window and not case.softcap:
            yield (case, "cudnn"), lowered(case, "cudnn")


def cases_table() -> str:
    """Times and temporaries of `CASES`."""
    programs = compiled(programs_of_cases())
    header = ["mask", "(B, T, Q, K, H), bf16", "visible", "cuDNN causal, ms (MiB)", "mosaic_gpu, ms (MiB)", "× cuDNN"]
    header += ["TFLOP/s", "cuDNN with the window, ms", "triton, ms (MiB)", "× mosaic_gpu"]
    rows = []
    for case in CASES:
        of_case = {who: programs.get((case, who)) for who in ("causal", "cudnn", *OURS)}
        ms = {who: ms_of(program, case, has_ids=who != "causal") for who, program in of_case.items()}
        mib = {who: p.memory_analysis().temp_size_in_bytes / 2**20 for who, p in of_case.items() if p is not None}
        both = {who: f"{show(ms[who])} ({mib[who]:.0f})" if who in mib else "–" for who in of_case}
        own = ms["mosaic_gpu"]
        rows.append([case.name, str(case.shape), f"{case.visible_share():.3f}", both["causal"], both["mosaic_gpu"]])
        rows[-1] += [show(own / ms["causal"]), show(case.tflops(own), 0), show(ms["cudnn"]), both["triton"]]
        rows[-1].append(show(ms["triton"] / own))
        print(rows[-1], flush=True)
    return table(header, rows)


def plain_attention(q, k, v, ids=None, *, window: int | None, softcap: float | None) -> jax.Array:
    """All scores at once, as one would write it: float32 scores and softmax, products in q.dtype."""
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * width**-0.5
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    seen = reference.visible(length, ids, window)[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)


def programs_of_errors(cases: Iterable[Case]) -> Iterator[tuple[Any, Any]]:
    """The programs by case and kernel: ours, plain XLA in bfloat16, and the truth in float32."""
    for case in cases:
        for kernel in OURS:
            yield (case, kernel), lowered(case, kernel)
        for who, dtype in (("plain", jnp.bfloat16), ("truth", jnp.float32)):
            attend = functools.partial(plain_attention, **case.mask)
            types = [jax.ShapeDtypeStruct(x.shape, dtype) for x in case.types()]
            with jax.default_matmul_precision("highest"):
                program = jax.jit(functools.partial(value_and_gradients, attend)).lower(*types, case.ids())
            yield (case, who), program


def rms_errors(found: Iterable[jax.Array], truth: Iterable[jax.Array]) -> list[float]:
    """The RMS error of each array."""
    return [float(jnp.sqrt(jnp.mean((x - t) ** 2))) for x, t in zip(found, truth, strict=True)]


def errors_table() -> str:
    """RMS errors over those of plain XLA, in one row of at most 2,048: its float32 scores fit in memory."""
    shape = lambda case: (1, min(case.shape[1], 2048), *case.shape[2:])
    cases = list(dict.fromkeys(dataclasses.replace(case, shape=shape(case)) for case in CASES))
    programs = compiled(programs_of_errors(cases))
    rows = []
    for case in cases:
        inputs, ids = case.inputs(), case.ids()
        truth = programs[case, "truth"](*(x.astype(jnp.float32) for x in inputs), ids)
        plain = rms_errors(programs[case, "plain"](*inputs, ids), truth)
        for kernel in OURS:
            if (case, kernel) not in programs:
                continue
            own = rms_errors(programs[case, kernel](*inputs, ids), truth)
            ratios = [f"{x / p:.2f}" for x, p in zip(own, plain, strict=True)]
            rows.append([case.name, str(case.shape), f"{case.visible_share():.3f}", kernel, *ratios])
            print(rows[-1], flush=True)
    return table(["mask", "(B, T, Q, K, H)", "visible", "kernel", "out", "dq", "dk", "dv"], rows)


def case_of_length(mask: str, length: int) -> Case:
    """32 heads of width 128 that share 8 heads of keys."""
    return Case(mask, (TOKENS // length, length, 32, 8, 128), **MASKS[mask])


def programs_by_length(chunks: bool) -> Iterator[tuple[Any, Any]]:
    """The programs by mask, kernel and length."""
    for mask in MASKS:
        for length in LENGTHS:
            kernels = [*OURS, *(["xla"] if chunks and length in CHUNK_LENGTHS else [])]
            kernels += [] if mask == "packed, mean 512" else ["cudnn", "tokamax"]
            for kernel in kernels:
                yield (mask, kernel, length), lowered(case_of_length(mask, length), kernel)


def torch_by_length() -> dict[tuple[str, str, int], float | str]:
    """Torch's times by mask, kernel and length, made in a process of its own."""
    cases = {}
    for mask in MASKS:
        for kind, lengths in (("varlen", LENGTHS), ("flex", FLEX_LENGTHS if mask != "one segment" else ())):
            for length in lengths:
                case = case_of_length(mask, length)
                ids = None if case.mean is None else np.asarray(case.ids())
                cases[mask, f"torch {kind}", length] = peers.TorchCase(kind, case.shape, ids, case.window)
    return dict(zip(cases, in_own_process(peers.torch_times, list(cases.values())), strict=True))


def times_by_length(chunks: bool) -> dict[tuple[str, str], dict[int, float]]:
    """Milliseconds by mask and kernel, then by length."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        torch = pool.submit(torch_by_length)  # while programs are lowered, which leaves the GPU alone
        programs = list(programs_by_length(chunks))
        milliseconds = torch.result()
    for (mask, kernel, length), program in compiled(programs).items():
        milliseconds[mask, kernel, length] = ms_of(program, case_of_length(mask, length))
        print(mask, kernel, length, show(milliseconds[mask, kernel, length]), flush=True)
    times: dict[tuple[str, str], dict[int, float]] = {}
    for (mask, kernel, length), ms in milliseconds.items():
        if isinstance(ms, str):
            print(ms)
        else:
            times.setdefault((mask, kernel), {})[length] = ms
    return times


def lengths_table(times: dict[tuple[str, str], dict[int, float]]) -> str:
    """A row for each mask and length."""
    kernels = list(dict.fromkeys(kernel for _, kernel in times))
    rows = []
    for mask in MASKS:
        for length in LENGTHS:
            case = case_of_length(mask, length)
            ms = {kernel: times.get((mask, kernel), {}).get(length, math.nan) for kernel in kernels}
            rows.append([mask, f"{length:,}", f"{case.visible_share():.3f}", *(show(ms[kernel]) for kernel in kernels)])
            rows[-1].append(show(case.tflops(ms.get("mosaic_gpu", math.nan)), 0))
    return table(["mask", "T", "visible", *(f"{kernel}, ms" for kernel in kernels), "mosaic_gpu, TFLOP/s"], rows)


def draw(times: dict[tuple[str, str], dict[int, float]], path: pathlib.Path, title: str) -> None:
    """Time against T, a panel for each mask; cuDNN's time for one segment is drawn in all."""
    if (pyplot := _figures.pyplot()) is None:
        return
    figure, panels = pyplot.subplots(1, len(MASKS), figsize=(5 * len(MASKS), 4.6), sharey=True)
    for panel, mask in zip(panels, MASKS, strict=True):
        if mask != "one segment" and ("one segment", "cudnn") in times:
            line = times["one segment", "cudnn"]
            panel.plot([*line], [*line.values()], ":", color=COLORS["cudnn"], label="cudnn, one segment")
        for (of_mask, kernel), line in times.items():
            if of_mask == mask:
                panel.plot([*line], [*line.values()], "o-", color=COLORS[kernel], label=kernel, markersize=4)
        panel.set(title=mask, xscale="log", yscale="log", xlabel="T (visible share)")
        shares = [case_of_length(mask, length).visible_share() for length in LENGTHS]
        ticks = [f"{length:,}\n({share:.2f})" for length, share in zip(LENGTHS, shares, strict=True)]
        panel.set_xticks(LENGTHS, ticks, fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel(f"ms, forward and backward, {TOKENS:,} tokens")
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


PARTS = ("cases", "errors", "lengths")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--chunks", action="store_true", help="measure XLA's chunks by length, too")
    parser.add_argument("--pictures", type=pathlib.Path, help="a folder for attention.png")
    arguments = parser.parse_args()
    command = "python -m benchmarks.attention"
    if tuple(arguments.parts) != PARTS:
        command += f" --parts {' '.join(arguments.parts)}"
    where = heading(command + " --chunks" * arguments.chunks)
    text = [where]
    if "cases" in arguments.parts:
        text.append(cases_table())
    if "errors" in arguments.parts:
        text.append("RMS errors against float32, over those of plain XLA in bfloat16:\n\n" + errors_table())
    if "lengths" in arguments.parts:
        times = times_by_length(arguments.chunks)
        kind = f"{TOKENS:,} tokens in rows of T, heads 32/8 of width 128; {versions('torch', 'tokamax')}:"
        text.append(f"{kind}\n\n{lengths_table(times)}")
        if arguments.pictures is not None:
            draw(times, arguments.pictures / "attention.png", where.split(", `")[0])
    save("attention", "\n".join(text))


if __name__ == "__main__":
    main()
