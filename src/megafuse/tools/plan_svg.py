"""The pictures of a plan as SVG text: a graph of boxes, and how long each buffer lives.

What can be pointed at carries `data-k`, the key of its details, and `data-r`, the regions it
belongs to; the page's script lights up everything of the same regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from megafuse.fusion.summary import BufferSummary, PlanSummary
from megafuse.tools.layout import Box, lay_out
from megafuse.tools.tables import gigabytes

CHARACTER = 6.03  # width of one at 10 px in a monospaced face
_HEADING = 7.4  # of a heading's, at most
_LINE, _PADDING = 14.0, 8.0
_MOST_BARS = 44


@dataclass(frozen=True)
class Item:
    """A box to draw: its heading with a note at the right, lines below (dimmer ones marked), its
    colour, and the regions it lights up with. A round one is a tensor, a
    gone one an operator that the plan has no need of."""

    name: str
    heading: str
    note: str = ""
    lines: tuple[tuple[str, bool], ...] = ()
    color: str = "#e8eaed"
    regions: tuple[str, ...] = ()
    round: bool = False
    gone: bool = False
    columns: int = 18

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in pixels."""
        letter = CHARACTER if self.round else _HEADING
        heading = len(self.heading) * letter + len(self.note) * CHARACTER
        height = 22.0 if self.round else _LINE * (1 + len(self.lines)) + 1.4 * _PADDING
        return max(self.columns * CHARACTER, heading + 2 * CHARACTER) + 2 * _PADDING, height


@dataclass
class Link:
    """An edge: what it carries, in short and in full, and the regions at its ends."""

    start: str
    end: str
    nbytes: int
    title: str
    key: str = ""
    regions: tuple[str, ...] = ()
    label: bool = field(default=True)


def graph(items: Sequence[Item], links: Sequence[Link], label: str) -> str:
    """One layered picture. items: in topological order; label: what a screen reader says."""
    sizes = {item.name: item.size for item in items}
    gap = (20.0, 40.0) if any(link.label for link in links) else (14.0, 22.0)
    drawing = lay_out(sizes, [(x.start, x.end) for x in links], gap)
    width, height = drawing.width, drawing.height
    most = max((x.nbytes for x in links), default=1) or 1
    parts = [_open(width, height, label)]
    for link in links:
        parts.append(_link(link, drawing.routes[link.start, link.end], most))
    parts += [_item(item, drawing.boxes[item.name]) for item in items]
    for link in links:
        if link.label:
            parts.append(_pill(link, drawing.routes[link.start, link.end]))
    return "\n".join([*parts, "</svg>"])


def lifetimes(
    summary: PlanSummary, colors: Mapping[str, str], readers: Mapping[str, Sequence[str]]
) -> str:
    """Bytes held while each region runs, above a bar for each buffer over the regions it lives in.

    colors: of regions; readers: the regions that read a buffer."""
    steps = [r.name for r in summary.regions]
    counted = [b for b in summary.buffers if b.counted]
    shown = sorted(counted, key=lambda b: -b.nbytes)[:_MOST_BARS]
    shown.sort(key=lambda b: (b.first, -b.nbytes, b.last))
    rest = [b for b in counted if b not in shown]
    left, right, chart, row = 330.0, 90.0, 120.0, 17.0
    step = max(14.0, min(88.0, 1000.0 / max(len(steps), 1)))
    top = 22.0 + chart + 26.0
    width = left + step * len(steps) + right
    height = top + row * (len(shown) + bool(rest)) + 8
    parts = [_open(width, height, "Bytes held while each region runs, and the life of each buffer")]
    forward = sum(r.direction == "forward" for r in summary.regions)
    if 0 < forward < len(steps):
        x = left + step * forward
        parts.append(f'<line class="fold" x1="{x:.1f}" y1="8" x2="{x:.1f}" y2="{height - 6:.1f}"/>')
        parts.append(_text(x - 6, 14, "forward", "axis end") + _text(x + 6, 14, "backward", "axis"))
    parts += _memory(summary.live_bytes(), steps, left, step, 22.0, chart)
    every = max(1, round(26.0 / step))
    for i, name in enumerate(steps):
        x = left + step * i
        if i % every == 0:
            parts.append(_text(x + step / 2, 22 + chart + 15, name, "axis middle"))
    for i, buffer in enumerate(shown):
        near = (buffer.made_by, *readers.get(buffer.name, ()))
        color = colors.get(buffer.made_by, "#bbb")
        parts.append(_bar(buffer, steps, left, step, top + row * i, row, color, near))
    if rest:
        total = gigabytes(sum(b.nbytes for b in rest))
        text = f"{len(rest)} smaller ones, {total} together"
        parts.append(_text(left - 8, top + row * len(shown) + 12, text, "axis end"))
    return "\n".join([*parts, "</svg>"])


