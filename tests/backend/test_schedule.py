"""What runs when, on graphs as AOTAutograd hands them over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from megafuse import Options
from megafuse.dynamo.part import Part
from megafuse.dynamo.program import assemble, boxed
from megafuse.dynamo.reader import Reader
from megafuse.dynamo.schedule import Group, schedule

X = torch.randn(4, 8)
INDEX = torch.tensor([2, 0, 1, 3])


def read(f: Callable[..., Any], *inputs: Tensor) -> Reader:
    return Reader(make_fx(lambda *args: list(f(*args)), tracing_mode="fake")(*inputs), "forward")


def names(items: list[Group | fx.Node]) -> list[Any]:
    """Groups as lists of their operators, PyTorch's calls by name."""

    def name(node: fx.Node) -> str:
        return str(node.target).split(".")[1]

    return [name(i) if isinstance(i, fx.Node) else list(map(name, i.nodes)) for i in items]


def test_calls_that_depend_on_nothing_do_not_cut_a_group() -> None:
    def f(x: Tensor, index: Tensor) -> Any:
        h = torch.exp(x)
        index = index + 1
        return (torch.tanh(h), index * 2)

    assert names(schedule(read(f, X, INDEX))) == ["add", "mul", ["exp", "tanh"]]


def test_groups_alternate_with_the_calls_they_need() -> None:
    def f(x: Tensor) -> Any:
        h = torch.exp(x).cumsum(0)
        return (torch.tanh(h) + torch.exp(x),)

    assert names(schedule(read(f, X))) == [["exp"], "cumsum", ["tanh", "exp", "add"]]


def test_what_needs_inputs_alone_waits_for_its_user() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        late, cast = torch.exp(w), w.cumsum(1)
        h = torch.tanh(x).cumsum(0)
        return (torch.sin(h).cumsum(0) * late + cast,)

    order = names(schedule(read(f, X, X)))
    assert order == [["tanh"], "cumsum", ["sin"], "cumsum", "cumsum", ["exp", "mul", "add"]]


def test_random_calls_keep_their_order() -> None:
    def f(x: Tensor) -> Any:
        a = torch.bernoulli(torch.sigmoid(torch.exp(x).cumsum(0)))
        b = torch.rand_like(x)
        return (a + b,)

    order = [n for n in names(schedule(read(f, X))) if isinstance(n, str)]
    assert order == ["cumsum", "bernoulli", "rand_like"]


def test_views_are_on_both_sides() -> None:
    """PyTorch's call gets a view made outside; a view of its result is addressing inside."""

    def f(x: Tensor) -> Any:
        h = (torch.exp(x) + 1).t()
        return (torch.tanh(h.cumsum(0)[:, :2]) * 2, h)

    reader = read(f, X)
    items = schedule(reader)
    assert names(items) == [["exp", "add"], "cumsum", ["tanh", "mul"]]
    parts = [Part(reader, i, Options()) if isinstance(i, Group) else i for i in items]
    first, _, last = parts
    assert isinstance(first, Part) and isinstance(last, Part)
    assert [str(n) for n in first.outputs] == ["add"]
    assert [str(n) for n in last.inputs] == ["cumsum"]
    program = assemble(reader, parts)
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count("aten.t.default") == 1 and "aten.slice.Tensor" not in calls
    (got, view), (want, _) = boxed(program)([X]), f(X)
    torch.testing.assert_close(got, want)
    assert view.stride() == (1, 8)


def test_a_program_holds_its_arguments_no_longer_than_needed() -> None:
    alive: list[bool] = []

    def watch(x: Tensor) -> Tensor:
        gc.collect()
        alive.append(ref() is not None)
        return x

    def f(x: Tensor) -> Any:
        return ((torch.exp(x) * 2).cumsum(0),)

    reader = read(f, X)
    items = [Part(reader, i, Options()) if isinstance(i, Group) else i for i in schedule(reader)]
    (part,) = (i for i in items if isinstance(i, Part))
    part.register_forward_hook(lambda *_: alive.append(ref() is not None))
    args = [X.clone()]
    ref = weakref.ref(args[0])
    run = boxed(assemble(reader, items))
    (result,) = run(args)
    assert args == [] and alive == [False]
    torch.testing.assert_close(result, *f(X))
