"""Hand-written row regions in the tile words: the shapes of code a generator emits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """How a row is divided: `columns` over `team` threads, `teams` of them in a block."""

    columns: int
    lanes: int
    team: int = 1
    teams: int = 1
    blocks: int = 1  # least resident blocks a multiprocessor

    @property
    def steps(self) -> int:
        return -(-self.columns // (self.lanes * self.team))

    @property
    def run(self) -> int:
        return self.lanes

    def cols(self) -> str:
        return f"mf::Cols<{self.columns}, {self.lanes}, {self.team}, {self.steps}>"

    def head(self) -> str:
        return (
            f"using Team = mf::Team<{self.team}, {self.teams}>;\n"
            f"  static constexpr int min_blocks = {self.blocks};"
        )


def gate_forward(s: Shape, dtype: str = "bf16", steps: str = "MF_STEPS", long: str = "") -> str:
    """h = LayerNorm(u) * silu(LayerNorm(g)) over rows of z = [u, g]; keeps the row statistics."""
    n, a = s.columns, s.run
    return f"""
struct f3 {{
  {s.head()}
  struct Args {{
    const {dtype}* z; const {dtype}* gx; const {dtype}* bx; const {dtype}* gg; const {dtype}* bg;
    {dtype}* h; float* stats; i64 rows; i64 parts; i64 span;
  }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {s.cols()};
    const i64 begin = team.part() * a.span, end = mf::min_i64(begin + a.span, a.rows);
    const auto same = [](int c) {{ return c; }};
    auto u = mf::{long}stream<C, {dtype}, {a}>(same);
    auto g = mf::{long}stream<C, {dtype}, {a}>([](int c) {{ return c + {n}; }});
    const auto gx = mf::{long}hold<C, {dtype}, {a}>(team, a.gx, same);
    const auto bx = mf::{long}hold<C, {dtype}, {a}>(team, a.bx, same);
    const auto gg = mf::{long}hold<C, {dtype}, {a}>(team, a.gg, same);
    const auto bg = mf::{long}hold<C, {dtype}, {a}>(team, a.bg, same);
    struct Row {{ i64 b; }};
    const auto row_of = [&](i64 r) {{ return Row{{r}}; }};
    const auto fetch = [&](const Row& q) {{
      u.fetch(team, a.z + q.b * {2 * n});
      g.fetch(team, a.z + q.b * {2 * n});
    }};
    const auto advance = [&] {{ u.advance(); g.advance(); }};
    mf::rows(begin, end, 1, row_of, fetch, advance, [&](const Row& row) {{
      mf::Sum<C> s0, s1;
      {steps}(j, C) {{
        s0.add(team, j, u.at(team, j));
        s1.add(team, j, g.at(team, j));
      }}
      const auto r0 = team.sum(s0, s1);
      const mf::real m0 = r0[0] * (mf::real(1) / {n}), m1 = r0[1] * (mf::real(1) / {n});
      mf::Sum<C> s2, s3;
      {steps}(j, C) {{
        const auto d0 = u.at(team, j) - m0;
        const auto d1 = g.at(team, j) - m1;
        s2.add(team, j, d0 * d0);
        s3.add(team, j, d1 * d1);
      }}
      const auto r1 = team.sum(s2, s3);
      const mf::real i0 = mf::rsqrt(r1[0] * (mf::real(1) / {n}) + mf::real(1e-5));
      const mf::real i1 = mf::rsqrt(r1[1] * (mf::real(1) / {n}) + mf::real(1e-5));
      {steps}(j, C) {{
        const auto x = (u.at(team, j) - m0) * i0 * gx.at(team, j) + bx.at(team, j);
        const auto y = (g.at(team, j) - m1) * i1 * gg.at(team, j) + bg.at(team, j);
        mf::store<C, {dtype}, {a}>(team, j, a.h + row.b * {n}, same, x * (y * mf::sigmoid(y)));
      }}
      team.store(a.stats + row.b * 4 + 0, m0);
      team.store(a.stats + row.b * 4 + 1, i0);
      team.store(a.stats + row.b * 4 + 2, m1);
      team.store(a.stats + row.b * 4 + 3, i1);
    }});
  }}
}};
MF_KERNEL(f3)
"""


_SUMS = ("dgx", "dbx", "dgg", "dbg", "du", "dg")


def gate_backward(s: Shape, dtype: str = "bf16", steps: str = "MF_STEPS", long: str = "") -> str:
    """The gate's backward: dz and the recomputed h, with all six column sums; then their finish."""
    n, a = s.columns, s.run
    column = "LongColumn" if long else "Column"
    columns = "\n    ".join(f"mf::{column}<C> c{i}(team, a.part{i});" for i in range(6))
    parts = " ".join(f"float* part{i};" for i in range(6))
    outs = " ".join(f"{dtype}* {name};" for name in _SUMS)
    finish = "\n    ".join(
        f"f.column<{dtype}>({i}, a.part{i}, {n}, 1, a.parts, [](i64, i64 i) {{ return i; }}, "
        f"[&](i64, int c) {{ return a.{name} + c; }});"
        for i, name in enumerate(_SUMS)
    )
    return f"""
struct b3 {{
  {s.head()}
  struct Args {{
    const {dtype}* z; const {dtype}* dh; const {dtype}* gx; const {dtype}* bx; const {dtype}* gg;
    const {dtype}* bg; const float* stats; {dtype}* dz; {dtype}* h; {parts} {outs}
    i64 rows; i64 parts; i64 span;
  }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {s.cols()};
    const i64 begin = team.part() * a.span, end = mf::min_i64(begin + a.span, a.rows);
    const auto same = [](int c) {{ return c; }};
    const auto second = [](int c) {{ return c + {n}; }};
    auto u = mf::{long}stream<C, {dtype}, {a}>(same);
    auto g = mf::{long}stream<C, {dtype}, {a}>(second);
    auto d = mf::{long}stream<C, {dtype}, {a}>(same);
    mf::Scalar<float> m0, i0, m1, i1;
    const auto gx = mf::{long}hold<C, {dtype}, {a}>(team, a.gx, same);
    const auto bx = mf::{long}hold<C, {dtype}, {a}>(team, a.bx, same);
    const auto gg = mf::{long}hold<C, {dtype}, {a}>(team, a.gg, same);
    const auto bg = mf::{long}hold<C, {dtype}, {a}>(team, a.bg, same);
    {columns}
    struct Row {{ i64 b; }};
    const auto row_of = [&](i64 r) {{ return Row{{r}}; }};
    const auto fetch = [&](const Row& q) {{
      u.fetch(team, a.z + q.b * {2 * n});
      g.fetch(team, a.z + q.b * {2 * n});
      d.fetch(team, a.dh + q.b * {n});
    }};
    const auto scalars = [&](const Row& q) {{
      m0.fetch(a.stats + q.b * 4); i0.fetch(a.stats + q.b * 4 + 1);
      m1.fetch(a.stats + q.b * 4 + 2); i1.fetch(a.stats + q.b * 4 + 3);
    }};
    mf::Turns<Team> turns(begin, end, 1);
    turns.fetch(team, row_of, scalars);
    const auto advance = [&] {{
      u.advance(); g.advance(); d.advance();
      if (turns.over()) {{
        m0.turn(); i0.turn(); m1.turn(); i1.turn();
        turns.fetch(team, row_of, scalars);
      }}
      m0.pick(team, turns.lane); i0.pick(team, turns.lane);
      m1.pick(team, turns.lane); i1.pick(team, turns.lane);
    }};
    mf::rows(begin, end, 1, row_of, fetch, advance, [&](const Row& row) {{
      mf::Sum<C> s0, s1, s2, s3;
      {steps}(j, C) {{
        const auto x = (u.at(team, j) - m0.value()) * i0.value();
        const auto y = (g.at(team, j) - m1.value()) * i1.value();
        const auto k = x * gx.at(team, j) + bx.at(team, j);
        const auto n = y * gg.at(team, j) + bg.at(team, j);
        const auto q = mf::sigmoid(n);
        const auto t = n * q;
        mf::store<C, {dtype}, {a}>(team, j, a.h + row.b * {n}, same, k * t);
        const auto e = d.at(team, j) * t;
        const auto f = d.at(team, j) * k * (q + t * (1.f - q));
        c0.add(team, j, e * x);
        c1.add(team, j, e);
        c2.add(team, j, f * y);
        c3.add(team, j, f);
        s0.add(team, j, e * gx.at(team, j));
        s1.add(team, j, e * gx.at(team, j) * x);
        s2.add(team, j, f * gg.at(team, j));
        s3.add(team, j, f * gg.at(team, j) * y);
      }}
      const auto r = team.sum(s0, s1, s2, s3);
      const mf::real w = mf::real(1) / {n};
      const mf::real a0 = r[0] * w, a1 = r[1] * w, a2 = r[2] * w, a3 = r[3] * w;
      {steps}(j, C) {{
        const auto x = (u.at(team, j) - m0.value()) * i0.value();
        const auto y = (g.at(team, j) - m1.value()) * i1.value();
        const auto k = x * gx.at(team, j) + bx.at(team, j);
        const auto n = y * gg.at(team, j) + bg.at(team, j);
        const auto q = mf::sigmoid(n);
        const auto t = n * q;
        const auto e = d.at(team, j) * t * gx.at(team, j);
        const auto f = d.at(team, j) * k * (q + t * (1.f - q)) * gg.at(team, j);
        const auto du = (e - a0 - x * a1) * i0.value();
        const auto dg = (f - a2 - y * a3) * i1.value();
        c4.add(team, j, du);
        c5.add(team, j, dg);
        mf::store<C, {dtype}, {a}>(team, j, a.dz + row.b * {2 * n}, same, du);
        mf::store<C, {dtype}, {a}>(team, j, a.dz + row.b * {2 * n}, second, dg);
      }}
    }});
    c0.write(team); c1.write(team); c2.write(team);
    c3.write(team); c4.write(team); c5.write(team);
  }}
}};
MF_KERNEL(b3)

struct b3_finish {{
  using Args = b3::Args;
  MF_FN static void run(const mf::Finisher& f, const Args& a) {{
    {finish}
  }}
}};
MF_FINISH(b3_finish)
"""


