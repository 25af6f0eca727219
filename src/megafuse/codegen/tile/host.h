// The tile words on a CPU: one thread walks whole rows, and a vector is a loop the compiler
// vectorises. Same meaning as cuda.cuh, which says more about each word's cost on a GPU.
#ifndef MF_TILE_H
#define MF_TILE_H

#include <cmath>
#include <cstring>

#define MF_FN inline __attribute__((always_inline))
#define MF_UNROLL
#define MF_KEEP_LOOP
#define MF_KEEP_ROWS
#define MF_LANES(i, V) for (int i = 0; i < (V); ++i)

// 1 when every stored tensor is 16 bits wide: float32 arithmetic is then exact enough. Otherwise
// everything between a load and a store is double, and a stored float32 has one rounding.
#ifndef MF_FAST
#define MF_FAST 0
#endif

using i64 = long long;

// Storage types: these exist in memory only.
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
struct bool8 { unsigned char bits; };

namespace mf {

#if MF_FAST
using real = float;
#else
using real = double;
#endif

// ---- conversions: round to nearest even, written so that a loop over them vectorises ------------

MF_FN unsigned bits_of(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
MF_FN float float_of(unsigned u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
MF_FN unsigned long long bits_of(double x) {
  unsigned long long u;
  std::memcpy(&u, &x, 8);
  return u;
}
MF_FN double float_of(unsigned long long u) {
  double x;
  std::memcpy(&x, &u, 8);
  return x;
}

MF_FN float load(float x) { return x; }
MF_FN float load(bf16 x) { return float_of(unsigned(x.bits) << 16); }
MF_FN float load(f16 x) {
  // Shifted into float32's fields, the exponent is off by 112; the product repairs it, subnormals
  // included. Infinity and NaN come out as 2^16 and above, and get the top exponent back.
  const unsigned u = x.bits;
  const float magnitude = float_of((u & 0x7fffu) << 13) * 0x1p112f;
  const unsigned m = bits_of(magnitude) | (magnitude >= 65536.f ? 0x7f800000u : 0u);
  return float_of(m | (u & 0x8000u) << 16);
}
MF_FN float load(bool8 x) { return x.bits ? 1.f : 0.f; }
MF_FN real load(int x) { return real(x); }
MF_FN real load(i64 x) { return real(x); }

MF_FN void convert(float x, float& out) { out = x; }
MF_FN void convert(float x, bf16& out) {
  const unsigned u = bits_of(x);
  const unsigned rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  out.bits = (unsigned short)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : rounded);
}
MF_FN void convert(float x, f16& out) {
  const unsigned u = bits_of(x), sign = u >> 16 & 0x8000u, m = u & 0x7fffffffu;
  // Normal result: rebias the exponent and round the 13 dropped bits; a carry may reach infinity.
  const unsigned normal = (m - 0x38000000u + 0xfffu + (m >> 13 & 1u)) >> 13;
  // Subnormal result: adding 0.5 lines the bits up, and the adder does the rounding.
  const unsigned tiny = bits_of(float_of(m) + 0.5f) - 0x3f000000u;
  const unsigned huge = m > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const unsigned r = m >= 0x47800000u ? huge : m < 0x38800000u ? tiny : normal;
  out.bits = (unsigned short)(r | sign);
}
MF_FN void convert(real x, bool8& out) { out.bits = x != 0; }
template <class T>
MF_FN T store_as(real x) {
  T out;
  convert(x, out);
  return out;
}

// ---- arithmetic of one lane ---------------------------------------------------------------------

namespace scalar {
MF_FN real infinity() { return __builtin_inff(); }
MF_FN real fma(real a, real b, real c) { return a * b + c; }
MF_FN real div(real a, real b) { return a / b; }
MF_FN real max(real a, real b) { return a > b || a != a ? a : b; }
MF_FN real min(real a, real b) { return a < b || a != a ? a : b; }
MF_FN real relu(real a) { return a < 0 ? real(0) : a; }

// e^x within 2 ulp, subnormal results included: x = n ln2 + r, |r| <= ln2 / 2, a polynomial in r,
// and 2^n applied in two factors because n itself may leave the exponent's range.
MF_FN float exp(float x) {
  x = x > 89.f ? 89.f : x;
  x = x < -104.f ? -104.f : x;
  const float shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.f;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.98756915e-4f;  // minimax over |r| <= ln2 / 2 (Cephes)
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345191e-3f;
  p = p * r + 4.16657959e-2f;
  p = p * r + 0.166666655f;
  p = p * r + 0.500000012f;
  p = p * (r * r) + r + 1.f;
  const unsigned k = bits_of(shifted) - 0x4b400000u;  // n as an integer, modulo 2^32
  const unsigned half = unsigned(int(k) >> 1), rest = k - half;
  return p * float_of((half + 127u) << 23) * float_of((rest + 127u) << 23);
}
// The same in double, within 2^-40: far below what a float32 result can show.
MF_FN double exp(double x) {
  x = x > 710. ? 710. : x;
  x = x < -746. ? -746. : x;
  const double shifted = x * 1.4426950408889634 + 0x1.8p52;  // rounds to an integer
  const double n = shifted - 0x1.8p52;
  const double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  double p = 1. / 3628800.;  // Taylor: the first term left out is 2^-42 at |r| = ln2 / 2
  p = p * r + 1. / 362880.;
  p = p * r + 1. / 40320.;
  p = p * r + 1. / 5040.;
  p = p * r + 1. / 720.;
  p = p * r + 1. / 120.;
  p = p * r + 1. / 24.;
  p = p * r + 1. / 6.;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.;
  const auto k = bits_of(shifted) - bits_of(0x1.8p52);  // n as an integer, modulo 2^64
  // Halved with its sign: AVX2 has no 64-bit shift that keeps it.
  const auto half = ((k + 4096u) >> 1) - 2048u, rest = k - half;
  return p * float_of((half + 1023u) << 52) * float_of((rest + 1023u) << 52);
}
MF_FN real sigmoid(real x) { return 1 / (1 + scalar::exp(-x)); }
MF_FN real rcp(real x) { return 1 / x; }
MF_FN real sqrt(real x) { return std::sqrt(x); }
MF_FN real rsqrt(real x) { return 1 / std::sqrt(x); }
MF_FN real abs(real x) { return std::fabs(x); }
MF_FN real floor(real x) { return std::floor(x); }
MF_FN real ceil(real x) { return std::ceil(x); }
MF_FN real trunc(real x) { return std::trunc(x); }
MF_FN real round(real x) { return std::rint(x); }
MF_FN real exp2(real x) { return std::exp2(x); }
MF_FN real expm1(real x) { return std::expm1(x); }
MF_FN real log(real x) { return std::log(x); }
MF_FN real log1p(real x) { return std::log1p(x); }
MF_FN real log2(real x) { return std::log2(x); }
MF_FN real tanh(real x) { return std::tanh(x); }
MF_FN real erf(real x) { return std::erf(x); }
MF_FN real sin(real x) { return std::sin(x); }
MF_FN real cos(real x) { return std::cos(x); }
MF_FN real pow(real x, real y) { return std::pow(x, y); }
MF_FN real to_bf16(real x) { return load(store_as<bf16>(x)); }
MF_FN real to_f16(real x) { return load(store_as<f16>(x)); }
}  // namespace scalar
}  // namespace mf

#include "common.h"

namespace mf {

// ---- accumulators over one row ------------------------------------------------------------------

// Lanes of a wide accumulator, combined as a balanced tree.
template <class Op, int V>
MF_FN real tree(real (&v)[V]) {
  for (int n = V; n > 1; n = (n + 1) / 2)
    for (int i = 0; i < n / 2; ++i) v[i] = Op::apply(v[i], v[n - 1 - i]);
  return v[0];
}

// What Sum, Max and Min share. Two levels, so that a long row's sum does not lose its low bits:
// 32 vectors go into `near`, then `near` goes into `far`.
template <class C, class Op>
struct Accumulator {
  static constexpr int V = C::lanes;
  real near[V], far[V];
  MF_FN Accumulator() {
    for (int i = 0; i < V; ++i) near[i] = far[i] = Op::identity();
  }
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<V>& v) {
    const int live = C::live(team, j);
    if (C::columns % V == 0 || live == V) {
      for (int i = 0; i < V; ++i) near[i] = Op::apply(near[i], v.e[i]);
    } else {
      for (int i = 0; i < live; ++i) near[i] = Op::apply(near[i], v.e[i]);
    }
    if ((j & 31) == 31)
      for (int i = 0; i < V; ++i) {
        far[i] = Op::apply(far[i], near[i]);
        near[i] = Op::identity();
      }
  }
  MF_FN real total() const {
    real t[V];
    for (int i = 0; i < V; ++i) t[i] = Op::apply(far[i], near[i]);
    return tree<Op>(t);
  }
};
template <class C> using Sum = Accumulator<C, Add>;
template <class C> using Max = Accumulator<C, Most>;
template <class C> using Min = Accumulator<C, Least>;

// ---- the team: here, one thread that is a whole block -------------------------------------------

template <int TEAM, int TEAMS>
struct Team {
  static_assert(TEAM == 1 && TEAMS == 1, "on the host one thread walks the rows");
  i64 number;
  MF_FN explicit Team(i64 part) : number(part) {}
  MF_FN int index() const { return 0; }
  MF_FN int rank() const { return 0; }
  static constexpr int LANES = 1;
  MF_FN int lane() const { return 0; }
  MF_FN i64 block() const { return number; }
  MF_FN i64 part() const { return number; }
  template <class... A>
  MF_FN Pack<sizeof...(A)> sum(const A&... a) const { return {{a.total()...}}; }
  template <class... A>
  MF_FN Pack<sizeof...(A)> max(const A&... a) const { return {{a.total()...}}; }
  template <class... A>
  MF_FN Pack<sizeof...(A)> min(const A&... a) const { return {{a.total()...}}; }
  template <class T>
  MF_FN void store(T* p, real v) const { *p = store_as<T>(v); }
  MF_FN void block_sync() const {}
};

// ---- reading and writing rows -------------------------------------------------------------------

// Vector j of the row at `base`. Every aligned run of A columns lies together in memory (SPLAT:
// shares the one element at its first column's offset).
template <class C, class T, int A, bool SPLAT, class Team, class Col>
MF_FN Vec<C::lanes> read(const Team& team, int j, const T* base, const Col& col) {
  constexpr int V = C::lanes, RUN = A < V ? A : V;
  static_assert(V % RUN == 0 && A % RUN == 0, "runs must tile the vector, or vectors the run");
  const int c0 = C::column(team, j), live = C::live(team, j);
  Vec<V> v;
  if (C::columns % V == 0 || live == V) {
    for (int p = 0; p < V; p += RUN) {
      const T* q = base + col(c0 + p);
      for (int i = 0; i < RUN; ++i) v.e[p + i] = load(q[SPLAT ? 0 : i]);
    }
  } else {
    // A run longer than one column starts at a multiple of A; the offset of a column inside it
    // counts from there.
    for (int i = 0; i < V; ++i) {
      const int c = c0 + i, start = c0 + i / RUN * RUN;
      v.e[i] = i < live ? load(base[col(start) + (SPLAT ? 0 : c - start)]) : 0;
    }
  }
  return v;
}

// A tensor read along the rows. On the host only the pointer moves; the caches do the rest.
template <class C, class T, int A, bool SPLAT, class Col>
struct Stream {
  Col col;
  const T *next = nullptr, *current = nullptr;
  template <class Team>
  MF_FN void fetch(const Team&, const T* row) { next = row; }
  MF_FN void advance() { current = next; }
  template <class Team>
  MF_FN Vec<C::lanes> at(const Team& team, int j) const {
    return read<C, T, A, SPLAT>(team, j, current, col);
  }
};
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN Stream<C, T, A, false, Col> stream(Col col) { return {col}; }
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN Stream<C, T, A, true, Col> splat(Col col) { return {col}; }
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN Stream<C, T, A, false, Col> long_stream(Col col) { return {col}; }
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN Stream<C, T, A, true, Col> long_splat(Col col) { return {col}; }

// On a GPU a table of the columns' places; here they are computed.
template <class C, int A, int PERIOD = 0, class Team, class Col>
MF_FN Col table(const Team&, Col col) { return col; }

// A tensor that every row reads at the same place: parameters.
template <class C, class T, int A, bool FRESH = false, class Team, class Col>
MF_FN Stream<C, T, A, false, Col> hold(const Team&, const T* base, Col col) {
  return {col, base, base};
}
template <class C, class T, int A, bool FRESH = false, class Team, class Col>
MF_FN Stream<C, T, A, true, Col> hold_splat(const Team&, const T* base, Col col) {
  return {col, base, base};
}
template <class C, class T, int A, bool FRESH = false, class Team, class Col>
MF_FN Stream<C, T, A, false, Col> long_hold(const Team&, const T* base, Col col) {
  return {col, base, base};
}

// One value a row.
template <class T, bool FRESH = false>
struct Scalar {
  real next = 0, held = 0, now = 0;
  MF_FN void fetch(const T* p) { next = load(*p); }
  MF_FN void turn() { held = next; }
  template <class Team>
  MF_FN void pick(const Team&, int) { now = held; }
  MF_FN real value() const { return now; }
};

// Writes vector j of the row at `base`, in aligned runs of A columns.
template <class C, class T, int A, class Team, class Col>
MF_FN void store(const Team& team, int j, T* base, const Col& col, const Vec<C::lanes>& v) {
  constexpr int V = C::lanes, RUN = A < V ? A : V;
  static_assert(V % RUN == 0 && A % RUN == 0, "runs must tile the vector, or vectors the run");
  const int c0 = C::column(team, j), live = C::live(team, j);
  for (int p = 0; p < V; p += RUN) {
    if (C::columns % V == 0 || p + RUN <= live) {
      T* q = base + col(c0 + p);
      for (int i = 0; i < RUN; ++i) q[i] = store_as<T>(v.e[p + i]);
    } else {
      for (int i = 0; i < RUN && p + i < live; ++i) base[col(c0 + p) + i] = store_as<T>(v.e[p + i]);
    }
  }
}

// ---- sums over rows -----------------------------------------------------------------------------

// One float32 partial a column and team, at partials[part * columns + column]: summed there, or in
// double beside it and rounded once.
template <class C>
struct Column {
  static constexpr bool BESIDE = sizeof(real) > sizeof(float);
  float* own;
  real* sum;
  template <class Team>
  MF_FN Column(const Team& team, float* partials) : own(partials + team.part() * C::columns) {
    if constexpr (BESIDE) {
      sum = new real[C::columns];
    } else {
      sum = own;
    }
    for (int c = 0; c < C::columns; ++c) sum[c] = 0;
  }
  Column(const Column&) = delete;
  MF_FN ~Column() {
    if constexpr (BESIDE) delete[] sum;
  }
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<C::lanes>& v) {
    real* p = sum + C::column(team, j);
    const int live = C::live(team, j);
    if (C::columns % C::lanes == 0 || live == C::lanes) {
      for (int i = 0; i < C::lanes; ++i) p[i] += v.e[i];
    } else {
      for (int i = 0; i < live; ++i) p[i] += v.e[i];
    }
  }
  template <class Team>
  MF_FN void write(const Team&) const {
    if constexpr (BESIDE)
      for (int c = 0; c < C::columns; ++c) own[c] = float(sum[c]);
  }
};
template <class C> using LongColumn = Column<C>;

