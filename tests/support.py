"""Comparing a fused target with float64 and eager, and building graphs and plans for tests."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megafuse
from megafuse import Options
from megafuse.compiler import Plan
from megafuse.invariants import broadcast
from megafuse.ir import Dim, Graph, Node, TensorType
from megafuse.subgraphs import Case, Settings, WorkloadSubgraph
from megafuse.tools.steps import InFloat64

REPOSITORY = Path(__file__).resolve().parents[1]
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
REFERENCE = Options(executor="reference")


def block_case(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0,
    name: str = "rankmixer", device: str = "cpu",
) -> Case:  # fmt: skip
    """The workload's block or dense FFN at (B, T, D, k), seeded."""
    return WorkloadSubgraph(name, Settings(shape, dtype, torch.device(device))).case(seed)


def plan_of(target: Any, *args: Any, options: Options | None = None, **kwargs: Any) -> Plan:
    """The plan of one call, not compiled."""
    fused = megafuse.fuse(target, *args, options=options, **kwargs)
    (plans,) = fused._plans.values()
    return plans[0].plan


def kinds(plan: Plan) -> tuple[list[str], list[str]]:
    """The kinds of the forward and of the backward regions, in order."""
    backward = plan.backward.regions if plan.backward else []
    return [r.kind for r in plan.forward.regions], [r.kind for r in backward]


def count_plans(fused: megafuse.FusedModule) -> int:
    return sum(map(len, fused._plans.values()))


def tensors_of(value: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]


def upstream_for(outputs: Sequence[Tensor], seed: int = 11) -> list[Tensor]:
    """A standard normal upstream gradient for each differentiable output."""
    generator = torch.Generator(device=outputs[0].device).manual_seed(seed)
    return [
        torch.randn(o.shape, dtype=o.dtype, device=o.device, generator=generator)
        for o in outputs if o.requires_grad
    ]  # fmt: skip


def step(
    target: Callable[..., Any], parameters: Sequence[Tensor], args: Sequence[Any],
    upstream: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Outputs, then gradients of `args` and of `parameters`, of one call on fresh leaves."""
    leaves = [
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
    ]
    outputs = tensors_of(target(*leaves))
    wanted = [t for t in [*tensors_of(leaves), *parameters] if t.requires_grad]
    roots = [o for o in outputs if o.requires_grad]
    grads: Sequence[Tensor | None] = []
    if roots and wanted:
        upstream = upstream_for(outputs) if upstream is None else upstream
        grads = torch.autograd.grad(roots, wanted, list(upstream), allow_unused=True)
    return [*(o.detach() for o in outputs), *grads]


def in_float64(value: Any) -> Any:
    def widen(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return leaf

    return pytree.tree_map(widen, value)


def assert_close_to_float64(
    module: nn.Module, args: Sequence[Any], *, options: Options | None = None,
    fused: Any = None, slack: float = 1.0, upstream: Sequence[Tensor] | None = None,
) -> Any:  # fmt: skip
    """Outputs and every gradient of the fused module are about as near float64 as eager's are.

    The policy of docs/proposal.md for one seed, with room for what chance does to small tensors.
    Returns the fused module.
    """
    fused = fused or megafuse.fuse(module, *args, options=options)
    upstream = upstream or upstream_for(tensors_of(module(*args)))
    eager = step(module, list(module.parameters()), args, upstream)
    got = step(fused, list(fused.parameters()), args, upstream)
    wide = copy.deepcopy(module).double()
    with InFloat64():
        exact = step(wide, list(wide.parameters()), in_float64(list(args)),
                     in_float64(list(upstream)))  # fmt: skip
    names = [f"result {i}" for i in range(len(eager))]
    assert len(got) == len(eager)
    for name, mine, theirs, true in zip(names, got, eager, exact, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert_as_near(name, mine, theirs, true, slack)
    return fused


def assert_as_near(
    name: str, got: Tensor, eager: Tensor, exact: Tensor, slack: float = 1.0
) -> None:
    assert got.shape == eager.shape and got.dtype == eager.dtype, name
    if not eager.is_floating_point():
        assert torch.equal(got, eager), name
        return
    assert torch.equal(got.isfinite(), eager.isfinite()), f"{name}: other elements are finite"
    u = ROUNDOFF[got.dtype]
    error, ours = (eager.double() - exact).abs(), (got.double() - exact).abs()
    size = exact.square().mean().sqrt().item()
    spread = (1.3 * rms(error) + 2 * u * size) * slack
    assert rms(ours) <= spread + 1e-30, f"{name}: error {rms(ours):.3e}, limit {spread:.3e}"
    peak = (2 * error.max().item() + 6 * u * max(size, exact.abs().max().item())) * slack
    assert ours.max().item() <= peak + 1e-30, f"{name}: peak {ours.max():.3e}, limit {peak:.3e}"


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def with_options(**changes: Any) -> Options:
    return dataclasses.replace(Options(), **changes)


class GraphBuilder:
    """Builds small graphs by hand: `g.op("add", a, b)`; shapes of pointwise nodes broadcast."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Node] = []

    def input(self, *shape: Dim, dtype: torch.dtype = torch.float32) -> Node:
        index = len(self.inputs)
        node = Node(f"x{index}", "input", (), TensorType(shape, dtype), {"index": index})
        self.inputs.append(node)
        self.nodes.append(node)
        return node

    def op(
        self, op: str, *args: Any, shape: Sequence[Dim] | None = None,
        dtype: torch.dtype | None = None, **attrs: Any,
    ) -> Node:  # fmt: skip
        nodes = [a for a in args if isinstance(a, Node)]
        if shape is None:
            shape = broadcast([n.shape for n in nodes])
            assert shape is not None
        type = TensorType(tuple(shape), dtype or (nodes[0].dtype if nodes else torch.float32))
        node = Node(f"{op}_{len(self.nodes)}", op, args, type, attrs)
        self.nodes.append(node)
        return node

    def reduce(self, op: str, x: Node, *dims: int, dtype: torch.dtype | None = None) -> Node:
        shape = [1 if i in dims else s for i, s in enumerate(x.shape)]
        return self.op(op, x, shape=shape, dtype=dtype, dims=dims)

    def permute(self, x: Node, *order: int) -> Node:
        return self.op("permute", x, shape=[x.shape[i] for i in order], order=order)

    def reshape(self, x: Node, *shape: Dim) -> Node:
        return self.op("reshape", x, shape=shape)

    def slice(self, x: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
        shape = list(x.shape)
        shape[dim] = len(range(start, stop, step))
        return self.op("slice", x, shape=shape, dim=dim, start=start, stop=stop, step=step)

    def graph(self, *outputs: Node | None) -> Graph:
        return Graph(self.inputs, self.nodes, list(outputs))


def ops_of(graph: Graph) -> list[str]:
    """The operators of a graph in order, inputs left out."""
    return [n.op for n in graph.nodes if n.op != "input"]
