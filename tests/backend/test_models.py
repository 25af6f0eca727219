"""What whole models do, compiled: each is compared with eager, and some of it must be fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import agree, fused, reasons
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megafuse


def r(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(
        grad
    )


def norm_gelu(x: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:]) * 2 + 1)


class Block(nn.Module):
    """Linear, normalisation and activation around `middle`."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.middle = middle or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm(self.a(x))) * 1.5
        return x + torch.tanh(self.b(self.middle(h)))


def test_a_model_with_gradients() -> None:
    backend = agree(Block(), (r(5, 8),))
    assert reasons(backend) == {}
    assert [g.direction for g in backend.report().graphs] == ["forward", "backward"]
    assert fused(backend) > 30


# -- mutation


def test_inputs_written_in_place() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(2).add_(1)
        y[:, 0] = 0
        return norm_gelu(x + y)

    assert fused(agree(f, (r(4, 8), r(4, 8, grad=False)))) > 10


def test_intermediates_written_in_place() -> None:
    def f(x: Tensor) -> Tensor:
        h = norm_gelu(x)
        h += 1
        h[:, ::2] *= 3
        return (torch.exp(h * 0.1) * 2).sub_(1)

    assert fused(agree(f, (r(4, 8),))) > 10


def test_buffers_and_counters() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return norm_gelu(x - self.mean)

    agree(Counter(), (r(4, 8),), (r(6, 8),), (r(5, 8),))


@pytest.mark.parametrize("shape", [(6, 8), (3, 8, 4)], ids=str)
def test_batchnorm_in_training_updates_its_statistics(shape: tuple[int, ...]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.silu(self.norm(torch.exp(x) * 0.1)) + 1)

    backend = agree(Net(), *[(r(*shape) + i,) for i in range(3)])
    assert fused(backend) > 4


def test_results_have_memory_of_their_own() -> None:
    """Written in place later: neither another result nor an argument changes."""

    def f(x: Tensor) -> Any:
        h = torch.tanh(x) + 1
        return h, h.clone(), torch.tanh(x) + 1, x.clone(), h.detach(), (h * 2)[:, :3]

    compiled = torch.compile(f, backend=megafuse.Backend())
    x = r(4, 8, grad=False)
    a, b, c, d, e, s = compiled(x)
    before = [t.clone() for t in (x, b, c, s)]
    a.add_(1)
    d.add_(1)
    for t, want in zip((x, b, c, s), before, strict=True):
        assert torch.equal(t, want)
    assert torch.equal(a, e)  # detached: the same memory, as in eager


# -- layouts


def test_results_keep_the_strides_of_eager() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(x.transpose(0, 1)) + 1
        return h, (h * 2).permute(2, 0, 1), torch.sigmoid(y) * 2, h.sum(0).t() + 1

    channels_last = r(2, 3, 4, 5, grad=False).contiguous(memory_format=torch.channels_last)
    assert fused(agree(f, (r(3, 4, 5), channels_last))) > 4


def test_as_strided_sees_the_memory_of_eager() -> None:
    def f(x: Tensor) -> Tensor:
        h = torch.tanh(x.t()) + 1
        return torch.exp(h.as_strided((3, 2), (1, 3))) * 2

    backend = agree(f, (r(4, 6, grad=False),))
    assert fused(backend) >= 4


def test_misaligned_and_strided_inputs() -> None:
    base = r(9, 17, grad=False)
    for x in (base[1:, 1:], base[:, ::2], base[3].expand(5, 17), base.t()):
        compiled = torch.compile(norm_gelu, backend=megafuse.Backend(), dynamic=False)
        torch.testing.assert_close(compiled(x), norm_gelu(x))


# -- modes


def test_train_eval_and_no_grad() -> None:
    backend = megafuse.Backend()
    torch._dynamo.reset()
    module = nn.Sequential(Block(nn.Dropout(0.5)), nn.BatchNorm1d(8), nn.Sigmoid()).eval()
    compiled = torch.compile(module, backend=backend)
    x = r(5, 8, grad=False)
    with torch.no_grad():
        got = compiled(x)
        assert not got.requires_grad
        torch.testing.assert_close(got, module(x))
    with torch.inference_mode():
        assert compiled(x).is_inference()
    assert {g.direction for g in backend.report().graphs} == {"inference"}
    assert compiled(x).requires_grad
    module.train()
    assert not torch.equal(compiled(x), compiled(x))


