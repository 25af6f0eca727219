"""From a module or function to one joint forward + backward graph.

The user's own code runs once under `make_fx` on meta tensors, followed by `torch.autograd.grad`, so
cast placement and derivatives are PyTorch's. Meta, because tracing on fake "cuda" tensors aborts on
machines without a GPU and fake "cpu" tensors give bf16 layer-norm statistics that CUDA does not.
The leading dimension of every input becomes a run-time size; what the trace had to assume about
those sizes (guards) is returned with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from megafuse import decompositions
from megafuse.attention import kept_whole
from megafuse.blame import raised_by_user, users_line
from megafuse.eager import Operator, operators
from megafuse.errors import CaptureError, UnsupportedError
from megafuse.importer import FOREIGN_TENSOR, Importer
from megafuse.ir import Graph, Node
from megafuse.layouts import Layouts, contiguous, from_memory, to_memory
from megafuse.provenance import Provenance, preserved_meta, without_logs


@dataclass
class Captured:
    """One traced call.

    graph: inputs are the flat tensors of the call followed by one upstream gradient for each
        differentiable output; outputs are the call's tensors, the new values of buffers it writes,
        and one gradient (or None) for each flat tensor. Upstream gradients, outputs and gradients
        have their extents in the order of `layouts`.
    outputs: how many of the graph's outputs belong to the forward pass.
    differentiable: which forward outputs have an upstream gradient, in order.
    written: flat tensors (buffers) whose new values are the last of the forward outputs.
    views: computes the outputs that share memory with an input, as views of it; None without any.
    detached: which of those have no gradient.
    guards: relations between run-time sizes that the trace assumed.
    rebuild: (forward outputs, views) in the structure the function returned.
    eager: what PyTorch runs for the same call one operator at a time; traced on demand.
    """

    graph: Graph
    outputs: int
    differentiable: tuple[int, ...]
    written: tuple[int, ...]
    views: Graph | None
    detached: tuple[bool, ...]
    layouts: Layouts
    guards: tuple[sympy.Basic, ...]
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Any]
    eager: Callable[[], list[Operator]]

    def accepts(self, sizes: dict[str, int]) -> bool:
        """Whether the assumptions hold for these run-time sizes."""
        return all(
            g.subs({s: sizes[s.name] for s in g.free_symbols}) == sympy.true for g in self.guards
        )


def batch_size(tensors: Sequence[torch.Tensor], parameters: Sequence[bool]) -> int | None:
    """The leading extent of the first non-parameter input: what `dim 0` of a batch looks like."""
    for tensor, is_parameter in zip(tensors, parameters, strict=True):
        if not is_parameter and tensor.dim() > 0:
            return tensor.shape[0]
    return None


def batched(tensors: Sequence[torch.Tensor], parameters: Sequence[bool]) -> list[bool]:
    """Which tensors have the batch as their leading extent."""
    batch = batch_size(tensors, parameters)
    return [not own and t.dim() > 0 and t.shape[0] == batch
            for t, own in zip(tensors, parameters, strict=True)]  # fmt: skip


def capture(
    function: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[bool],
    needs_grad: Sequence[bool],
    module: nn.Module | None = None,
    dynamic: bool = True,
    layouts: Layouts | None = None,
) -> Captured:
    """Trace `function(tensors)` and its gradients.

    tensors: flat inputs, any shape and dtype; only their metadata is used.
    parameters: which of them are parameters or buffers (static shapes).
    needs_grad: which of them get a gradient.
    dynamic: whether leading dimensions of the other inputs become run-time sizes.
    layouts: eager's; contiguous by default.

    Raises CaptureError when the code cannot be traced (data-dependent control flow, an operator
    without a meta kernel, ...), UnsupportedError when it writes to its inputs or opens autocast.
    """
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = []
    leading = batched(tensors, parameters)
    for tensor, run_time, wants in zip(tensors, leading, needs_grad, strict=True):
        shape = list(tensor.shape)
        run_time &= dynamic
        if run_time:
            shape[0] = max(2, shape[0])  # an extent of 1 would be traced as a constant
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        sizes = [
            DimDynamic.DYNAMIC if run_time and i == 0 else DimDynamic.STATIC
            for i in range(len(shape))
        ]
        with mode:
            fake = mode.from_tensor(
                meta, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
            )
        fakes.append(fake.requires_grad_(True) if wants else fake)

    structure: dict[str, Any] = {}
    wanted = [i for i, wants in enumerate(needs_grad) if wants]

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
        outputs = _forward(primals)
        spread: list[Any] = [None] * len(primals)
        if wanted and structure["differentiable"]:
            own = [o for o, view in zip(outputs, structure["layouts"].views) if not view]
            roots = [own[i] for i in structure["differentiable"]]
            structure["provenance"].follow_backward(roots)
            orders = [structure["layouts"].orders[i] for i in structure["differentiable"]]
            upstream = [from_memory(t, o) for t, o in zip(tangents, orders, strict=True)]
            grads = torch.autograd.grad(
                roots, [primals[i] for i in wanted], upstream, allow_unused=True
            )
            for i, grad in zip(wanted, grads, strict=True):
                spread[i] = grad
        return _in_memory(outputs, spread, structure["layouts"])

    def _forward(primals: list[torch.Tensor]) -> list[torch.Tensor]:
        structure["provenance"] = provenance = Provenance(module, tensors[0].device)
        provenance.unbound = getattr(env, "pending_fresh_unbacked_symbols", [])
        try:
            with provenance, kept_whole(tensors[0].device):
                result = function(primals)
        finally:
            provenance.close()
        flat, spec = tree_flatten(result)
        where = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]
        constants = {i: v for i, v in enumerate(flat) if i not in where}
        outputs = [flat[i] for i in where]
        found = layouts or contiguous(len(outputs), len(tensors))
        if len(found.outputs) != len(outputs):
            raise CaptureError("the code returns another number of tensors each time it runs.")
        own = [i for i, view in zip(where, found.views, strict=True) if not view]
        structure["layouts"] = found
        structure["rebuild"] = _rebuilder(spec, own, [i for i in where if i not in own], constants)
        structure["differentiable"] = tuple(k for k, i in enumerate(own) if flat[i].requires_grad)
        structure["detached"] = tuple(
            not o.requires_grad for o, view in zip(outputs, found.views, strict=True) if view
        )
        return outputs

    def run(f: Callable[..., Any], table: dict[Any, Any]) -> torch.fx.GraphModule:
        with mode, preserved_meta(), torch.enable_grad():
            outputs = _forward(list(fakes))  # once outside the trace, for the outputs' metadata
            own, _, _ = _in_memory(outputs, [], structure["layouts"])
            tangents = [
                torch.empty(own[i].shape, dtype=own[i].dtype, device="meta")
                for i in structure["differentiable"]
            ]
            primals = [t.detach().requires_grad_(t.requires_grad) for t in fakes]
            if f is not joint:  # gradients are in the graph already
                primals = [t.detach() for t in primals]
            return make_fx(f, table, "real", _allow_non_fake_inputs=True)(primals, tangents)

    try:
        with without_logs():
            table = decompositions.table()
            traced = run(joint, table)
            written: tuple[int, ...] = ()
            if _mutates(traced):
                traced = run(_functional(traced), table)
                buffers = {i for i, t in enumerate(tensors)
                           if parameters[i] and not isinstance(t, nn.Parameter)}  # fmt: skip
                written = _take_writes(traced, buffers)
            _refuse_input_mutation(traced)
    except UnsupportedError:
        raise
    except Exception as error:
        if "in-place operation" in str(error):
            raise UnsupportedError(
                f"{_explain(error)} The module writes in place to a tensor the caller owns; "
                "megafuse never does. Use the out-of-place form (inplace=False)."
            ) from error
        failure = CaptureError(_explain(error))
        failure.own = error if _of_the_users(error) else None
        raise failure from error

    found: Layouts = structure["layouts"]
    outer = Importer(env, {}).run(traced, len(tensors))
    guards = tuple(_guards(env, outer.names))
    results, grads = len(found.orders), len(found.orders) + len(tensors)
    seen = grads + sum(found.views)
    flat = outer.graph.outputs
    graph = Graph(outer.graph.inputs, outer.graph.nodes,
                  [*flat[:results], *flat[seen:], *flat[results:grads]])  # fmt: skip
    views = _views(graph, len(tensors), flat[grads:seen]) if seen > grads else None

    def eager() -> list[Operator]:
        return operators(run(joint, {}), len(tensors), outer.dim, outer.origin)

    return Captured(
        graph, results + len(written), structure["differentiable"], written, views,
        structure["detached"], found, guards,
        structure["rebuild"], eager,
    )  # fmt: skip


def _in_memory(
    outputs: Sequence[Any], grads: Sequence[Any], layouts: Layouts
) -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs and gradients with their extents in the order they have in memory; then the outputs
    that share memory with an input, as they are."""
    own = [o for o, view in zip(outputs, layouts.views, strict=True) if not view]
    views = [o for o, view in zip(outputs, layouts.views, strict=True) if view]
    return (
        [to_memory(o, order) for o, order in zip(own, layouts.orders, strict=True)],
        [None if g is None else to_memory(g, o) for g, o in zip(grads, layouts.gradients)],
        views,
    )


