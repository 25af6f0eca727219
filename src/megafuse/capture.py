"""From a module or function to one joint forward + backward graph.

The user's own code runs once under `make_fx` on meta tensors, followed by `torch.autograd.grad`, so
cast placement and derivatives are PyTorch's. Meta, because tracing on fake "cuda" tensors aborts on
machines without a GPU and fake "cpu" tensors give bf16 layer-norm statistics that CUDA does not.
The leading dimension of every input becomes a run-time size; what the trace had to assume about
those sizes (guards) is returned with the graph.
"""

from __future__ import annotations

import bisect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from megafuse import decompositions
from megafuse.attention import is_attention, kept_whole, whole_attention
from megafuse.blame import raised_by_user, users_line
from megafuse.eager import Operator, operators
from megafuse.errors import CaptureError, UnsupportedError
from megafuse.exported import recorded_place
from megafuse.importer import BACKWARD, CAST, FOREIGN_TENSOR, Importer
from megafuse.ir import Graph

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_EXAMPLES = str(Path(__file__).parent / "zoo")


def _inner(filename: str) -> bool:
    """Whether a frame belongs to megafuse or PyTorch rather than to the code that is fused."""
    inside = filename.startswith((_OWN, _TORCH, "<"))
    return inside and not filename.startswith(_EXAMPLES)



