"""Small modules on generated host code: outputs and every gradient beside eager and float64."""

from __future__ import annotations

import pytest
import torch
from small_modules import CASES, make
from support import REFERENCE, assert_as_near, assert_close_to_float64, step, upstream_for
from torch import Tensor

import megafuse
from megafuse import Options, decompositions
from megafuse.errors import CaptureError

IN_BF16 = ["mlp", "softmax", "rms_norm", "activations", "cat_split_stack", "column_sums"]
ROUNDED = ["mlp", "residual", "activations"]


@pytest.mark.parametrize("name", CASES)
def test_generated_code_float32(name: str) -> None:
    module, args = make(name)
    fused = assert_close_to_float64(module, args)
    first, second = (step(fused, list(fused.parameters()), args) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", IN_BF16)
def test_generated_code_bfloat16(name: str) -> None:
    module, args = make(name, torch.bfloat16)
    assert_close_to_float64(module, args)


def test_generated_code_float16() -> None:
    module, args = make("mlp", torch.float16)
    assert_close_to_float64(module, args)


@pytest.mark.parametrize("name", CASES)
def test_reference_executor(name: str) -> None:
    module, args = make(name, torch.bfloat16 if name in IN_BF16 else torch.float32)
    assert_close_to_float64(module, args, options=REFERENCE)


@pytest.mark.parametrize("name", ROUNDED)
def test_eager_rounding_is_eagers_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every cast of eager's operator boundaries, nearly all elements are bitwise eager's.

    What differs between machines is left out: PyTorch's layer norm keeps its statistics in the
    low precision on a CPU, and in float32 on CUDA, which is what megafuse reproduces.
    """
    ours = decompositions.layer_norm

    def as_on_a_cpu(x: Tensor, *rest: object) -> tuple[Tensor, ...]:
        y, *statistics = ours(x, *rest)  # type: ignore[arg-type]
        return y, *(s.to(x.dtype).float() for s in statistics)

    layer_norm = torch.ops.aten.native_layer_norm.default
    monkeypatch.setitem(decompositions._OURS, layer_norm, as_on_a_cpu)
    module, args = make(name, torch.bfloat16)
    upstream = upstream_for([o for o in _list(module(*args))])
    eager = step(module, list(module.parameters()), args, upstream)
    fused = megafuse.fuse(module, *args, options=Options(rounding="eager"))
    got = step(fused, list(fused.parameters()), args, upstream)
    same = total = 0
    for a, b in zip(got, eager, strict=True):
        assert a is not None and b is not None
        same += int((a == b).sum())
        total += a.numel()
        assert (a - b).float().norm() <= 2.0**-7 * b.float().norm()
    assert same >= 0.95 * total, f"{same} of {total} elements equal eager's"


def _list(value: object) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]  # type: ignore[list-item]


def test_min_memory_computes_the_same() -> None:
    module, args = make("mlp")
    assert_close_to_float64(module, args, options=Options(memory="min"))


@pytest.mark.parametrize("shift, dtype", [(1e4, torch.float32), (64.0, torch.bfloat16)])
def test_a_large_mean_does_not_cancel(shift: float, dtype: torch.dtype) -> None:
    """E[x^2] - E[x]^2 would lose every digit here."""
    torch.manual_seed(5)
    module, (x, y) = make("residual", dtype)
    x = (x.detach() + shift).to(dtype).requires_grad_()
    assert_close_to_float64(module, [x, y])
    wide = module.norm.double()
    exact = wide(x.detach().double() + y.detach().double())
    module.norm.to(dtype)
    got = megafuse.fuse(module)(x, y)[0].detach()
    error = (got.double() - exact).norm() / exact.norm()
    assert error < (3e-3 if dtype == torch.float32 else 0.2)


def test_a_row_without_variance_is_finite() -> None:
    module, (x, y) = make("residual")
    with torch.no_grad():
        x[2], y[2], x[3], y[3] = 0.0, 0.0, 7.5, -2.25
    assert_close_to_float64(module, [x, y])
    out, _ = megafuse.fuse(module)(x, y)
    assert torch.equal(out[2], module.norm.bias) and torch.equal(out[3], module.norm.bias)


def test_a_nan_stays_in_its_sample() -> None:
    module, (x,) = make("mlp")
    fused = megafuse.fuse(module)
    upstream = upstream_for([module(x)])
    clean = step(fused, [], [x], upstream)
    dirty_x = x.detach().clone()
    dirty_x[2, 1, 3] = float("nan")
    out, grad = step(fused, [], [dirty_x.requires_grad_()], upstream)
    assert out is not None and grad is not None
    rows = [b for b in range(5) if b != 2]
    assert torch.equal(out[rows], clean[0][rows]) and torch.equal(grad[rows], clean[1][rows])
    assert torch.equal(out[2, [0, 2]], clean[0][2, [0, 2]])
    assert out[2, 1].isnan().all() and grad[2, 1].isnan().all()


def test_sizes_of_one_and_odd_sizes() -> None:
    module, _ = make("mlp")
    for shape in ((1, 1, 7), (1, 3, 7), (2, 1, 7), (17, 3, 7), (33, 7)):
        x = torch.randn(shape, requires_grad=True)
        assert_close_to_float64(module, [x])


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 31, 64])
def test_row_lengths(columns: int) -> None:
    def centred(x: Tensor, w: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * w

    torch.manual_seed(columns)
    x = torch.randn(3, columns, requires_grad=True)
    w = torch.randn(columns, requires_grad=True)
    upstream = torch.randn(3, columns)
    args = (x, w)
    got, want = (
        (y, *torch.autograd.grad(y, args, upstream))
        for y in (megafuse.fuse(centred)(*args), centred(*args))
    )
    wide = [t.detach().double().requires_grad_() for t in args]
    y = centred(*wide)
    exact = (y, *torch.autograd.grad(y, wide, upstream.double()))
    for i, (a, b, c) in enumerate(zip(got, want, exact, strict=True)):
        if columns > 1 or i == 1:  # one column: everything is zero in theory
            assert_as_near(str(i), a.detach(), b.detach(), c.detach())
        assert columns > 1 or bool((a == 0).all())


INTEGERS = {
    "cat": lambda i, b: torch.cat([i, i], 1).float() * 2,
    "where": lambda i, b: torch.where(i > 3, i, i * 2).float() + 1,
    "views": lambda i, b: i[:, None].expand(6, 3, 4).reshape(18, 4)[:, 1:].float().sum(0),
    "split": lambda i, b: i.split(2, 1)[1] + i.unbind(1)[2][:, None],
    "alpha": lambda i, b: torch.add(i, i, alpha=3),
    "bools": lambda i, b: (b + b).float() * 3,
    "float64": lambda i, b: (b.float().double() * 1.1).float() + 1,
}


@pytest.mark.parametrize("options", [Options(), REFERENCE], ids=["generated", "reference"])
@pytest.mark.parametrize("name", INTEGERS)
def test_other_dtypes_are_left_to_pytorch(name: str, options: Options) -> None:
    torch.manual_seed(1)
    index, mask = torch.randint(0, 9, (6, 4)), torch.rand(6, 4) > 0.5
    want = INTEGERS[name](index, mask)
    got = megafuse.fuse(INTEGERS[name], options=options)(index, mask)
    assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_operands_of_two_dtypes_are_refused_as_eager_refuses_them(dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 4, dtype=dtype), torch.randn(4, 5)
    with pytest.raises(RuntimeError):
        torch.mm(x, w)
    with pytest.raises((RuntimeError, CaptureError)):
        megafuse.fuse(torch.mm)(x, w)