def _memory(
    live: Sequence[int], steps: Sequence[str], left: float, step: float, top: float, height: float
) -> Iterable[str]:
    most = max(live, default=0)
    if not most:
        return
    bottom = top + height
    peak = live.index(most)
    for i, (nbytes, name) in enumerate(zip(live, steps, strict=True)):
        tall = (height - 18) * nbytes / most
        mark = " peak" if i == peak else ""
        yield (
            f'<g data-k="{name}" data-r="{name}"><rect class="live{mark}" '
            f'x="{left + step * i + 1:.1f}" y="{bottom - tall:.1f}" width="{step - 2:.1f}" '
            f'height="{tall:.1f}"/><title>{gigabytes(nbytes)} held while {name} runs</title></g>'
        )
    x = left + step * (peak + 0.5)
    anchor = "end" if peak > 0.75 * len(live) else "start" if peak < 0.25 * len(live) else "middle"
    yield _text(x, top + 10, f"peak {gigabytes(most)} in {steps[peak]}", f"strong {anchor}")
    yield _text(left - 8, bottom - 4, "bytes held", "axis end")


def _bar(
    buffer: BufferSummary, steps: Sequence[str], left: float, step: float, y: float, row: float,
    color: str, near: Sequence[str],
) -> str:  # fmt: skip
    x, wide = left + step * buffer.first, step * (buffer.last - buffer.first + 1)
    label = _fit(f"{buffer.label}  {buffer.type}", int((left - 14) / CHARACTER))
    until = "the end" if buffer.role == "result" else steps[buffer.last]
    title = f"{buffer.label} {buffer.type}: {gigabytes(buffer.nbytes)}, {buffer.role}, " \
            f"from {buffer.made_by} to {until}"  # fmt: skip
    return (
        f'<g data-k="b:{escape(buffer.name)}" data-r="{" ".join(near)}">'
        f"<title>{escape(title)}</title>"
        + _text(left - 8, y + 12, label, "code end")
        + f'<rect class="bar {buffer.role}" x="{x + 1:.1f}" y="{y + 2:.1f}" '
        f'width="{wide - 2:.1f}" height="{row - 5:.1f}" rx="3" '
        f'fill="{color}"/>' + _text(x + wide + 5, y + 12, gigabytes(buffer.nbytes), "axis") + "</g>"
    )


def _open(width: float, height: float, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'width="{width:.0f}" style="min-width: {0.65 * width:.0f}px" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">'
    )


def _item(item: Item, box: Box) -> str:
    x, y = box.x - box.width / 2, box.y - box.height / 2
    key, regions = escape(item.name), escape(" ".join(item.regions))
    kind = "tensor" if item.round else "box gone" if item.gone else "box"
    parts = [
        f'<g class="{kind}" tabindex="0" data-k="{key}" data-r="{regions}">',
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{11 if item.round else 5}" '
        f'fill="{item.color}"/>',
    ]
    if item.round:
        parts.append(_text(box.x, box.y + 3.5, item.heading, "code middle"))
        return "".join([*parts, "</g>"])
    base = y + _PADDING + 8
    parts.append(_text(x + _PADDING, base, item.heading, "strong"))
    if item.note:
        parts.append(_text(x + box.width - _PADDING, base, item.note, "note end"))
    room = int((box.width - 2 * _PADDING) / CHARACTER)
    for i, (text, dim) in enumerate(item.lines, 1):
        style = "code dim" if dim else "code"
        parts.append(_text(x + _PADDING, base + i * _LINE, _fit(text, room), style))
    return "".join([*parts, "</g>"])


def _link(link: Link, route: Sequence[Box], most: int) -> str:
    first, last = route[0], route[-1]
    x, y = first.x, first.y + first.height / 2
    path = [f"M{x:.1f},{y:.1f}"]
    for box in route[1:]:
        end = box.y - box.height / 2
        middle = (y + end) / 2
        path.append(f"C{x:.1f},{middle:.1f} {box.x:.1f},{middle:.1f} {box.x:.1f},{end:.1f}")
        x, y = box.x, end
        if box is not last and box.height:
            y += box.height
            path.append(f"L{x:.1f},{y:.1f}")
    thick = 1.0 + 4.0 * (link.nbytes / most) ** 0.5
    return (
        f'<g class="link" data-k="{escape(link.key)}" data-r="{escape(" ".join(link.regions))}">'
        f'<path d="{" ".join(path)}" stroke-width="{thick:.1f}"/>'
        f"<title>{escape(link.title)}</title></g>"
    )


def _pill(link: Link, route: Sequence[Box]) -> str:
    """The bytes of an edge, on the curve of its last piece: nearer the start, where edges that
    meet in one box are still apart."""
    before, end = route[-2], route[-1]
    top, bottom = before.y + before.height / 2, end.y - end.height / 2
    x, y = 0.65 * before.x + 0.35 * end.x, 0.58 * top + 0.42 * bottom  # the curve at 0.4
    text = gigabytes(link.nbytes)
    wide = len(text) * CHARACTER * 0.92 + 8
    return (
        f'<g class="pill" data-k="{escape(link.key)}" data-r="{escape(" ".join(link.regions))}">'
        f'<rect x="{x - wide / 2:.1f}" y="{y - 7:.1f}" width="{wide:.1f}" height="14" rx="7"/>'
        + _text(x, y + 3.3, text, "axis middle")
        + f"<title>{escape(link.title)}</title></g>"
    )


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _fit(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"
