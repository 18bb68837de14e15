"""Draw the figures of the documentation into docs/images: charts from docs/data/*.json, and diagrams.

    python scripts/docs_figures.py

The files are the same on every run, so that a test can compare them with what is committed.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA, IMAGES = ROOT / "docs/data", ROOT / "docs/images"
COLORS = {"minisgl": "#4051b5", "vLLM 0.23.0": "#b6bcc6"}
TEXT, LINE, FILL = "#1f2328", "#57606a", "#f6f8fa"


def main() -> None:
    """Write every figure."""
    IMAGES.mkdir(exist_ok=True)
    for name, svg in figures().items():
        (IMAGES / name).write_text(svg, encoding="utf-8")


def figures() -> dict[str, str]:
    """Return each figure's SVG by its file name."""
    return {
        "throughput.svg": throughput(json.loads((DATA / "offline.json").read_text())),
        "latency.svg": latency(json.loads((DATA / "online.json").read_text())),
        "data-flow.svg": data_flow(),
        "engine-step.svg": engine_step(),
        "packages.svg": packages(),
    }


# Charts.


def throughput(data: dict[str, Any]) -> str:
    """Draw grouped horizontal bars: output tokens per second per model and engine."""
    left, width, bar, gap = 220, 780, 16, 18
    rows = [each for each in data["rows"] if set(COLORS) <= set(each["tokens_per_s"])]
    largest = max(max(each["tokens_per_s"].values()) for each in rows)
    parts, top = [], 58
    for row in rows:
        values = {engine: row["tokens_per_s"][engine] for engine in COLORS}
        middle = top + len(values) * bar / 2 + 4
        parts.append(_text(left - 12, middle, row["model"], anchor="end"))
        for engine, value in values.items():
            length = (width - left - 70) * value / largest
            parts.append(
                f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{bar - 3}" fill="{COLORS[engine]}"/>'
            )
            parts.append(_text(left + length + 6, top + bar - 5, f"{value:,}", size=11))
            top += bar
        top += gap
    legend = _legend(left, 36, [*COLORS])
    return _svg(width, top + 4, _text(16, 20, data["title"], size=14, weight="bold"), legend, *parts)


def latency(data: dict[str, Any]) -> str:
    """Draw two panels side by side: the median TTFT and TPOT over the request rate, a line per engine."""
    panels = [
        _panel(data, "ttft_ms", "TTFT, ms (median)", 60, 100),
        _panel(data, "tpot_ms", "TPOT, ms (median)", 440, 20),
    ]
    legend = _legend(60, 36, [*COLORS])
    return _svg(800, 300, _text(16, 20, data["title"], size=14, weight="bold"), legend, *panels)


def _panel(data: dict[str, Any], field: str, label: str, left: int, most: int) -> str:
    top, height, width = 76, 170, 320
    rates = [row["requests_per_s"] for row in data["rows"]]

    def x(rate: float) -> float:
        return left + width * rate / (max(rates) + 1)

    def y(value: float) -> float:
        return top + height * (1 - value / most)

    parts = [_text(left, top - 10, label)]
    for tick in range(0, most + 1, most // 4):
        parts.append(_line(left, y(tick), left + width, y(tick), color="#d8dee4"))
        parts.append(_text(left - 6, y(tick) + 4, str(tick), size=11, anchor="end"))
    parts += [_text(x(rate), top + height + 16, str(rate), size=11, anchor="middle") for rate in rates]
    parts.append(_text(left + width / 2, top + height + 34, "requests per second", size=11, anchor="middle"))
    for engine in COLORS:
        points = [(x(row["requests_per_s"]), y(row[engine][field][0])) for row in data["rows"]]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[engine]}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{COLORS[engine]}"/>' for px, py in points]
    return "\n".join(parts)


def _legend(left: float, top: float, engines: list[str]) -> str:
    parts = []
    for engine in engines:
        parts.append(f'<rect x="{left}" y="{top - 9}" width="11" height="11" fill="{COLORS[engine]}"/>')
        parts.append(_text(left + 17, top, engine, size=12))
        left += 36 + 7 * len(engine)
    return "\n".join(parts)


# Diagrams.


