"""The example regions against float64 numpy, whichever host runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Launch = Callable[[str, Sequence[int]], None]
Place = Callable[[np.ndarray], np.ndarray]  # a copy where the kernels can reach it


def address(x: np.ndarray) -> int:
    assert x.flags.c_contiguous
    return x.ctypes.data


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, by hand: the word under test must agree with this."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    wide: np.ndarray = (x.astype(np.uint32) << 16).view(np.float32)
    return wide


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy at a 256-byte boundary, where an allocator of tensors would put it."""
    room = np.zeros(x.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def check_gate(
    launch: Launch,
    columns: int,
    dtype: str,
    rows: int = 6,
    parts: int = 2,
    place: Place = aligned,
    rounded_once: bool = False,
) -> None:
    """Runs f3, b3 and b3_finish; outputs, statistics and all six column sums must be right.

    rounded_once: the forward's results have no error but that of being stored in float32.
    """
    span = -(-rows // parts) + 1  # the last part is short
    random = np.random.default_rng(columns)

    def store(x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x, np.float32)
        return place({"float": x, "bf16": to_bf16(x), "f16": x.astype(np.float16)}[dtype])

    def load(x: np.ndarray) -> np.ndarray:
        return (from_bf16(x) if dtype == "bf16" else x).astype(np.float64)

    def blank(*shape: int) -> np.ndarray:
        return place(np.full(shape, np.nan, np.float32))

    z, dh = (store(random.standard_normal((rows, k * columns)) + 1) for k in (2, 1))
    gx, bx, gg, bg = (store(random.standard_normal(columns)) for _ in range(4))
    h, h2 = store(np.full((rows, columns), np.nan)), store(np.full((rows, columns), np.nan))
    dz, stats = store(np.full(z.shape, np.nan)), blank(rows, 4)
    parameters = [address(v) for v in (gx, bx, gg, bg)]
    launch("f3", [address(z), *parameters, address(h), address(stats), rows, parts, span])
    partials = [blank(parts, columns) for _ in range(6)]
    sums = [store(np.full(columns, np.nan)) for _ in range(6)]
    args = [address(z), address(dh), *parameters, address(stats), address(dz), address(h2)]
    args += [address(v) for v in (*partials, *sums)] + [rows, parts, span]
    launch("b3", args)
    launch("b3_finish", args)

    want_h, want_dz, want_sums = gate(*(load(v) for v in (z, dh, gx, bx, gg, bg)))
    unit = {"float": 2e-6, "bf16": 6e-3, "f16": 8e-4}[dtype]
    assert np.abs(load(h) - want_h).max() <= unit * max(1, np.abs(want_h).max())
    if rounded_once:
        assert np.linalg.norm(h - want_h) <= 0.51 * 2.0**-24 * np.linalg.norm(want_h)
        assert np.abs(h2 - want_h).max() <= unit * max(1, np.abs(want_h).max())
    else:  # the backward recomputes it from statistics that were stored, contracted as it may be
        ulp = {"float": 4 * 2.0**-23, "bf16": 2.0**-7, "f16": 2.0**-10}[dtype]
        np.testing.assert_allclose(load(h2), load(h), rtol=ulp, atol=4 * 2.0**-23)
    np.testing.assert_allclose(stats[:, 0], load(z)[:, :columns].mean(1), rtol=1e-5, atol=1e-5)
    if columns > 1:  # one column: every gradient through its norm is zero times 300
        assert np.abs(load(dz) - want_dz).max() <= unit * 4 * np.abs(want_dz).max()
        for got, want in zip(sums, want_sums, strict=True):
            assert np.abs(load(got) - want).max() <= unit * 2 * np.abs(want_sums).max()


def gate(
    z: np.ndarray, dh: np.ndarray, gx: np.ndarray, bx: np.ndarray, gg: np.ndarray, bg: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """h, dz and the stacked column sums of LayerNorm(u) * silu(LayerNorm(g)), z = [u, g]."""
    n = gx.size

    def norm_backward(e: np.ndarray, x: np.ndarray, rstd: np.ndarray) -> np.ndarray:
        d: np.ndarray = e - e.mean(1, keepdims=True) - x * (e * x).mean(1, keepdims=True)
        return rstd * d

    u, g = z[:, :n], z[:, n:]
    i0, i1 = (1 / np.sqrt(v.var(1, keepdims=True) + 1e-5) for v in (u, g))
    x, y = norm(u), norm(g)
    k, m = x * gx + bx, y * gg + bg
    q = 1 / (1 + np.exp(-m))
    t = m * q
    e, f = dh * t, dh * k * (q + t * (1 - q))
    du, dg = norm_backward(e * gx, x, i0), norm_backward(f * gg, y, i1)
    sums = np.stack([v.sum(0) for v in (e * x, e, f * y, f, du, dg)])
    return k * t, np.concatenate([du, dg], 1), sums


def norm(v: np.ndarray) -> np.ndarray:
    d: np.ndarray = v - v.mean(-1, keepdims=True)
    return d / np.sqrt(v.var(-1, keepdims=True) + 1e-5)


def check_mixing(
    launch: Launch, groups: int, tokens: int, columns: int, place: Place = aligned
) -> None:
    """Runs f1 in two parts over float32 groups."""
    x = np.random.default_rng(2).standard_normal((groups, tokens, columns))
    x = place(x.astype(np.float32))
    out, mean, rstd = (place(np.full_like(v, np.nan)) for v in (x, x[..., 0], x[..., 0]))
    launch("f1", [*map(address, (x, out, mean, rstd)), groups, 2])
    wide = x.astype(np.float64)
    mixed = norm(wide).reshape(groups, tokens, tokens, columns // tokens).swapaxes(1, 2)
    want = norm(mixed.reshape(x.shape) + wide)
    np.testing.assert_allclose(out, want, atol=3e-6)


def check_column_sum(launch: Launch, columns: int, rows: int, parts: int, units: float) -> None:
    """Runs sums and sums_finish. units: what the relative error may be, in float32's 2^-24; one
    float32 register would reach about sqrt(rows) / 3."""
    x = aligned(np.random.default_rng(4).standard_normal((rows, columns)).astype(np.float32))
    y, partials = aligned(np.zeros(columns, np.float32)), aligned(np.zeros((parts, columns), "f4"))
    args = [*map(address, (x, y, partials)), rows, parts, -(-rows // parts)]
    launch("sums", args)
    launch("sums_finish", args)
    want = x.sum(0, dtype=np.float64)
    assert np.linalg.norm(y - want) <= units * 2.0**-24 * np.linalg.norm(want)
    x[rows // 2, 0], x[rows // 3, 1] = np.inf, np.nan
    launch("sums", args)
    launch("sums_finish", args)
    assert np.isinf(y[0]) and np.isnan(y[1]) and np.isfinite(y[2:]).all()


def check_flags(launch: Launch, columns: int) -> None:
    random = np.random.default_rng(5)
    x = aligned(random.random((3, columns)).astype(np.float32))
    x[0, 0], x[1] = np.nan, 0
    old = aligned((random.random((3, columns)) > 0.8).astype(np.uint8))
    old[1] = 0
    out, some = aligned(np.full_like(old, 7)), aligned(np.full(3, 7, np.uint8))
    launch("flags", [*map(address, (x, old, out, some)), 3, 0])
    np.testing.assert_array_equal(out, (x > 0.5) | (old > 0))
    np.testing.assert_array_equal(some, [1, 0, 1])
