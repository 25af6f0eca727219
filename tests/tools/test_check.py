import copy
import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from megafuse.errors import InputError
from megafuse.subgraphs import Case
from megafuse.tools.check import check, check_cases
from megafuse.tools.repeats import DOCUMENTED, _repeats, unrepeatable
from megafuse.tools.steps import InFloat64, bind, run_step


class Block(nn.Module):
    """Two norms, a product and a gate: enough for every rule, small enough for many runs."""

    def __init__(self, width=32, hidden=48, dtype=torch.bfloat16):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.first = nn.Linear(width, 2 * hidden, dtype=dtype)
        self.inner = nn.LayerNorm(hidden, dtype=dtype)
        self.unused = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x, scale=1.0):
        u, g = self.first(self.norm(x)).chunk(2, -1)
        return self.inner(u) * F.silu(g) * scale


def made(seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    block = Block(dtype=dtype)
    return block, torch.randn(6, 32, dtype=dtype, requires_grad=True)


class Changed(nn.Module):
    """A copy of the block whose output passes through `change`."""

    def __init__(self, block, change):
        super().__init__()
        for name, child in copy.deepcopy(block).named_children():
            self.add_module(name, child)
        self.unused = nn.Parameter(block.unused.detach().clone())
        self.change = change
        self.body = Block.forward

    def forward(self, x, scale=1.0):
        return self.change(self.body(self, x, scale))


def test_an_equal_copy_passes_in_both_precisions():
    block, x = made()
    report = check(block, copy.deepcopy(block), x, scale=0.5)
    assert report.passed, str(report)
    assert [s.dtype for s in report.stages] == [torch.bfloat16, torch.float32]
    names = [t.name for t in report.stages[0].tensors]
    assert names == ["output", "d x", "d norm.weight", "d norm.bias", "d first.weight",
                     "d first.bias", "d inner.weight", "d inner.bias"]  # fmt: skip


def test_a_wrong_epsilon_shows_in_float32_at_the_latest():
    block, x = made()
    wrong = copy.deepcopy(block)
    wrong.inner.eps = 1e-3
    report = check(block, wrong, x)
    assert not report.passed
    assert any(line.startswith("float32: output: relative error") for line in report.failures)


def nan(y):
    return torch.where(torch.arange(y.numel()).reshape(y.shape) == 5, torch.nan, y)


def lost_row(y):
    return torch.cat([y[:-1], y[-1:] * 0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [(nan, "non-finite"), (lost_row, "relative error"), (lambda y: y.float(), "is float32[6, 48]"),
     (lambda y: y.detach() + 0 * y.sum(), "relative error")],
)  # fmt: skip
def test_a_broken_copy_is_rejected(change, reason):
    block, x = made()
    report = check(block, Changed(block, change), x, grad_output=torch.ones(6, 48).bfloat16())
    assert not report.passed
    assert any(reason in line for line in report.failures), report.failures


def test_results_that_differ_between_runs_are_rejected():
    block, x = made()
    calls = []

    def unsteady(y):
        calls.append(1)
        return y * (1 + 2.0**-7 * (len(calls) == 1))

    report = check(block, Changed(block, unsteady), x)
    assert any("two runs differ" in line for line in report.failures)


def test_what_eager_does_not_repeat_is_noted_only():
    """Attention's backward, say, adds in an order of its own: the candidate calls the same."""

    class Unsteady(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(48))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.weight * (1 + 2.0**-20 * self.calls)

    x = torch.randn(6, 48, requires_grad=True)
    report = check(Unsteady(), Unsteady(), x)
    assert not any("two runs differ" in line for line in report.failures)
    assert "as eager's does" in str(report)


NOISY = torch.library.Library("megafuse_tests", "DEF")
NOISY.define("noisy(Tensor x, float level) -> Tensor")
calls_of_noisy = []


def _noisy(x, level):
    """One element differs from call to call."""
    calls_of_noisy.append(None)
    result = x.clone()
    result.view(-1)[0] += level * (len(calls_of_noisy) % 7)
    return result


NOISY.impl("noisy", _noisy, "CPU")


class NoisyBackward(torch.autograd.Function):
    """As attention's: the result repeats, the gradient does not."""

    @staticmethod
    def forward(ctx, x, level):
        ctx.level = level
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.megafuse_tests.noisy(grad, ctx.level), None


class Attends(torch.nn.Module):
    """The bias's gradient sums the varying one; the scale's does not depend on it."""

    def __init__(self, level, unsteady=False):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(8))
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.level, self.unsteady, self.calls = level, unsteady, 0

    def forward(self, x):
        self.calls += 1
        scale = self.scale * (1 + 2.0**-7 * self.calls) if self.unsteady else self.scale
        return NoisyBackward.apply(x + self.bias, self.level) * scale


@pytest.mark.parametrize("unsteady", [False, True])
def test_a_sum_over_what_eager_does_not_repeat_may_differ(unsteady):
    x, grad = torch.randn(64, 8, requires_grad=True), torch.ones(64, 8)
    grad[0] = 2.0**-20  # of which a sum over rows shows nothing
    eager = Attends(2.0**-30)
    call = bind(eager, (x,), {})
    assert unrepeatable(eager, call, [grad]) == {"d x", "d bias"}
    runs = [run_step(eager, call, [grad]) for _ in range(2)]
    assert torch.equal(*(run.gradients["bias"] for run in runs))
    report = check(eager, Attends(2.0**-10, unsteady), x, grad_output=grad)
    text = str(report)
    assert "d bias differs from run to run, as what eager computes it from does" in text
    for name in ("output", "d scale"):
        fault = f"float32: {name}: two runs differ"
        assert any(f.startswith(fault) for f in report.failures) is unsteady


def test_results_overwritten_by_a_later_call_are_rejected():
    block, x = made()
    buffer = torch.zeros(6, 48, dtype=torch.bfloat16)

    class Reuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return buffer.copy_(y).detach() if y.dtype == buffer.dtype else y.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    report = check(block, Changed(block, Reuse.apply), x)
    assert "bfloat16: output: overwritten by a later call" in report.failures


@pytest.mark.parametrize("victim", ["x", "norm.weight", "upstream gradient 0"])
def test_writing_what_the_caller_owns_is_rejected(victim):
    block, x = made()
    grad = torch.ones(6, 48).bfloat16()
    targets = {"x": x, "norm.weight": block.norm.weight, "upstream gradient 0": grad}

    def scribble(y):
        targets[victim].data.flatten()[0] += 1  # as a kernel writes: autograd does not notice
        return y

    broken = Changed(block, scribble)
    broken.norm = block.norm  # the parameters are shared, as a fused module shares them
    report = check(block, broken, x, grad_output=grad)
    assert f"bfloat16: the candidate modified {victim}, which the caller owns" in report.failures


def test_other_parameter_values_are_reported():
    block, x = made()
    other = copy.deepcopy(block)
    with torch.no_grad():
        other.first.bias += 1
    assert (
        "bfloat16: parameter first.bias differs from the reference's"
        in check(block, other, x).failures
    )


def test_nothing_of_the_caller_is_changed():
    block, x = made()
    x.grad, before = torch.ones_like(x), {k: v.clone() for k, v in block.state_dict().items()}
    kept = x.grad
    check(block, copy.deepcopy(block), x)
    assert x.grad is kept
    assert all(p.grad is None for p in block.parameters())
    assert all(torch.equal(v, before[k]) for k, v in block.state_dict().items())


def test_frozen_weights_and_inputs_without_gradient():
    block, x = made(dtype=torch.float32)
    block.first.requires_grad_(False)
    report = check(block, copy.deepcopy(block), x.detach())
    assert report.passed
    assert "d first.weight" not in [t.name for t in report.stages[0].tensors]
    assert "note: no input requires a gradient" in str(report)


def test_a_function_and_several_outputs():
    def pair(a, b):
        return {"sum": a + b, "product": a * b}

    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    report = check(pair, pair, a, b=b)
    assert report.passed
    assert [t.name for t in report.stages[0].tensors] == [
        "output['sum']", "output['product']", "d a", "d b",
    ]  # fmt: skip
    assert not check(pair, lambda a, b: {"sum": a + b, "product": a * a}, a, b=b).passed


def test_a_gradient_that_is_zero_in_theory_is_judged_absolutely():
    """The sum of a LayerNorm's output does not depend on its input: only rounding is left."""

    class Sum(nn.Module):
        def __init__(self, slack):
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.slack = slack

        def forward(self, x):
            return self.norm(x).sum(-1) + self.slack * x.sum(-1)

    torch.manual_seed(1)
    x = torch.randn(8, 64, requires_grad=True)
    ones = torch.ones(8)
    report = check(Sum(0.0), Sum(1e-9), x, grad_output=ones)
    gradient = next(t for t in report.stages[0].tensors if t.name == "d x")
    assert gradient.absolute
    assert gradient.passed, str(report)
    report = check(Sum(0.0), Sum(1e-3), x, grad_output=ones)
    assert any(line.startswith("float32: d x") for line in report.failures)


def test_float64_reference_ignores_the_casts_of_the_code():
    with InFloat64():
        x = torch.ones(3, dtype=torch.float64) / 3
        assert x.float().dtype == x.to(torch.bfloat16).dtype == x.type(torch.half).dtype
        assert x.float().dtype == torch.float64
        assert torch.equal(F.softmax(x, 0, dtype=torch.float32), F.softmax(x, 0))


def test_seeds_are_pooled_and_the_report_is_plain_data():
    def make(seed, dtype):
        block, x = made(seed, dtype or torch.bfloat16)
        return Case(block, (x,)), copy.deepcopy(block)

    seen = []
    report = check_cases(make, range(8), progress=lambda *step: seen.append(step))
    assert report.passed
    assert all(t.pooled_limit is not None for s in report.stages for t in s.tensors)
    assert (
        report.headline == "PASS: 8 tensors x 8 seeds in bfloat16, 8 tensors x 8 seeds in float32"
    )
    assert seen[-1] == ("checked float32", 8, 8)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["passed"] and data["stages"][1]["dtype"] == "float32"
    assert max(map(len, str(report).splitlines())) <= 100


def test_float64_has_no_policy():
    block = Block(dtype=torch.float64)
    with pytest.raises(InputError, match="float64"):
        check(block, block, torch.randn(2, 32, dtype=torch.float64))


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_documented_operators_do_not_repeat_on_a_gpu(name):
    """Whatever their tags say: some of attention's backwards are said to draw random numbers."""
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    with FakeTensorMode():
        for device, repeats in (("cuda", False), ("cpu", True)):
            x = torch.empty(4, device=device)
            args = (x, [x.long()], x, True) if name == "index_put" else (x,)
            function = getattr(operator, operator.overloads()[0])
            if device == "cuda" or torch.Tag.nondeterministic_seeded in function.tags:
                assert _repeats(function, args, {}, x) is repeats
