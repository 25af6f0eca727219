"""The block on a CUDA device: the policy, determinism, memory, streams and layouts."""

from __future__ import annotations

import pytest
import torch
from support import assert_close_to_float64, block_case, count_plans, step

import megafuse
from megafuse import Options
from megafuse.subgraphs import Settings, WorkloadSubgraph
from megafuse.tools.candidate import Candidate
from megafuse.tools.check import check_cases

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"
)

PUBLIC = (4, 16, 128, 2)
ODD = [(1, 8, 64, 2), (5, 24, 120, 3), (3, 8, 72, 2), (1, 64, 1280, 2), (64, 16, 512, 2)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def candidate(shape: tuple[int, ...], dtype: torch.dtype, **options: str) -> Candidate:
    settings = Settings(shape, dtype, torch.device("cuda"))
    return Candidate(WorkloadSubgraph("rankmixer", settings), Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [PUBLIC, *ODD], ids=str)
def test_policy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    seeds = range(2 if shape == (1, 64, 1280, 2) else 8)
    report = check_cases(candidate(shape, dtype).make, seeds, float32=False)
    assert report.passed, str(report)
    assert len(report.stages[0].tensors) == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(520, 32, 256, 2), (520, 16, 480, 2), (130, 64, 1280, 2)], ids=str
)
def test_policy_in_layouts_for_many_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shelves, unpacked parameters and one reduction for both moments; even rows and odd ones."""
    report = check_cases(candidate(shape, dtype).make, range(2), float32=False)
    assert report.passed, str(report)


def test_rows_far_from_zero() -> None:
    """Means of a hundred deviations, constant rows, rows that begin with an outlier."""
    case = block_case((520, 32, 256, 2), torch.bfloat16, device="cuda")
    with torch.no_grad():
        case.args[0].add_(100)
        case.args[0][:, ::5] = 7
        case.args[0][:, 1::5, 0] = 3000
    assert_close_to_float64(case.module, case.args, upstream=[case.grad_output])


def test_eager_rounding() -> None:
    make = candidate(PUBLIC, torch.bfloat16, rounding="eager").make
    report = check_cases(make, range(8), float32=False)
    assert report.passed, str(report)


@pytest.fixture(scope="module")
def public() -> tuple:  # type: ignore[type-arg]
    case = block_case(PUBLIC, torch.bfloat16, device="cuda")
    fused = megafuse.fuse(case.module, *case.args)
    return case, fused, step(fused, list(fused.parameters()), case.args, [case.grad_output])


def assert_equal(got: list, want: list) -> None:  # type: ignore[type-arg]
    assert len(got) == len(want) > 1
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"result {i}"


def test_the_first_batch_leaves_no_trace() -> None:
    """Layouts follow from a call's own sizes: what else a module has seen cannot show."""
    small, large = (block_case((b, 16, 64, 2), torch.bfloat16, device="cuda") for b in (3, 600))
    want = []
    for case in (small, large):
        fresh = megafuse.fuse(case.module, *case.args)
        want.append(step(fresh, list(fresh.parameters()), case.args, [case.grad_output]))
    for first, second in ((0, 1), (1, 0)):
        fused = megafuse.fuse(small.module)
        for i in (first, second):
            case = (small, large)[i]
            fused.load_state_dict(case.module.state_dict())
            got = step(fused, list(fused.parameters()), case.args, [case.grad_output])
            assert_equal(got, want[i])
        assert count_plans(fused) == 1


def test_repeated_runs_are_bitwise_equal(public: tuple) -> None:  # type: ignore[type-arg]
    case, fused, want = public
    for _ in range(20):
        assert_equal(step(fused, list(fused.parameters()), case.args, [case.grad_output]), want)


def test_poisoned_allocator(public: tuple) -> None:  # type: ignore[type-arg]
    """Freshly allocated memory holds NaN: what is read before it is written shows."""
    case, fused, want = public
    for _ in range(3):
        torch.cuda.empty_cache()
        held = [torch.full((n,), float("nan"), device="cuda")
                for n in [1 << k for k in range(8, 25)] * 4]  # fmt: skip
        torch.cuda.synchronize()
        del held
        assert_equal(step(fused, list(fused.parameters()), case.args, [case.grad_output]), want)


def test_layouts_of_inputs_and_gradients(public: tuple) -> None:  # type: ignore[type-arg]
    case, fused, want = public
    parameters = list(fused.parameters())
    x, grad = case.args[0].detach(), case.grad_output
    for lay in (
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    ):
        assert_equal(step(fused, parameters, [lay(x).requires_grad_()], [lay(grad)]), want)
    ones = torch.ones_like(grad)
    plain = step(fused, parameters, case.args, [ones])
    assert_equal(step(fused, parameters, case.args, [ones[:1, :1, :1].expand_as(ones)]), plain)


def test_another_stream(public: tuple) -> None:  # type: ignore[type-arg]
    """Kernels follow the current stream: their input is still being written on it."""
    case, fused, want = public
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = torch.zeros_like(case.args[0])
        late.copy_(case.args[0].detach())
        got = step(fused, list(fused.parameters()), [late.requires_grad_()], [case.grad_output])
    stream.synchronize()
    assert_equal(got, want)


def test_batch_changes_without_a_new_plan(public: tuple) -> None:  # type: ignore[type-arg]
    case, fused, _ = public
    for batch in (1, 7, 64, 4):
        torch.manual_seed(batch)
        x = torch.randn(batch, *PUBLIC[1:3], dtype=torch.bfloat16, device="cuda")
        grad = torch.randn_like(x)
        args = [x.requires_grad_()]
        got = step(fused, list(fused.parameters()), args, [grad])
        eager = step(case.module, list(case.module.parameters()), args, [grad])
        for a, b in zip(got, eager, strict=True):
            assert a is not None and b is not None and torch.isfinite(a).all()
            assert (a.float() - b.float()).norm() <= 0.03 * b.float().norm()
    assert count_plans(fused) == 1


def test_parameters_and_inputs_are_not_written(public: tuple) -> None:  # type: ignore[type-arg]
    case, fused, _ = public
    owned = [case.args[0], case.grad_output, *fused.parameters()]
    before = [t.detach().clone() for t in owned]
    step(fused, list(fused.parameters()), case.args, [case.grad_output])
    torch.cuda.synchronize()
    assert_equal([t.detach() for t in owned], before)


def test_tensors_on_two_devices_are_eagers_error(public: tuple) -> None:  # type: ignore[type-arg]
    case, fused, _ = public
    with pytest.raises(RuntimeError, match="device"):
        fused(case.args[0].cpu())
