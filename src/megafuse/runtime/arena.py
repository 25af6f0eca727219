"""Calls that keep the host busy: memory in few blocks, one native call for each run of launches.

Where a call computes little, what Python does around it is what it costs. A `Program` is worked out
once for a set of run-time sizes: every buffer that only generated kernels touch has its place in an
*arena*, a block that others use before and after (`places.py`), and launches know their buffers as
(address, offset). What the caller can see, and what PyTorch reads or writes, are tensors of their
own.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafuse.fusion.plan import ExternRegion, GraphPlan, Operand, Region
from megafuse.ir import Node, TensorType, evaluate
from megafuse.runtime.built import Step, Values, current_stream
from megafuse.runtime.native import Launch, Queue, Target
from megafuse.runtime.places import Life, busiest, pack, runs

SMALL_BYTES = 32 << 20
"""Calls that need no more for temporaries and kept values have one arena a direction, and launch as
far as PyTorch has no part in it in one go."""

MIDDLE_BYTES = 512 << 20
"""Calls that need more run step by step. Every byte is written and read again at least once, which
takes a GPU 0.35 ms at 3 TB/s, and products as much again; a slow host takes 1.0-1.4 ms for the
steps of both directions of a block. Above it memory counts for more."""

SLACK = 1.03
"""How much more memory than step by step a call between the two may hold."""

APART_BYTES = 1 << 20
"""Of kept values that such a call gives memory of their own, for backward to drop early. PyTorch's
allocator draws its line between small and large there."""

ALIGNMENT = 256
"""Of buffers in an arena, as in PyTorch's own allocator at the least."""

