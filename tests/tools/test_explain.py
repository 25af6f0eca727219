"""explain in words and as a page: what it says is what the plan is."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from support import block_case
from torch import Tensor, nn

import megafuse
from megafuse.compiler import Plan
from megafuse.tools.explain import Explanation, explain

SHAPE = (4, 8, 64, 2)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.up(self.norm(x))) + 1


@pytest.fixture(scope="module")
def block() -> tuple[Plan, Explanation]:
    case = block_case(SHAPE, torch.bfloat16)
    fused = megafuse.fuse(case.module, *case.args, **case.kwargs)
    (plans,) = fused._plans.values()
    return plans[0].plan, explain(fused, case.args, case.kwargs)


@pytest.fixture(scope="module")
def tiny() -> Explanation:
    x = torch.randn(8, 64, requires_grad=True)
    return explain(megafuse.fuse(Tiny(), x), (x,))


def test_words_name_lines_operators_tiles_and_reasons(block: tuple[Plan, Explanation]) -> None:
    text = str(block[1])
    assert max(map(len, text.splitlines())) <= 100 and len(text.splitlines()) <= 80
    assert re.search(r"block\.py:\d+ \(norm0\) +sum, div, sub, mul, add, rsqrt", text)
    engines = [r.engine for r in block[1].summary.regions if r.kind == "matmul"]
    assert len(engines) == 6 and all(e.startswith("Hopper kernel, ") for e in engines)
    assert "Hopper kernel, 64x128 tile: 8 tiles in 1 waves on 132 multiprocessors" in text
    assert "times predicted for NVIDIA H200, default rates" in text
    assert "recomputed: " in text and "→ its results leave the graph" in text
    letters = re.findall(r"→ [\w, ]+: (\[\w\])$", text, re.MULTILINE)
    assert letters and all(re.search(rf"\w {re.escape(x)}$", text, re.MULTILINE) for x in letters)


def test_refused_merges_are_told_once_and_about_other_regions(
    block: tuple[Plan, Explanation],
) -> None:
    for region in block[1].summary.regions:
        told = [w.consumer for w in (*region.boundaries, *region.tried)]
        assert len(told) == len(set(told)) and region.name not in told
        assert all(w.producer == region.name for w in (*region.boundaries, *region.tried))


def test_lifetimes_are_the_executors(block: tuple[Plan, Explanation]) -> None:
    plan, told = block
    buffers = {b.name: b for b in told.summary.buffers}
    last = plan.forward.last_use()
    forward = len(plan.forward.regions)
    total = len(told.summary.regions)
    saved = 0
    for name, buffer in buffers.items():
        if not buffer.counted:
            assert buffer.made_by == ""
            continue
        assert 0 <= buffer.first <= buffer.last < total
        if buffer.role == "temporary" and name.startswith("F."):
            (node,) = [n for n in last if f"F.{n.name}" == name]
            assert buffer.last == last[node]
        if buffer.role == "saved":
            saved += buffer.nbytes
            assert buffer.first < forward <= buffer.last
        if buffer.role == "result":
            assert buffer.last == total - 1
    assert saved == told.summary.saved_bytes
    labels = [b.label for b in buffers.values() if b.role == "result"]
    assert {"result", "d w1", "d inputs", "d norm2.gamma"} <= set(labels)


def test_the_peak_is_what_was_allocated(block: tuple[Plan, Explanation]) -> None:
    """Counted by hand over the steps: made, and not yet past the last use."""
    told = block[1].summary
    live = told.live_bytes()
    running: set[str] = set()
    sizes = {b.name: b.nbytes for b in told.buffers}
    last = {b.name: b.last for b in told.buffers if b.counted}
    for step, region in enumerate(told.regions):
        running |= {u.buffer for u in region.writes if u.buffer in last}
        assert live[step] == sum(sizes[n] for n in running)
        running -= {n for n in running if last[n] == step}


def test_bytes_add_up(block: tuple[Plan, Explanation]) -> None:
    summary = block[1].summary
    for region in summary.regions:
        assert region.bytes_read == sum(u.nbytes for u in region.reads)
        assert region.bytes_written == sum(u.nbytes for u in region.writes)
    assert summary.unfused_bytes == sum(o.bytes_read + o.bytes_written for o in summary.unfused)


def test_unfused_operators_find_their_regions(block: tuple[Plan, Explanation]) -> None:
    by_op: dict[str, list[tuple[str, ...]]] = {}
    for op in block[1].summary.unfused:
        by_op.setdefault(op.op, []).append(op.regions)
    assert by_op["bmm"] == [("F2",), ("F4",), ("B2",), ("B3",), ("B5",), ("B6",)]
    assert by_op["native_layer_norm"] == [("F1",), ("F1",), ("F3",), ("F3",), ("F5",)]
    assert set(by_op["clone"]) == {()}  # token mixing is addressing


class _Outline(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module", params=["block", "tiny"])
def page(request: pytest.FixtureRequest) -> tuple[Explanation, str]:
    value = request.getfixturevalue(request.param)
    told = value[1] if isinstance(value, tuple) else value
    return told, told.html()


def test_the_page_is_self_contained(page: tuple[Explanation, str]) -> None:
    text = page[1]
    outline = _Outline(text)
    for tag, attributes in outline.tags:
        assert not {"src", "href"} & attributes.keys(), tag
        assert tag not in ("link", "img", "iframe", "object")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "url(" not in text and "@import" not in text and "$" not in text


def test_every_picture_is_well_formed(page: tuple[Explanation, str]) -> None:
    text = page[1]
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 5  # before and after, forward and backward; lifetimes
    for picture in pictures:
        assert ElementTree.fromstring(picture).get("aria-label")


def test_everything_that_can_be_pointed_at_has_details(page: tuple[Explanation, str]) -> None:
    told, text = page
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    details = json.loads(found.group(1))
    keys = {a["data-k"] for _, a in _Outline(text).tags if a.get("data-k")}
    assert keys <= details.keys()
    for region in told.summary.regions:
        assert region.name in keys
        for line in region.lines:
            assert line.location in details[region.name]
        for why in region.boundaries:
            assert why.reason.split("'")[0] in details[region.name]
    for op in told.summary.unfused:
        assert op.name in keys


def test_a_page_is_written_where_asked(tmp_path: Path) -> None:
    x = torch.randn(8, 64, requires_grad=True)
    fused = megafuse.fuse(Tiny(), x)
    path = tmp_path / "plan.html"
    text = megafuse.explain(fused, x, html=path)
    assert text == megafuse.explain(fused, x)
    assert path.read_text() == explain(fused, (x,)).html()
    with pytest.raises(megafuse.MegafuseError, match=r"nowhere/plan\.html cannot be written"):
        megafuse.explain(fused, x, html=tmp_path / "nowhere" / "plan.html")


def test_forward_alone_and_functions() -> None:
    told = explain(megafuse.fuse(lambda a, b: (a * b).sum(-1), torch.ones(4, 8), torch.ones(4, 8)))
    assert told.summary.saved_bytes == 0 and "backward" not in str(told).split("Saved")[0]
    assert {b.label for b in told.summary.buffers if b.role == "input"} == {"a", "b"}
    assert told.html().count("<svg") == 3
