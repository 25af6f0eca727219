"""What a caller may do with a fused module: it behaves as the original does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_modules import Of, make
from support import REFERENCE, assert_close_to_float64, block_case, count_plans, step
from torch import Tensor, nn

import megafuse
from megafuse import FusedModule, Options, workload
from megafuse.errors import DoubleBackwardError, InputError, MegafuseError


class Net(nn.Module):
    """One product and one norm; named here so that it pickles."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 19)
        self.norm = nn.LayerNorm(19)
        self.register_buffer("shift", torch.randn(19))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.norm(self.lin(x)) + self.shift) * scale


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def fused(net: Net) -> FusedModule:
    return megafuse.fuse(net)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def grads(module: nn.Module, x: Tensor, upstream: Tensor | None = None) -> list[Tensor]:
    out = module(x)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    upstream = torch.ones_like(out) if upstream is None else upstream
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def assert_near(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- layouts


def layouts() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "transposed": lambda x: x.t().contiguous().t(),
        "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
        "offset": lambda x: torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape),
        "expanded": lambda x: x[:1].expand(x.shape[0], -1),
        "flipped": lambda x: x.flip(0),
    }


@pytest.mark.parametrize("layout", layouts())
def test_layout_of_inputs_and_gradients(fused: FusedModule, layout: str) -> None:
    """The layout changes nothing, bit for bit, and what comes in is left alone."""
    lay = layouts()[layout]
    x, upstream = lay(draw(5, 7).detach()), lay(draw(5, 19).detach())
    kept = x.clone(), upstream.clone()
    got = grads(fused, x.requires_grad_(), upstream)
    plain = x.detach().contiguous().clone().requires_grad_()
    assert_equal(got, grads(fused, plain, upstream.contiguous().clone()))
    assert torch.equal(x, kept[0]) and torch.equal(upstream, kept[1])


def test_sum_backward_gives_an_expanded_gradient(net: Net, fused: FusedModule) -> None:
    x = draw(5, 7)
    fused(x).sum().backward()
    got = [x.grad, *(p.grad for p in net.parameters())]
    x.grad = None
    net.zero_grad()
    net(x).sum().backward()
    assert_near(got, [x.grad, *(p.grad for p in net.parameters())])  # type: ignore[arg-type]


# -- sizes


def test_batch_changes_without_a_new_plan(net: Net, fused: FusedModule) -> None:
    for batch in (5, 1, 64, 7, 2, 5):
        x = draw(batch, 7)
        assert_near(grads(fused, x), grads(net, x))
    assert count_plans(fused) == 1


def test_another_rank_dtype_or_constant_is_another_plan(net: Net, fused: FusedModule) -> None:
    fused(draw(5, 7))
    fused(draw(5, 3, 7))
    assert count_plans(fused) == 2
    fused(draw(4, 7), scale=2.0)
    fused(draw(5, 7), 2.0)
    assert 3 <= count_plans(fused) <= 4
    before = count_plans(fused)
    fused(draw(6, 7), scale=2.0)
    assert count_plans(fused) == before


def test_an_empty_batch(net: Net, fused: FusedModule) -> None:
    x = torch.empty(0, 7, requires_grad=True)
    out = fused(x)
    assert out.shape == (0, 19)
    got = torch.autograd.grad(out.sum(), [x, *net.parameters()])
    want = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    assert_equal(list(got), list(want))


def test_a_wrong_shape_or_dtype_is_an_error_and_the_module_lives_on(
    net: Net, fused: FusedModule
) -> None:
    before = fused(draw(5, 7)).detach()
    for wrong in (torch.randn(5, 8), torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 5)):
        with pytest.raises((RuntimeError, MegafuseError)) as ours:
            fused(wrong)
        with pytest.raises(RuntimeError) as eagers:
            net(wrong)
        assert type(ours.value) is type(eagers.value) or isinstance(ours.value, MegafuseError)
    with pytest.raises((TypeError, MegafuseError)):
        fused()
    assert torch.equal(fused(draw(5, 7)), before)


# -- autograd


def test_no_grad_and_inference_mode(net: Net, fused: FusedModule) -> None:
    x = draw(5, 7)
    with torch.no_grad():
        out = fused(x)
    assert not out.requires_grad
    with torch.inference_mode():
        again = fused(x)
    assert torch.equal(out, again)
    assert torch.equal(out, fused(x).detach())
    torch.testing.assert_close(out, net(x).detach())


def test_input_without_gradient(net: Net, fused: FusedModule) -> None:
    x = draw(5, 7).detach()
    fused(x).sum().backward()
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    assert_near(got, [p.grad for p in net.parameters()])  # type: ignore[arg-type]
    assert x.grad is None


