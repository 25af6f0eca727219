"""Decide what runs when: groups of fused operators between calls that PyTorch makes.

Time goes in turns. Groups run at even times, PyTorch's calls at odd ones; a node runs at the
earliest time its operands allow. So a call that does not depend on a group never cuts it in two.
What needs only the graph's inputs (recomputed activations, casts of weights) waits for its first
user, or memory would hold all of it at once. Views have no time: whoever needs one makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from megafuse.dynamo.reader import Reader, is_ordered

SOURCES = -1
"""The time of the graph's inputs, and of PyTorch's calls on nothing else."""


@dataclass
class Group:
    """Operators that run as one fused part, in graph order, all on `device`."""

    nodes: list[fx.Node]
    device: torch.device


def schedule(reader: Reader) -> list[Group | fx.Node]:
    """Groups and PyTorch's calls in execution order."""
    times = _times(reader)
    turns: dict[int, list[fx.Node]] = defaultdict(list)
    for node in reader.traced.graph.nodes:
        if reader.kinds.get(node) in ("fused", "left"):
            turns[times[node]].append(node)
    items: list[Group | fx.Node] = []
    for time in sorted(turns):
        if time % 2:
            items += turns[time]
            continue
        groups: dict[torch.device, Group] = {}
        for node in turns[time]:
            device = reader.value(node).device
            groups.setdefault(device, Group([], device)).nodes.append(node)
        items += groups.values()
    return items


def _times(reader: Reader) -> dict[fx.Node, int]:
    times: dict[fx.Node, int] = {}
    last = SOURCES  # of the calls that keep their order
    for node in reader.traced.graph.nodes:
        kind = reader.kinds.get(node)
        time = max((times[n] for n in node.all_input_nodes), default=SOURCES)
        if kind == "fused":
            time += time % 2
        elif kind == "left":
            time += 1 - time % 2
            if is_ordered(node):
                last = time = max(time, last)
        times[node] = time
    _delay(reader, times)
    return times


def _delay(reader: Reader, times: dict[fx.Node, int]) -> None:
    """Move what depends on the graph's inputs alone to its first user."""
    for node in reversed(reader.traced.graph.nodes):
        kind = reader.kinds.get(node)
        if kind not in ("fused", "left", "view") or times[node] > 0 or is_ordered(node):
            continue
        if not all(reader.kinds.get(u) in ("fused", "left", "view") for u in node.users):
            continue  # the graph returns it
        needed = [times[u] for u in node.users]
        if kind != "view":  # the last turn of its own kind before each user, or the user's own
            needed = [t if t % 2 == (kind == "left") else t - 1 for t in needed]
        times[node] = max(times[node], min(needed, default=times[node]))


def readers_of(reader: Reader, node: fx.Node) -> Iterator[fx.Node]:
    """Who needs the value of `node` in memory: its users, and through views the users of those."""
    for user in node.users:
        if reader.kinds.get(user) == "view":
            yield from readers_of(reader, user)
        else:
            yield user
