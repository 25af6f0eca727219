"""state_dict, deepcopy, pickle, attributes, and the module inside a larger one."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Net, agree, assert_generated, draw, seeded
from support import count_plans
from torch import Tensor, nn

import megafuse
from megafuse import FusedModule, Options


class Versioned(nn.Module):
    """Saves more than its tensors, and renames a key of old checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.register_buffer("scratch", torch.ones(6), persistent=False)
        self.note = "fresh"

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) * self.scratch

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *rest)


def test_state_dict_round_trip_with_everything_a_module_may_save() -> None:
    module = seeded(Versioned)
    module.note = "trained"
    fused = megafuse.fuse(module)
    saved = fused.state_dict()
    assert list(saved) == list(module.state_dict()) == ["weight", "_extra_state"]
    other = megafuse.fuse(seeded(Versioned, seed=4))
    other.load_state_dict({"w": saved["weight"], "_extra_state": saved["_extra_state"]})
    assert other.note == other.original.note == "trained"
    x = draw(4, 6)
    assert torch.equal(other(x), fused(x))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


def test_inside_a_larger_module() -> None:
    class Model(nn.Module):
        def __init__(self, fuse: bool) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 6)
            blocks = [Net(), Versioned()]
            self.blocks = nn.ModuleList(map(megafuse.fuse, blocks) if fuse else blocks)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = x + block(x)
            return x

    plain, model = seeded(lambda: Model(False)), seeded(lambda: Model(True), seed=8)
    assert list(plain.state_dict()) == list(model.state_dict())
    names = [n for n, _ in plain.named_parameters()]
    assert names == [n for n, _ in model.named_parameters()]
    model.load_state_dict(plain.state_dict())
    model.eval()
    assert not model.blocks[0].original.training
    model.train()
    x = draw(4, 6)
    got, want = (
        torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (model, plain)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert_generated(model.blocks[0])
    model.to(torch.bfloat16)
    assert model.blocks[0].original.lin.weight.dtype == torch.bfloat16


def test_copies_are_independent_and_run_generated_code(tmp_path: Path) -> None:
    net = seeded()
    fused = megafuse.fuse(net, options=Options(memory="min"))
    x = draw(4, 6)
    want = fused(x)
    path = tmp_path / "fused.pt"
    torch.save(fused, path)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)),
              torch.load(path, weights_only=False)]  # fmt: skip
    for made in copies:
        assert isinstance(made, FusedModule) and made.options.memory == "min"
        assert not {id(p) for p in made.parameters()} & {id(p) for p in net.parameters()}
        agree(made.original, x, fused=made)
        with torch.no_grad():
            made.lin.weight.zero_()
        assert not torch.equal(made(x), want)
    assert torch.equal(fused(x), want)


def test_copies_keep_hooks_and_mode() -> None:
    fused = megafuse.fuse(seeded()).eval()
    fused.register_forward_hook(double)
    made = pickle.loads(pickle.dumps(fused))
    assert not made.training and not made.original.training
    assert torch.equal(made(draw(4, 6)), fused(draw(4, 6)))
    assert torch.equal(made(draw(4, 6)), made.forward(draw(4, 6)) * 2)


def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


class Tuned(nn.Module):
    """Reads attributes of every plain kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.power, self.on, self.act = 2.0, 2, True, torch.tanh
        self.steps = [1.0, 2.0]
        self.inner = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scale if self.on else x
        return self.act(x) ** self.power + self.steps[0] * x


ATTRIBUTES: dict[str, Any] = {
    "scale": 3.0, "power": 3, "on": False, "act": torch.sigmoid, "steps": [5.0, 2.0],
    "inner": nn.Identity(),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_changes_is_no_stale_constant(name: str) -> None:
    for through in ("fused", "original"):
        module = Tuned()
        fused = megafuse.fuse(module)
        x = draw(4, 6)
        agree(module, x, fused=fused)
        setattr(fused if through == "fused" else module, name, ATTRIBUTES[name])
        assert getattr(module, name) is getattr(fused, name) is ATTRIBUTES[name]
        agree(module, x, fused=fused)


def test_changes_inside_lists_and_of_submodules() -> None:
    module = Tuned()
    fused = megafuse.fuse(module)
    x = draw(4, 6)
    agree(module, x, fused=fused)
    module.steps[0] = -4.0
    agree(module, x, fused=fused)
    fused.inner.eps = 0.5
    agree(module, x, fused=fused)
    assert count_plans(fused) == 3
    module.steps[0], module.inner.eps = 1.0, 1e-5  # back to the first plan
    agree(module, x, fused=fused)
    assert count_plans(fused) == 3
    del fused.power
    assert not hasattr(module, "power")


def test_methods_properties_and_names() -> None:
    fused = megafuse.fuse(seeded(Versioned))
    assert fused.get_extra_state() == {"note": "fresh"}
    assert [n for n, _ in fused.named_buffers()] == ["scratch"]
    fused.register_buffer("more", torch.zeros(2))
    assert "more" in dict(fused.original.named_buffers())
    fused.extra = nn.Linear(2, 2)
    assert fused.original.extra is fused.extra and "extra.weight" in fused.state_dict()