def test_frozen_parameters(net: Net) -> None:
    net.lin.requires_grad_(False)
    fused = megafuse.fuse(net)
    x = draw(5, 7)
    fused(x).sum().backward()
    assert net.lin.weight.grad is None and net.lin.bias.grad is None
    assert net.norm.weight.grad is not None and x.grad is not None
    assert_near(grads(fused, x), grads(net, x))
    # Thawing them later is another plan, with their gradients.
    net.lin.requires_grad_(True)
    assert_near(grads(fused, x), grads(net, x))


def test_two_backwards_of_one_graph(fused: FusedModule) -> None:
    x = draw(5, 7)
    out = fused(x)
    wanted = [x, *fused.parameters()]
    first = torch.autograd.grad(out.sum(), wanted, retain_graph=True)
    second = torch.autograd.grad(out.sum(), wanted)
    assert_equal(list(first), list(second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), wanted)


def test_gradients_accumulate(net: Net, fused: FusedModule) -> None:
    x, y = draw(5, 7), draw(3, 7)
    one, two = grads(fused, x)[2:], grads(fused, y)[2:]
    fused(x).sum().backward()
    fused(y).sum().backward()
    assert_near([p.grad for p in net.parameters()], [a + b for a, b in zip(one, two)])  # type: ignore[misc]


def test_one_module_twice_in_a_graph(net: Net) -> None:
    square = Of(lambda m, x: torch.tanh(m.norm(x)) + x, norm=nn.LayerNorm(7))
    fused = megafuse.fuse(square)
    x = draw(4, 7)
    got = grads(fused, x)  # warm
    wanted = [x, *square.parameters()]
    got = torch.autograd.grad(fused(fused(x)).square().sum(), wanted)
    want = torch.autograd.grad(square(square(x)).square().sum(), wanted)
    assert_near(list(got), list(want))
    assert count_plans(fused) == 1


def test_two_calls_before_either_backward(net: Net, fused: FusedModule) -> None:
    x, y = draw(5, 7), (draw(5, 7) * 2).detach().requires_grad_()
    a, b = fused(x), fused(y)
    gy, gx = torch.autograd.grad(b.sum(), y)[0], torch.autograd.grad(a.sum(), x)[0]
    assert torch.equal(gx, grads(fused, x)[1]) and torch.equal(gy, grads(fused, y)[1])


def test_double_backward_is_a_named_error(fused: FusedModule) -> None:
    x = draw(5, 7)
    with pytest.raises(DoubleBackwardError, match="first derivatives only"):
        torch.autograd.grad(fused(x).sum(), x, create_graph=True)


def test_changing_an_input_before_backward_is_noticed(fused: FusedModule) -> None:
    x = draw(5, 7)
    held = x * 1.0
    out = fused(held)
    with torch.no_grad():
        held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_one_of_several_outputs_is_used() -> None:
    module, (x, y) = make("residual")
    fused = megafuse.fuse(module)
    for i in (0, 1):
        wanted = [x, y, *(module.parameters() if i == 0 else ())]
        got = torch.autograd.grad(fused(x, y)[i].square().sum(), wanted)
        want = torch.autograd.grad(module(x, y)[i].square().sum(), wanted)
        assert_near(list(got), list(want))


def test_nothing_the_caller_owns_is_written(net: Net, fused: FusedModule) -> None:
    x, upstream = draw(5, 7), torch.randn(5, 19)
    owned = [x, upstream, *net.parameters(), *net.buffers()]
    before = [t.detach().clone() for t in owned]
    versions = [t._version for t in owned]
    out = fused(x)
    kept = out.detach().clone()
    out.backward(upstream)
    fused((x * 3).detach())
    assert_equal([t.detach() for t in owned], before)
    assert [t._version for t in owned] == versions
    assert torch.equal(out, kept)


# -- being the original


def test_state_dict_parameters_and_attributes(net: Net, fused: FusedModule) -> None:
    assert list(fused.state_dict()) == list(net.state_dict())
    assert dict(fused.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert all(a is b for a, b in zip(fused.parameters(), net.parameters(), strict=True))
    assert fused.lin is net.lin and fused.shift is net.shift and fused.original is net
    with pytest.raises(AttributeError):
        _ = fused.no_such_thing
    assert "Net" in repr(fused)


def test_load_state_dict_is_seen_by_both(net: Net, fused: FusedModule) -> None:
    x = draw(5, 7)
    old = fused(x).detach()
    other = Net()
    fused.load_state_dict(other.state_dict())
    torch.testing.assert_close(fused(x), other(x))
    assert torch.equal(net.lin.weight, other.lin.weight)
    assert not torch.equal(fused(x), old)
    assert count_plans(fused) == 1


def test_an_optimizer_step_is_seen(net: Net, fused: FusedModule) -> None:
    x = draw(5, 7)
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.5)
    first = fused(x).square().mean()
    first.backward()
    optimizer.step()
    assert fused(x).square().mean() < first
    torch.testing.assert_close(fused(x), net(x))


