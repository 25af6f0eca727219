"""Which axes are rows and which are columns must be the same for every root of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from megafuse.fusion.plan import Root, Stage
from megafuse.index import Axis


def disagreement(roots: Sequence[Root], axes: Sequence[Axis], cols: Sequence[Axis]) -> str | None:
    """None when `cols` suits every root, else the reason as a clause."""
    col_set, row_set = set(cols), {a for a in axes if a not in cols}
    for root in roots:
        name = root.node.origin.op or root.node.op
        match root.kind:
            case "row" if set(root.reduced) != col_set:
                return f"{name} reduces over other axes than the row it would share"
            case "column" if set(root.reduced) & col_set:
                return f"{name} sums along the row, not across rows"
            case "column" if not col_set <= root.axes or not row_set <= root.axes:
                return f"{name} does not run over the whole row"
            case "store":
                own = root.axes
                if not row_set <= own:
                    return f"{name} would be written more than once"
                if own & col_set and not col_set <= own:
                    return f"{name} covers only part of the row"
    return None


def merged_cols(x: Stage, y: Stage) -> list[Axis] | None:
    """The settled columns of the union (y already renamed to x's axes)."""
    return x.cols if x.cols is not None else y.cols