def mixing(s: Shape, tokens: int, dtype: str = "bf16", run: int = 4) -> str:
    """A group of `tokens` rows: norm, transpose of (token, head) blocks, residual, norm.

    Output row j takes columns [j * width, (j + 1) * width) of every normalised row i, so the second
    stage needs the first one's statistics of all rows: a barrier lies between them.
    """
    n, width = s.columns, s.columns // tokens
    return f"""
struct f1 {{
  {s.head()}
  struct Args {{
    const {dtype}* x; {dtype}* out; float* mean; float* rstd; i64 groups; i64 parts;
  }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {s.cols()};
    const auto same = [](int c) {{ return c; }};
    for (i64 group = team.block(); group < a.groups; group += a.parts) {{
      {{
        auto x0 = mf::stream<C, {dtype}, {s.run}>(same);
        const auto row_of = [&](i64 r) {{ return group * {tokens} + r; }};
        const auto fetch = [&](i64 q) {{ x0.fetch(team, a.x + q * {n}); }};
        const auto advance = [&] {{ x0.advance(); }};
        mf::rows(team.index(), {tokens}, {s.teams}, row_of, fetch, advance, [&](i64 row) {{
          mf::Sum<C> s0;
          MF_STEPS(j, C) s0.add(team, j, x0.at(team, j));
          const mf::real mean = team.sum(s0)[0] * (mf::real(1) / {n});
          mf::Sum<C> s1;
          MF_STEPS(j, C) s1.add(team, j, mf::square(x0.at(team, j) - mean));
          const mf::real rstd = mf::rsqrt(team.sum(s1)[0] * (mf::real(1) / {n}) + mf::real(1e-5));
          team.store(a.mean + row, mean);
          team.store(a.rstd + row, rstd);
        }});
      }}
      team.block_sync();
      {{
        // column c of the mixed row: input row c / width, at offset c % width of this row's slice
        auto x0 = mf::stream<C, {dtype}, {s.run}>(same);
        auto x1 = mf::stream<C, {dtype}, {run}>(
            [](int c) {{ return c / {width} * {n} + c % {width}; }});
        auto m1 = mf::splat<C, float, {run}, true>([](int c) {{ return c / {width}; }});
        auto i1 = mf::splat<C, float, {run}, true>([](int c) {{ return c / {width}; }});
        const auto row_of = [&](i64 r) {{ return r; }};
        const auto fetch = [&](i64 q) {{
          x0.fetch(team, a.x + (group * {tokens} + q) * {n});
          x1.fetch(team, a.x + group * {tokens * n} + q * {width});
          m1.fetch(team, a.mean + group * {tokens});
          i1.fetch(team, a.rstd + group * {tokens});
        }};
        const auto advance = [&] {{ x0.advance(); x1.advance(); m1.advance(); i1.advance(); }};
        mf::rows(team.index(), {tokens}, {s.teams}, row_of, fetch, advance, [&](i64 row) {{
          mf::Keep<C> k0;
          mf::Sum<C> s0;
          MF_STEPS(j, C) {{
            k0.put(j, (x1.at(team, j) - m1.at(team, j)) * i1.at(team, j) + x0.at(team, j));
            s0.add(team, j, k0.at(j));
          }}
          const mf::real mean = team.sum(s0)[0] * (mf::real(1) / {n});
          mf::Sum<C> s1;
          MF_STEPS(j, C) s1.add(team, j, mf::square(k0.at(j) - mean));
          const mf::real rstd = mf::rsqrt(team.sum(s1)[0] * (mf::real(1) / {n}) + mf::real(1e-5));
          MF_STEPS(j, C)
            mf::store<C, {dtype}, {s.run}>(team, j, a.out + (group * {tokens} + row) * {n}, same,
                                           (k0.at(j) - mean) * rstd);
        }});
      }}
      team.block_sync();
    }}
  }}
}};
MF_GROUP_KERNEL(f1)
"""


