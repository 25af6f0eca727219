"""Small calls: one block of memory for all that stays inside, one native call for each run of
launches.

Where a call computes little, what Python does around it is what it costs. A `Program` is worked out
once for a set of run-time sizes: every buffer that only generated kernels touch has its place in an
*arena*, one allocation a call, and launches know their buffers as (address, offset). What the
caller can see, and what PyTorch reads or writes, are tensors of their own.
"""

from __future__ import annotations

import functools
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

SMALL_BYTES = 32 << 20
"""Calls that need more for temporaries and kept values run step by step: there the GPU takes longer
than the host, and memory freed after its last use counts for more."""

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


class Program:
    """One direction of a small call. See `program_of`."""

    def __init__(
        self, plan: GraphPlan, works: Sequence[Work], results: Sequence[Reader | None],
        sizes: Mapping[str, int], device: torch.device, public: int | None, target: Target,
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
        self._as_tensors = [n for _, n in inputs if n in touched or n in returned]
        self._aligned = any(w.region.kind == "matmul" and w not in foreign for w in works)

        slots: dict[Any, int] = {n: slot for slot, (_, n) in enumerate(inputs, 1)}  # 0 is the arena
        offsets: dict[Any, int] = {}
        self.nbytes = 0

        def reserve(buffer: Any, nbytes: int) -> None:
            offsets[buffer] = self.nbytes
            self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT

        # A result that is its whole buffer under another shape is made in that shape.
        shapes: dict[Node, set[tuple[int, ...]]] = {}
        for o in plan.results:
            if o is not None:
                shapes.setdefault(o.buffer, set()).add(_whole(o, sizes) or ())
        self._own: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        nodes = [n for _, n in inputs]
        direct: dict[Node, Reader] = {}
        for work in works:
            if work in foreign:
                continue
            for node in work.region.writes():
                if node in slots or node in offsets:  # a concatenation with several writers
                    continue
                if node in shown or node in touched:
                    slots[node] = len(slots) + 1
                    nodes.append(node)
                    shape, room = (
                        tuple(evaluate(d, sizes) for d in dims) for dims in (node.shape, node.room)
                    )
                    seen = shapes.get(node, set())
                    if node not in touched and len(seen) == 1 and (as_read := seen.pop()):
                        shape, direct[node] = as_read, _itself(node)
                        room = shape
                    self._own.append((shape, _row_major(room), node.dtype))
                else:
                    reserve(node, evaluate(TensorType(node.room, node.dtype).nbytes, sizes))
            for buffer, nbytes in (work.workspaces or {}).items():
                reserve(buffer, nbytes)
        self._nodes = nodes
        for work in foreign:
            for node in work.region.writes():
                slots[node] = len(slots) + 1
        self._foreign_slots = len(slots) - len(self._nodes)
        self._pack = struct.Struct(f"={len(slots) + 1}q").pack

        def place(buffer: Any) -> tuple[int, int]:
            return (0, offsets[buffer]) if buffer in offsets else (slots[buffer], 0)

        self._parts: list[Queue | tuple[Step, list[tuple[Node, int]]]] = []
        waiting: list[Launch] = []
        for work in works:
            if work not in foreign:
                waiting += work.launches or ()
                continue
            if waiting:
                self._parts.append(Queue(waiting, place, target))
                waiting = []
            self._parts.append((work.step, [(n, slots[n]) for n in work.region.writes()]))
        if waiting:
            self._parts.append(Queue(waiting, place, target))
        self._results = [
            direct.get(o.buffer, read) if o is not None else None
            for o, read in zip(plan.results, results, strict=True)
        ]
        self._spots = [
            _spot(o, offsets[o.buffer], sizes) if o is not None and o.buffer in offsets else None
            for o in plan.results
        ]

    def run(self, inputs: Sequence[Any]) -> list[Any] | None:
        """The graph's outputs, where those that only backward reads may be pieces; None if an
        input lies where a product cannot read it. inputs: tensors or pieces."""
        device = self._device
        given = [inputs[i] for i in self._inputs]
        addresses = [0, *[x.data_ptr() for x in given]]
        if self._aligned and functools.reduce(operator.or_, addresses) & 15:
            return None
        base = 0
        if self.nbytes:
            arena = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            base = addresses[0] = arena.data_ptr()
        own = [  # `empty_strided` takes half the time of `empty`
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self._own
        ]
        addresses += [x.data_ptr() for x in own]
        addresses += [0] * self._foreign_slots
        values: dict[Node, Any] = dict(zip(self._nodes, [*given, *own], strict=True))
        for node in self._as_tensors:
            values[node] = as_tensor(values[node])
        stream = current_stream(device)
        for part in self._parts:
            if isinstance(part, Queue):
                part.run(self._pack(*addresses), stream)
                continue
            step, written = part
            step(values)
            for node, slot in written:
                addresses[slot] = values[node].data_ptr()
        return [
            Piece(arena, base, spot) if spot is not None
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
    if total > SMALL_BYTES or not any(w.launches for w in works):
        return None
    found = target()
    if found is None:
        return None
    return Program(plan, works, results, sizes, device, public, found)


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
