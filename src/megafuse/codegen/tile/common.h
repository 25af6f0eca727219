// Words that read the same on every host: shapes of a row, lanes of arithmetic, the row loop.
// Included by host.h and cuda.cuh after they have defined
//   MF_FN          how a function is declared (always inlined)
//   MF_UNROLL      pragma that unrolls the next loop (nothing on the host)
//   MF_KEEP_LOOP   pragma for a run-time loop over the vectors of a long row
//   MF_LANES       loop over the lanes of a vector
//   mf::real       what values are computed in: float, or double where storage is float32 and the
//                  machine has double for little
//   mf::scalar     the arithmetic of one real: exp, sigmoid, maximum, ...

// Walk the vectors of a row. MF_STEPS: few vectors, held in registers, so the loop disappears.
// MF_LOOP: a long row (long_stream and its kin), so the loop stays.
#define MF_STEPS(j, C) MF_UNROLL for (int j = 0; j < C::steps; ++j)
#define MF_LOOP(j, C) MF_KEEP_LOOP for (int j = 0; j < C::steps; ++j)

namespace mf {

MF_FN constexpr i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }
MF_FN constexpr i64 max_i64(i64 a, i64 b) { return a > b ? a : b; }

// A row of N columns, shared by TEAM threads: each owns STEPS vectors of V lanes, and vector j of
// thread `rank` starts at column (j * TEAM + rank) * V. Lanes at columns >= N are dead: loads give
// 0, sums leave them out, stores skip them.
template <int N, int V, int TEAM, int STEPS>
struct Cols {
  static constexpr int columns = N, lanes = V, team = TEAM, steps = STEPS;
  static_assert(N > 0 && V > 0 && TEAM > 0 && STEPS > 0, "a row has at least one column");
  static_assert(1ll * TEAM * STEPS * V >= N, "the team's vectors must cover the row");

  template <class Team>
  MF_FN static int column(const Team& team, int j) { return (j * TEAM + team.rank()) * V; }

  // Lanes of vector j that lie inside the row: V or 0, or less than V at a ragged end (host only).
  // Folds to the constant V wherever the shape alone decides it.
  template <class Team>
  MF_FN static int live(const Team& team, int j) {
    if ((j + 1) * TEAM * V <= N) return V;
    const int left = N - column(team, j);
    if (left >= V) return V;
    return N % V == 0 || left < 0 ? 0 : left;
  }
};

// ---- arithmetic on the lanes of one vector ------------------------------------------------------

// V consecutive columns of a row. A plain number stands for a vector of equal lanes.
template <int V>
struct Vec {
  real e[V];
  Vec() = default;
  MF_FN Vec(real x) { MF_LANES(i, V) e[i] = x; }
};

// A vector's lane, or a scalar seen as every lane.
template <int V>
MF_FN real lane(const Vec<V>& a, int i) { return a.e[i]; }
MF_FN real lane(real a, int) { return a; }

// The type an expression over vectors and scalars has: a vector as soon as one operand is one.
template <class... A>
struct Joined { using type = real; };
template <int V, class... A>
struct Joined<Vec<V>, A...> { using type = Vec<V>; };
template <class S, class... A>
struct Joined<S, A...> { using type = typename Joined<A...>::type; };

// f applied lane by lane; once, when every operand is a scalar.
template <class F>
MF_FN real lanewise(real*, F f) { return f(0); }
template <int V, class F>
MF_FN Vec<V> lanewise(Vec<V>*, F f) {
  Vec<V> r;
  MF_LANES(i, V) r.e[i] = f(i);
  return r;
}

#define MF_UNARY(NAME)                                            \
  MF_FN real NAME(real a) { return scalar::NAME(a); }             \
  template <int V>                                                \
  MF_FN Vec<V> NAME(const Vec<V>& a) {                            \
    Vec<V> r;                                                     \
    MF_LANES(i, V) r.e[i] = scalar::NAME(a.e[i]);                 \
    return r;                                                     \
  }