// Adds the partials of a column sum up: out(k, c) = sum over i < count, in that order, of
// partials[index(k, i) * n + c], added in double.
struct Finisher {
  template <class T, class Index, class Out>
  MF_FN void column(int, const float* partials, int n, i64 kept, i64 count, const Index& index,
                    const Out& out) const {
    constexpr int STRIP = 64;
    for (i64 k = 0; k < kept; ++k)
      for (int c0 = 0; c0 < n; c0 += STRIP) {
        const int width = n - c0 < STRIP ? n - c0 : STRIP;
        double sum[STRIP] = {};
        for (i64 i = 0; i < count; ++i) {
          const float* p = partials + index(k, i) * n + c0;
          for (int c = 0; c < width; ++c) sum[c] += p[c];
        }
        for (int c = 0; c < width; ++c) *out(k, c0 + c) = store_as<T>(sum[c]);
      }
  }
};

}  // namespace mf

// ---- entry points: one call runs every part -----------------------------------------------------

#define MF_KERNEL(NAME)                                     \
  extern "C" void NAME(const NAME::Args* a) {               \
    for (i64 part = 0; part < a->parts; ++part)             \
      NAME::run(NAME::Team(part), *a);                      \
  }
#define MF_GROUP_KERNEL(NAME) MF_KERNEL(NAME)
#define MF_FINISH(NAME)                                     \
  extern "C" void NAME(const NAME::Args* a) { NAME::run(mf::Finisher(), *a); }

#endif  // MF_TILE_H