@dataclass
class Captured:
    """One traced call.

    graph: inputs are the flat tensors of the call followed by one upstream gradient for each
        differentiable output; outputs are the call's tensors followed by one gradient (or None)
        for each flat tensor.
    outputs: how many of the graph's outputs belong to the forward pass.
    differentiable: which forward outputs have an upstream gradient, in order.
    guards: relations between run-time sizes that the trace assumed.
    rebuild: puts a list of output tensors back into the structure the function returned.
    eager: what PyTorch runs for the same call one operator at a time; traced on demand.
    """

    graph: Graph
    outputs: int
    differentiable: tuple[int, ...]
    guards: tuple[sympy.Basic, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    eager: Callable[[], list[Operator]]

    def accepts(self, sizes: dict[str, int]) -> bool:
        """Whether the assumptions hold for these run-time sizes."""
        return all(
            g.subs({s: sizes[s.name] for s in g.free_symbols}) == sympy.true for g in self.guards
        )


_CASTS = {"to", "_to_copy", "bfloat16", "half", "float", "type", "type_as"}


class DataDependentError(RuntimeError):
    """Traced code asked for a tensor's values."""


class _Provenance(TorchFunctionMode):
    """Tags every traced node with the user's line and module path."""

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        super().__init__()
        self.unbound: list[Any] = []  # sizes that only tensor values tell, as ShapeEnv meets them
        self.device = device
        self.paths: list[str] = [""]
        self.places: dict[int, str] = {}
        self.handles: list[Any] = []
        if module is not None:
            for path, child in module.named_modules():
                self.handles.append(child.register_forward_pre_hook(self._enter(path)))
                self.handles.append(child.register_forward_hook(self._leave, always_call=True))

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self.paths.append(path)

    def _leave(self, *_: Any) -> None:
        self.paths.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # exported programs assert a device, and meta is none of the user's
        frame, place = sys._getframe(1), None
        while frame is not None and _inner(frame.f_code.co_filename):
            place = recorded_place(frame) if place is None else place
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            cast = f"|{CAST}" if getattr(func, "__name__", "").split(".")[0] in _CASTS else ""
            if place is None:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            tag = f"{place}|{self.paths[-1]}{cast}"
            _set_tag(tag)
        result = None
        if is_attention(func):
            result = whole_attention(self.device, *args, **(kwargs or {}))
        if result is None:
            result = func(*args, **(kwargs or {}))
        if self.unbound:
            name = getattr(func, "__name__", str(func))
            raise DataDependentError(f"{name} makes a number or a size out of tensor values")
        if frame is not None:
            for value in tree_flatten(result)[0]:
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    self.places[value.grad_fn._sequence_nr()] = tag
        return result

    def follow_backward(self, roots: Sequence[torch.Tensor]) -> None:
        """Make every backward node traced from now on carry its forward operator's tag.

        Autograd numbers its nodes in forward order; a node inside a composite operator belongs to
        the next tag at or after its number.
        """
        numbers = sorted(self.places)
        stack = [t.grad_fn for t in roots]
        seen = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
            at = bisect.bisect_left(numbers, node._sequence_nr())
            tag = self.places[numbers[at]] if at < len(numbers) else "|"
            node.register_prehook(lambda _, tag=tag: _set_tag(f"{BACKWARD}|{tag}"))
        _set_tag(f"{BACKWARD}||")

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def _set_tag(tag: str) -> None:
    fx_traceback.current_meta["stack_trace"] = tag


def batch_size(tensors: Sequence[torch.Tensor], parameters: Sequence[bool]) -> int | None:
    """The leading extent of the first non-parameter input: what `dim 0` of a batch looks like."""
    for tensor, is_parameter in zip(tensors, parameters, strict=True):
        if not is_parameter and tensor.dim() > 0:
            return tensor.shape[0]
    return None


def capture(
    function: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[bool],
    needs_grad: Sequence[bool],
    module: nn.Module | None = None,
    dynamic: bool = True,
) -> Captured:
    """Trace `function(tensors)` and its gradients.

    tensors: flat inputs, any shape and dtype; only their metadata is used.
    parameters: which of them are parameters or buffers (static shapes).
    needs_grad: which of them get a gradient.
    dynamic: whether leading dimensions of the other inputs become run-time sizes.

    Raises CaptureError when the code cannot be traced (data-dependent control flow, an operator
    without a meta kernel, ...), UnsupportedError when it writes to its inputs.
    """
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    batch = batch_size(tensors, parameters)
    fakes = []
    for tensor, is_parameter, wants in zip(tensors, parameters, needs_grad, strict=True):
        shape = list(tensor.shape)
        run_time = dynamic and not is_parameter and tensor.dim() > 0 and shape[0] == batch
        if run_time:
            shape[0] = max(2, shape[0])  # an extent of 1 would be traced as a constant
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        sizes = [DimDynamic.DYNAMIC if run_time and i == 0 else DimDynamic.STATIC
                 for i in range(len(shape))]
        with mode:
            fake = mode.from_tensor(
                meta, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
            )
        fakes.append(fake.requires_grad_(True) if wants else fake)

    structure: dict[str, Any] = {}
    wanted = [i for i, wants in enumerate(needs_grad) if wants]

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> tuple[Any, Any]:
        outputs = _forward(primals)
        if not wanted or not structure["differentiable"]:
            return outputs, [None] * len(primals)
        roots = [outputs[i] for i in structure["differentiable"]]
        structure["provenance"].follow_backward(roots)
        grads = torch.autograd.grad(
            roots,
            [primals[i] for i in wanted],
            tangents,
            allow_unused=True,
        )
        spread: list[Any] = [None] * len(primals)
        for i, grad in zip(wanted, grads, strict=True):
            spread[i] = grad
        return outputs, spread

    def _forward(primals: list[torch.Tensor]) -> list[Any]:
        structure["provenance"] = provenance = _Provenance(module, tensors[0].device)
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
        structure["outputs"] = len(outputs)
        structure["rebuild"] = _rebuilder(spec, where, constants)
        structure["differentiable"] = tuple(i for i, t in enumerate(outputs) if t.requires_grad)
        return outputs

    def run(f: Callable[..., Any], table: dict[Any, Any]) -> torch.fx.GraphModule:
        with mode, _preserved_meta(), torch.enable_grad():
            outputs = _forward(list(fakes))  # once outside the trace, for the outputs' metadata
            tangents = [
                torch.empty_like(outputs[i], device="meta").detach()
                for i in structure["differentiable"]
            ]
            primals = [t.detach().requires_grad_(t.requires_grad) for t in fakes]
            if f is not joint:  # gradients are in the graph already
                primals = [t.detach() for t in primals]
            return make_fx(
                f, table, "real", _allow_non_fake_inputs=True
            )(primals, tangents)

    quiet = logging.getLogger("torch._subclasses.fake_tensor")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)  # what fails is told in one named error, not in pages
    try:
        table = decompositions.table()
        traced = run(joint, table)
        if _mutates(traced):
            traced = run(_functional(traced), table)
        _refuse_input_mutation(traced)
    except UnsupportedError:
        raise
    except Exception as error:
        if "in-place operation" in str(error):
            raise UnsupportedError(
                f"{_explain(error)} The module writes in place to a tensor the caller owns; "
                "megafuse never does. Use the out-of-place form (inplace=False); a BatchNorm in "
                "training updates its buffers, so call .eval() on it or leave it outside."
            ) from error
        failure = CaptureError(_explain(error))
        failure.own = error if _of_the_users(error) else None
        raise failure from error
    finally:
        quiet.setLevel(level)

    outer = Importer(env, {}).run(traced, len(tensors))
    guards = tuple(_guards(env, outer.names))

    def eager() -> list[Operator]:
        return operators(run(joint, {}), len(tensors), outer.dim, outer.origin)

    return Captured(
        outer.graph, structure["outputs"], structure["differentiable"], guards,
        structure["rebuild"], eager,
    )  # fmt: skip


@contextmanager
def _preserved_meta() -> Iterator[None]:
    with fx_traceback.preserve_node_meta():
        before = dict(fx_traceback.current_meta)
        try:
            yield
        finally:
            fx_traceback.current_meta.clear()
            fx_traceback.current_meta.update(before)


def _rebuilder(spec: Any, where: list[int], constants: dict[int, Any]) -> Callable[..., Any]:
    def rebuild(tensors: Sequence[Any]) -> Any:
        flat = dict(constants) | dict(zip(where, tensors, strict=True))
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


def _refuse_input_mutation(traced: torch.fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        if not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable):
            continue
        raise UnsupportedError(
            f"{node.target} writes in place to a tensor the caller can see "
            f"({_place(node)}); megafuse never writes to its "
            "inputs. Use the out-of-place form, or keep this module outside the fused one "
            "(a BatchNorm in training updates its buffers: call .eval() on it)."
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