UNARY = [
    "exp", "expm1", "log", "log1p", "log2", "exp2", "sqrt", "rsqrt", "rcp", "square", "neg",
    "sigmoid", "tanh", "erf", "sin", "cos", "abs", "floor", "ceil", "trunc", "round", "relu",
    "logical_not", "to_bf16", "to_f16",
]  # fmt: skip
BINARY = [
    "pow", "max", "min", "div", "lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or",
]  # fmt: skip


def every_word(s: Shape, dtype: str = "float") -> str:
    """All pointwise words on vectors and scalars: does each mean something on this host?"""
    lines = [f"v = v + mf::{w}(x) * mf::{w}(s);" for w in UNARY]
    lines += [
        f"v = v + mf::{w}(x, s) + mf::{w}(s, x) + mf::{w}(x, v) * mf::{w}(s, s);" for w in BINARY
    ]
    body = "\n        ".join(lines)
    return f"""
struct words {{
  {s.head()}
  struct Args {{ const {dtype}* x; const float* s; {dtype}* out; i64 parts; }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {s.cols()};
    const auto same = [](int c) {{ return c; }};
    auto x0 = mf::stream<C, {dtype}, {s.run}>(same);
    mf::Scalar<float> s0;
    const auto fetch = [&](i64 r) {{ x0.fetch(team, a.x + r * {s.columns}); }};
    const auto scalars = [&](i64 r) {{ s0.fetch(a.s + r); }};
    const auto row_of = [](i64 r) {{ return r; }};
    mf::Turns<Team> turns(team.part(), team.part() + 1, 1);
    turns.fetch(team, row_of, scalars);
    const auto advance = [&] {{
      x0.advance();
      if (turns.over()) {{ s0.turn(); turns.fetch(team, row_of, scalars); }}
      s0.pick(team, turns.lane);
    }};
    mf::rows(team.part(), team.part() + 1, 1, row_of, fetch, advance, [&](i64 row) {{
      const mf::real s = s0.value();
      mf::Max<C> most;
      mf::Min<C> least;
      MF_STEPS(j, C) {{
        const auto x = x0.at(team, j);
        mf::Vec<C::lanes> v = 0.f;
        {body}
        v = mf::where(x > s, v, 0.f) + mf::fma(x, s, v) - -x + (1 - x) / (2 + s) + (x != x);
        v = v + 0.25 * x - x * 0.5f + mf::where(x > s, 1, 0.5) + mf::max(mf::real(0.1), x);
        most.add(team, j, v);
        least.add(team, j, v);
        mf::store<C, {dtype}, {s.run}>(team, j, a.out + row * {s.columns}, same, v);
      }}
      team.store(a.out, team.max(most)[0] + team.min(least, least)[1]);
    }});
  }}
}};
MF_KERNEL(words)
"""


