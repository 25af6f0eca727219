"""The backend itself: its name, options and report, and what it does when megafuse fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import agree, fused, reasons
from support import REPOSITORY
from torch import Tensor

import megafuse
from megafuse.dynamo import compile, part
from megafuse.errors import BuildError, ToolchainError


def f(x: Tensor) -> Tensor:
    h = F.gelu(F.layer_norm(x, (8,)) * 2 + 1)
    return torch.tanh(h @ x.t()) * torch.exp(h).sum(-1, keepdim=True)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, requires_grad=True)


def run(script: str, path: Path | str = "") -> str:
    """stdout of a fresh interpreter that sees the sources, and `path` before them."""
    paths = [str(path), str(REPOSITORY / "src")] if path else [str(REPOSITORY / "src")]
    result = subprocess.run(
        [sys.executable, "-c", script], text=True, capture_output=True, timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_installed_name(tmp_path: Path) -> None:
    """As pip installs it: metadata names the entry point, nothing was imported before."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    group = "torch_dynamo_backends"
    lines = [f"{k} = {v}" for k, v in project["entry-points"][group].items()]
    info = tmp_path / "megafuse-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megafuse\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    script = """
import torch
f = lambda x: torch.tanh(x).exp() * 2
x = torch.randn(4, 8)
torch.testing.assert_close(torch.compile(f, backend="megafuse")(x), f(x))
import megafuse
print(megafuse.backend.report().graphs[0].fused_operators)
"""
    assert run(script, tmp_path) == "3"


def test_the_name_in_a_checkout() -> None:
    """Not installed: known by name once megafuse was imported after Dynamo, or `backend` used."""
    for first in ("import torch._dynamo.backends.registry, megafuse", "import megafuse.dynamo"):
        look = "from torch._dynamo import lookup_backend; import megafuse"
        assert run(f"{first}; {look}; print(lookup_backend('megafuse') is megafuse.backend)")


def test_importing_megafuse_waits_for_nothing() -> None:
    assert run("import sys, megafuse; print('torch' in sys.modules)") == "False"
    assert run("import sys, torch, megafuse; print('torch._dynamo' in sys.modules)") == "False"


def test_options(x: Tensor) -> None:
    backend = megafuse.Backend(megafuse.Options(executor="reference"))
    agree(f, (x,), backend=backend)
    assert fused(backend) > 10
    got = []
    for options in ({}, {"rounding": "eager"}):
        torch._dynamo.reset()
        half = x.detach().bfloat16()
        got.append(torch.compile(f, backend=megafuse.Backend(), options=options)(half))
    exact = f(x.detach().bfloat16().double())
    errors = [(g.double() - exact).norm() for g in got]
    assert errors[0] < errors[1]  # fewer roundings, less error


@pytest.mark.parametrize(
    "options, message", [({"memory": "min"}, "checkpoint"), ({"speed": 11}, "speed")]
)
def test_options_it_cannot_honour(x: Tensor, options: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(f, backend=megafuse.Backend(), options=options)(x)


def test_the_report(x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    def g(x: Tensor) -> Tensor:
        return f(f(x).cumsum(1) @ x)

    backend = megafuse.Backend()
    with caplog.at_level(logging.INFO, logger="megafuse.dynamo"):
        agree(g, (x,), backend=backend)
    text = megafuse.explain(backend)
    assert text == str(backend.report())
    forward, backward = backend.report().graphs
    assert (forward.direction, backward.direction) == ("forward", "backward")
    line = g.__code__.co_firstlineno + 1
    assert f"aten.cumsum.default test_backend.py:{line}: no generated code for it" in text
    assert f"test_backend.py:{f.__code__.co_firstlineno + 1}" in text
    assert "self.fused_0" in forward.code and "aten.cumsum" in forward.code
    assert f"{forward.fused_operators} operators" in caplog.text
    torch._dynamo.reset()
    assert megafuse.explain(backend) == "megafuse: nothing compiled yet"


def test_what_fails_is_left_alone(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A group that does not build is halved until only the operator at fault is PyTorch's."""
    real, tried = part.Executor, []

    def executor(plan: Any, *args: Any) -> Any:
        tried.append(plan)
        if any(n.op == "tanh" for n in plan.graph.nodes):
            raise BuildError("no tanh today")
        return real(plan, *args)

    monkeypatch.setattr(part, "Executor", executor)
    backend = megafuse.Backend()
    with caplog.at_level(logging.WARNING, logger="megafuse.dynamo"):
        agree(f, (x,), backend=backend)
    assert "BuildError: no tanh today" in reasons(backend)["tanh"]
    assert fused(backend) > 10 and len(tried) > 3
    assert "do not compile together: BuildError: no tanh today" in caplog.text


@pytest.mark.parametrize("module, name", [(part, "Planner"), (compile, "schedule")])
def test_a_defect_does_not_stop_the_program(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("oh")

    monkeypatch.setattr(module, name, broken)
    backend = agree(f, (x,))
    assert fused(backend) == 0
    assert all("KeyError: 'oh'" in reason for reason in reasons(backend).values())


def test_without_a_compiler_everything_runs_in_pytorch(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: Any) -> Any:
        raise ToolchainError("install g++")

    monkeypatch.setattr(part, "Executor", missing)
    with caplog.at_level(logging.WARNING, logger="megafuse.dynamo"):
        backend = agree(f, (x,))
    assert fused(backend) == 0 and "install g++" in reasons(backend).values()
    assert caplog.text.count("install g++") == 2  # once a graph, not once an operator
