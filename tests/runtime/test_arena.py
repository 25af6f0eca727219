"""Small and middling calls: the same bits as step by step, memory of their own, no more of it, and
what reaches the driver."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import block_case, step
from torch import Tensor, nn

import megafuse
from megafuse.runtime import arena, cuda, native
from megafuse.runtime.arena import Piece
from megafuse.runtime.native import Launch, Patch, Queue, Target

ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
READDRESS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Net(nn.Module):
    """Two row regions with column sums, around a product; the activation is returned too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 16)
        self.out = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.norm(x))
        y = self.linear(h)
        return self.out(y * torch.sigmoid(y)), h


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory holds NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def example(seed: int = 1, batch: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 24, generator=generator).requires_grad_()


def executors(fused: megafuse.FusedModule) -> Any:
    (compiled,) = next(iter(fused._plans.values()))
    return compiled.forward, compiled.backward


def programs(fused: megafuse.FusedModule) -> list[Any]:
    return [r.program for e in executors(fused) if e is not None for r in e.recipes.values()]


def cases() -> dict[str, Any]:
    def net() -> Any:
        return Net(), [example()]

    def block(dtype: torch.dtype) -> Any:
        case = block_case((3, 4, 32, 2), dtype)
        return case.module, list(case.args)

    return {
        "net": net,
        "block": lambda: block(torch.float32),
        "block in bf16": lambda: block(torch.bfloat16),
        "a cat and a scalar": lambda: (
            lambda x: (torch.cat([x.exp(), x.sum(1, keepdim=True)], 1).softmax(1), x.mul(x).sum()),
            [example()],
        ),
    }  # fmt: skip


@pytest.fixture(params=["small", "middling"])
def size(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """What calls count as."""
    if request.param == "middling":
        middling(monkeypatch)
    return str(request.param)


def middling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "SMALL_BYTES", -1)
    monkeypatch.setattr(arena, "APART_BYTES", 1024)


@pytest.mark.parametrize("name", cases())
def test_the_same_bits_as_step_by_step(
    name: str, size: str, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    target, args = cases()[name]()
    parameters = list(target.parameters()) if isinstance(target, nn.Module) else []
    fused = megafuse.fuse(target)
    got = step(fused, parameters, args)
    assert all(p is not None for p in programs(fused)) and programs(fused)
    for compiled in next(iter(fused._plans.values())):
        compiled.forward.recipes.clear()
        compiled.backward.recipes.clear()
    monkeypatch.setattr(native, "_library", lambda: None)  # no compiler
    want = step(fused, parameters, args)
    assert not any(programs(fused))
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None
        assert torch.isfinite(a).all() and torch.equal(a, b) and a.stride() == b.stride()


def test_what_the_caller_sees_has_memory_of_its_own(size: str) -> None:
    fused = megafuse.fuse(Net())
    results = [r for r in step(fused, list(fused.parameters()), [example()]) if r is not None]
    storages = [r.untyped_storage() for r in results]
    assert len({s.data_ptr() for s in storages}) == len(results)
    assert all(s.nbytes() == r.numel() * 4 for s, r in zip(storages, results, strict=True))
    forward, _ = executors(fused)
    compiled, tensors, sizes = fused._call((example(),), {})  # type: ignore[misc]
    with torch.no_grad():
        outputs, kept, _ = compiled.run_forward(tensors, sizes)
    pieces = [k for k in kept if isinstance(k, Piece)]
    assert pieces and not any(isinstance(o, Piece) for o in outputs)
    assert all(p.tensor().data_ptr() == p.data_ptr() for p in pieces)
    assert any(k.data_ptr() == outputs[1].data_ptr() for k in kept)  # both result and kept
    assert forward.public == 2


def test_large_calls_run_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "MIDDLE_BYTES", 0)
    fused = megafuse.fuse(Net())
    step(fused, list(fused.parameters()), [example()])
    assert programs(fused) == [None, None]


class Memory:
    """Counts the bytes that calls ask for and still hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.peak = 0
        for name in ("empty", "empty_strided"):
            monkeypatch.setattr(torch, name, functools.partial(self._made, getattr(torch, name)))

    def _made(self, make: Any, *args: Any, **how: Any) -> Tensor:
        tensor: Tensor = make(*args, **how)
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self._freed, storage.nbytes())
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        return tensor

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes


class Long(nn.Module):
    """Temporaries and kept values by turns, with products between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        return x