def column_sum(s: Shape) -> str:
    """y = sum of the rows of x, float32."""
    return f"""
struct sums {{
  {s.head()}
  struct Args {{ const float* x; float* y; float* partials; i64 rows; i64 parts; i64 span; }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {s.cols()};
    auto x = mf::stream<C, float, {s.run}>([](int c) {{ return c; }});
    mf::Column<C> sum(team, a.partials);
    const i64 begin = team.part() * a.span, end = mf::min_i64(begin + a.span, a.rows);
    const auto row_of = [](i64 r) {{ return r; }};
    const auto fetch = [&](i64 r) {{ x.fetch(team, a.x + r * {s.columns}); }};
    const auto advance = [&] {{ x.advance(); }};
    mf::rows(begin, end, 1, row_of, fetch, advance, [&](i64) {{
      MF_STEPS(j, C) sum.add(team, j, x.at(team, j));
    }});
    sum.write(team);
  }}
}};
MF_KERNEL(sums)
struct sums_finish {{
  using Args = sums::Args;
  MF_FN static void run(const mf::Finisher& f, const Args& a) {{
    f.column<float>(0, a.partials, {s.columns}, 1, a.parts, [](i64, i64 i) {{ return i; }},
                    [&](i64, int c) {{ return a.y + c; }});
  }}
}};
MF_FINISH(sums_finish)
"""


def flags(s: Shape) -> str:
    """Stores which elements of each row are above its scalar as bool8, and adds those of `old`."""
    return f"""
struct flags {{
  {s.head()}
  struct Args {{
    const float* x; const bool8* old; bool8* out; bool8* any; i64 parts; i64 unused;
  }};
  MF_FN static void run(const Team& team, const Args& a) {{
    using C = {s.cols()};
    const auto same = [](int c) {{ return c; }};
    const i64 at = team.part() * {s.columns};
    auto x = mf::stream<C, float, {s.run}>(same);
    auto old = mf::stream<C, bool8, {s.run}>(same);
    x.fetch(team, a.x + at); x.advance();
    old.fetch(team, a.old + at); old.advance();
    mf::Max<C> most;
    MF_STEPS(j, C) {{
      const auto v = (x.at(team, j) > 0.5f) + old.at(team, j);
      most.add(team, j, v);
      mf::store<C, bool8, {s.run}>(team, j, a.out + at, same, v);
    }}
    team.store(a.any + team.part(), team.max(most)[0]);
  }}
}};
MF_KERNEL(flags)
"""