def _views(graph: Graph, primals: int, outputs: Sequence[Node | None]) -> Graph:
    """The part of `graph` that computes `outputs`, which look at the flat tensors only."""
    inputs = graph.inputs[:primals]
    live = Graph(inputs, graph.nodes, list(outputs)).live()
    return Graph(inputs, [n for n in graph.nodes if n in live or n in inputs], list(outputs))


def _rebuilder(
    spec: Any, own: list[int], views: list[int], constants: dict[int, Any]
) -> Callable[..., Any]:
    if own == [0] and not views and not constants and spec.is_leaf():
        return lambda outputs, seen: outputs[0]  # by far the most common

    def rebuild(outputs: Sequence[Any], seen: Sequence[Any]) -> Any:
        flat = constants | dict(zip(own, outputs)) | dict(zip(views, seen, strict=True))
        return tree_unflatten([flat[i] for i in sorted(flat)], spec)

    return rebuild


def _functional(traced: torch.fx.GraphModule) -> Callable[..., Any]:
    """A traced graph without its in-place operators; gradients are in the graph already."""

    def replay(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
        return torch.fx.Interpreter(traced).run(primals, tangents)

    return torch.func.functionalize(replay, remove="mutations")  # type: ignore[no-any-return]


def _mutates(traced: torch.fx.GraphModule) -> bool:
    return any(
        isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
        for n in traced.graph.nodes
    )


def _take_writes(traced: torch.fx.GraphModule, buffers: set[int]) -> tuple[int, ...]:
    """Turn the last write to each of `buffers` (positions among the inputs) into one more output;
    returns their positions."""
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    (result,) = (n for n in traced.graph.nodes if n.op == "output")
    written: list[int] = []
    values = []
    for node in list(traced.graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.args[0] not in places:
            continue
        index = places.index(node.args[0])
        if index in buffers and not node.users:
            written.append(index)
            values.append(node.args[1])
            traced.graph.erase_node(node)
    result.args = ([*result.args[0], *values],)
    return tuple(written)


def _refuse_input_mutation(traced: torch.fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        if not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable):
            continue
        raise UnsupportedError(
            f"{node.target} writes in place to a tensor the caller can see "
            f"({_place(node)}); megafuse never writes to its "
            "inputs. Use the out-of-place form, register what the module updates as a buffer, or "
            "keep this module outside the fused one."
        )


def _place(node: torch.fx.Node) -> str:
    location, _, module = str(node.meta.get("stack_trace") or "|").partition("|")
    return " ".join(x for x in (location, f"({module})" if module else "") if x) or "unknown place"


def _guards(env: ShapeEnv, names: dict[sympy.Symbol, sympy.Symbol]) -> Iterator[sympy.Basic]:
    for guard in env.guards:
        expr = guard.expr.xreplace(names)
        if expr not in (sympy.true, True):
            # sympy may fold a guard such as s0 > 0 for our positive symbols; keep real ones only
            unknown = [s for s in expr.free_symbols if s not in names.values()]
            if unknown:
                raise CaptureError(f"the trace assumed {guard.expr}, which cannot be checked")
            yield expr


def _of_the_users(error: Exception) -> bool:
    """Whether eager would raise the same: the user's code did, or it was called the wrong way."""
    if raised_by_user(error):
        return True
    called = isinstance(error, TypeError) and users_line(error) is None
    return called and ("positional argument" in str(error) or "keyword argument" in str(error))


def _explain(error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    place = users_line(error)
    where = f" at {place}" if place else ""
    hint = ""
    text = str(error)
    if "meta" in text and ("cpu" in text or "cuda" in text or "copy out" in text):
        hint = FOREIGN_TENSOR
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        first = first.rstrip(".") + "."
        hint = (" Control flow and sizes that depend on tensor values cannot be captured; move "
                "them outside the fused module.")  # fmt: skip
    return f"tracing failed{where}: {type(error).__name__}: {first}{hint}"
