"""A plan as one HTML file without outside resources: before, after, and what memory holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

from megafuse.fusion.summary import BufferSummary, Direction, RegionSummary, Role
from megafuse.tools.explain import Explanation, merged_lines, render, together
from megafuse.tools.plan_svg import Item, Link, graph, lifetimes
from megafuse.tools.tables import counted, gigabytes, operations

_ROWS = ("#cfe3f7", "#d3ecd6", "#e3d9f3", "#c9ecec", "#fbdce6", "#dfe6c4", "#d5d9f5", "#f3dccb")
_MATMUL, _EXTERN = "#fde6ae", "#d9dce1"
_ROLES: dict[Role, str] = {
    "input": "yours",
    "grad": "yours",
    "temporary": "freed after its last use",
    "saved": "saved for backward",
    "result": "handed to you",
}
_GONE = "gone: the regions that need its result read or write each element in place"
_MOST_LINES, _COLUMNS = 6, 46


def page(explanation: Explanation) -> str:
    """The whole page as text."""
    return _Page(explanation).text()


class _Page:
    def __init__(self, explanation: Explanation) -> None:
        self.told, self.summary = explanation, explanation.summary
        self.buffers = {b.name: b for b in self.summary.buffers}
        self.colors = _colors(self.summary.regions)
        self.readers: dict[str, list[str]] = {}
        self.writers: dict[str, list[str]] = {}
        for region in self.summary.regions:
            for use in region.reads:
                self.readers.setdefault(use.buffer, []).append(region.name)
            for use in region.writes:
                self.writers.setdefault(use.buffer, []).append(region.name)
        self.details: dict[str, str] = {}

    def text(self) -> str:
        summary, told = self.summary, self.told
        graphs = "\n".join(self._graphs())
        for region in summary.regions:
            self.details[region.name] = self._region_details(region)
        for buffer in summary.buffers:
            self.details[f"b:{buffer.name}"] = self._buffer_details([buffer.name])
        at = ", ".join(f"{k} = {v}" for k, v in told.sizes.items())
        return Template(Path(__file__).with_suffix(".html").read_text()).substitute(
            title=escape(f"megafuse plan of {told.title}"),
            subtitle=escape(f"{f'{at}, ' if at else ''}on {told.where}; {told.rates}."),
            tiles="".join(self._tiles()),
            legend=_legend(),
            graphs=graphs,
            hint="<h3>Point at anything</h3><p class=dim>for its lines, bytes and reasons. A click "
            "keeps it; Escape lets go.</p>",
            memory_note="Everything the plan allocates, from the region that makes it to the last "
            "that needs it; results stay to the end. Your parameters, inputs and upstream "
            "gradients are not counted, nor the scratch of column sums.",
            lifetimes=lifetimes(summary, self.colors, self.readers),
            text=escape(render(told)),
            details=json.dumps(self.details).replace("<", "\\u003c"),
        )

    def _tiles(self) -> Iterator[str]:
        summary = self.summary
        live = summary.live_bytes()
        moved, before = summary.fused_bytes, summary.unfused_bytes
        tiles = [
            (f"{len(summary.unfused)} → {len(summary.regions)}", "operators → regions"),
            (f"{gigabytes(before)} → {gigabytes(moved)}", "bytes moved"),
            (gigabytes(summary.saved_bytes), "saved for backward"),
            (gigabytes(max(live, default=0)), "held at the peak"),
            (f"{sum(r.predicted_ms for r in summary.regions):.3f} ms", "predicted"),
        ]
        for value, what in tiles:
            yield f'<div class="tile"><b>{escape(value)}</b><span>{what}</span></div>'

    # -- graphs

    def _graphs(self) -> Iterator[str]:
        for direction in ("forward", "backward"):
            regions = [r for r in self.summary.regions if r.direction == direction]
            if not regions:
                continue
            ops = [o for o in self.summary.unfused if o.direction == direction]
            moved = gigabytes(sum(o.bytes_read + o.bytes_written for o in ops))
            after = gigabytes(sum(r.bytes_read + r.bytes_written for r in regions))
            name, before = direction.capitalize(), counted(len(ops), "operator")
            yield _card(f"{name}, before", f"{before}, {moved}", self._before(direction))
            plan = counted(len(regions), "region")
            yield _card(f"{name}, after", f"{plan}, {after}", self._after(direction))

    def _before(self, direction: Direction) -> str:
        ops = [o for o in self.summary.unfused if o.direction == direction]
        own = {o.name: o for o in ops}
        used = dict.fromkeys(s for o in ops for s in o.sources if self._is_given(s, direction))
        items = [self._tensor(name) for name in used]
        links = []
        for op in ops:
            color = self.colors[op.regions[0]] if op.regions else "#ffffff"
            tag = " ".join(op.regions) or "gone"
            where = f"now in {tag}" if op.regions else _GONE
            items.append(Item(op.name, op.op, tag, ((op.line, True),), color, op.regions,
                              gone=not op.regions))  # fmt: skip
            self.details[op.name] = (
                f"<h3><code>{escape(op.op)}</code></h3><p>{escape(op.line)}</p><p>reads "
                f"{gigabytes(op.bytes_read)}, writes {gigabytes(op.bytes_written)}</p>"
                f"<p class=dim>{where}</p>"
            )
            for source in op.sources:
                if source in own or source in used:
                    nbytes = own[source].bytes_written if source in own else self._size(source)
                    links.append(Link(source, op.name, nbytes, gigabytes(nbytes), source,
                                      op.regions, label=False))  # fmt: skip
        return graph(items, links, f"The unfused {direction} graph")

    def _after(self, direction: Direction) -> str:
        regions = [r for r in self.summary.regions if r.direction == direction]
        here = {r.name for r in regions}
        given = dict.fromkeys(u.buffer for r in regions for u in r.reads
                              if self._is_given(u.buffer, direction))  # fmt: skip
        items = [self._tensor(name) for name in given]
        carried: dict[tuple[str, str], list[tuple[str, int]]] = {}
        for region in regions:
            items.append(self._region(region))
            for use in region.reads:
                if use.buffer in given:
                    sources = [use.buffer]
                else:
                    sources = [w for w in self.writers.get(use.buffer, []) if w in here]
                for source in sources:
                    if source != region.name:
                        pair = source, region.name
                        carried.setdefault(pair, []).append((use.buffer, use.nbytes))
        for name in dict.fromkeys(u.buffer for r in regions for u in r.writes):
            if self._is_shown_result(name, direction):
                items.append(self._tensor(name))
                for maker in self.writers[name]:
                    carried[maker, name] = [(name, self.buffers[name].nbytes)]
        links = []
        for (a, b), uses in carried.items():
            total = sum(n for _, n in uses)
            names = [name for name, _ in uses]
            title = "\n".join(f"{self._title(n)}: {gigabytes(x)}" for n, x in uses)
            key = "e:" + "+".join(names)
            self.details[key] = self._buffer_details(names)
            ends = tuple(n for n in (a, b) if n in here)
            links.append(Link(a, b, total, title, key, ends))
        return graph(items, links, f"The {direction} plan")

    def _is_given(self, name: str, direction: Direction) -> bool:
        """Drawn at the top: an argument of the call, or the upstream gradient."""
        buffer = self.buffers.get(name)
        if buffer is None:
            return False
        argument = name in self.told.arguments and direction == "forward"
        return buffer.role == "grad" or (buffer.role == "input" and argument)

    def _is_shown_result(self, name: str, direction: Direction) -> bool:
        buffer = self.buffers[name]
        shown = {f"d {self.buffers[a].label}" for a in self.told.arguments if a in self.buffers}
        return buffer.role == "result" and (direction == "forward" or buffer.label in shown)

    def _tensor(self, name: str) -> Item:
        buffer = self.buffers[name]
        text = f"{buffer.label}  {buffer.type}"
        self.details.setdefault(name, self._buffer_details([name]))
        near = tuple(dict.fromkeys([*self.writers.get(name, []), *self.readers.get(name, [])]))
        return Item(name, text, color="#ffffff", round=True, regions=near, columns=4)

    def _region(self, region: RegionSummary) -> Item:
        lines = [(f"{place}: {ops}", False) for place, ops in merged_lines(region).items()]
        if len(lines) > _MOST_LINES:
            more = len(lines) - _MOST_LINES + 1
            lines = [*lines[: _MOST_LINES - 1], (f"and {more} more lines", True)]
        taken = [self._short(u.buffer, u.nbytes) for u in region.reads if self._beside(u.buffer)]
        if taken:
            lines.append((f"takes {', '.join(taken)}", True))
        kept = [u for u in region.writes if self.buffers[u.buffer].role == "saved"]
        if kept:
            size = gigabytes(sum(u.nbytes for u in kept))
            lines.append((f"saves {len(kept)} for backward, {size}", True))
        given = [self.buffers[u.buffer].label for u in region.writes
                 if self.buffers[u.buffer].role == "result"]  # fmt: skip
        if given:
            lines.append((f"gives {', '.join(given)}", True))
        lines.append((f"reads {gigabytes(region.bytes_read)}, writes "
                      f"{gigabytes(region.bytes_written)}", True))  # fmt: skip
        note = f"{region.predicted_ms * 1e3:.1f} µs"
        heading = f"{region.name}  {region.kind}"
        columns = min(_COLUMNS, max(len(text) for text, _ in lines))
        return Item(region.name, heading, note, tuple(lines), self.colors[region.name],
                    (region.name,), columns=columns)  # fmt: skip

    def _beside(self, name: str) -> bool:
        """Read without an edge, but worth a word: a parameter."""
        buffer = self.buffers[name]
        return buffer.role == "input" and name not in self.told.arguments

    def _short(self, name: str, nbytes: int) -> str:
        return f"{self.buffers[name].label} {gigabytes(nbytes)}"

    # -- details

    def _title(self, name: str) -> str:
        buffer = self.buffers[name]
        return f"{buffer.label} {buffer.type}"

    def _size(self, name: str) -> int:
        return self.buffers[name].nbytes if name in self.buffers else 0

    def _region_details(self, region: RegionSummary) -> str:
        parts = [f"<h3>{region.name}, {region.kind}</h3>",
                 f"<p>{region.predicted_ms * 1e3:.1f} µs predicted; {region.launches} launch"
                 f"{'es' if region.launches > 1 else ''}"
                 f"{f'; {operations(region.flops)}' if region.flops else ''}</p>",
                 "<h4>Lines</h4><table>"]  # fmt: skip
        parts += [f"<tr><td><code>{escape(place)}</code></td><td>{escape(ops)}</td></tr>"
                  for place, ops in merged_lines(region).items()]  # fmt: skip
        parts.append("</table>")
        if region.engine:
            parts.append(f"<h4>On {escape(self.told.spec.name)}</h4><p>{escape(region.engine)}</p>")
        for heading, uses in (("Reads", region.reads), ("Writes", region.writes)):
            if not uses:
                continue
            total = gigabytes(sum(u.nbytes for u in uses))
            parts.append(f"<h4>{heading} {total}</h4><table class=bytes>")
            for use in sorted(uses, key=lambda u: -u.nbytes):
                buffer = self.buffers[use.buffer]
                role = f" <span class=dim>{buffer.role}</span>" if buffer.role != "input" else ""
                parts.append(f"<tr><td>{escape(buffer.label)}{role}</td><td><code>"
                             f"{escape(buffer.type)}</code></td><td>{gigabytes(use.nbytes)}</td>"
                             "</tr>")  # fmt: skip
            parts.append("</table>")
        if region.boundaries:
            parts.append("<h4>Why it ends here</h4><ul>")
            parts += [f"<li><b>→ {names}</b>: {escape(reason)}</li>"
                      for names, reason in together(region.boundaries)]  # fmt: skip
            parts.append("</ul>")
        if region.tried:
            parts.append("<h4>Also tried and refused</h4><ul>")
            parts += [f"<li>with <b>{names}</b>: {escape(reason)}</li>"
                      for names, reason in together(region.tried)]  # fmt: skip
            parts.append("</ul>")
        return "".join(parts)

    def _buffer_details(self, names: list[str]) -> str:
        parts = []
        for name in names:
            buffer: BufferSummary = self.buffers[name]
            read_by = ", ".join(self.readers.get(name, [])) or "nobody in the plan"
            made = f"made by {buffer.made_by}, " if buffer.made_by else ""
            parts.append(
                f"<h3>{escape(buffer.label)}</h3><p><code>{escape(buffer.type)}</code>, "
                f"{gigabytes(buffer.nbytes)}, {_ROLES[buffer.role]}</p>"
                f"<p>{made}read by {read_by}</p>"
            )
        return "".join(parts)


def _colors(regions: tuple[RegionSummary, ...]) -> dict[str, str]:
    fixed = {"matmul": _MATMUL, "extern": _EXTERN}
    result: dict[str, str] = {}
    taken = 0
    for region in regions:
        if region.kind in fixed:
            result[region.name] = fixed[region.kind]
        else:
            result[region.name] = _ROWS[taken % len(_ROWS)]
            taken += 1
    return result


def _legend() -> str:
    marks = ((_ROWS[0], "row regions, a colour each"), (_MATMUL, "matrix product"),
             (_EXTERN, "left to PyTorch"))  # fmt: skip
    keys = "".join(f'<i style="background:{color}"></i>{what}' for color, what in marks)
    more = "dashed: gone, became addressing; an edge is a buffer, wider with its bytes"
    return f"{keys} &nbsp; {more}"


def _card(heading: str, note: str, picture: str) -> str:
    return (f'<section class="card"><h2>{heading}</h2><p class="dim">{note}</p>{picture}'
            "</section>")  # fmt: skip
