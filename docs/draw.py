"""Draws pictures of the pages: `python -m docs.draw`.

They are those of how-it-works.md, whose heights are to scale, and of distributed.md, and the loss's frontier and the
norms in performance.md. The step's heights are the planner's estimates, and the loss's are those of its plan. On the
site the pictures take the page's colours; where they are shown by themselves they follow the browser's preference.
"""

import dataclasses
import math
from pathlib import Path

from jax.sharding import AbstractDevice

from liger_jax import plan_fused_linear_cross_entropy
from liger_jax.planner import plan

FOLDER = Path(__file__).parent
STYLE = """<style>
.drawn{max-width:100%;height:auto}
.drawn .ink{fill:var(--md-default-fg-color,#222)} .drawn .line{stroke:var(--md-default-fg-color,#222);fill:none}
.drawn text{font-family:system-ui,sans-serif;font-size:13px} .drawn .small{font-size:11.5px}
.drawn .strong{font-weight:600} .drawn .tight{text-anchor:middle}
@media (prefers-color-scheme:dark){
.drawn .ink{fill:var(--md-default-fg-color,#ddd)} .drawn .line{stroke:var(--md-default-fg-color,#ddd)}
}
</style>"""
COLOURS = {
    "parameters": "#607d8b",
    "optimizer state": "#8fa7b3",
    "layers' inputs": "#26a69a",
    "gradients": "#d9a441",
    "the loss": "#e4572e",
    "one layer's work": "#7e57c2",
    "logits in float32": "#f0a08a",
    "logits' gradient in 16 bits": "#e4572e",
    "what sums gradients": "#d9a441",
}

OURS, PEERS = "#e4572e", ("Liger *", "Liger CuTe SM90", "QuACK", "torch.compile")
PEER_COLOURS = "#d9a441", "#26a69a", "#7e57c2", "#607d8b"


@dataclasses.dataclass(frozen=True)
class Panel:
    """A chart of memory against time, which is a row of phases; each part has a height in each phase.

    Attributes:
        title: above the chart.
        phases: what happens, and how wide it is drawn.
        parts: by name, a height for each phase, or a pair where it grows or shrinks.
        peak: what is written at the highest place.
    """

    title: str
    phases: list[tuple[str, int]]
    parts: dict[str, list]
    peak: str

    def draw(self, left: int, top: int, width: int, height: int, most: float) -> str:
        """The chart as SVG, whose height stands for `most`."""
        scale = width / sum(size for _, size in self.phases)
        edges = [left]
        for _, size in self.phases:
            edges.append(edges[-1] + size * scale)
        drawn, bottoms, bottom = [], [(0.0, 0.0)] * len(self.phases), top + height
        for name, heights in self.parts.items():
            for i, now in enumerate(heights):
                start, end = now if isinstance(now, tuple) else (now, now)
                low = bottoms[i]
                high = (low[0] + start, low[1] + end)
                corners = [(edges[i], low[0]), (edges[i], high[0]), (edges[i + 1], high[1]), (edges[i + 1], low[1])]
                points = " ".join(f"{x:.1f},{bottom - y / most * height:.1f}" for x, y in corners)
                if start or end:
                    drawn.append(f'<polygon points="{points}" fill="{COLOURS[name]}"/>')
                bottoms[i] = high
        tallest = max(range(len(bottoms)), key=lambda i: max(bottoms[i]))
        at, peak = (edges[tallest] + edges[tallest + 1]) / 2, bottom - max(bottoms[tallest]) / most * height
        drawn.append(f'<text class="ink strong tight" x="{at:.0f}" y="{peak - 7:.0f}">{self.peak}</text>')
        drawn.append(f'<path class="line" d="M{left},{bottom}H{left + width}"/>')
        for (name, _), a, b in zip(self.phases, edges, edges[1:], strict=False):
            drawn.append(f'<text class="ink small tight" x="{(a + b) / 2:.0f}" y="{bottom + 16}">{name}</text>')
        drawn.append(f'<text class="ink strong" x="{left}" y="{top - 24}">{self.title}</text>')
        return "".join(drawn)


def picture(panels: list[Panel], names: list[str], most: float, width: int, height: int) -> str:
    """Panels side by side, and what the colours mean."""
    gap, top, bottom = 28, 52, height - 72
    each = (width - gap * (len(panels) - 1)) // len(panels)
    charts = [panel.draw(i * (each + gap), top, each, bottom - top, most) for i, panel in enumerate(panels)]
    legend, x, y = [], 0, height - 34
    for name in names:
        room = 30 + 7 * len(name)
        if x + room > width:
            x, y = 0, y + 22
        legend.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{COLOURS[name]}"/>')
        legend.append(f'<text class="ink small" x="{x + 18}" y="{y + 10}">{name}</text>')
        x += room
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" {size}>{STYLE}{"".join(charts + legend)}</svg>\n'


