"""Calls from several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from parity import assert_generated, draw, seeded
from support import count_plans
from torch import Tensor, nn

import megafuse


def in_threads(work: Callable[[int], None], count: int = 6) -> None:
    faults: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(k: int) -> None:
        try:
            barrier.wait(timeout=60)
            work(k)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def test_forward_and_backward_in_every_thread() -> None:
    """First calls at once, other batches, then many; each thread's results are its own."""
    net = seeded()
    fused = megafuse.fuse(net)
    xs = [draw(3 + k, 6, seed=k) for k in range(6)]
    want = [torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]) for x in xs]
    got: dict[int, tuple[Tensor, ...]] = {}

    def work(k: int) -> None:
        for _ in range(5):
            loss = fused(xs[k]).square().sum()
            got[k] = torch.autograd.grad(loss, [xs[k], *net.parameters()])

    in_threads(work)
    for k in range(6):
        for a, b in zip(got[k], want[k], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert count_plans(fused) == 1
    assert_generated(fused)


def test_modules_that_share_parameters() -> None:
    """Tracing one swaps parameters for a moment; calls of the other must not meet them."""
    shared = nn.Linear(6, 6)
    modules = [nn.Sequential(shared, act()) for act in (nn.Tanh, nn.ReLU, nn.Sigmoid)]
    fused = [megafuse.fuse(m) for m in modules]
    x = draw(4, 6, grad=False)
    want = [m(x) for m in modules]

    def work(k: int) -> None:
        for round in range(4):
            j = (k + round) % 3
            torch.testing.assert_close(fused[j](x), want[j])

    in_threads(work)
    assert all(isinstance(p, nn.Parameter) and p.device.type == "cpu" for p in shared.parameters())


def test_modes_are_each_threads_own() -> None:
    fused = megafuse.fuse(seeded())
    x = draw(4, 6)

    def work(k: int) -> None:
        with torch.set_grad_enabled(k % 2 == 0):
            for _ in range(3):
                assert fused(x).requires_grad == (k % 2 == 0)

    in_threads(work)
