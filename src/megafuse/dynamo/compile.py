"""`torch.compile(model, backend="megafuse")`: fuse what can be fused, leave the rest to PyTorch.

Dynamo finds the graphs, AOTAutograd makes them functional (mutation of inputs and buffers, aliases
and views are its work), differentiates them and splits forward from backward. Each of the resulting
aten graphs becomes a program of fused parts and PyTorch calls.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Literal

from torch import fx
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from megafuse import decompositions
from megafuse.config import Options
from megafuse.dynamo.part import Part
from megafuse.dynamo.program import assemble, boxed
from megafuse.dynamo.reader import LeftToPyTorch, Reader, is_view
from megafuse.dynamo.report import GraphReport, LeftOperator, Report
from megafuse.dynamo.schedule import Group, schedule
from megafuse.errors import MegafuseError, ToolchainError
from megafuse.exported import place

log = logging.getLogger("megafuse.dynamo")

Direction = Literal["forward", "backward", "inference"]


class Backend:
    """A backend for `torch.compile`, with a report of what it did.

    options: as for `megafuse.fuse`, except `memory`: what a forward saves is decided by
        AOTAutograd's minimum cut. None: the defaults when a graph is compiled.
        `torch.compile(..., options={"rounding": "eager"})` overrides single fields.

    Nothing is refused: an operator that generated code does not cover runs in PyTorch, at its place
    in the program. Why is in `report()`, and on the logger "megafuse.dynamo" (level INFO; WARNING
    where megafuse itself failed).
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options
        self._report = Report()

    def __call__(
        self, graph: fx.GraphModule, example_inputs: list[Any], *,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Compile one Dynamo graph. Raises TypeError or ValueError for options that are none."""
        chosen = dataclasses.replace(self.options or Options(), **(options or {}))
        if chosen.memory != "balanced":
            raise ValueError(
                f"memory={chosen.memory!r}: under torch.compile AOTAutograd decides what a forward "
                "saves; use torch.utils.checkpoint, or megafuse.fuse on the block."
            )

        def compiler(direction: Direction) -> Callable[..., Any]:
            return functools.partial(self._compile, direction=direction, options=chosen)

        compile_graph = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions.table(),
        )
        return compile_graph(graph, example_inputs)

    def report(self) -> Report:
        """What was fused and what was left, for every graph since the last `reset`."""
        return self._report

    def reset(self) -> None:
        """Forget the report; `torch._dynamo.reset()` calls it."""
        self._report = Report()

    def _compile(
        self, traced: fx.GraphModule, example_inputs: Any, *, direction: Direction, options: Options
    ) -> Callable[[list[Any]], Any]:
        try:
            report, run = _program(traced, direction, options)
        except Exception as error:  # a defect of ours must not stop the user's program
            known = isinstance(error, LeftToPyTorch)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            log.warning("left a %s graph to PyTorch: %s", direction, reason, exc_info=not known)
            left = [_left(n, reason) for n in traced.graph.nodes if n.op == "call_function"]
            report, run = GraphReport(direction, [], left, traced.code), make_boxed_func(traced)
        self._report.graphs.append(report)
        log.info("%s", report)
        return run


def _program(
    traced: fx.GraphModule, direction: Direction, options: Options
) -> tuple[GraphReport, Callable[[list[Any]], Any]]:
    reader = Reader(traced, "backward" if direction == "backward" else "forward")
    items: list[Part | fx.Node] = []
    for item in schedule(reader):
        items += [item] if isinstance(item, fx.Node) else _build(reader, item, options)
    program = assemble(reader, items)
    parts = [i.plan for i in items if isinstance(i, Part)]
    calls = [i for i in items if isinstance(i, fx.Node) and not is_view(i)]
    left = [_left(n, reader.left[n]) for n in calls if n.target is not operator.getitem]
    return GraphReport(direction, parts, left, program.code), boxed(program)


def _left(node: fx.Node, reason: str) -> LeftOperator:
    return LeftOperator(str(node.target), place(node), reason)


def _build(reader: Reader, group: Group, options: Options, fault: str = "") -> list[Part | fx.Node]:
    """`group` as a part; where that fails, in halves, so that PyTorch gets only what fails.

    fault: why a larger group that it was part of failed.
    """
    try:
        return [Part(reader, group, options)]
    except LeftToPyTorch as left:
        return _leave(reader, group, f"{left} ({fault})" if fault else str(left))
    except ToolchainError as error:
        log.warning("fused nothing: %s", error)
        return _leave(reader, group, str(error))
    except Exception as error:  # a defect of ours must not stop the user's program
        reason = f"{type(error).__name__}: {error}"
        if not fault:
            what, known = f"{len(group.nodes)} operators", isinstance(error, MegafuseError)
            log.warning("%s do not compile together: %s", what, reason, exc_info=not known)
        if len(group.nodes) == 1:
            return _leave(reader, group, reason)
        half = len(group.nodes) // 2
        return [
            item for nodes in (group.nodes[:half], group.nodes[half:])
            for item in _build(reader, Group(nodes, group.device), options, fault or reason)
        ]  # fmt: skip


def _leave(reader: Reader, group: Group, reason: str) -> list[Part | fx.Node]:
    for node in group.nodes:
        reader.left[node] = reason
    return [*group.nodes]


def _register() -> None:
    """Make the name known to torch.compile where no installed package metadata does: a checkout."""
    installed = entry_points(group="torch_dynamo_backends").names
    if "megafuse" not in installed and "megafuse" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="megafuse")


backend = Backend()
"""What `torch.compile(backend="megafuse")` uses."""

_register()
