"""torch.compile(backend="megafuse") on a CUDA device: training, run-time sizes, mixed devices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training import Recommender, Transformer, compare, losses, made

import megafuse

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
)


@pytest.mark.parametrize("kind", [Transformer, Recommender])
def test_losses_are_inside_the_spread_of_eager_runs(kind: type[nn.Module]) -> None:
    backend = megafuse.Backend()
    compare(kind, backend, "cuda")
    assert all(g.parts and g.row_regions > 4 for g in backend.report().graphs)


def test_training_in_bfloat16_follows_eager() -> None:
    curves = []
    for compiled in (False, True):
        model = made(Transformer, device="cuda").bfloat16()
        step = torch.compile(model, backend=megafuse.Backend()) if compiled else model
        curves.append(losses(model, step, "cuda", steps=20).float())
    assert curves[1][-1] < curves[1][0]
    torch.testing.assert_close(*curves, rtol=0.02, atol=0.02)


def test_two_devices_in_one_graph() -> None:
    """Tensors on the host, scalars among them, meet those on the device as in eager."""

    def f(x: Tensor, host: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        on_host = torch.tanh(host * 2).exp()
        return torch.sigmoid(x * scale + 1) + on_host.to(x.device), on_host + 1

    backend = megafuse.Backend()
    compiled = torch.compile(f, backend=backend)
    for batch in (4, 6, 9):
        args = torch.randn(batch, 8, device="cuda"), torch.randn(batch, 8), torch.tensor(0.5)
        for got, want in zip(compiled(*args), f(*args), strict=True):
            torch.testing.assert_close(got, want)
    assert len(backend.report().graphs) == 2