def data_flow() -> str:
    """Draw the processes and the messages between them."""
    boxes = [
        _box(20, 110, 110, 60, "client", "HTTP"),
        _box(210, 110, 130, 60, "API server", "asyncio, no model"),
        _box(420, 110, 140, 60, "tokenizer worker", "--num-tokenizers"),
        _box(640, 104, 90, 44, "router", "--replicas", dash=True),
        _box(830, 96, 150, 88, "rank 0", "scheduler", "model runner"),
        _box(830, 254, 150, 60, "rank 1, 2, ...", "model runner"),
        _box(210, 254, 350, 44, "launcher: starts and watches every process"),
    ]
    arrows = [
        _arrow(130, 128, 210, 128, "request"),
        _arrow(210, 154, 130, 154, "events", below=True),
        _arrow(340, 128, 420, 128, "Tokenize"),
        _arrow(420, 154, 340, 154, "TextBatch", below=True),
        _arrow(560, 128, 640, 128, "Submit"),
        _arrow(730, 128, 830, 128),
        _arrow(830, 162, 560, 162, "TokenBatch", below=True),
        _arrow(870, 184, 870, 254),
        _text(862, 222, "BatchPlan, masks", size=11, anchor="end"),
        _arrow(942, 254, 942, 184),
        _arrow(942, 184, 942, 254),
        _text(950, 222, "NCCL", size=11),
        _line(275, 254, 275, 170, dash=True),
        _line(490, 254, 490, 170, dash=True),
        _line(560, 284, 830, 284, dash=True),
    ]
    replica = [_box(752, 64, 252, 262, dash=True), _text(764, 82, "one engine per replica", size=11)]
    title = _text(20, 30, "msgspec messages over ZeroMQ between processes; tensors between ranks over NCCL", size=13)
    return _svg(1020, 340, title, *replica, *arrows, *boxes)


def engine_step() -> str:
    """Draw one step of the engine: what is scheduled, run and processed, and what each part reads."""
    cpu = _text(20, 64, "CPU", size=12, weight="bold")
    device = _text(20, 224, "device", size=12, weight="bold")
    boxes = [
        _box(90, 36, 150, 56, "Scheduler.schedule", "decodes, prefill chunks"),
        _box(300, 36, 120, 56, "BatchPlan", "NumPy arrays"),
        _box(640, 36, 150, 56, "Scheduler.process", "append, finish"),
        _box(90, 118, 150, 44, "page manager", "prefix cache"),
        _box(290, 196, 140, 56, "execute_model", "ModelRunner"),
        _box(470, 196, 120, 56, "model", "logits"),
        _box(640, 196, 150, 56, "sample_tokens", "ModelRunner"),
        _box(470, 286, 120, 44, "paged KV pool"),
    ]
    arrows = [
        _arrow(240, 64, 300, 64),
        _arrow(165, 118, 165, 92),
        _arrow(360, 92, 360, 196),
        _text(368, 150, "one upload", size=11),
        _arrow(430, 224, 470, 224),
        _arrow(590, 224, 640, 224),
        _arrow(715, 196, 715, 92),
        _text(707, 150, "tokens", size=11, anchor="end"),
        _arrow(530, 252, 530, 286),
        _arrow(530, 286, 530, 252),
        _text(538, 274, "attention", size=11),
        _line(715, 252, 715, 352, dash=True),
        _line(715, 352, 360, 352, dash=True),
        _arrow(360, 352, 360, 252),
        _text(368, 346, "sampled tokens: input of the next decode, on the device", size=11),
        _line(715, 36, 715, 14),
        _line(715, 14, 165, 14),
        _arrow(165, 14, 165, 36),
        _text(440, 28, "next step", size=11, anchor="middle"),
    ]
    return _svg(820, 370, cpu, device, *arrows, *boxes)


def packages() -> str:
    """Draw the packages and their imports."""
    names = ["minisgl-backends", "minisgl-models", "minisgl-server", "your plugin"]
    parts = [_box(245, 130, 330, 52, "minisgl-core", "contracts, scheduler, engine, LLM")]
    for index, name in enumerate(names):
        left = 20 + 200 * index
        parts.append(_box(left, 24, 180, 44, name))
        parts.append(_arrow(left + 90, 68, 300 + 72 * index, 130))
    return _svg(820, 200, *parts, _text(20, 110, "imports", size=11))


# SVG.


def _svg(width: int, height: float, *parts: str) -> str:
    """Join elements into a document with a white background, so that dark pages show it too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" font-family="sans-serif">'
    marker = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>'
    )
    background = f'<rect width="{width}" height="{height:g}" fill="white"/>'
    return "\n".join([head, marker, background, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{TEXT}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, *lines: str, dash: bool = False) -> str:
    style = f'fill="{FILL}" stroke="{LINE}"' + (' stroke-dasharray="4 4"' if dash else "")
    frame = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" {style}/>'
    first = y + height / 2 - 8 * (len(lines) - 1) + 4
    texts = [
        _text(x + width / 2, first + 16 * index, line, 11 if index else 13, "middle", "normal" if index else "bold")
        for index, line in enumerate(lines)
    ]
    return "\n".join([frame, *texts])


def _line(x1: float, y1: float, x2: float, y2: float, color: str = LINE, dash: bool = False) -> str:
    style = ' stroke-dasharray="4 4"' if dash else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}"{style}/>'


def _arrow(x1: float, y1: float, x2: float, y2: float, label: str = "", below: bool = False) -> str:
    line = (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.5" '
        'marker-end="url(#arrow)"/>'
    )
    if not label:
        return line
    return "\n".join([line, _text((x1 + x2) / 2, y1 + (16 if below else -6), label, size=11, anchor="middle")])


if __name__ == "__main__":
    main()