def step() -> str:
    """A training step of Qwen2-0.5B, 8 × 2,048 tokens, on logits and fused."""
    estimates, gib = plan("qwen2-0.5b", batch=8, seq=2048, device="h200", remat="full").estimates, 2**30
    fused, logits = estimates["fused"], estimates["logits"]
    params, state = (fused.bytes_of[name] / gib for name in ("parameters", "optimizer state"))
    inputs, work = fused.bytes_of["layer inputs"] / gib, fused.bytes_of["one layer's work"] / gib
    head = 4 * 151936 * 896 / gib  # its gradient, which the fused loss makes together with the loss
    names = ["parameters", "optimizer state", "layers' inputs", "gradients", "the loss", "one layer's work"]
    phases = [("forward", 3), ("loss", 2), ("backward", 3), ("update", 2)]
    panels = []
    for title, loss, early in (
        ("On logits", logits.loss_bytes / gib, 0.0),
        ("Fused", fused.loss_bytes / gib, head),
    ):
        parts = [
            [params] * 4,
            [state] * 4,
            [(0.0, inputs), inputs, inputs, 0.0],
            [0.0, early, params, params],
            [0.0, loss, 0.0, 0.0],
            [0.0, 0.0, work, 0.0],
        ]
        highest = max(params + state + inputs + early + loss, 2 * params + state + inputs + work)
        panels.append(Panel(title, phases, dict(zip(names, parts, strict=True)), f"{highest:.1f} GiB"))
    return picture(panels, names, most=27, width=760, height=360)


def loss() -> str:
    """The loss of Llama-3-8B's head and 8,192 tokens in bfloat16, beside its inputs and gradients."""
    n, d, v, mib = 8192, 4096, 128256, 2**20
    h200 = AbstractDevice("NVIDIA H200", 132, "gpu")
    fast = plan_fused_linear_cross_entropy(n, d, v, device=h200, memory_budget_bytes=2 * v * d + 4096 * v)
    lean = plan_fused_linear_cross_entropy(n, d, v, device=h200, mode="lean")
    chunk, low = 2 * fast.chunk_size * v / mib, v * d / mib
    last = 2 * (n - 2 * fast.chunk_size) * v / mib
    slice_, dx = 2 * n * lean.chunk_size / mib, 4 * n * d / mib
    names = ["logits' gradient in 16 bits", "logits in float32", "what sums gradients"]
    panels = [
        Panel(
            "On logits",
            [("logits", 2), ("gradient", 2), ("dX, dW", 2)],
            dict(zip(names, [[0] + [2 * n * v / mib] * 2, [4 * n * v / mib] * 2 + [0], [0] * 3], strict=True)),
            f"{6 * n * v / mib:,.0f} MiB",
        ),
        Panel(
            "Fast, in three chunks of tokens",
            [("chunk 1", 2), ("chunk 2", 2), ("chunk 3", 2)],
            dict(zip(names, [[chunk, chunk, last], [0, 0, 0], [low, low, low]], strict=True)),
            f"{fast.extra_bytes / mib:,.0f} MiB",
        ),
        Panel(
            "Lean, in slices of V",
            [("statistics", 2), *[("", 1)] * 2, ("slices", 1), *[("", 1)] * 2],
            dict(zip(names, [[0] + [slice_] * 5, [0] * 6, [0] + [dx] * 5], strict=True)),
            f"{lean.extra_bytes / mib:,.0f} MiB",
        ),
    ]
    return picture(panels, names, most=6600, width=760, height=340)


# --- who holds what ---------------------------------------------------------------------------------------------------

# Devices 2i and 2i + 1 are a pair along "tensor", and have one hue.
DEVICES = ("#1f5fa8", "#9cc4ec", "#1b7f6b", "#93d6c6", "#b5541c", "#f3bd9c", "#6b4aa0", "#cbb9e8")