def test_deepcopy_and_pickle_are_independent(net: Net, fused: FusedModule, tmp_path: Path) -> None:
    x = draw(5, 7)
    want = grads(fused, x)
    torch.save(fused, tmp_path / "fused.pt")
    loaded = torch.load(tmp_path / "fused.pt", weights_only=False)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), loaded]
    for made in copies:
        assert isinstance(made, FusedModule) and made.options == fused.options
        assert made.lin.weight is not net.lin.weight and made.lin is made.original.lin
        assert_equal(grads(made, x), want)
        with torch.no_grad():
            made.lin.weight.zero_()
    assert_equal(grads(fused, x), want)


def test_train_and_eval_reach_the_original() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    fused = megafuse.fuse(module, options=REFERENCE)
    fused.eval()
    assert not module.training and not module[1].training
    x = torch.randn(3, 4)
    torch.testing.assert_close(fused(x), module(x))


def test_moving_to_another_dtype(net: Net, fused: FusedModule) -> None:
    fused(draw(5, 7))
    fused.to(torch.bfloat16)
    out = fused(draw(5, 7).to(torch.bfloat16))
    assert out.dtype == torch.bfloat16 and net.lin.weight.dtype == torch.bfloat16
    torch.testing.assert_close(out, net(draw(5, 7).to(torch.bfloat16)), rtol=0.02, atol=0.02)


def test_float64_and_autocast_are_served_by_pytorch(net: Net) -> None:
    wide = copy.deepcopy(net).double()
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    for a, b in zip(grads(megafuse.fuse(wide), x), grads(wide, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = megafuse.fuse(net)(draw(5, 7))
        assert torch.equal(out, net(draw(5, 7)))


# -- functions


def test_dense_ffn_function_itself() -> None:
    case = block_case((3, 8, 72, 2), name="dense_ffn")
    module = case.module
    function = workload._import(workload.ENTRY).dense_ffn_v2_compute
    weights = [module.w1, module.b1, module.wout, module.bout]
    fused = megafuse.fuse(function)
    assert_close_to_float64(module, case.args)
    x = case.args[0]
    wanted = [x, *weights, *module.norm_x.parameters(), *module.norm_gate.parameters()]
    assert len(wanted) == 9
    got, want = (
        torch.autograd.grad(f(x, *weights, module.norm_x, module.norm_gate), wanted,
                            case.grad_output)
        for f in (fused, function)
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    # Other norms are other parameters: the plan must not hold on to the first ones.
    other = copy.deepcopy(module.norm_x)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    out = fused(x, *weights, other, module.norm_gate)
    torch.testing.assert_close(out, module.bout.expand_as(out))


def test_explain_and_summary_need_a_plan(net: Net, fused: FusedModule) -> None:
    with pytest.raises(InputError, match="no plan yet"):
        megafuse.explain(fused)
    assert "forward: 2 regions" in megafuse.explain(fused, draw(5, 7))


def test_build_reports_progress(net: Net) -> None:
    seen: list[tuple[str, int, int]] = []
    fused = megafuse.fuse(net, options=Options())
    fused.build(draw(5, 7), progress=lambda *told: seen.append(told))
    assert seen and all(0 < done <= total for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2]
    assert step(fused, [], [draw(5, 7)])[0] is not None


def test_a_replaced_submodule_is_seen() -> None:
    """The shortcut that remembers where parameters lie must not outlive the modules it knew."""
    block = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    x = torch.randn(4, 6)
    fused = megafuse.fuse(block, x)
    fused(x), fused(x)
    block[0] = nn.Linear(6, 5)
    torch.testing.assert_close(fused(x), block(x))
    block[0].weight = nn.Parameter(torch.randn(5, 6))
    torch.testing.assert_close(fused(x), block(x))


def test_plain_arguments_that_change_are_no_stale_constants() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
            return x * by

    x = torch.randn(4, 6)
    fused = megafuse.fuse(Scale())
    for by in (2.0, 3.0, 2.0):
        torch.testing.assert_close(fused(x, by=by), x * by)
    torch.testing.assert_close(fused(x.t()), x.t() * 1.0)
