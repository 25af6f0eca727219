"""What the stages of a region share while it is written: arguments and the names of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megafuse.codegen.expr import CPP_TYPE
from megafuse.codegen.schedule import Schedule
from megafuse.fusion.plan import Root, RowRegion, Stage
from megafuse.index import Axis
from megafuse.ir import Node


@dataclass(frozen=True)
class Arg:
    """One 8-byte member of a kernel's Args: kind "buffer" (of `node`), "partial" (column sum
    number `index`), "size" (run-time size `name`), or "parts", "chunks", "span" of the launch."""

    kind: str
    name: str
    node: Node | None = None
    index: int = 0


@dataclass
class Emitter:
    """State shared by the stages of one region."""

    region: RowRegion
    buffers: set[Node]
    schedule: Schedule
    rounding: bool
    fast: bool = False
    args: dict[tuple[str, object], Arg] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    axis_names: dict[Axis, str] = field(default_factory=dict)
    partials: list[int] = field(default_factory=list)
    sums: list[tuple[Root, Stage, str]] = field(default_factory=list)

    def pointer(self, node: Node, write: bool = False) -> str:
        key = ("buffer", node)
        if key not in self.args:
            written = node in self.region.writes()
            const = "" if written else "const "
            self.args[key] = Arg("buffer", node.name, node)
            self.members.append(f"{const}{CPP_TYPE[node.dtype]}* {node.name};  // {node.type}")
        return f"a.{node.name}"

    def partial(self, columns: int) -> str:
        index = len(self.partials)
        self.partials.append(columns)
        self.args["partial", index] = Arg("partial", f"part{index}", None, index)
        self.members.append(f"float* part{index};")
        return f"a.part{index}"

    def axis(self, axis: Axis) -> str:
        if axis not in self.axis_names:
            stem = "g" if axis in self.region.group else "r"
            self.axis_names[axis] = f"{stem}{len(self.axis_names)}"
        return self.axis_names[axis]


def indent(lines: Sequence[str], by: int = 2) -> list[str]:
    return [" " * by + line for line in lines]
