"""Two-dimensional convolutions with channels last in memory.

Before → after, for 16-bit ones on a GPU:
    convolution(x, w, bias)         → first(convolution'(copy(last(x)), w) + bias)
    convolution_backward(g, x)[0]   → first(convolution_backward'(copy(last(g)), copy(last(x)))[0])
    convolution_backward(g, x)[2]   → sum(last(g)) over all but channels

last and first are permutations, which are addressing only; the primed calls take and return
contiguous [batch, height, width, channels] tensors. Whoever computes x stores it in that order, a
tensor that lies so already (behind ConvNeXt's own permutations) is taken as it is, and only one
that the caller holds channels-first is copied. cuDNN's 16-bit kernels work on channels-last memory:
given another they copy in and out themselves, and depthwise ones fall back on a slow loop.

The bias is ours: PyTorch would add it to a result that is rounded already, in a kernel of its own;
here it is added where the result is read.

Float32 is left as eager has it, whose arithmetic is the yardstick; so are grouped convolutions that
are not depthwise, which are slower with channels last.
"""

from __future__ import annotations

from dataclasses import replace

from megafuse.convolution import FIRST, LAST
from megafuse.index import strides
from megafuse.ir import Arg, Graph, Node, Ref, Rewriter, TensorType
from megafuse.ops import is_view
from megafuse.passes.additions import HALVES
from megafuse.passes.in_memory import RESHAPE
from megafuse.passes.operands import layout_of

MOVED = {"aten.convolution.default": (0,), "aten.convolution_backward.default": (0, 1)}
"""Which arguments of a call have channels."""
_WEIGHT = {"aten.convolution.default": 1, "aten.convolution_backward.default": 2}
_GROUPS = {"aten.convolution.default": 8, "aten.convolution_backward.default": 9}


class ChannelsLast(Rewriter):
    name = "channels_last"

    def __init__(self, any_dtype: bool) -> None:
        super().__init__()
        self.any_dtype = any_dtype
        self.calls: set[Node] = set()
        self.copies: dict[Node, Node] = {}
        self.bias_gradients: dict[Node, Node] = {}  # call → the upstream gradient, channels last

    def visit(self, node: Node, args: tuple[Arg, ...]) -> Node:
        if node.op == "extern" and self._fits(node):
            return self._call(node, args)
        if node.op == "item" and args[0] in self.calls and node.attrs["index"] == 0:
            return self._seen(self.keep(replace(node, type=_moved(node.type)), args))
        if node.op == "item" and args[0] in self.bias_gradients and node.attrs["index"] == 2:
            return self._bias_gradient(node, self.bias_gradients[args[0]])  # type: ignore[index]
        if node.attrs.get("target") == RESHAPE:
            (x,) = args
            assert isinstance(x, Node)
            if self._under(x) in self.calls:  # a view of memory, which has another order now
                args = (self.emit("cast", (x,), x.type, x.origin),)
        return self.keep(node, args)

    def _fits(self, node: Node) -> bool:
        target = node.attrs["target"]
        if target not in MOVED or len(node.inputs[0].shape) != 4:
            return False
        call = node.attrs["call_args"]
        weight = node.inputs[call[_WEIGHT[target]].index]
        depthwise = weight.shape[1] == 1
        if call[_GROUPS[target]] != 1 and not depthwise:
            return False
        return self.any_dtype or node.inputs[0].dtype in HALVES

    def _call(self, node: Node, args: tuple[Arg, ...]) -> Node:
        operands, target = list(args), node.attrs["target"]
        for place in MOVED[target]:
            ref = node.attrs["call_args"][place]
            assert isinstance(ref, Ref)
            x = operands[ref.index]
            assert isinstance(x, Node)
            operands[ref.index] = self._last(x)
        call = list(node.attrs["call_args"])
        bias: Arg | None = None
        if node.attrs["multiple"]:
            *how, mask = call
            call = [*how, [*mask[:2], False]]
        elif isinstance(call[2], Ref):
            bias, call[2] = operands[call[2].index], None
            kept = [ref.index for ref in call if isinstance(ref, Ref)]
            operands = [operands[i] for i in kept]
            call = [Ref(kept.index(a.index)) if isinstance(a, Ref) else a for a in call]
        attrs = {**node.attrs, "target": target.replace("aten", "megafuse"), "call_args": call}
        type = node.type if node.attrs["multiple"] else _moved(node.type)
        made = self._append(replace(node, args=tuple(operands), type=type, attrs=attrs))
        self.calls.add(made)
        if node.attrs["multiple"]:
            grad = operands[node.attrs["call_args"][0].index]
            assert isinstance(grad, Node)
            self.bias_gradients[made] = grad
            return made
        if isinstance(bias, Node):
            row = TensorType((1, 1, 1, *bias.shape), bias.dtype)
            made = self.emit(
                "add", (made, self.emit("reshape", (bias,), row, bias.origin)), type, node.origin
            )
            self.calls.add(made)
        return self._seen(made)

    def _bias_gradient(self, node: Node, grad: Node) -> Node:
        row = TensorType((1, 1, 1, grad.shape[3]), node.dtype)
        total = self.emit("sum", (grad,), row, node.origin, dims=(0, 1, 2))
        return self.emit("reshape", (total,), node.type, node.origin)

    def _last(self, x: Node) -> Node:
        """`x` with channels last, contiguous in memory; one copy for all calls that read it."""
        if x not in self.copies:
            moved = self._permuted(x, LAST)
            layout = layout_of(moved)
            row_major = layout is not None and layout.strided and layout.start == 0 and all(
                not loops or extent == 1 or loops[-1][1] == stride
                for loops, extent, stride in zip(
                    layout.dims, moved.shape, strides(moved.shape), strict=True
                )
            )  # fmt: skip
            self.copies[x] = moved if row_major else self.emit("cast", (moved,), moved.type,
                                                               x.origin)  # fmt: skip
        return self.copies[x]

    def _seen(self, y: Node) -> Node:
        """A result with channels last, as the rest of the graph sees it."""
        return self._permuted(y, FIRST)

    def _permuted(self, x: Node, order: tuple[int, ...]) -> Node:
        shape = tuple(x.shape[i] for i in order)
        return self.emit("permute", (x,), TensorType(shape, x.dtype), x.origin, order=order)

    def _under(self, x: Node) -> Node:
        while is_view(x) or x.op == "item":
            x = x.inputs[0]
        return x


def _moved(type: TensorType) -> TensorType:
    return TensorType(tuple(type.shape[i] for i in LAST), type.dtype)


def channels_last(graph: Graph, any_dtype: bool = False) -> Graph:
    """any_dtype: float32 convolutions too."""
    return ChannelsLast(any_dtype).run(graph)