@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("name", ["block", "long"])
def test_memory_is_that_of_steps(name: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "block":
        case = block_case((64, 8, 64, 2))
        module, args = case.module, list(case.args)
    else:
        module, args = Long(), [torch.randn(500, 64).requires_grad_()]
    middling(monkeypatch)
    peaks, counts = [], []
    for limit in (1 << 30, -1):
        monkeypatch.setattr(arena, "MIDDLE_BYTES", limit)
        fused = megafuse.fuse(module)

        def call(fused: Any = fused) -> None:
            with torch.set_grad_enabled(grad):
                out = fused(*args)
            if grad:
                torch.autograd.backward(out, torch.ones_like(out))

        call()
        assert all((p is None) == (limit < 0) for p in programs(fused))
        counts += [len(p._runs) for p in programs(fused) if p is not None]
        with monkeypatch.context() as patch:
            memory = Memory(patch)
            call()
            peaks.append(memory.peak)
            for p in (*args, *module.parameters()):
                p.grad = None
        assert memory.live == 0
    program, steps = peaks
    # With PyTorch 2.6 both hold more, as if what forward kept were freed only after backward; with
    # 2.11 and 2.13 they do not. Versions between were not tried.
    early = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    assert program <= (1.05 if early else 1.2) * steps
    assert sum(counts) < sum(len(e.plan.regions) for e in executors(fused) if e is not None)


def test_a_forward_of_pieces_may_be_followed_by_steps(size: str) -> None:
    fused = megafuse.fuse(Net())
    want = step(fused, list(fused.parameters()), [example()])
    x = example()
    out, _ = fused(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(11))
    with torch.profiler.profile():
        (got,) = torch.autograd.grad(out, x, upstream)
    (again,) = torch.autograd.grad(fused(x := example())[0], x, upstream)
    assert torch.equal(got, again) and want[0] is not None and torch.equal(out, want[0])


def test_backward_twice_and_hooks_on_what_is_saved(size: str) -> None:
    fused = megafuse.fuse(Net())
    x = example()
    out, _ = fused(x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    fused(example(7))[0].sum().backward()  # other calls do not disturb what is kept
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], first)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.clone(), lambda t: t
    ):
        out, _ = fused(x)
    assert len(packed) > 3 and all(type(t) in (Tensor, nn.Parameter) for t in packed)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], first)


def test_threads_share_a_program(size: str) -> None:
    fused = megafuse.fuse(Net())
    inputs = [example(seed) for seed in range(4)]
    want = [step(fused, list(fused.parameters()), [x]) for x in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            got = step(fused, list(fused.parameters()), [inputs[k]])
            for a, b in zip(got, want[k], strict=True):
                # Not to the bit: PyTorch's own product may round otherwise in another thread.
                if a is None or b is None or not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- what reaches the driver


class Recorder:
    """Stands where cuLaunchKernelEx and cuTensorMapReplaceAddress are."""

    def __init__(self, size: int) -> None:
        self.calls: list[Any] = []
        self.answers: list[int] = []
        self.known = 0
        self.launch, self.readdress = ENTRY(self._launch), READDRESS(self._readdress)
        self._size = size

    def _launch(self, how: int, function: int, params: int, extra: int) -> int:
        where = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        assert where is not None and where % 64 == 0 and not extra
        config = struct.unpack("=7I4x2QI4x", ctypes.string_at(how, 56))
        self.calls.append((function, config, ctypes.string_at(where, self._size)))
        return self.answers.pop(0) if self.answers else 0

    def _readdress(self, map: int, address: int) -> int:
        ctypes.memmove(map, b"map!" + struct.pack("=q", address), 12)
        return 0

    def target(self) -> Target:
        def known() -> None:
            self.known += 1

        library = native._library()
        assert library is not None
        return Target(library.mf_enqueue, native._address(self.launch),
                      native._address(self.readdress), known)  # fmt: skip


def queue_of(recorder: Recorder) -> Queue:
    from megafuse.runtime.launch import config

    first = Launch("first", 7, config((5, 6, 7), 320, 48), struct.pack("=3q", 0, 11, 0),
                   (Patch(0, "x"), Patch(16, "y", 8)))  # fmt: skip
    second = Launch("second", 8, config((1, 1, 1), (32, 8, 1), 0), bytes(24),
                    (Patch(0, "y", 2, map=True),))  # fmt: skip
    return Queue([first, second], {"x": (0, 256), "y": (1, 0)}.__getitem__, recorder.target())


def test_launches_are_packed_for_the_driver() -> None:
    recorder = Recorder(24)
    queue = queue_of(recorder)
    queue.run(struct.pack("=2q", 1000, 2**40), 99)
    assert recorder.calls == [
        (7, (5, 6, 7, 320, 1, 1, 48, 99, 0, 0), struct.pack("=3q", 1256, 11, 2**40 + 8)),
        (8, (1, 1, 1, 32, 8, 1, 0, 99, 0, 0),
         b"map!" + struct.pack("=q", 2**40 + 2) + bytes(12)),
    ]  # fmt: skip
    recorder.calls.clear()
    queue.run(struct.pack("=2q", 0, 0), 0)  # nothing stays from the call before
    assert recorder.calls[0] == (
        7,
        (5, 6, 7, 320, 1, 1, 48, 0, 0, 0),
        struct.pack("=3q", 256, 11, 8),
    )


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_reason", str)
    recorder = Recorder(24)
    recorder.answers = [0, 701]
    with pytest.raises(cuda.DriverError, match="second failed: 701"):
        queue_of(recorder).run(bytes(16), 0)
    # A thread that the driver does not know goes on where it was refused.
    recorder.answers, recorder.calls = [0, cuda.INVALID_CONTEXT, 0], []
    queue_of(recorder).run(bytes(16), 0)
    assert recorder.known == 1 and [c[0] for c in recorder.calls] == [7, 8, 8]


def test_a_refused_launch_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_reason", str)
    recorder = Recorder(8)
    recorder.answers = [719]
    monkeypatch.setattr(native, "on_host", recorder.target)
    with pytest.raises(cuda.DriverError, match=r"launching mf_F1 .* failed: 719"):
        megafuse.fuse(Net())(example())
