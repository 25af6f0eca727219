"""From nodes to roots: what has to be computed, over which loops, reading what."""

from __future__ import annotations

from collections.abc import Iterator

from megafuse.fusion.plan import Operand, Read, Root, Stage
from megafuse.index import (
    ZERO,
    Affine,
    Axis,
    Coords,
    NeedSplit,
    NotAffine,
    fresh_coords,
    offset,
    operand_coords,
    split_axis,
    strides,
    substitute,
)
from megafuse.ir import Dim, Node, as_dim
from megafuse.ops import is_pointwise, is_reduction, is_view


class Materialise(Exception):
    """`node` has to live in memory for the plan to be possible; start over with that."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


def resolve(node: Node, coords: Coords, buffers: set[Node]) -> tuple[Node, Coords]:
    """Look through views to the element they rename. Raises NeedSplit; Materialise for a view that
    no loop structure makes affine."""
    while is_view(node) and node not in buffers:
        operand = node.inputs[0]
        try:
            coords = operand_coords(node, operand, coords)
        except NotAffine:
            raise Materialise(node) from None
        node = operand
    return node, coords


def is_column_sum(node: Node) -> bool:
    """A reduction is over a row when it sums the innermost extents and they are known when the
    kernel is compiled, else over rows."""
    if not is_reduction(node):
        return False
    shape, dims = node.inputs[0].shape, node.attrs["dims"]
    if any(not isinstance(shape[d], int) for d in dims):
        return True
    last = max((d for d, s in enumerate(shape) if s != 1), default=-1)
    return last not in dims


def reads_of(node: Node, coords: Coords, buffers: set[Node], expand: bool) -> list[Read]:
    """The buffers and reductions that `node` at `coords` is computed from. With `expand`, `node`
    itself is computed even if it is a buffer."""
    found: dict[tuple[Node, Coords], None] = {}
    seen: set[tuple[Node, Coords]] = set()

    def visit(node: Node, coords: Coords, expand: bool) -> None:
        start = node
        node, coords = resolve(node, coords, buffers - {node} if expand else buffers)
        expand = expand and node is start
        if (node, coords) in seen:
            return
        seen.add((node, coords))
        if (node in buffers and not expand) or is_reduction(node):
            found[node, coords] = None
        elif is_pointwise(node):
            for operand in node.inputs:
                visit(operand, operand_coords(node, operand, coords), False)
        else:
            raise Materialise(node)

    visit(node, coords, expand)
    return [Read(n, c) for n, c in found]


def stage_of(root: Root, axes: list[Axis], cols: list[Axis] | None, expression: Node,
             expand: bool, buffers: set[Node]) -> Stage:  # fmt: skip
    """A stage of one root, its axes refined until every read is affine."""
    stage = Stage(axes, cols, [root])
    while True:
        try:
            root.reads = reads_of(expression, root.at, buffers, expand)
            return stage
        except NeedSplit as need:
            _, _, replacement = split_axis(need.axis, need.inner)
            stage.rename({need.axis: replacement})


def reduction_stage(node: Node, target: Node, shift: dict[int, int], buffers: set[Node]) -> Stage:
    """A row reduction or column sum. `target`, `shift`: the buffer a column sum is finished into
    and where its piece of it starts, by dimension."""
    operand = node.inputs[0]
    axes, at = fresh_coords(operand)
    dims = node.attrs["dims"]
    reduced = tuple(a for d in dims for a in at[d].axes)
    column = is_column_sum(node)
    where = tuple(
        (ZERO if d in dims else c) + shift.get(d, 0) for d, c in enumerate(at)
    )
    root = Root(node, "column" if column else "row", target, at, where, reduced)
    return stage_of(root, axes, None if column else list(reduced), operand, False, buffers)


def store_stage(node: Node, target: Node, shift: dict[int, int], buffers: set[Node]) -> Stage:
    """A value written to memory, as a whole buffer or as one piece of a concatenation."""
    axes, at = fresh_coords(node)
    where = tuple(c + shift.get(d, 0) for d, c in enumerate(at))
    root = Root(node, "store", target, at, where, ())
    return stage_of(root, axes, None, node, target is node, buffers)


def operand_view(node: Node, buffers: set[Node]) -> Operand:
    """`node` as a strided view of the buffer under it. Raises Materialise when it is none."""
    if node in buffers:
        return Operand(node, node.shape, tuple(strides(node.room)), 0)
    _, coords = fresh_coords(node)
    dims = coords
    while True:
        try:
            base, at = resolve(node, coords, buffers)
            break
        except NeedSplit as need:
            _, _, replacement = split_axis(need.axis, need.inner)
            coords = substitute(coords, {need.axis: replacement})
            dims = coords
    if base not in buffers:
        raise Materialise(base if not is_view(base) else node)
    form = offset(at, base.room)
    steps = tuple(_one_stride(form, coordinate, node) for coordinate in dims)
    return Operand(base, node.shape, steps, form.const)


def _one_stride(form: Affine, coordinate: Affine, node: Node) -> Dim:
    """The stride of one dimension of a view whose loop may have been split into several."""
    step: Dim | None = None
    for axis, weight in reversed(coordinate.sorted_terms()):
        stride = form.coefficient(axis)
        if step is None:
            step = stride
        elif as_dim(stride - step * weight) != 0:
            raise Materialise(node)
    return 1 if step is None else step


def cat_pieces(node: Node) -> Iterator[tuple[Node, dict[int, int]]]:
    """The parts of a concatenation and where each starts."""
    dim, start = node.attrs["dim"], 0
    for part in node.inputs:
        yield part, {dim: start}
        start = start + part.shape[dim]
