"""The buffers of a plan over both directions: what they are, who makes them, how long they live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megafuse.fusion.plan import GraphPlan
from megafuse.fusion.summary import BufferSummary, Role
from megafuse.ir import Node, TensorType, evaluate


@dataclass
class _Draft:
    node: Node
    label: str
    role: Role
    made_by: str = ""
    first: int = -1
    last: int = -1


class Buffers:
    """All buffers of `plan` (a `megafuse.compiler.Plan`), under one name each.

    names: of the call's flat tensors, as the user knows them; missing ones are numbered.
    """

    def __init__(self, plan: Any, sizes: Mapping[str, int], names: Sequence[str] = ()) -> None:
        self._sizes, self._names = sizes, names
        self._drafts: dict[str, _Draft] = {}
        self._keys: dict[Node, str] = {}
        outputs = plan.captured.outputs
        saved: list[str] = []
        steps = len(plan.forward.regions)
        self._walk(plan.forward, 0)
        single = outputs == 1
        for i, operand in enumerate(plan.forward.results):
            if operand is None:
                continue
            key = self._keys[operand.buffer]
            if i >= outputs:
                saved.append(key)
                self._become(key, "saved")
            else:
                self._become(key, "result", "result" if single else f"result {i}")
        if plan.backward is not None:
            steps += len(plan.backward.regions)
            self._walk(plan.backward, len(plan.forward.regions), saved)
            for i, operand in enumerate(plan.backward.results):
                if operand is not None:
                    label = f"d {self._name(i)}"
                    self._become(self._keys[operand.buffer], "result", label)
        for draft in self._drafts.values():
            if draft.role == "result" or (draft.role == "saved" and plan.backward is None):
                draft.last = steps - 1

    def name(self, node: Node) -> str:
        """The name of the buffer that `node` is."""
        return self._keys[node]

    def summaries(self) -> tuple[BufferSummary, ...]:
        return tuple(
            BufferSummary(key, d.label, shown_type(d.node.type, self._sizes),
                          evaluate(d.node.type.nbytes, self._sizes), d.role, d.made_by,
                          d.first, d.last)
            for key, d in self._drafts.items()
        )  # fmt: skip

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else f"x{index}"

    def _become(self, key: str, role: Role, label: str = "") -> None:
        """A buffer that leaves its direction; one that is both saved and a result is a result."""
        draft = self._drafts[key]
        if draft.role in ("input", "grad", "result"):
            return
        draft.role, draft.label = role, label or draft.label

    def _walk(self, plan: GraphPlan, start: int, saved: Sequence[str] = ()) -> None:
        primals = sum(n.attrs["role"] == "primal" for n in plan.graph.inputs)
        for node in plan.graph.inputs:
            role, index = node.attrs["role"], node.attrs["index"]
            if role == "saved":
                self._keys[node] = saved[index - primals]
                continue
            key = f"x{index}" if role == "primal" else node.name
            label = self._name(index) if role == "primal" else "upstream gradient"
            self._keys[node] = key
            kind: Role = "input" if role == "primal" else "grad"
            self._drafts.setdefault(key, _Draft(node, label, kind))
        letter = "F" if plan.direction == "forward" else "B"
        for step, region in enumerate(plan.regions, start):
            for node in region.writes():
                if node not in self._keys:
                    self._keys[node] = key = f"{letter}.{node.name}"
                    self._drafts[key] = _Draft(
                        node, place(node), "temporary", region.name, step, step
                    )
            for node in [*region.reads(plan.buffers), *region.writes()]:
                draft = self._drafts[self._keys[node]]
                draft.last = max(draft.last, step)


def place(node: Node) -> str:
    """The user's line and module, or else the operator."""
    origin = node.origin
    where = " ".join(
        x for x in (origin.location, f"({origin.module})" if origin.module else "") if x
    )
    return where or origin.op


def shown_type(type: TensorType, sizes: Mapping[str, int]) -> str:
    """`type` with the run-time sizes filled in."""
    return str(TensorType(tuple(evaluate(d, sizes) for d in type.shape), type.dtype))