#define MF_BINARY_VEC(NAME, WORD)                                 \
  template <int V>                                                \
  MF_FN Vec<V> NAME(const Vec<V>& a, const Vec<V>& b) {           \
    Vec<V> r;                                                     \
    MF_LANES(i, V) r.e[i] = WORD(a.e[i], b.e[i]);                 \
    return r;                                                     \
  }                                                               \
  template <int V>                                                \
  MF_FN Vec<V> NAME(const Vec<V>& a, real b) {                    \
    Vec<V> r;                                                     \
    MF_LANES(i, V) r.e[i] = WORD(a.e[i], b);                      \
    return r;                                                     \
  }                                                               \
  template <int V>                                                \
  MF_FN Vec<V> NAME(real a, const Vec<V>& b) {                    \
    Vec<V> r;                                                     \
    MF_LANES(i, V) r.e[i] = WORD(a, b.e[i]);                      \
    return r;                                                     \
  }
#define MF_BINARY(NAME)                                           \
  MF_FN real NAME(real a, real b) { return scalar::NAME(a, b); }  \
  MF_BINARY_VEC(NAME, scalar::NAME)

namespace scalar {
MF_FN real add(real a, real b) { return a + b; }
MF_FN real sub(real a, real b) { return a - b; }
MF_FN real mul(real a, real b) { return a * b; }
MF_FN real lt(real a, real b) { return a < b ? real(1) : real(0); }
MF_FN real le(real a, real b) { return a <= b ? real(1) : real(0); }
MF_FN real gt(real a, real b) { return a > b ? real(1) : real(0); }
MF_FN real ge(real a, real b) { return a >= b ? real(1) : real(0); }
MF_FN real eq(real a, real b) { return a == b ? real(1) : real(0); }
MF_FN real ne(real a, real b) { return a != b ? real(1) : real(0); }
MF_FN real logical_not(real a) { return a == 0.f ? real(1) : real(0); }
MF_FN real logical_and(real a, real b) { return a != 0.f && b != 0.f ? real(1) : real(0); }
MF_FN real logical_or(real a, real b) { return a != 0.f || b != 0.f ? real(1) : real(0); }
MF_FN real neg(real a) { return -a; }
MF_FN real square(real a) { return a * a; }
}  // namespace scalar

// Pointwise words, on vectors and on row scalars alike. Comparisons and logic give 1 or 0.
// max, min and relu hand a NaN on, as torch.maximum does; round goes to even, as torch.round does.
MF_UNARY(exp) MF_UNARY(expm1) MF_UNARY(log) MF_UNARY(log1p) MF_UNARY(log2) MF_UNARY(exp2)
MF_UNARY(sqrt) MF_UNARY(rsqrt) MF_UNARY(rcp) MF_UNARY(square) MF_UNARY(neg)
MF_UNARY(sigmoid) MF_UNARY(tanh) MF_UNARY(erf) MF_UNARY(sin) MF_UNARY(cos)
MF_UNARY(abs) MF_UNARY(floor) MF_UNARY(ceil) MF_UNARY(trunc) MF_UNARY(round)
MF_UNARY(relu) MF_UNARY(logical_not)
MF_UNARY(to_bf16) MF_UNARY(to_f16)  // round to a storage type and back: rounding="eager"
MF_BINARY(pow) MF_BINARY(max) MF_BINARY(min) MF_BINARY(div)
MF_BINARY(lt) MF_BINARY(le) MF_BINARY(gt) MF_BINARY(ge) MF_BINARY(eq) MF_BINARY(ne)
MF_BINARY(logical_and) MF_BINARY(logical_or)

MF_BINARY_VEC(operator+, scalar::add)
MF_BINARY_VEC(operator-, scalar::sub)
MF_BINARY_VEC(operator*, scalar::mul)
MF_BINARY_VEC(operator/, scalar::div)
MF_BINARY_VEC(operator<, scalar::lt)
MF_BINARY_VEC(operator<=, scalar::le)
MF_BINARY_VEC(operator>, scalar::gt)
MF_BINARY_VEC(operator>=, scalar::ge)
MF_BINARY_VEC(operator==, scalar::eq)
MF_BINARY_VEC(operator!=, scalar::ne)
template <int V>
MF_FN Vec<V> operator-(const Vec<V>& a) { return neg(a); }

// a where c is not zero, else b; each of the three a vector or a scalar.
template <class C, class A, class B>
MF_FN typename Joined<C, A, B>::type where(const C& c, const A& a, const B& b) {
  using R = typename Joined<C, A, B>::type;
  return lanewise((R*)nullptr, [&](int i) { return lane(c, i) != 0.f ? lane(a, i) : lane(b, i); });
}

