"""Drop-in behaviour that only a CUDA device shows: streams, graphs, devices, memory formats."""

from __future__ import annotations

import copy

import pytest
import torch
from support import count_plans
from torch import Tensor, nn

import megafuse

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
)

WIDTH = 128


class Net(nn.Module):
    """A product, norms, a buffer and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(a) * b + self.shift)


def make(dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Net:
    torch.manual_seed(0)
    return Net().to(device, dtype)


def draw(batch: int = 32, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, WIDTH, generator=generator)
    return x.to(device, dtype).requires_grad_()


def grads(module: nn.Module, x: Tensor) -> list[Tensor]:
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


def near(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device, f"result {i}"
        assert torch.isfinite(a).all(), f"result {i}"
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error <= (0.03 if a.dtype == torch.bfloat16 else 2e-3), f"result {i}: {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_batch_changes_without_a_new_plan_or_kernel(dtype: torch.dtype) -> None:
    net = make(dtype)
    fused = megafuse.fuse(net)
    for batch in (32, 1, 257, 8, 1000):
        near(grads(fused, draw(batch, dtype)), grads(net, draw(batch, dtype)))
    assert count_plans(fused) == 1
    (compiled,) = next(iter(fused._plans.values()))
    modules = {n: b.module for n, b in compiled.forward.built.items()}
    fused(draw(77, dtype))
    assert modules and modules == {n: b.module for n, b in compiled.forward.built.items()}


def test_streams_other_than_the_default() -> None:
    """Forward and backward on two streams at once, each fed late; then on a third one."""
    net = make()
    fused = megafuse.fuse(net)
    want = {b: grads(fused, draw(b)) for b in (16, 48)}
    torch.cuda.synchronize()
    got: dict[int, list[Tensor]] = {}
    streams = {b: torch.cuda.Stream() for b in want}
    sources = {b: draw(b).detach() for b in want}
    torch.cuda.synchronize()
    for _ in range(3):
        for b, stream in streams.items():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                late = torch.zeros_like(sources[b]).copy_(sources[b]).requires_grad_()
                got[b] = grads(fused, late)
        torch.cuda.synchronize()
        for b in want:
            assert all(torch.equal(p, q) for p, q in zip(got[b], want[b], strict=True))


def test_backward_on_the_stream_of_its_forward() -> None:
    fused = megafuse.fuse(make())
    x = draw()
    want = grads(fused, x)[1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = fused(x)
    stream.synchronize()
    (got,) = torch.autograd.grad(out.square().sum(), x)  # called from the default stream
    torch.cuda.synchronize()
    assert torch.equal(got, want)


def test_a_whole_step_in_a_cuda_graph() -> None:
    """Zero, forward, loss, backward and optimizer captured once; replays follow their inputs."""
    net, twin = make(torch.float32), make(torch.float32)
    fused = megafuse.fuse(net)
    x = draw(dtype=torch.float32).detach()
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=1e-3)
    reference = torch.optim.SGD(twin.parameters(), lr=1e-3)

    def step(module: nn.Module, opt: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        opt.zero_grad(set_to_none=True)
        loss = (module(batch) - 1).square().mean()
        loss.backward()
        opt.step()
        return loss

    start = copy.deepcopy(net.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(fused, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(fused, optimizer, x)
    net.load_state_dict(start)
    for k in range(5):
        batch = draw(32, torch.float32).detach() * (1 + k)
        x.copy_(batch)
        graph.replay()
        want = step(twin, reference, batch)
        torch.testing.assert_close(loss, want, rtol=1e-3, atol=1e-5)
    for p, q in zip(params, twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_tensor_on_a_device_that_is_not_current() -> None:
    assert torch.cuda.current_device() == 0
    net = make(device="cuda:1")
    fused = megafuse.fuse(net)
    x = draw(device="cuda:1")
    near(grads(fused, x), grads(net, x))
    assert torch.cuda.current_device() == 0
    for device in ("cuda:0", "cuda:1"):  # and moved between them
        fused.to(device)
        near(grads(fused, draw(device=device)), grads(net, draw(device=device)))
    with pytest.raises(RuntimeError, match="device"):
        fused(draw(device="cuda:0"))


def test_moving_between_cpu_and_gpu() -> None:
    net = make(torch.float32, "cpu")
    fused = megafuse.fuse(net)
    on_cpu = grads(fused, draw(8, torch.float32, "cpu"))
    fused.cuda()
    on_gpu = grads(fused, draw(8, torch.float32))
    near([g.cpu() for g in on_gpu], on_cpu)
    fused.cpu()
    got = grads(fused, draw(8, torch.float32, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(got, on_cpu, strict=True))
    assert count_plans(fused) == 2


def test_results_lie_in_memory_as_eagers_do() -> None:
    def code(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x) * 2, x.exp().transpose(0, 1)

    fused = megafuse.fuse(code)
    for x in (draw(), draw().detach().t().requires_grad_()):
        for got, want in zip(fused(x), code(x), strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
            assert got.stride() == want.stride()
    x = torch.randn(2, 64, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    x.requires_grad_()
    norm = nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()).cuda()
    twin = copy.deepcopy(norm)
    fused_norm = megafuse.fuse(norm)
    got, want = fused_norm(x), twin(x)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert got.stride() == want.stride()
    (a,), (b,) = (torch.autograd.grad(o.square().sum(), x) for o in (got, want))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    for p, q in zip(norm.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_autocast_around_the_call() -> None:
    net = make(torch.float32)
    fused = megafuse.fuse(net)
    with torch.autocast("cuda", torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        got = fused(draw(dtype=torch.float32))
    with torch.autocast("cuda", torch.bfloat16):
        want = net(draw(dtype=torch.float32))
    assert torch.equal(got, want) and got.dtype == want.dtype


def test_backward_frees_what_it_has_read() -> None:
    """After a step, only what the caller holds is left."""
    net = make()
    fused = megafuse.fuse(net)
    x = draw(1024)
    for _ in range(2):  # the first call makes the plan, and PyTorch its own workspaces
        grads(fused, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        grads(fused, x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