def cells(left: float, top: float, width: float, height: float, table: list[list[tuple[int, ...]]]) -> str:
    """A table of equal cells. The devices of a cell stand in it side by side, and each of them holds all of it."""
    drawn, tall = [], height / len(table)
    for i, row in enumerate(table):
        for j, holders in enumerate(row):
            wide = width / len(row) / len(holders)
            for k, device in enumerate(holders):
                x, y = left + (j * len(holders) + k) * wide, top + i * tall
                ink = "#fff" if device % 2 == 0 else "#222"
                drawn.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" ')
                drawn.append(f'fill="{DEVICES[device]}"/><text class="strong tight" fill="{ink}" ')
                drawn.append(f'x="{x + wide / 2:.1f}" y="{y + tall / 2 + 5:.1f}">{device}</text>')
            x = left + j * width / len(row)
            drawn.append(f'<rect class="line" x="{x:.1f}" y="{top + i * tall:.1f}" width="{width / len(row):.1f}" ')
            drawn.append(f'height="{tall:.1f}"/>')
    return "".join(drawn)


def shares() -> str:
    """What each device of a mesh fsdp=2, sequence=2, tensor=2 holds."""
    pairs = [(0, 1), (2, 3)], [(4, 5), (6, 7)]  # by fsdp, then by sequence
    chunks = (0, 1, 1, 0)  # who has which of a row's four: to and fro
    panels = [
        ("Between sublayers: positions", "rows over fsdp ↓, their chunks over sequence and tensor →",
         [[(pairs[f][c][i // 2],) for i, c in enumerate(chunks)] for f in range(2)]),
        ("In a sublayer: heads, or the feed-forward's width", "a pair computes the same chunks, each its own heads",
         [[(device,) for c in chunks for device in pairs[f][c]] for f in range(2)]),
        ("A matrix, its gradient and its moments", "inputs over fsdp and sequence ↓, outputs over tensor →",
         [[(device,) for device in pair] for of_rows in pairs for pair in of_rows]),
        ("Keys and values in attention", "heads over tensor →; whole rows on both devices of a cell",
         [[tuple(pair[t] for pair in of_rows) for t in range(2)] for of_rows in pairs]),
    ]  # fmt: skip
    drawn = []
    for number, (title, caption, table) in enumerate(panels):
        left, top = 8 + 384 * (number % 2), 210 * (number // 2)
        drawn.append(f'<text class="ink strong" x="{left}" y="{top + 18}">{title}</text>')
        drawn.append(f'<text class="ink small" x="{left}" y="{top + 36}">{caption}</text>')
        drawn.append(cells(left, top + 48, 356, 132, table))
    size = 'viewBox="0 0 760 400" width="760" height="400"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" {size}>{STYLE}{"".join(drawn)}</svg>\n'


# --- time against memory ----------------------------------------------------------------------------------------------


def rows_of(table: str, shape: str) -> list[list[str]]:
    """The cells of a shape's lines in a table of benchmarks/results/loss_h200.md that begins with `table`."""
    text = (FOLDER.parent / "benchmarks/results/loss_h200.md").read_text(encoding="utf-8")
    lines = text[text.index(table) :].split("\n\n")[0].splitlines()
    return [cells for line in lines if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] == shape]


def frontier() -> str:
    """The fused loss within budgets on two cards, and peers, each a range of times and of memory."""
    drawn, width, height, top, ticks = [], 300, 300, 40, (100, 200, 500, 1000, 2000, 5000)
    for number, (shape, title) in enumerate(
        (("8192, 4096, 128256", "Llama-3-8B's head"), ("8192, 2304, 256000", "Gemma-2-2B's head"))
    ):
        left = 44 + number * (width + 60)
        x = lambda mib, left=left: left + math.log(mib / 100) / math.log(50) * width
        y = lambda ratio: top + (1.45 - ratio) / 0.45 * height
        drawn.append(f'<text class="ink strong" x="{left}" y="{top - 20}">{title}</text>')
        drawn.append(f'<path class="line" d="M{left},{top}V{top + height}H{left + width}"/>')
        for mib in ticks:
            drawn.append(f'<text class="ink small tight" x="{x(mib):.0f}" y="{top + height + 16}">{mib:,}</text>')
        for ratio in (1.0, 1.1, 1.2, 1.3, 1.4):
            drawn.append(f'<text class="ink small" x="{left - 28}" y="{y(ratio) + 4:.0f}">{ratio:.1f}</text>')
        best, line = 9.0, []
        for cells in sorted(
            rows_of("| (N, D, V) | who | extra MiB |", shape), key=lambda cells: _number(cells[2] or "0")
        ):
            if not cells[2]:
                continue
            mib, ratios = _number(cells[2]), [float(cell) for cell in cells[5:7]]
            drawn.extend(f'<circle cx="{x(mib):.1f}" cy="{y(ratio):.1f}" r="3.5" fill="{OURS}"/>' for ratio in ratios)
            if sum(ratios) / 2 < best:
                best = sum(ratios) / 2
                line.append(f"{x(mib):.1f},{y(best):.1f}")
        drawn.append(f'<path d="M{" ".join(line)}" fill="none" stroke="{OURS}"/>')
        for cells in rows_of("| (N, D, V) | peer |", shape):
            (low, *high), (least, *most) = (cell.split(" to ") for cell in cells[2:4])
            slow, much = float([low, *high][-1]), _number([least, *most][-1])
            box = x(_number(least)) - 3, y(slow) - 3, x(much) - x(_number(least)) + 6, y(float(low)) - y(slow) + 6
            drawn.append('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '.format(*box))
            name = cells[1].partition(",")[0] + (" *" if "," in cells[1] else "")
            place = PEERS.index(name)
            drawn.append(f'fill="{PEER_COLOURS[place]}" fill-opacity="0.8"/>')
    for i, (name, colour) in enumerate(zip(("liger-jax", *PEERS), (OURS, *PEER_COLOURS), strict=True)):
        at = 44 + 132 * i
        drawn.append(f'<rect x="{at}" y="392" width="12" height="12" rx="2" fill="{colour}"/>')
        drawn.append(f'<text class="ink small" x="{at + 18}" y="402">{name}</text>')
    below = top + height + 32
    drawn.append(f'<text class="ink small" x="44" y="{below}">× three matmuls, against extra MiB</text>')
    size = 'viewBox="0 0 760 412" width="760" height="412"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" {size}>{STYLE}{"".join(drawn)}</svg>\n'


def norms() -> str:
    """Per cent of a copy's speed against columns, of 16,384 rows: the first tables of benchmarks/results/norms.md."""
    text = (FOLDER.parent / "benchmarks/results/norms.md").read_text(encoding="utf-8")
    names = {"liger-jax, default": OURS, "liger-jax, xla": "#26a69a", "torch.compile": "#607d8b", "Liger": "#d9a441"}
    drawn, width, height = [], 204, 130
    for i, op in enumerate(("rms_norm", "layer_norm", "fused_add_rms_norm")):
        section = text.partition(f"\n## {op}\n")[2].strip().partition("\n\n")[0]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if " × " in line]
        shapes = list(dict.fromkeys(row[0].strip("*") for row in rows))
        for j, (direction, column) in enumerate((("forward", 4), ("backward", 7))):
            left, top = 34 + i * (width + 44), 32 + j * (height + 68)
            step = (width - 16) / (len(shapes) - 1)
            x = lambda k, left=left, step=step: left + 8 + k * step
            y = lambda share, top=top: top + (105 - share) / 105 * height
            drawn.append(f'<text class="ink small strong" x="{left}" y="{top - 12}">{op}, {direction}</text>')
            drawn.append(f'<path class="line" d="M{left},{top}V{top + height}H{left + width}"/>')
            for share in (0, 50, 100):
                drawn.append(f'<text class="ink small" x="{left - 28}" y="{y(share) + 4:.0f}">{share}</text>')
            for k, shape in enumerate(shapes):
                if k % 2 == 1 - len(shapes) % 2:
                    label = f"{int(shape.split(' × ')[1]):,}"
                    drawn.append(f'<text class="ink small tight" x="{x(k):.0f}" y="{top + height + 16}">{label}</text>')
            for name, colour in names.items():
                found = {row[0]: _number(row[column].rstrip(" %")) for row in rows if row[1] == name}
                points = " ".join(f"{x(k):.1f},{y(found[shape]):.1f}" for k, shape in enumerate(shapes))
                wide = 2.5 if colour == OURS else 1.5
                drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"/>')
    for i, (name, colour) in enumerate(names.items()):
        at = 34 + 150 * i
        drawn.append(f'<rect x="{at}" y="426" width="12" height="12" rx="2" fill="{colour}"/>')
        drawn.append(f'<text class="ink small" x="{at + 18}" y="436">{name}</text>')
    drawn.append('<text class="ink small" x="34" y="412">per cent of a copy\'s speed, against columns</text>')
    size = 'viewBox="0 0 760 446" width="760" height="446"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" {size}>{STYLE}{"".join(drawn)}</svg>\n'


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    (FOLDER / "how_step.svg").write_text(step(), encoding="utf-8")
    (FOLDER / "how_loss.svg").write_text(loss(), encoding="utf-8")
    (FOLDER / "loss_frontier.svg").write_text(frontier(), encoding="utf-8")
    (FOLDER / "norms.svg").write_text(norms(), encoding="utf-8")
    (FOLDER / "who_holds_what.svg").write_text(shares(), encoding="utf-8")
