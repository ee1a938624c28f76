"""Draw the diagrams of the pages under docs/concepts/ as SVG files in docs/assets/:
`python docs/diagrams.py`.

They have a light background of their own, so that they can be read in dark mode too.
"""

# ruff: noqa: E501 - coordinates and texts of pictures

from __future__ import annotations

from html import escape
from pathlib import Path

import torch

from flashtrain.distributed.context.layouts import LAYOUTS
from flashtrain.distributed.context.work import attention_work, visible_keys
from flashtrain_kernels import masks

ASSETS = Path(__file__).parent / "assets"
INK, GREY, LINE = "#22303c", "#5b6b79", "#9aa7b2"
COLORS = ("#123f7e", "#b8420a", "#35a897", "#cf9d10")  # of flashtrain/report/figures.py
PALE = ("#d9e4f4", "#f7ddcf", "#d5efea", "#f8ebcb")


class Drawing:
    """An SVG picture that is made of boxes, texts and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str = "#ffffff",
        line: str = LINE,
        r: float = 6,
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        *lines: str,
        size: int = 13,
        fill: str = INK,
        at: str = "start",
        bold: int = 0,
    ) -> None:
        """Write lines of text; the first `bold` of them in bold. at: start,
        middle or end, where x is."""
        for number, line in enumerate(lines):
            weight = ' font-weight="600"' if number < bold else ""
            place = f'x="{x:g}" y="{y + number * size * 1.35:g}" text-anchor="{at}"'
            self.parts.append(
                f'<text {place} font-size="{size}" fill="{fill}"{weight}>{escape(line)}</text>'
            )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, color: str = GREY) -> None:
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" '
            'stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def save(self, name: str) -> None:
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto">'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            'role="img" font-family="system-ui, Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<defs>{head}<path d="M0 0 10 5 0 10z" fill="{GREY}"/></marker></defs>',
            (
                f'<rect width="{self.width}" height="{self.height}" rx="10" '
                'fill="#f8fafc" stroke="#d5dde4"/>'
            ),
            *self.parts,
            "</svg>",
        ]
        (ASSETS / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def layers() -> None:
    drawing = Drawing(760, 330, "The three layers: recipes, flashtrain, flashtrain_kernels")
    rows = (
        ("recipes/", "experiments and benchmarks",
            ("recipe=NAME.yaml", "studies", "benchmarks", "results/*.json")),
        ("flashtrain/", "the framework",
            ("command, settings", "run, report", "tasks, models, data", "distributed")),
        ("kernels/flashtrain_kernels/", "attention; needs torch and Triton only",
            ("functions", "masks", "backends", "reference")),
    )  # fmt: skip
    for number, (name, what, parts) in enumerate(rows):
        y = 22 + number * 104
        drawing.box(20, y, 620, 80, PALE[number], COLORS[number])
        drawing.text(36, y + 24, name, bold=1, size=15)
        drawing.text(608 + 16, y + 24, what, fill=GREY, at="end")
        for place, part in enumerate(parts):
            drawing.box(36 + place * 148, y + 40, 140, 28)
            drawing.text(36 + place * 148 + 70, y + 59, part, size=12, at="middle")
    for y in (22 + 80, 22 + 184):
        drawing.arrow(250, y + 1, 250, y + 23)
        drawing.text(260, y + 17, "imports", size=12, fill=GREY)
    drawing.arrow(420, 22 + 80 + 23, 420, 22 + 80 + 1)
    drawing.text(430, 22 + 80 + 17, "registers its parts by name", size=12, fill=GREY)
    drawing.text(654, 60, "reproduces,", "measures", size=12, fill=GREY)
    drawing.text(654, 164, "trains", size=12, fill=GREY)
    drawing.text(654, 268, "computes", "attention", size=12, fill=GREY)
    drawing.save("layers.svg")


def run() -> None:
    drawing = Drawing(860, 250, "The life of a run")
    steps = (
        ("command line", ("recipe=gpt2", "context=8192")),
        ("settings", ("recipe + words,", "by Hydra; checked", "at once")),
        ("task", ("data, model,", "loss, batching,", "memory estimate")),
        ("Trainer.fit", ("Lightning: steps,", "validation,", "checkpoints")),
        ("summary", ("one flat row:", "loss, tokens/s,", "MFU, memory")),
        ("report", ("report.html,", "tables, figures", "of many runs")),
    )
    for number, (name, words) in enumerate(steps):
        x = 18 + number * 140
        drawing.box(
            x,
            26,
            118,
            96,
            PALE[0] if number != 3 else PALE[1],
            COLORS[0] if number != 3 else COLORS[1],
        )
        drawing.text(x + 59, 48, name, at="middle", bold=1, size=14)
        drawing.text(x + 59, 70, *words, at="middle", size=12)
        if number:
            drawing.arrow(x - 21, 74, x - 2, 74)
    files = ((158, "config.yaml"), (298, "tokenizer/"), (438, "metrics.jsonl"),
        (438, "checkpoints/"), (578, "summary.json"), (718, "report.html"))  # fmt: skip
    drawing.box(18, 160, 818, 76, "#ffffff")
    drawing.text(
        32, 224, "runs/RECIPE/DATE_TIME/: the folder that a run leaves", size=12, fill=GREY
    )
    for number, (x, name) in enumerate(files):
        down = 22 if name == "checkpoints/" else 0
        drawing.text(x + 59, 184 + down, name, at="middle", size=12)
        if number != 3:
            drawing.arrow(x + 59, 124, x + 59, 158)
    drawing.save("run.svg")


def forward() -> None:
    drawing = Drawing(
        760, 330, "The forward: a tile of queries loops over the tiles of keys that it sees"
    )
    drawing.text(20, 30, "One program computes one tile of queries of one head.", bold=1, size=14)
    skipped, full, partial = "#eef1f4", "#9db8dc", "#e8b99f"
    for row in range(6):
        here = row == 3
        drawing.box(92, 64 + row * 34, 44, 34, COLORS[0] if here else PALE[0], "#ffffff", 0)
        for column in range(6):
            kind = skipped if column > row else partial if column == row else full
            drawing.box(152 + column * 34, 64 + row * 34, 34, 34, kind, "#ffffff", 0)
    drawing.box(151, 64 + 3 * 34 - 1, 6 * 34 + 2, 36, "none", COLORS[0], 2)
    drawing.text(114, 56, "Q", at="middle", bold=1)
    drawing.text(
        254, 56, "keys and values, in tiles (causal mask)", at="middle", size=12, fill=GREY
    )
    drawing.text(84, 64 + 3 * 34 + 22, "this tile", at="end", size=12)
    drawing.arrow(160, 64 + 3 * 34 + 17, 283, 64 + 3 * 34 + 17, INK)
    for number, (fill, words) in enumerate(((full, "every pair is visible: no test"),
        (partial, "tested pair by pair"), (skipped, "not visited"))):  # fmt: skip
        x = (92, 300, 452)[number]
        drawing.box(x, 286, 16, 16, fill, LINE, 2)
        drawing.text(x + 22, 299, words, size=12)
    drawing.box(400, 48, 340, 222, "#ffffff")
    drawing.text(416, 72, "For each tile of keys, in on-chip memory:", bold=1)
    drawing.text(
        416, 96, "S = Q Kᵀ · scale", "m' = max(m, row maximum of S)", "P = exp(S - m')",
        "l = l · exp(m - m') + row sum of P",
        "O = O · exp(m - m') + P V", "m = m'", size=13,
    )  # fmt: skip
    drawing.text(416, 214, "At the end, to the GPU's memory:", bold=1)
    drawing.text(416, 238, "out = O / l", "log-sum-exp = m + log l, for the backward", size=13)
    drawing.save("forward.svg")


def mask_grid(
    drawing: Drawing, x: float, y: float, seen: torch.Tensor, tile: int, size: float = 11
) -> None:
    """A mask (Sq, Sk) bool as cells, and the tiles that a kernel visits as frames."""
    count = seen.shape[0]
    drawing.box(x, y, count * size, count * size, "#eef1f4", "#eef1f4", 0)
    for row, pairs in enumerate(seen.tolist()):
        drawing.box(
            x + pairs.index(True) * size,
            y + row * size,
            sum(pairs) * size,
            size,
            "#7e9dc9",
            "none",
            0,
        )
    lines = "".join(
        f"M{x + n * size:g} {y:g}v{count * size:g}M{x:g} {y + n * size:g}h{count * size:g}"
        for n in range(count)
    )
    drawing.parts.append(f'<path d="{lines}" stroke="#ffffff" stroke-width="0.8"/>')
    for row in range(0, seen.shape[0], tile):
        for column in range(0, seen.shape[1], tile):
            part = seen[row : row + tile, column : column + tile]
            if part.any():
                line = COLORS[0] if part.all() else COLORS[1]
                edge = tile * size
                drawing.box(
                    x + column * size + 1, y + row * size + 1, edge - 2, edge - 2, "none", line, 1
                )


def masks_as_data() -> None:
    drawing = Drawing(800, 356, "A mask is data: an interval of keys for each query")
    ids = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4])
    shown = (
        ("causal", masks.causal(16)),
        ("window of 5", masks.sliding_window(16, (4, 0))),
        ("documents, causal", masks.document(ids, causal=True)),
    )
    for number, (name, mask) in enumerate(shown):
        x = 24 + number * 262
        drawing.text(x, 30, name, bold=1, size=14)
        mask_grid(drawing, x, 44, mask.dense()[0], 4)
        drawing.text(x + 186, 36, "LOW", size=10, fill=GREY)
        drawing.text(x + 214, 36, "HIGH", size=10, fill=GREY)
        for query in (0, 3, 6, 9, 12, 15):
            low, high = (
                int(mask.queries[masks.LOW, 0, query]),
                int(mask.queries[masks.HIGH, 0, query]),
            )
            drawing.text(x + 192, 54 + query * 11, f"{low}", size=10)
            drawing.text(x + 220, 54 + query * 11, f"{high}", size=10)
    y = 246
    for color, line, words in (
        (
            "#7e9dc9",
            "#ffffff",
            "a pair that the mask lets through: LOW ≤ key < HIGH. Rows are queries, columns keys",
        ),
        ("none", COLORS[0], "a tile whose pairs are all visible: computed without a test"),
        ("none", COLORS[1], "a tile with some visible pairs: each pair is tested"),
    ):
        drawing.box(24, y, 14, 14, color, line, 2)
        drawing.text(46, y + 12, words, size=12)
        y += 24
    drawing.text(24, y + 14,
        "Tiles without a frame are not visited. The plan of a mask lists, once a batch, which tiles are; every layer uses it.", size=12, fill=GREY)  # fmt: skip
    drawing.save("masks.svg")


def layouts() -> None:
    lengths = (3000, 600, 2400, 400, 1792)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    cases = (
        ("contiguous, causal", "contiguous", masks.causal(8192)),
        ("zigzag, causal", "zigzag", masks.causal(8192)),
        ("zigzag, packed documents", "zigzag", masks.document(ids, causal=True)),
        ("balanced, packed documents", "balanced", masks.document(ids, causal=True)),
    )
    drawing = Drawing(800, 320, "Layouts: which of 4 GPUs holds which tokens of a sequence")
    drawing.text(20, 28, "8,192 tokens on 4 GPUs: who holds which", bold=1, size=14)
    drawing.text(596, 28, "work, mean 1", bold=1, size=13)
    for number, (name, layout, mask) in enumerate(cases):
        y = 52 + number * 62
        made = LAYOUTS[layout](mask, 4)
        drawing.text(20, y + 12, name, size=13)
        owner = torch.empty(8192, dtype=torch.int64)
        for rank in range(4):
            held = made.tokens[0, rank]
            owner[held[held >= 0]] = rank
        begin = 0
        edges = [*(torch.nonzero(owner.diff()).flatten() + 1).tolist(), 8192]
        for end in edges:
            drawing.box(
                20 + begin * 560 / 8192,
                y + 18,
                (end - begin) * 560 / 8192,
                20,
                COLORS[int(owner[begin])],
                "#ffffff",
                0,
            )
            begin = end
        if "documents" in name:
            at = 0
            for length in lengths[:-1]:
                at += length
                drawing.parts.append(
                    f'<path d="M{20 + at * 560 / 8192:g} {y + 14}v28" '
                    f'stroke="{INK}" stroke-width="2"/>'
                )
        work = attention_work(made, visible_keys(mask))
        for rank in range(4):
            share = float(work[rank]) / float(work.mean())
            drawing.box(
                598 + rank * 46, y + 38 - 18 * share, 30, 18 * share, COLORS[rank], "#ffffff", 0
            )
            drawing.text(613 + rank * 46, y + 52, f"{share:.2f}", size=11, at="middle")
    for rank in range(4):
        drawing.box(20 + rank * 80, 292, 14, 14, COLORS[rank], "#ffffff", 0)
        drawing.text(40 + rank * 80, 304, f"GPU {rank}", size=12)
    drawing.text(345, 304, "bars: where a document begins", size=12, fill=GREY)
    drawing.save("layouts.svg")


def methods() -> None:
    drawing = Drawing(820, 330, "What 4 GPUs exchange: ulysses, all-gather, ring")
    titles = ("ulysses", "all-gather", "ring")
    words = (
        ("All-to-all: tokens for heads.", "Each GPU computes some heads of",
            "the whole sequence; a second", "all-to-all brings outputs back."),
        ("Each GPU gathers all keys and", "values, some heads at a time, and",
            "computes its own queries. Packed", "documents: only the keys it sees."),
        ("Keys and values go from GPU to", "GPU. Each step computes with those",
            "that are here, while the next come;", "log-sum-exps merge the parts."),
    )  # fmt: skip
    for number, title in enumerate(titles):
        x = 20 + number * 270
        drawing.box(x, 16, 250, 298, "#ffffff")
        drawing.text(x + 14, 40, title, bold=1, size=15)
        drawing.text(x + 14, 246, *words[number], size=12)
    # ulysses: rows are tokens, columns heads
    x = 36
    for side, (left, name) in enumerate(((x, "before"), (x + 130, "after"))):
        drawing.text(left + 40, 66, name, size=12, at="middle", fill=GREY)
        for row in range(4):
            for column in range(4):
                drawing.box(
                    left + column * 20,
                    76 + row * 28,
                    20,
                    28,
                    COLORS[row if side == 0 else column],
                    "#ffffff",
                    0,
                )
        drawing.text(left + 40, 204, "heads →", size=11, at="middle", fill=GREY)
    drawing.text(x - 4, 222, "rows: tokens; color: the GPU", size=11, fill=GREY)
    drawing.arrow(x + 88, 132, x + 124, 132)
    # all-gather
    x = 306
    drawing.text(x + 4, 66, "queries", size=12, fill=GREY)
    drawing.text(x + 104, 66, "keys and values", size=12, fill=GREY)
    for row in range(4):
        y = 76 + row * 34
        drawing.box(x, y, 56, 24, COLORS[row], "#ffffff", 3)
        drawing.text(x + 28, y + 16, f"GPU {row}", size=11, fill="#ffffff", at="middle")
        drawing.arrow(x + 60, y + 12, x + 88, y + 12)
        for column in range(4):
            drawing.box(
                x + 92 + column * 32,
                y,
                30,
                24,
                COLORS[column] if column == row else PALE[column],
                COLORS[column],
                2,
            )
    drawing.text(x, 222, "filled: held here; pale: fetched", size=11, fill=GREY)
    # ring
    x = 576
    places = ((x + 20, 80), (x + 150, 80), (x + 150, 166), (x + 20, 166))
    for rank, (left, top) in enumerate(places):
        drawing.box(left, top, 66, 40, COLORS[rank], "#ffffff", 5)
        drawing.text(left + 33, top + 17, f"GPU {rank}", size=12, fill="#ffffff", at="middle")
        drawing.text(left + 33, top + 32, "own queries", size=10, fill="#ffffff", at="middle")
    drawing.arrow(x + 90, 100, x + 146, 100)
    drawing.arrow(x + 183, 124, x + 183, 162)
    drawing.arrow(x + 146, 186, x + 90, 186)
    drawing.arrow(x + 53, 162, x + 53, 124)
    drawing.text(x + 118, 147, "K, V", size=13, at="middle", bold=1)
    drawing.save("methods.svg")


def main() -> None:
    for draw in (layers, run, forward, masks_as_data, layouts, methods):
        draw()


if __name__ == "__main__":
    main()