Reader = Callable[[Values], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Work:
    """What one region does at fixed sizes. launches: the same as `step` for `native.Queue`; None
    where PyTorch computes it. workspaces: bytes of the buffers that only these launches know."""

    region: Region
    step: Step
    launches: Sequence[Launch] | None = None
    workspaces: Mapping[Any, int] | None = None


@dataclass(frozen=True)
class _Spot:
    """Where a value lies in the arenas of a program, and as what."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Piece:
    """A value in a call's arena, kept for backward: as an address, or as a tensor on demand."""

    __slots__ = ("_address", "_arena", "_spot")

    def __init__(self, arena: torch.Tensor, base: int, spot: _Spot) -> None:
        self._arena, self._address, self._spot = arena, base + spot.offset, spot

    def data_ptr(self) -> int:
        return self._address

    def tensor(self) -> torch.Tensor:
        spot = self._spot
        first = spot.offset // spot.dtype.itemsize
        return self._arena.view(spot.dtype).as_strided(spot.shape, spot.strides, first)


def as_tensor(value: Any) -> Any:
    """`value`, or the tensor that a `Piece` is."""
    return value.tensor() if type(value) is Piece else value


@dataclass
class _Run:
    """Regions that are launched without memory being asked for or given back in between.

    made: tensors allocated before, as (slot of its address, what it is known as, shape, strides,
    dtype). parts: launches, and what PyTorch does, with the nodes it writes and their slots.
    dead: what nobody needs afterwards.
    """

    made: list[tuple[int, Any, tuple[int, ...], tuple[int, ...], torch.dtype]]
    parts: list[Queue | tuple[Step, list[tuple[Node, int]]]]
    dead: list[Any]


class Program:
    """One direction of a call. See `program_of`."""

    def __init__(
        self, plan: GraphPlan, works: Sequence[Work], results: Sequence[Reader | None],
        sizes: Mapping[str, int], device: torch.device, public: int | None, target: Target,
        small: bool,
    ) -> None:  # fmt: skip
        self._device = device
        made = {n for w in works if isinstance(w.region, ExternRegion) for n in w.region.writes()}
        shown = {o.buffer for o in plan.results[:public] if o is not None}
        # PyTorch may hand out its result anywhere, even where a product's tensor map cannot point.
        foreign = [w for w in works if _foreign(w, plan.buffers, made)]
        touched = {n for w in foreign for n in [*w.region.reads(plan.buffers), *w.region.writes()]}
        returned = {o.buffer for o in plan.results if o is not None}
        read = returned.union(*(w.region.reads(plan.buffers) for w in works))
        inputs = [(i, n) for i, n in enumerate(plan.graph.inputs) if n in read]
        self._inputs = [i for i, _ in inputs]
        self._nodes = [n for _, n in inputs]
        self._as_tensors = [n for n in self._nodes if n in touched or n in returned]
        self._aligned = any(w.region.kind == "matmul" and w not in foreign for w in works)

        lives = _lives(plan, works, sizes, shown | touched | (set() if small else returned))
        counted = [*lives.values(), *_given_up(plan, sizes, public)]
        most = sum(x.nbytes for x in counted) if small else int(SLACK * busiest(counted))
        spans = runs(counted, len(works), most)
        turn = [k for k, span in enumerate(spans) for _ in span] + [len(spans)]
        self._runs = [_Run([], [], []) for _ in spans]
        slots: dict[Any, int] = {n: i for i, n in enumerate(self._nodes)}
        last_use = plan.last_use()
        ends: dict[Any, int] = {n: last_use.get(n, len(works)) for n in self._nodes}

        def make(key: Any, life: Life, *tensor: Any) -> None:
            slots[key], ends[key] = len(slots), life.last
            self._runs[turn[life.first]].made.append((slots[key], key, *tensor))

        offsets: dict[Any, tuple[int, int]] = {}  # in blocks: the block's slot, and bytes
        inside = [x for b, x in lives.items() if b not in shown and b not in touched]
        for key, block in _blocks(inside, None if small else turn, returned).items():
            at, nbytes = pack(block)
            life = Life(key, nbytes, min(x.first for x in block), max(x.last for x in block))
            make(key, life, (nbytes,), (1,), torch.uint8)
            offsets |= {buffer: (slots[key], start) for buffer, start in at.items()}
        direct: dict[Node, Reader] = {}
        ours = {n for w in works if w not in foreign for n in w.region.writes()}
        shapes = _shapes(plan, sizes)
        for node, life in lives.items():
            if node in offsets:
                continue
            if node not in ours:  # PyTorch allocates it
                slots[node], ends[node] = len(slots), life.last
                continue
            shape, room = (
                tuple(evaluate(d, sizes) for d in dims) for dims in (node.shape, node.room)
            )
            if node in shapes and node not in touched:
                shape = room = shapes[node]
                direct[node] = _itself(node)
            make(node, life, shape, _row_major(room), node.dtype)
        self._unknown = [0] * (len(slots) - len(self._nodes))
        self._pack = struct.Struct(f"={len(slots)}q").pack
        for key, end in ends.items():
            if turn[end] < len(spans) - 1:
                self._runs[turn[end]].dead.append(key)

        def place(buffer: Any) -> tuple[int, int]:
            return offsets[buffer] if buffer in offsets else (slots[buffer], 0)

        for run, span in zip(self._runs, spans, strict=True):
            inside_run = works[span.start : span.stop]
            for theirs, group in itertools.groupby(inside_run, foreign.__contains__):
                if theirs:
                    run.parts += [
                        (w.step, [(n, slots[n]) for n in w.region.writes()]) for w in group
                    ]
                elif launches := [launch for w in group for launch in w.launches or ()]:
                    run.parts.append(Queue(launches, place, target))
        self._results = [
            direct.get(o.buffer, read) if o is not None else None
            for o, read in zip(plan.results, results, strict=True)
        ]
        keys = {slot: key for key, slot in slots.items()}
        self._spots: list[tuple[int, Any, _Spot] | None] = []
        for o in plan.results:
            spot = None
            if o is not None and o.buffer in offsets:
                slot, start = offsets[o.buffer]
                spot = slot, keys[slot], _spot(o, start, sizes)
            self._spots.append(spot)

    def run(self, inputs: list[Any]) -> list[Any] | None:
        """The graph's outputs, where those that only backward reads may be pieces; None if an
        input lies where a product cannot read it. inputs: tensors or pieces; the list is emptied
        unless None is returned."""
        device = self._device
        given = [inputs[i] for i in self._inputs]
        addresses = [x.data_ptr() for x in given]
        if self._aligned and functools.reduce(operator.or_, addresses, 0) & 15:
            return None
        values: dict[Any, Any] = dict(zip(self._nodes, given, strict=True))
        for node in self._as_tensors:
            values[node] = as_tensor(values[node])
        del given
        inputs.clear()
        addresses += self._unknown
        stream = current_stream(device)
        for run in self._runs:
            for slot, key, shape, strides, dtype in run.made:
                # No name of its own, which would hold it.
                values[key] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                addresses[slot] = values[key].data_ptr()
            for part in run.parts:
                if isinstance(part, Queue):
                    part.run(self._pack(*addresses), stream)
                    continue
                step, written = part
                step(values)
                for node, slot in written:
                    addresses[slot] = values[node].data_ptr()
            for key in run.dead:
                del values[key]
        return [
            Piece(values[spot[1]], addresses[spot[0]], spot[2]) if spot is not None
            else None if read is None else read(values)
            for read, spot in zip(self._results, self._spots, strict=True)
        ]  # fmt: skip


def program_of(
    plan: GraphPlan, works: Sequence[Work], results: Sequence[Reader | None],
    sizes: Mapping[str, int], device: torch.device, public: int | None,
    target: Callable[[], Target | None],
) -> Program | None:  # fmt: skip
    """A program for one direction at the given sizes; None where it runs step by step.

    results: read the graph's outputs out of the buffers. public: how many of them, from the first,
    the caller gets (all by default). target: where launches go.
    """
    shown = {o.buffer for o in plan.results[:public] if o is not None}
    inside = {n for w in works for n in w.region.writes() if n not in shown}
    inside |= {n for n in plan.graph.inputs if n.attrs["role"] == "saved"}
    total = sum(evaluate(n.type.nbytes, sizes) for n in inside)
    total += sum(sum((w.workspaces or {}).values()) for w in works)
    if total > MIDDLE_BYTES or not any(w.launches for w in works):
        return None
    found = target()
    if found is None:
        return None
    small = total <= SMALL_BYTES
    return Program(plan, works, results, sizes, device, public, found, small)


def _lives(
    plan: GraphPlan, works: Sequence[Work], sizes: Mapping[str, int], apart: set[Node]
) -> dict[Any, Life]:
    """What is written, by buffer, in the order of its first moments. apart: buffers that share
    their place with no other."""
    last = plan.last_use()
    known = {p.buffer for w in works for launch in w.launches or () for p in launch.patches}
    outside = apart | {o.buffer for o in plan.results if o is not None}
    lives: dict[Any, Life] = {}
    for i, work in enumerate(works):
        wanted: dict[Any, int] = dict(work.workspaces or {})
        for node in work.region.writes():
            # Not what never leaves its kernel; and a concatenation has several writers.
            if node in known or node in outside or work.launches is None:
                wanted[node] = evaluate(TensorType(node.room, node.dtype).nbytes, sizes)
        for buffer, nbytes in wanted.items():
            nbytes, end = -(-nbytes // ALIGNMENT) * ALIGNMENT, last.get(buffer, len(works))
            if buffer in (work.workspaces or {}):
                end = i
            lives.setdefault(buffer, Life(buffer, nbytes, i, end, buffer not in apart))
    return lives


def _blocks(
    lives: Sequence[Life], turn: Sequence[int] | None, returned: set[Node]
) -> dict[Any, list[Life]]:
    """What lies in one block of memory. turn: of a moment, the run it is in; None for a small call,
    where everything lies in one. Else what comes and goes with the same runs does, and so do values
    kept for backward, but for those worth dropping before the others."""
    blocks: dict[Any, list[Life]] = {}
    for life in lives:
        if turn is None:
            key: Any = "all"
        elif life.buffer not in returned:
            key = turn[life.first], turn[life.last]
        else:
            key = ("kept", life.buffer if life.nbytes >= APART_BYTES else None)
        blocks.setdefault(key, []).append(life)
    return blocks


def _shapes(plan: GraphPlan, sizes: Mapping[str, int]) -> dict[Node, tuple[int, ...]]:
    """The shape in which a result that is its whole buffer is read, where there is just one."""
    seen: dict[Node, set[tuple[int, ...] | None]] = {}
    for o in plan.results:
        if o is not None:
            seen.setdefault(o.buffer, set()).add(_whole(o, sizes))
    only = {node: next(iter(shapes)) for node, shapes in seen.items() if len(shapes) == 1}
    return {node: shape for node, shape in only.items() if shape}


def _given_up(plan: GraphPlan, sizes: Mapping[str, int], public: int | None) -> list[Life]:
    """The inputs that may be freed after their last use: what forward kept, and, in a part of a
    larger program (one that is told neither), anything."""
    last, roles = plan.last_use(), {n.attrs["role"] for n in plan.graph.inputs}
    part = public is None and roles == {"primal"}
    return [
        Life(n, evaluate(n.type.nbytes, sizes), 0, last[n], False) for n in plan.graph.inputs
        if n in last and (part or n.attrs["role"] == "saved")
    ]  # fmt: skip


def _foreign(work: Work, buffers: set[Node], made: set[Node]) -> bool:
    if work.launches is None:
        return True
    return work.region.kind == "matmul" and not made.isdisjoint(work.region.reads(buffers))


def _spot(operand: Operand, offset: int, sizes: Mapping[str, int]) -> _Spot:
    start = evaluate(operand.offset, sizes) * operand.buffer.dtype.itemsize
    shape = tuple(evaluate(d, sizes) for d in operand.shape)
    strides = tuple(evaluate(d, sizes) for d in operand.strides)
    return _Spot(offset + start, shape, strides, operand.buffer.dtype)


def _whole(operand: Operand, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of an operand that is all of its buffer in the order of memory, else None."""
    shape = tuple(evaluate(d, sizes) for d in operand.shape)
    strides = tuple(evaluate(d, sizes) for d in operand.strides)
    same = evaluate(operand.offset, sizes) == 0 and all(
        n == 1 or s == t for n, s, t in zip(shape, strides, _row_major(shape), strict=True)
    )
    size = functools.reduce(operator.mul, (evaluate(d, sizes) for d in operand.buffer.shape), 1)
    return shape if same and functools.reduce(operator.mul, shape, 1) == size else None


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    steps = [1]
    for extent in reversed(shape[1:]):
        steps.insert(0, steps[0] * max(extent, 1))
    return tuple(steps) if shape else ()


def _itself(node: Node) -> Reader:
    return lambda values: values[node]
