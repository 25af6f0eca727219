"""Capture: provenance, run-time sizes, and what is refused rather than got wrong."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from support import block_case, count_plans, plan_of
from torch import Tensor, nn

import megafuse
from megafuse import workload
from megafuse.errors import CaptureError, UnsupportedError
from megafuse.ir import Node


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))  # LINE-TANH
        return self.inner(h) * x  # LINE-MUL


def line_of(owner: object, marker: str) -> str:
    lines, start = inspect.getsourcelines(owner)  # type: ignore[arg-type]
    (at,) = [start + i for i, text in enumerate(lines) if marker in text]
    return f"test_capture.py:{at}"


def find(nodes: list[Node], op: str, direction: str) -> list[Node]:
    return [n for n in nodes if n.origin.op == op and n.origin.direction == direction]


def test_provenance_names_line_module_and_direction() -> None:
    net = Net()
    nodes = plan_of(net, torch.randn(3, 6, requires_grad=True)).captured.graph.nodes
    (tanh,) = find(nodes, "aten.tanh", "forward")
    assert tanh.origin.location == line_of(Net, "LINE-TANH") and tanh.origin.module is None
    rsqrt = [n for n in nodes if n.op == "rsqrt"]
    assert {(n.origin.module, n.origin.direction) for n in rsqrt} == {("inner.0", "forward")}
    products = [n for n in nodes if n.op == "matmul"]
    assert len(products) == 3
    assert [n.origin.direction for n in products] == ["forward", "backward", "backward"]
    assert {n.origin.module for n in products} == {"first"}
    backward = [n for n in nodes if n.origin.direction == "backward" and n.op != "input"]
    places = {n.origin.location for n in backward}
    assert places == {line_of(Net, "LINE-TANH"), line_of(Net, "LINE-MUL")}
    # tanh's own derivative is joined to the line of tanh, the norm's to the line that called it
    norm = {n.origin.location for n in backward if n.origin.module == "inner.0"}
    assert norm == {line_of(Net, "LINE-MUL")}


def test_hooks_used_for_provenance_are_removed() -> None:
    net = Net()
    plan_of(net, torch.randn(3, 6, requires_grad=True))
    for child in net.modules():
        assert not child._forward_pre_hooks and not child._forward_hooks


@pytest.mark.parametrize("batch", [1, 2, 4, 7])
def test_batch_is_a_run_time_size(batch: int) -> None:
    """Also where it is 1, and where it equals another extent (T = 4)."""
    case = block_case((batch, 4, 16, 2))
    plan = plan_of(case.module, *case.args)
    assert [str(d) for d in plan.joint.inputs[-2].shape] == ["s0", "4", "16"]
    assert plan.joint.sizes == {"s0": (len(plan.joint.inputs) - 2, 0)}
    assert plan.captured.accepts({"s0": 1}) and plan.captured.accepts({"s0": 1024})
    for node in plan.joint.nodes:
        if node.op == "matmul":
            assert any(not isinstance(d, int) for n in (node, *node.inputs) for d in n.shape)


def test_plan_does_not_depend_on_the_batch_it_was_made_with() -> None:
    texts = []
    for batch in (1, 4, 9):
        case = block_case((batch, 4, 16, 2))
        texts.append(str(plan_of(case.module, *case.args).joint))
    assert texts[0] == texts[1] == texts[2]


def test_data_dependent_control_flow_is_refused_by_line() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # LINE-BRANCH
                return x * 2
            return x

    with pytest.raises(CaptureError, match=re.escape(line_of(Branches, "LINE-BRANCH"))) as error:
        megafuse.fuse(Branches(), torch.randn(3, 4))
    assert "cannot be captured" in str(error.value)


def test_item_is_refused() -> None:
    with pytest.raises(CaptureError):
        megafuse.fuse(lambda x: x * x.max().item(), torch.randn(3, 4))


def test_in_place_on_an_input_is_refused() -> None:
    def clobber(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    x = torch.randn(3, 4)
    kept = x.clone()
    with pytest.raises(UnsupportedError, match=r"in place.*test_capture\.py:\d+"):
        megafuse.fuse(clobber, x)
    assert torch.equal(x, kept)


def test_buffers_written_in_place_are_outputs_of_the_plan() -> None:
    norm = nn.BatchNorm1d(4)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    captured = plan_of(norm, torch.randn(3, 4)).captured
    names = [n for n, _ in (*norm.named_parameters(), *norm.named_buffers())]
    assert {names[i] for i in captured.written} == {
        "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    assert captured.outputs == 4 and captured.differentiable == (0,)
    for name, value in norm.state_dict().items():  # tracing writes nothing
        assert torch.equal(value, before[name])


def test_in_place_on_a_temporary_is_captured() -> None:
    def local(x: Tensor) -> Tensor:
        y = x + 1
        y.mul_(2).relu_()
        return y * x

    x = torch.randn(3, 4, requires_grad=True)
    fused = megafuse.fuse(local, x, options=megafuse.Options(executor="reference"))
    y = fused(x)
    assert torch.equal(y, local(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(local(x).sum(), x)
    assert torch.equal(grad, want)


def test_frozen_parameters_have_no_gradient_nodes() -> None:
    net = Net()
    net.first.requires_grad_(False)
    plan = plan_of(net, torch.randn(3, 6))
    grads = plan.joint.outputs[plan.captured.outputs :]
    names = [name for name, _ in net.named_parameters()]
    assert {n for n, g in zip(names, grads, strict=False) if g is not None} == {
        "inner.0.weight", "inner.0.bias",
    }  # fmt: skip
    backward = [n for n in plan.joint.nodes if n.origin.direction == "backward"]
    assert backward and not [n for n in backward if n.op == "matmul"]


def test_function_with_module_arguments() -> None:
    case = block_case((3, 4, 16, 2), name="dense_ffn")
    module = case.module
    function = workload._import(workload.ENTRY).dense_ffn_v2_compute
    args = (case.args[0], module.w1, module.b1, module.wout, module.bout)
    fused = megafuse.fuse(function, *args, norm_x=module.norm_x, norm_gate=module.norm_gate)
    (plans,) = fused._plans.values()
    plan = plans[0].plan
    assert len(plan.captured.graph.inputs) == 4 + 5 + 1  # norms' parameters, tensors, gradient
    assert all(g is not None for g in plan.joint.outputs)
    assert {n.origin.location.split(":")[0] for n in plan.joint.nodes if n.origin.location} == {
        "ffn.py"
    }
    assert count_plans(fused) == 1


def test_structures_and_constants_are_rebuilt() -> None:
    def several(x: Tensor, scale: float) -> dict[str, object]:
        return {"twice": x * scale, "rest": (x + 1, None, "text"), "shape": 3}

    fused = megafuse.fuse(several, options=megafuse.Options(executor="reference"))
    x = torch.randn(2, 3)
    got = fused(x, 2.0)
    assert torch.equal(got["twice"], x * 2) and torch.equal(got["rest"][0], x + 1)
    assert got["rest"][1:] == (None, "text") and got["shape"] == 3
    assert torch.equal(fused(x, 3.0)["twice"], x * 3)
    assert count_plans(fused) == 2


def test_code_that_reads_its_batch_size() -> None:
    def means(x: Tensor) -> Tensor:
        return x.sum(0) / x.shape[0]

    fused = megafuse.fuse(means, options=megafuse.Options(executor="reference"))
    for batch in (4, 1, 7):
        x = torch.randn(batch, 5)
        torch.testing.assert_close(fused(x), means(x))
    assert count_plans(fused) == 1


def test_python_branch_on_the_batch_keeps_both_answers_right() -> None:
    def branchy(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 3 else x + 1

    fused = megafuse.fuse(branchy, options=megafuse.Options(executor="reference"))
    for batch in (5, 2, 3, 4, 1):
        x = torch.randn(batch, 5)
        assert torch.equal(fused(x), branchy(x))
    assert count_plans(fused) <= 3