// a * b + c in one rounding where the machine has it; each of the three a vector or a scalar.
template <class A, class B, class C>
MF_FN typename Joined<A, B, C>::type fma(const A& a, const B& b, const C& c) {
  using R = typename Joined<A, B, C>::type;
  return lanewise((R*)nullptr,
                  [&](int i) { return scalar::fma(lane(a, i), lane(b, i), lane(c, i)); });
}

// ---- small holders ------------------------------------------------------------------------------

// K reduced values, the same in every thread of the team.
template <int K>
struct Pack {
  real e[K];
  MF_FN real operator[](int i) const { return e[i]; }
};

template <class... F>
MF_FN Pack<sizeof...(F)> pack(F... f) { return {{f...}}; }

// How accumulators combine.
struct Add {
  MF_FN static real identity() { return 0; }
  MF_FN static real apply(real a, real b) { return a + b; }
};
struct Most {
  MF_FN static real identity() { return -scalar::infinity(); }
  MF_FN static real apply(real a, real b) { return scalar::max(a, b); }
};
struct Least {
  MF_FN static real identity() { return scalar::infinity(); }
  MF_FN static real apply(real a, real b) { return scalar::min(a, b); }
};

// A value computed in one phase of a row and wanted again in a later one.
template <class C>
struct Keep {
  Vec<C::lanes> kept[C::steps];
  MF_FN void put(int j, const Vec<C::lanes>& v) { kept[j] = v; }
  MF_FN Vec<C::lanes> at(int j) const { return kept[j]; }
};

// ---- the row loop -------------------------------------------------------------------------------

// What a row has one value of (Scalar) is fetched for as many rows at once as a warp has lanes, each
// lane one row, and a whole turn of rows ahead. Used inside advance():
//   if (turns.over()) { x.turn(); turns.fetch(team, row_of, fetch); }   // fetch(row): x.fetch(...)
//   x.pick(team, turns.lane);
template <class Team, class I = i64>
struct Turns {
  I next, end, step;
  int lane = Team::LANES - 1;  // whose row it is
  MF_FN Turns(I b, I e, I s) : next(b), end(e), step(s) {}
  template <class RowOf, class Fetch>
  MF_FN void fetch(const Team& team, const RowOf& row_of, const Fetch& fetch_row) {
    if (next >= end) return;
    const I mine = next + team.lane() * step;
    fetch_row(row_of(mine < end ? mine : end - 1));
    next += Team::LANES * step;
  }
  MF_FN bool over() {
    lane = lane + 1 == Team::LANES ? 0 : lane + 1;
    return lane == 0;
  }
};

// Rows begin, begin + step, ... below end, one ahead in memory: the loads of the next row are under
// way while the body works on this one.
//   row_of(r)   what the generated code calls a row: its indices
//   fetch(row)  starts the loads of a row in every stream
//   advance()   makes what was fetched the current row
//   body(row)   computes and stores
// Counted in the type of `begin`: an int in generated code.
template <class I, class RowOf, class Fetch, class Advance, class Body>
MF_FN void rows(I begin, decltype(I()) end, decltype(I()) step, const RowOf& row_of, const Fetch& fetch,
                const Advance& advance, const Body& body) {
  if (begin >= end) return;
  auto next = row_of(begin);
  fetch(next);
  MF_KEEP_ROWS for (I r = begin; r < end; r += step) {
    const auto row = next;
    advance();
    // The last row is fetched once more: behind a branch the loads would wait for this row's
    // arithmetic, which the compiler moves to the other side of it.
    next = row_of(r + step < end ? r + step : r);
    fetch(next);
    body(row);
  }
}

// mf::rows without the look-ahead: half the registers, for when many warps hide the loads.
template <class I, class RowOf, class Fetch, class Advance, class Body>
MF_FN void rows_now(I begin, decltype(I()) end, decltype(I()) step, const RowOf& row_of, const Fetch& fetch,
                    const Advance& advance, const Body& body) {
  MF_KEEP_ROWS for (I r = begin; r < end; r += step) {
    const auto row = row_of(r);
    fetch(row);
    advance();
    body(row);
  }
}

}  // namespace mf
