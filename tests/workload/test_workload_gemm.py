"""The grouped GEMM: equal and variable group sizes, values and gradients, against einsum."""

import pytest
import torch

from rank_mixer_src.gemm import GEMM_BACKENDS, Gemm, grouped_gemm

EQUAL, VARIABLE = [5, 5, 5], [2, 0, 7]


def operands(sizes: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    groups = [torch.randn(m, 4, dtype=torch.float64, requires_grad=True) for m in sizes]
    return groups, torch.randn(len(sizes), 4, 6, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("sizes", [EQUAL, VARIABLE, [3]])
def test_each_group_meets_its_own_weight(sizes: list[int]) -> None:
    groups, weights = operands(sizes)
    products = grouped_gemm(groups, weights)
    assert len(products) == len(sizes)
    upstream = [torch.randn_like(p) for p in products]
    gradients = torch.autograd.grad(products, (*groups, weights), upstream)
    for group, weight, product in zip(groups, weights, products, strict=True):
        torch.testing.assert_close(product, torch.einsum("mk,kn->mn", group, weight))
    for weight, up, gradient in zip(weights, upstream, gradients[:-1], strict=True):
        torch.testing.assert_close(gradient, torch.einsum("mn,kn->mk", up, weight))
    for group, up, gradient in zip(groups, upstream, gradients[-1], strict=True):
        torch.testing.assert_close(gradient, torch.einsum("mk,mn->kn", group, up))


@pytest.mark.parametrize("sizes", [EQUAL, [2, 1, 3]])
def test_gradients_by_finite_differences(sizes: list[int]) -> None:
    groups, weights = operands(sizes)
    torch.autograd.gradcheck(lambda w, *g: tuple(grouped_gemm(g, w)), (weights, *groups))


@pytest.mark.parametrize(("sizes", "called"), [(EQUAL, "bmm"), (VARIABLE, "matmul")])
def test_group_sizes_choose_the_operator(
    sizes: list[int], called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("bmm", "matmul"):
        real: Gemm = getattr(torch, name)

        def spy(*args: torch.Tensor, name: str = name, real: Gemm = real) -> torch.Tensor:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(torch, name, spy)
    groups, weights = operands(sizes)
    grouped_gemm(groups, weights)
    assert set(calls) == {called}
    assert len(calls) == (1 if called == "bmm" else len(sizes))


def test_both_paths_and_the_stacked_form_agree() -> None:
    groups, weights = operands(EQUAL)
    equal = grouped_gemm(groups, weights)
    uneven = grouped_gemm([torch.cat([groups[0], groups[0]]), *groups[1:]], weights)
    torch.testing.assert_close(uneven[0][:5], equal[0])
    torch.testing.assert_close(uneven[1:], equal[1:])
    stacked = torch.stack(groups)
    assert torch.equal(grouped_gemm(stacked, weights), torch.stack(equal))
    assert torch.equal(
        GEMM_BACKENDS["grouped"](stacked, weights), GEMM_BACKENDS["bmm"](stacked, weights)
    )


def test_numbers_of_groups_and_weights_must_agree() -> None:
    groups, weights = operands(EQUAL)
    with pytest.raises(ValueError, match="one weight a group"):
        grouped_gemm(groups[:2], weights)