def test_dropout_draws_what_eager_draws() -> None:
    def f(x: Tensor) -> Tensor:
        a = F.dropout(torch.tanh(x) * 2, 0.5)
        b = F.dropout(torch.exp(x) + 1, 0.3)
        return torch.sigmoid(b + 1) * F.dropout(a + 1, 0.1)

    backend = agree(f, (r(16, 8),), seed=3)
    assert fused(backend) > 3
    assert reasons(backend)["native_dropout"] == "no generated code for it"


def test_frozen_and_tied_weights() -> None:
    block = Block()
    block.a.weight.requires_grad_(False)
    block.norm.requires_grad_(False)
    block.middle = nn.Linear(16, 16)
    block.middle.bias = block.a.bias
    agree(block, (r(5, 8),), (r(5, 8, grad=False),))


def test_autocast() -> None:
    block = Block()

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x)

    assert fused(agree(f, (r(5, 8),), rtol=2e-2, atol=2e-2)) > 20


def test_casts_the_user_wrote_round() -> None:
    backend = agree(lambda x: (x - x.bfloat16().float()) * 1024, (r(4, 8),), rtol=0, atol=0)
    assert fused(backend) >= 4


def test_checkpointed_block() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    assert fused(agree(Net(), (r(5, 8),))) > 20


def test_backward_twice_and_gradients_of_gradients() -> None:
    x = r(4, 8)
    compiled = torch.compile(norm_gelu, backend=megafuse.Backend())
    y = compiled(x).sum()
    (once,) = torch.autograd.grad(y, x, retain_graph=True)
    (again,) = torch.autograd.grad(y, x)
    assert torch.equal(once, again)
    y = compiled(x).sum()
    with pytest.raises(RuntimeError, match="double backward"):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.sum().backward()


# -- what PyTorch keeps


def test_graph_breaks() -> None:
    seen = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            seen.append(len(h))
            if h.sum() > 0:
                h = h * 2
            return self.second(h)

    backend = agree(Net(), (r(5, 8),))
    assert len(seen) == 2
    assert len(backend.report().graphs) >= 4


def test_control_flow_on_values() -> None:
    def f(x: Tensor) -> Tensor:
        h = norm_gelu(x)
        h = torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: h - 1, (h,))
        return norm_gelu(h)

    assert fused(agree(f, (r(4, 8, grad=False),), (-r(4, 8, grad=False).abs(),))) > 20


@pytest.mark.parametrize(
    "name, middle",
    [("cumsum", lambda h: h.cumsum(-1)), ("sort", lambda h: h.sort(-1).values),
     ("_fft_r2c", lambda h: torch.fft.rfft(h).abs()), ("_to_copy", lambda h: h.double() + 1),
     ("index", lambda h: h[:, torch.tensor([3, 1, 1])])],
)  # fmt: skip
def test_other_operators_run_in_pytorch(name: str, middle: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return norm_gelu(middle(norm_gelu(x)))

    backend = agree(f, (r(4, 8),), rtol=1e-4, atol=1e-5)
    assert fused(backend) > 20
    assert name in reasons(backend)


def test_models_in_float64_run_in_pytorch() -> None:
    backend = agree(Block().double(), (r(5, 8).double(),))
    assert fused(backend) == 0
    assert set(reasons(backend).values()) == {"works on float64"}


def test_nothing_to_fuse() -> None:
    backend = agree(lambda x, y: x @ y, (r(4, 8), r(8, 3)))
    assert fused(backend) == 0
    assert reasons(backend) == {"mm": "no neighbour to fuse with"}


# -- run-time sizes


def test_batches_of_any_size_share_two_compilations() -> None:
    block = Block()
    backend = agree(block, *[(r(batch, 8),) for batch in (4, 5, 7, 3, 64, 2)])
    assert len(backend.report().graphs) == 4  # 4 rows, then any number: forward and backward each


def test_dynamic_from_the_start() -> None:
    class Flat(nn.Module):
        """Sizes that backward knows only as a product."""

        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x.flatten(0, 1)).mean()

    backend = agree(Flat(), *[(r(*s, 8),) for s in ((3, 5), (4, 6), (7, 2))], dynamic=True)
    assert len(backend.report().graphs) == 2
    assert fused(backend) > 40


def test_one_row_and_none() -> None:
    agree(Block(), (r(4, 8),), (r(1, 8),), (r(0, 8),), (r(9, 8),))
