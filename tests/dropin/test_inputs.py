"""Inputs of every kind: layouts in 16 bits, batches of 0 and 1, dtypes, devices, structures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import Net, agree, assert_generated, compiled_of, draw, seeded
from support import count_plans
from torch import Tensor, nn

import megafuse
from megafuse.errors import FallbackWarning

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "off by one element": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape[0], -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_layouts_of_inputs_and_upstream_gradients(layout: str) -> None:
    """Bit for bit what contiguous tensors give; 2 bytes off any alignment among them."""
    net = seeded().to(torch.bfloat16)
    fused = megafuse.fuse(net)
    lay = LAYOUTS[layout]
    x, upstream = (lay(draw(5, 6, dtype=torch.bfloat16, seed=i).detach()) for i in (1, 2))
    results = []
    for a, g in ((x, upstream), (x.contiguous().clone(), upstream.contiguous().clone())):
        a = a.detach().requires_grad_()
        out = fused(a)
        results.append([out, *torch.autograd.grad(out, [a, *net.parameters()], g)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert_generated(fused)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_scalars_are_expanded(reduce: str) -> None:
    net = seeded()
    agree(lambda x: getattr(torch.tanh(x) * x, reduce)(), draw(4, 6))
    fused = megafuse.fuse(net)
    grads = []
    for module in (fused, net):
        x = draw(5, 6)
        getattr(module(x), reduce)().backward()
        grads.append([x.grad, *(p.grad.clone() for p in net.parameters())])
        net.zero_grad()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_batch_changes_between_calls() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    for batch in (5, 1, 33, 2, 1):
        agree(net, draw(batch, 6), fused=fused)
    assert count_plans(fused) == 1


def test_an_empty_batch() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    agree(net, draw(3, 6), fused=fused)
    agree(net, draw(0, 6), fused=fused)
    out = fused(draw(0, 6))
    out.sum().backward()
    assert out.shape == (0, 6) and all((p.grad == 0).all() for p in net.parameters())


BRANCHES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x * 2 if x.shape[0] == 1 else x + 1,
    "squeeze": lambda x: x.squeeze() * 2,
    "broadcast": lambda x: x + torch.tanh(x[:1]).expand(2, 6) if len(x) < 3 else x * 2,
    "len": lambda x: x.exp() if len(x) > 2 else x.tanh(),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_code_that_asks_for_its_batch_size(name: str) -> None:
    fused = megafuse.fuse(BRANCHES[name])
    for batch in (3, 1, 2, 1, 4):
        agree(BRANCHES[name], draw(batch, 6), fused=fused)


def test_integers_and_booleans_pass_through() -> None:
    def code(x: Tensor, index: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(x[index]) * 2, index + 1, mask.logical_not(), x.masked_fill(mask, 0) + 1

    index, mask = torch.tensor([2, 0, 0, 1]), draw(4, 6, grad=False) > 0
    agree(code, draw(4, 6), index, mask)
    agree(lambda x, i: torch.tanh(x * i) + i, draw(4, 6), torch.arange(6))


def test_what_is_left_to_pytorch_is_said_once() -> None:
    fused = megafuse.fuse(lambda x: x * 2)
    for dtype in (torch.complex64, torch.float64):
        x = torch.ones(3, dtype=dtype, requires_grad=True)
        with pytest.warns(FallbackWarning, match=f"unfused for {dtype} tensors") as said:
            for _ in range(2):
                assert torch.equal(fused(x), x * 2)
        assert len(said) == 1
    meta = fused(torch.empty(3, 4, device="meta"))
    assert meta.device.type == "meta" and meta.shape == (3, 4)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(fused(sparse).to_dense(), torch.eye(3) * 2)

    class Marked(torch.Tensor):
        pass

    with pytest.warns(FallbackWarning, match="class Marked"):
        assert type(fused(torch.ones(3).as_subclass(Marked))) is Marked
    assert not compiled_of(fused)


@pytest.mark.parametrize(
    "x",
    [torch.ones(4, 5), torch.ones(6), torch.ones(4, 6, device="meta"), torch.ones(4, 6).double()],
    ids=["width", "rank 1 is fine", "device", "dtype"],
)
def test_what_eager_refuses_is_refused_and_the_module_lives_on(x: Tensor) -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    before = fused(draw(4, 6))
    try:
        want = net(x)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            fused(x)
    else:
        torch.testing.assert_close(fused(x), want)
    assert torch.equal(fused(draw(4, 6)), before)


def test_nested_arguments_and_results() -> None:
    class Nested(nn.Module):
        def forward(self, batch: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
            a, (b, flag) = batch["a"], batch["rest"]
            return {
                "out": (torch.tanh(a) * b * scale, None),
                "n": 3 if flag else 4,
                "list": [a + b],
            }

    module = Nested()
    fused = megafuse.fuse(module)
    for flag, scale in ((True, 1.0), (False, 2.5)):
        batch = {"a": draw(4, 6), "rest": (draw(4, 6, seed=2), flag)}
        agree(module, batch, fused=fused, scale=scale)
        got = fused(batch, scale=scale)
        assert got["n"] == (3 if flag else 4) and got["out"][1] is None


def test_the_same_tensor_twice() -> None:
    x = draw(4, 6)
    agree(lambda a, b: torch.tanh(a) * b, x, x)


def test_arguments_are_never_written() -> None:
    net = seeded()
    fused = megafuse.fuse(net)
    base = draw(5, 12, grad=False)
    for x in (base[:, ::2], base[:, :6], base[:5, :6].contiguous()):
        upstream = draw(1, 6, seed=3, grad=False).expand(5, 6)
        owned = [x, upstream, *net.parameters(), *net.buffers()]
        kept, versions = [t.detach().clone() for t in owned], [t._version for t in owned]
        fused(x.detach().requires_grad_()).backward(upstream)
        assert all(torch.equal(a, b) for a, b in zip(owned, kept, strict=True))
        assert [t._version for t in owned] == versions
    assert isinstance(fused.original, Net)
