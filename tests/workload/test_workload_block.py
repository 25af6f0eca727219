"""The block, its FFN, its initializer and its seeds against the brief's own formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_mixer_src.bench_rank_mixer import (
    NezhaLayerNorm,
    RankMixerBlockFwd,
    dense_ffn_v2_compute,
    token_mixer,
)
from rank_mixer_src.initializer import he_uniform, he_uniform_bound
from rank_mixer_src.runner import BenchConfig, require_complete, seeded_case

CPU = torch.device("cpu")
SMALL = BenchConfig(3, 4, 16, 2, dtype="float32", seed=11)


def layer_norm(z: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma + beta


def brief_ffn(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """The dense subgraph as the brief writes it, one token at a time."""
    rows = []
    for t in range(x.shape[1]):
        z = x[:, t] @ p["w1"][t] + p["b1"][t]
        u, g = z[:, : z.shape[1] // 2], z[:, z.shape[1] // 2 :]
        gate = layer_norm(g, p["norm_gate.weight"], p["norm_gate.bias"], 1e-5)
        hidden = layer_norm(u, p["norm_x.weight"], p["norm_x.bias"], 1e-5) * gate * gate.sigmoid()
        rows.append(hidden @ p["wout"][t] + p["bout"][t])
    return torch.stack(rows, dim=1)


def brief_block(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """The whole block as the brief writes it."""

    def outer(i: int, z: Tensor) -> Tensor:
        return layer_norm(z, p[f"norm{i}.gamma"], p[f"norm{i}.beta"], 1e-3)

    batch, tokens, dim = x.shape
    mixed = outer(0, x).reshape(batch, tokens, tokens, dim // tokens).swapaxes(1, 2)
    out1 = outer(1, mixed.reshape(batch, tokens, dim) + x)
    return outer(2, out1 + brief_ffn(out1, p))


def random_block(k: int, gemm_backend: str) -> RankMixerBlockFwd:
    """A float64 block whose norms are not at identity."""
    torch.manual_seed(5)
    block = RankMixerBlockFwd(4, 16, k, gemm_backend=gemm_backend, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return block


def test_token_mixing_example() -> None:
    assert token_mixer(torch.arange(8).reshape(1, 2, 4)).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


@pytest.mark.parametrize("shape", [(2, 4, 16), (1, 8, 64), (3, 1, 5)])
def test_token_mixing_moves_every_head(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape)
    _, tokens, dim = shape
    mixed = token_mixer(x)
    assert mixed.shape == x.shape
    head = dim // tokens
    for i in range(tokens):
        for j in range(tokens):
            a = mixed[:, i, j * head : (j + 1) * head]
            assert torch.equal(a, x[:, j, i * head : (i + 1) * head])


def test_token_mixing_refuses_a_dim_that_tokens_do_not_divide() -> None:
    with pytest.raises(RuntimeError):
        token_mixer(torch.zeros(1, 3, 8))


@pytest.mark.parametrize("gemm_backend", ["bmm", "grouped"])
@pytest.mark.parametrize("k", [2, 3])
def test_block_and_every_gradient_match_the_formulas(k: int, gemm_backend: str) -> None:
    block = random_block(k, gemm_backend)
    x = torch.randn(3, 4, 16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    names, parameters = zip(*block.named_parameters(), strict=True)
    copies = {n: p.detach().clone().requires_grad_() for n, p in block.named_parameters()}

    out, expected = block(x), brief_block(x, copies)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    got = torch.autograd.grad(out, (x, *parameters), upstream)
    want = torch.autograd.grad(expected, (x, *copies.values()), upstream)
    for name, a, b in zip(("inputs", *names), got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=name)


def test_dense_ffn_takes_the_documented_positional_arguments() -> None:
    block = random_block(2, "bmm")
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    out = dense_ffn_v2_compute(
        x, block.w1, block.b1, block.wout, block.bout, block.norm_x, block.norm_gate
    )
    torch.testing.assert_close(out, brief_ffn(x, block.state_dict()), rtol=1e-11, atol=1e-11)


def test_parameters_are_the_documented_ones() -> None:
    t, d, h = 4, 16, 48
    block = RankMixerBlockFwd(t, d, 3)
    expected = {
        **{f"norm{i}.{name}": (d,) for i in range(3) for name in ("gamma", "beta")},
        **{
            f"{norm}.{name}": (h,)
            for norm in ("norm_x", "norm_gate")
            for name in ("weight", "bias")
        },
        "w1": (t, d, 2 * h),
        "b1": (t, 2 * h),
        "wout": (t, h, d),
        "bout": (t, d),
    }
    assert {name: tuple(value.shape) for name, value in block.state_dict().items()} == expected
    assert (block.norm_x.eps, block.norm_gate.eps, NezhaLayerNorm.epsilon) == (1e-5, 1e-5, 1e-3)
    for name, value in block.state_dict().items():
        if name.endswith((".gamma", ".weight")):
            assert torch.equal(value, torch.ones_like(value)), name
        if name.endswith((".beta", ".bias")):
            assert torch.equal(value, torch.zeros_like(value)), name


@pytest.mark.parametrize(
    ("shape", "fan_in"), [((4, 16, 64), 64), ((4, 64), 4), ((4, 32, 16), 128), ((7,), 1)]
)
def test_he_uniform_fills_its_interval(shape: tuple[int, ...], fan_in: int) -> None:
    torch.manual_seed(0)
    bound = math.sqrt(6 / fan_in)
    assert he_uniform_bound(shape) == pytest.approx(bound, rel=1e-15)
    draws = torch.cat(
        [he_uniform(shape, dtype=torch.float32).detach().flatten() for _ in range(400)]
    )
    assert draws.abs().max() <= bound * (1 + 1e-6)
    assert draws.min() < -0.99 * bound
    assert draws.max() > 0.99 * bound
    assert draws.var().item() == pytest.approx(bound**2 / 3, rel=0.1)


def test_he_uniform_covers_weights_and_biases_of_the_block() -> None:
    block = seeded_case(SMALL, CPU).block
    for parameter in (block.w1, block.b1, block.wout, block.bout):
        bound = he_uniform_bound(parameter.shape)
        assert 0.9 * bound < parameter.abs().max().item() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("overlap", ["full", "", None, "NONE"])
def test_any_other_overlap_raises(overlap: str) -> None:
    case = seeded_case(SMALL, CPU)
    with pytest.raises(ValueError, match="overlap"):
        case.block(case.inputs, overlap=overlap)


def test_comp_only_changes_nothing() -> None:
    case = seeded_case(SMALL, CPU)
    full = case.block(case.inputs, "none", False)
    assert torch.equal(case.block(case.inputs, overlap="none", comp_only=True), full)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3, 16, 2), {}, "divide"),
        ((4, 16, 4), {}, "k must be"),
        ((4, 16, 2), {"ffn_type": "sparse_moe"}, "ffn_type"),
        ((4, 16, 2), {"gemm_backend": "other"}, "gemm_backend"),
    ],
)
def test_block_refuses(
    arguments: tuple[int, int, int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        RankMixerBlockFwd(*arguments, **options)


@pytest.mark.parametrize("rank", [0, 3])
def test_seeds_are_those_of_the_brief(rank: int) -> None:
    case = seeded_case(SMALL, CPU, rank)
    torch.manual_seed(11 + rank)
    block = RankMixerBlockFwd(4, 16, 2, dtype=torch.float32)
    inputs = torch.randn(3, 4, 16)
    upstream = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(11 + 1000 + rank))
    for name, value in case.block.state_dict().items():
        assert torch.equal(value, block.state_dict()[name]), name
    assert torch.equal(case.inputs, inputs)
    assert torch.equal(case.grad_output, upstream)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_step_replaces_gradients_instead_of_adding(dtype: str) -> None:
    case = seeded_case(BenchConfig(2, 4, 16, 2, dtype=dtype, gemm_backend="grouped"), CPU)
    require_complete(case, case.step())
    leaves = [case.inputs, *case.block.parameters()]
    first = [leaf.grad for leaf in leaves]
    case.step()
    for leaf, before in zip(leaves, first, strict=True):
        assert leaf.grad is not None and before is not None
        assert leaf.grad is not before
        assert torch.equal(leaf.grad, before)


def test_incomplete_results_are_named() -> None:
    case = seeded_case(SMALL, CPU)
    output = case.step().detach()
    case.block.b1.grad = None
    with pytest.raises(RuntimeError, match=r"b1\.grad is missing"):
        require_complete(case, output)
    case.step()
    output[0, 0, 0] = math.nan
    with pytest.raises(RuntimeError, match="output has non-finite"):
        require_complete(case, output)
