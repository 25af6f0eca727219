"""Programs that torch recorded, fused: `fx.GraphModule`s and `torch.export` programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support import count_plans, step, upstream_for
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import symbolic_trace

import megafuse
from megafuse.cli import main

LINE = "normed * w.float()"


class Net(nn.Module):
    """Casts, a buffer, and perhaps a constant that is neither parameter nor buffer."""

    def __init__(self, constant: bool = True) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("shift", torch.randn(8))
        self.constant = torch.randn(8) if constant else 1.5

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        normed = self.norm(self.layer(x) + self.shift)
        scaled = normed * w.float()
        return torch.tanh(scaled) + self.constant


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, 8), (8,)
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def assert_equal(fused: Any, module: nn.Module, args: list[Tensor]) -> None:
    """Outputs and gradients of arguments and parameters, by name."""
    theirs = dict(module.named_parameters())
    mine = dict(fused.named_parameters())
    assert set(mine) == set(theirs)
    upstream = upstream_for([module(*args)])
    got = step(fused, [mine[n] for n in theirs], args, upstream)
    want = step(module, list(theirs.values()), args, upstream)
    assert len(got) == 1 + 2 + 4
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def exported(net: Net, batch: bool = True) -> ExportedProgram:
    shapes = ({0: Dim("batch")}, None) if batch else None
    return export(net, tuple(t.detach() for t in inputs(5)), dynamic_shapes=shapes)


def test_a_graph_module(net: Net) -> None:
    traced = symbolic_trace(net)
    fused = megafuse.fuse(traced, *inputs(5))
    for rows in (5, 9):
        assert_equal(fused, net, inputs(rows))
    assert count_plans(fused) == 1
    assert all(a is b for a, b in zip(fused.parameters(), traced.parameters(), strict=True))


@pytest.mark.parametrize("form", ["program", "module"])
def test_an_exported_program(form: str) -> None:
    torch.manual_seed(0)
    net = Net(constant=form == "program")
    program = exported(net)
    fused = megafuse.fuse(program if form == "program" else program.module(), *inputs(5))
    for rows in (5, 9):
        assert_equal(fused, net, inputs(rows))
    assert count_plans(fused) == 1
    if form == "program":
        assert set(fused.state_dict()) == set(net.state_dict()) == set(program.state_dict)


def test_training_an_exported_program(net: Net) -> None:
    fused = megafuse.fuse(exported(net))
    for module in (fused, net):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for rows in (5, 7):
            module(*inputs(rows)).square().sum().backward()
        optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_a_program_for_one_size_says_so(net: Net) -> None:
    program = exported(net, batch=False)
    fused = megafuse.fuse(program, *inputs(5))
    assert_equal(fused, net, inputs(5))
    with pytest.raises(RuntimeError, match="5"):
        fused(*inputs(9))


def test_another_precision_than_recorded(net: Net) -> None:
    fused = megafuse.fuse(exported(net)).bfloat16()
    args = [t.detach().bfloat16() for t in inputs(5)]
    assert "constant" in dict(fused.named_buffers())
    want = net.bfloat16()
    want.constant = want.constant.bfloat16()
    torch.testing.assert_close(fused(*args), want(*args), rtol=0.03, atol=0.03)


def test_explain_names_the_lines_that_were_recorded() -> None:
    net = Net(constant=False)
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.strip().endswith(LINE))
    for target in (net, exported(net), exported(net).module()):
        text = megafuse.explain(megafuse.fuse(target, *inputs(5)))
        assert f"test_programs.py:{line}" in text
    text = megafuse.explain(megafuse.fuse(symbolic_trace(net), *inputs(5)))
    assert ".py:" not in text  # it recorded none, and megafuse's caller is not the place


def test_recorded_casts_round() -> None:
    class Rest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.bfloat16().float()) * 1024

    x = inputs(5)[0].detach()
    program = export(Rest(), (x,))
    for target in (program, program.run_decompositions(), symbolic_trace(Rest())):
        fused = megafuse.fuse(target, x)
        assert torch.equal(fused(x), Rest()(x)) and fused(x).any()


@pytest.mark.parametrize("command", ["check", "explain"])
def test_commands_take_a_saved_program(net: Net, tmp_path: Path, command: str) -> None:
    path = tmp_path / "net.pt2"
    torch.export.save(exported(net), path)
    result = CliRunner().invoke(main, [command, str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert {"check": "PASS: 7 tensors", "explain": "test_programs.py:"}[command] in result.output
