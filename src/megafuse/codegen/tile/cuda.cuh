// The tile words on an NVIDIA GPU (sm_80 and up, written for sm_90a), for NVRTC without any CUDA
// header. TEAM threads walk a row together, 16 bytes a load, and a row lives in their registers:
// every array here is indexed by constants once the loops over vectors and lanes are unrolled.
#ifndef MF_TILE_H
#define MF_TILE_H

#define MF_FN __device__ __forceinline__
#define MF_UNROLL _Pragma("unroll")
#define MF_KEEP_LOOP _Pragma("unroll 2")
#define MF_KEEP_ROWS _Pragma("unroll 1")
#define MF_LANES(i, V) MF_UNROLL for (int i = 0; i < (V); ++i)

// 1 when every stored tensor is 16 bits wide: exp, sigmoid, rsqrt and division then use the
// approximate instructions, whose error is far below half a step of such an output.
#ifndef MF_FAST
#define MF_FAST 0
#endif

// 1 for small problems whose storage is float32: everything between a load and a store is double,
// as on the host, and a stored float32 has one rounding. A launch hides what that costs.
#ifndef MF_WIDE
#define MF_WIDE 0
#endif
#if MF_FAST && MF_WIDE
#error "MF_FAST gives accuracy away and MF_WIDE adds some: at most one of them"
#endif

#include "ptx.cuh"

using i64 = long long;

// Storage types: these exist in memory only.
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
struct bool8 { unsigned char bits; };

namespace mf {

#if MF_WIDE
using real = double;
#else
using real = float;
#endif

// ---- arithmetic of one lane ---------------------------------------------------------------------

namespace scalar {
#if MF_WIDE
MF_FN double infinity() { return __uint_as_float(0x7f800000u); }
MF_FN double fma(double a, double b, double c) { return ::fma(a, b, c); }
MF_FN double max(double a, double b) { return a > b || a != a ? a : b; }
MF_FN double min(double a, double b) { return a < b || a != a ? a : b; }
MF_FN double relu(double a) { return a < 0. ? 0. : a; }
MF_FN double exp(double x) { return ::exp(x); }
MF_FN double exp2(double x) { return ::exp2(x); }
MF_FN double rcp(double x) { return 1. / x; }
MF_FN double rsqrt(double x) { return 1. / ::sqrt(x); }
MF_FN double div(double a, double b) { return a / b; }
MF_FN double sigmoid(double x) { return 1. / (1. + ::exp(-x)); }
MF_FN double tanh(double x) { return ::tanh(x); }
MF_FN double expm1(double x) { return ::expm1(x); }
MF_FN double log(double x) { return ::log(x); }
MF_FN double log1p(double x) { return ::log1p(x); }
MF_FN double log2(double x) { return ::log2(x); }
MF_FN double sqrt(double x) { return ::sqrt(x); }
MF_FN double erf(double x) { return ::erf(x); }
MF_FN double sin(double x) { return ::sin(x); }
MF_FN double cos(double x) { return ::cos(x); }
MF_FN double pow(double x, double y) { return ::pow(x, y); }
MF_FN double abs(double x) { return ::fabs(x); }
MF_FN double floor(double x) { return ::floor(x); }
MF_FN double ceil(double x) { return ::ceil(x); }
MF_FN double trunc(double x) { return ::trunc(x); }
MF_FN double round(double x) { return ::rint(x); }
#else
MF_FN float infinity() { return __uint_as_float(0x7f800000u); }
MF_FN float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
MF_FN float max(float a, float b) { return ptx::max_nan(a, b); }
MF_FN float min(float a, float b) { return ptx::min_nan(a, b); }
MF_FN float relu(float a) { return ptx::max_nan(a, 0.f); }

#if MF_FAST
// Relative error below 2^-20 for |x| <= 22, growing with |x| to 2^-18 at the ends of the range.
MF_FN float exp(float x) { return ptx::ex2(x * 1.44269504f); }
MF_FN float exp2(float x) { return ptx::ex2(x); }
MF_FN float rcp(float x) { return ptx::rcp(x); }
MF_FN float rsqrt(float x) { return ptx::rsqrt(x); }
MF_FN float div(float a, float b) { return ::__fdividef(a, b); }
MF_FN float sigmoid(float x) { return ptx::rcp(1.f + scalar::exp(-x)); }
#else
MF_FN float exp(float x) { return ::expf(x); }
MF_FN float exp2(float x) { return ::exp2f(x); }
MF_FN float rcp(float x) { return 1.f / x; }
MF_FN float rsqrt(float x) { return ::rsqrtf(x); }
MF_FN float div(float a, float b) { return a / b; }
// 1 / y for y in [1, 2^126]: the instruction's error is squared by one Newton step, which leaves
// only the last rounding. A third of an IEEE division, and no call.
MF_FN float sigmoid(float x) {
  const float y = ptx::min_nan(1.f + ::expf(-x), 0x1p126f), r = ptx::rcp(y);
  return ::fmaf(r, ::fmaf(-y, r, 1.f), r);
}
#endif
// tanh.approx is only good to 2^-11, so both builds take the accurate one.
MF_FN float tanh(float x) { return ::tanhf(x); }
MF_FN float expm1(float x) { return ::expm1f(x); }
MF_FN float log(float x) { return ::logf(x); }
MF_FN float log1p(float x) { return ::log1pf(x); }
MF_FN float log2(float x) { return ::log2f(x); }
MF_FN float sqrt(float x) { return ::sqrtf(x); }
MF_FN float erf(float x) { return ::erff(x); }
MF_FN float sin(float x) { return ::sinf(x); }
MF_FN float cos(float x) { return ::cosf(x); }
MF_FN float pow(float x, float y) { return ::powf(x, y); }
MF_FN float abs(float x) { return ::fabsf(x); }
MF_FN float floor(float x) { return ::floorf(x); }
MF_FN float ceil(float x) { return ::ceilf(x); }
MF_FN float trunc(float x) { return ::truncf(x); }
MF_FN float round(float x) { return ::rintf(x); }
#endif
}  // namespace scalar

// ---- storage: registers as they come from memory ------------------------------------------------

// How each storage type sits in words. get: element i. put: elements 0..n-1 of v into w.
template <class T>
struct Storage;
template <>
struct Storage<float> {
  MF_FN static float get(const unsigned* w, int i) { return __uint_as_float(w[i]); }
  MF_FN static void put(unsigned* w, const real* v, int n) {
    MF_LANES(i, n) w[i] = __float_as_uint(float(v[i]));
  }
};
template <>
struct Storage<bf16> {
  MF_FN static float get(const unsigned* w, int i) {
    return __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
  }
  MF_FN static void put(unsigned* w, const real* v, int n) {
    MF_LANES(i, (n + 1) / 2)
    w[i] = ptx::pair_bf16(float(v[2 * i]), 2 * i + 1 < n ? float(v[2 * i + 1]) : 0.f);
  }
};
template <>
struct Storage<f16> {
  MF_FN static float get(const unsigned* w, int i) {
    return i % 2 ? ptx::high_f16(w[i / 2]) : ptx::low_f16(w[i / 2]);
  }
  MF_FN static void put(unsigned* w, const real* v, int n) {
    MF_LANES(i, (n + 1) / 2)
    w[i] = ptx::pair_f16(float(v[2 * i]), 2 * i + 1 < n ? float(v[2 * i + 1]) : 0.f);
  }
};
template <>
struct Storage<bool8> {
  MF_FN static float get(const unsigned* w, int i) {
    return (w[i / 4] >> (i % 4 * 8) & 0xffu) ? 1.f : 0.f;
  }
  MF_FN static void put(unsigned* w, const real* v, int n) {
    MF_LANES(i, (n + 3) / 4) w[i] = 0u;
    MF_LANES(i, n) w[i / 4] |= v[i] != 0.f ? 1u << (i % 4 * 8) : 0u;
  }
};
template <>
struct Storage<int> {
  MF_FN static real get(const unsigned* w, int i) { return real(int(w[i])); }
};
template <>
struct Storage<i64> {
  MF_FN static real get(const unsigned* w, int i) {
    return real(i64((unsigned long long)w[2 * i + 1] << 32 | w[2 * i]));
  }
};

namespace scalar {
MF_FN real to_bf16(real x) {
  return __uint_as_float(ptx::pair_bf16(0.f, float(x)) & 0xffff0000u);
}
MF_FN real to_f16(real x) { return ptx::low_f16(ptx::pair_f16(float(x), 0.f)); }
}  // namespace scalar

template <int BYTES>
MF_FN void write_raw(void* p, const Raw<BYTES>& r) {
  if constexpr (BYTES == 1) {
    *(unsigned char*)p = (unsigned char)r.w[0];
  } else if constexpr (BYTES == 2) {
    *(unsigned short*)p = (unsigned short)r.w[0];
  } else if constexpr (BYTES == 4) {
    *(unsigned*)p = r.w[0];
  } else if constexpr (BYTES == 8) {
    *(uint2*)p = make_uint2(r.w[0], r.w[1]);
  } else {
    MF_UNROLL for (int i = 0; i < BYTES / 16; ++i)
      ((uint4*)p)[i] = make_uint4(r.w[4 * i], r.w[4 * i + 1], r.w[4 * i + 2], r.w[4 * i + 3]);
  }
}

template <class T>
MF_FN void write_one(T* p, real v) {
  Raw<sizeof(T)> r;
  Storage<T>::put(r.w, &v, 1);
  write_raw<sizeof(T)>(p, r);
}
}  // namespace mf

#include "common.h"

namespace mf {

// ---- accumulators over one row ------------------------------------------------------------------

// What Sum, Max and Min share: this thread's part of the row. Two chains, even and odd lanes: as
// many fused multiply-adds as one chain, half the waiting. In a long row 32 vectors go into the
// chains, then the chains go into `far`, so that the sum does not lose its low bits.
template <class C, class Op>
struct Accumulator {
  static constexpr bool LONG = C::steps > 32;
  real even = Op::identity(), odd = Op::identity(), far = Op::identity();
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<C::lanes>& v) {
    if (C::live(team, j) == 0) return;
    MF_LANES(i, C::lanes) {
      real& chain = i % 2 ? odd : even;
      chain = Op::apply(chain, v.e[i]);
    }
    if (LONG && (j & 31) == 31) {
      far = Op::apply(far, chains());
      even = odd = Op::identity();
    }
  }
  MF_FN real total() const { return LONG ? Op::apply(far, chains()) : chains(); }

 private:
  MF_FN real chains() const { return C::lanes > 1 ? Op::apply(even, odd) : even; }
};
template <class C> using Sum = Accumulator<C, Add>;
template <class C> using Max = Accumulator<C, Most>;
template <class C> using Min = Accumulator<C, Least>;

struct alignas(16) Four { real e[4]; };  // read 16 bytes at a time

constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// ---- the team -----------------------------------------------------------------------------------

// TEAM threads that walk a row together, TEAMS of them in a block. A power of two up to 32 (teams
// share a warp, and may run different numbers of rows: shuffles name this team's lanes only), or
// whole warps (one barrier a reduction).
template <int TEAM, int TEAMS>
struct Team {
  static_assert(TEAM <= 32 ? (TEAM & (TEAM - 1)) == 0 : TEAM % 32 == 0, "see above");
  static_assert(TEAM * TEAMS <= 1024, "a block has at most 1024 threads");
  static_assert(TEAM <= 32 || TEAMS == 1 || TEAMS <= 15, "one named barrier a team, 15 of them");
  static constexpr int THREADS = TEAM * TEAMS;
  static constexpr int LANES = TEAM < 32 ? TEAM : 32, WARPS = TEAM > 32 ? TEAM / 32 : 1;

  mutable int phase = 0;  // which half of the exchange buffer the next reduction writes

  MF_FN int index() const { return TEAMS == 1 ? 0 : int(threadIdx.x) / TEAM; }
  MF_FN int rank() const { return TEAMS == 1 ? int(threadIdx.x) : int(threadIdx.x) % TEAM; }
  MF_FN i64 block() const { return blockIdx.x; }
  MF_FN i64 part() const { return i64(blockIdx.x) * TEAMS + index(); }

  // Every accumulator combined over the team, in an order the shape alone decides; all threads get
  // the results. Several at once cost far less than one after the other.
  template <class... A>
  MF_FN Pack<sizeof...(A)> sum(const A&... a) const { return reduce<Add>(pack(a.total()...)); }
  template <class... A>
  MF_FN Pack<sizeof...(A)> max(const A&... a) const { return reduce<Most>(pack(a.total()...)); }
  template <class... A>
  MF_FN Pack<sizeof...(A)> min(const A&... a) const { return reduce<Least>(pack(a.total()...)); }

  // One thread writes a row's value.
  template <class T>
  MF_FN void store(T* p, real v) const {
    if (rank() == 0) write_one(p, v);
  }

  // All teams of the block (group kernels only: there every team runs).
  MF_FN void block_sync() const { __syncthreads(); }

 private:
  MF_FN static unsigned mask() {
    if constexpr (LANES == 32) {
      return ~0u;
    } else {
      return ((1u << LANES) - 1u) << (threadIdx.x & 31u & ~unsigned(LANES - 1));
    }
  }
  MF_FN void barrier() const {
    if constexpr (TEAMS == 1) {
      __syncthreads();
    } else {
      ptx::named_barrier<TEAM>(1 + index());
    }
  }

  // K values over WIDTH lanes. While there are several values, the lanes halve the work: each half
  // keeps half of the values and hands the other half over. Value k ends in the WIDTH / P lanes
  // starting at k * (WIDTH / P), P being K rounded up to a power of two.
  template <class Op, int WIDTH, int K>
  MF_FN static real fold(const Pack<K>& a) {
    constexpr int P = power_of_two(K);
    static_assert(P <= WIDTH, "more values than lanes");
    real v[P];
    MF_LANES(i, P) v[i] = i < K ? a.e[i < K ? i : 0] : Op::identity();
    MF_UNROLL for (int o = WIDTH / 2, n = P; o > 0; o /= 2) {
      if (n > 1) {
        n /= 2;
        const bool upper = threadIdx.x & o;
        MF_LANES(i, P / 2) {
          if (i < n) {
            const real give = upper ? v[i] : v[i + n];
            const real keep = upper ? v[i + n] : v[i];
            v[i] = Op::apply(keep, __shfl_xor_sync(mask(), give, o));
          }
        }
      } else {
        v[0] = Op::apply(v[0], __shfl_xor_sync(mask(), v[0], o));
      }
    }
    return v[0];
  }

  template <class Op, int WIDTH, int K>
  MF_FN static Pack<K> spread(real v) {
    Pack<K> r;
    if constexpr (K == 1) {
      r.e[0] = v;
    } else {
      MF_LANES(k, K) r.e[k] = __shfl_sync(mask(), v, k * (WIDTH / power_of_two(K)), LANES);
    }
    return r;
  }

  template <class Op, int K>
  MF_FN Pack<K> reduce(Pack<K> a) const {
    constexpr int P = power_of_two(K);
    if constexpr (P > LANES) {  // a tiny team with many sums: value by value
      MF_LANES(k, K)
      MF_UNROLL for (int o = LANES / 2; o > 0; o /= 2)
        a.e[k] = Op::apply(a.e[k], __shfl_xor_sync(mask(), a.e[k], o));
      return a;
    } else if constexpr (WARPS == 1) {
      return spread<Op, LANES, K>(fold<Op, LANES, K>(a));
    } else {
      // Double-buffered: a thread still reading one half cannot be overtaken twice, because the
      // reduction in between has a barrier of its own.
      constexpr int ROW = (WARPS + 3) / 4 * 4;
      alignas(16) __shared__ real exchange[2][TEAMS][K][ROW];
      real(*own)[ROW] = exchange[phase][index()];
      phase ^= 1;
      const int here = threadIdx.x & 31, warp = rank() / 32, k = here / (32 / P);
      const real mine = fold<Op, 32, K>(a);
      if (here % (32 / P) == 0 && k < K) own[k][warp] = mine;
      barrier();
      constexpr int GROUP = 32 / P;  // lanes that combine the warps' parts of one value
      if constexpr (K * WARPS <= 12) {
        Pack<K> r;
        MF_LANES(i, K) {
          Four q[ROW / 4];
          MF_LANES(w, ROW / 4) q[w] = *(const Four*)&own[i][4 * w];
          r.e[i] = q[0].e[0];
          MF_UNROLL for (int w = 1; w < WARPS; ++w) r.e[i] = Op::apply(r.e[i], q[w / 4].e[w % 4]);
        }
        return r;
      } else {
        real v = Op::identity();
        MF_UNROLL for (int w = 0; w < WARPS; w += GROUP) {
          const int from = w + here % GROUP;
          const real x = from < WARPS && k < K ? own[k < K ? k : 0][from] : Op::identity();
          v = Op::apply(v, x);
        }
        MF_UNROLL for (int o = (GROUP < power_of_two(WARPS) ? GROUP : power_of_two(WARPS)) / 2;
                       o > 0; o /= 2)
          v = Op::apply(v, __shfl_xor_sync(~0u, v, o));
        return spread<Op, 32, K>(v);
      }
    }
  }
};

// ---- reading rows -------------------------------------------------------------------------------

// One row's worth of a tensor in this thread's registers. Every aligned run of A columns lies
// together in memory (SPLAT: shares the one element at its first column's offset).
template <class C, class T, int A, bool SPLAT>
struct Tile {
  static constexpr int V = C::lanes, RUN = A < V ? A : V, RUNS = V / RUN;
  static constexpr int BYTES = (SPLAT ? 1 : RUN) * int(sizeof(T));
  static_assert(C::columns % V == 0, "on the device a vector is whole or dead");
  static_assert(V % RUN == 0 && A % RUN == 0, "runs must tile the vector, or vectors the run");
  Raw<BYTES> raw[RUNS];

  template <class Reader, class Team, class Col>
  MF_FN void load(const Team& team, int j, const T* base, const Col& col) {
    const int c = C::column(team, j);
    if (C::live(team, j) == V) {
      MF_LANES(p, RUNS) Reader::template load<BYTES>(raw[p], base + col(c + p * RUN));
    } else {
      MF_LANES(p, RUNS) MF_LANES(i, Raw<BYTES>::words) raw[p].w[i] = 0u;
    }
  }
  MF_FN Vec<V> unpack() const {
    Vec<V> v;
    MF_LANES(i, V) v.e[i] = Storage<T>::get(raw[i / RUN].w, SPLAT ? 0 : i % RUN);
    return v;
  }
};

template <bool FRESH, class Reader>
struct ReaderFor { using type = Reader; };
template <class Reader>
struct ReaderFor<true, Reader> { using type = Fresh; };

// A tensor read along the rows: the current row and, on its way, the next one. FRESH: this launch
// wrote it.
template <class C, class T, int A, bool SPLAT, bool FRESH, class Col>
struct Stream {
  Col col;
  Tile<C, T, A, SPLAT> next[C::steps], current[C::steps];
  MF_FN explicit Stream(Col c) : col(c) {}
  template <class Team>
  MF_FN void fetch(const Team& team, const T* row) {
    MF_STEPS(j, C) next[j].template load<typename ReaderFor<FRESH, Once>::type>(team, j, row, col);
  }
  MF_FN void advance() { MF_STEPS(j, C) current[j] = next[j]; }
  template <class Team>
  MF_FN Vec<C::lanes> at(const Team&, int j) const { return current[j].unpack(); }
};
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN auto stream(Col col) { return Stream<C, T, A, false, FRESH, Col>(col); }
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN auto splat(Col col) { return Stream<C, T, A, true, FRESH, Col>(col); }

#ifndef MF_DYNAMIC_SHARED
#define MF_DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) unsigned char NAME[]
#endif

// A tensor read along the rows with DEPTH rows on their way, in shared memory instead of registers.
// Each thread copies and reads back its own vectors only, so no thread waits for another. OFFSET:
// where in the block's shared memory the slots of this tensor begin. Used inside mf::rows_ring.
template <class C, class T, int A, int DEPTH, int OFFSET, int THREADS, class Col>
struct Ring {
  static constexpr int V = C::lanes, RUN = A < V ? A : V, BYTES = RUN * int(sizeof(T));
  static constexpr int PIECE = BYTES < 16 ? BYTES : 16, PIECES = V * int(sizeof(T)) / PIECE;
  // Slot layout [depth][step][piece][thread][PIECE]: neighbouring threads, neighbouring banks.
  static constexpr int PER_PIECE = THREADS * PIECE, PER_ROW = C::steps * PIECES * PER_PIECE;
  Col col;
  unsigned head = DEPTH - 1, tail = DEPTH - 1;  // the slot being read; the last one filled
  MF_FN explicit Ring(Col c) : col(c) {}
  MF_FN static unsigned own() {
    MF_DYNAMIC_SHARED(mf_shared);
    return unsigned(__cvta_generic_to_shared(mf_shared)) + OFFSET + threadIdx.x * PIECE;
  }
  template <class Team>
  MF_FN void fetch(const Team& team, const T* row) {
    tail = tail + 1 == DEPTH ? 0 : tail + 1;
    MF_STEPS(j, C) {
      const int c = C::column(team, j);
      if (C::live(team, j) == V) {
        MF_LANES(p, PIECES) {
          constexpr int PER = PIECE / int(sizeof(T));  // columns of a piece
          const int at = p * PER;
          const T* from = row + col(c + at / RUN * RUN) + at % RUN;
          ptx::copy_async<PIECE>(own() + tail * PER_ROW + (j * PIECES + p) * PER_PIECE, from);
        }
      }
    }
  }
  MF_FN void advance() { head = head + 1 == DEPTH ? 0 : head + 1; }
  template <class Team>
  MF_FN Vec<V> at(const Team& team, int j) const {
    Raw<V * int(sizeof(T))> raw;
    if (C::live(team, j) == V) {
      MF_LANES(p, PIECES) {
        Raw<PIECE> piece;
        ptx::read_shared<PIECE>(piece.w, own() + head * PER_ROW + (j * PIECES + p) * PER_PIECE);
        MF_LANES(i, Raw<PIECE>::words) raw.w[p * (PIECE / 4) + i] = piece.w[i];
      }
    } else {
      MF_LANES(i, Raw<V * int(sizeof(T))>::words) raw.w[i] = 0u;
    }
    Vec<V> v;
    MF_LANES(i, V) v.e[i] = Storage<T>::get(raw.w, i);
    return v;
  }
};
template <class C, class T, int A, int DEPTH, int OFFSET, int THREADS, class Col>
MF_FN auto ring(Col col) { return Ring<C, T, A, DEPTH, OFFSET, THREADS, Col>(col); }

// mf::rows with the rings DEPTH - 1 rows ahead of the body; fetch_ring starts their copies.
template <int DEPTH, class RowOf, class Fetch, class FetchRing, class Advance, class Body>
MF_FN void rows_ring(i64 begin, i64 end, i64 step, const RowOf& row_of, const Fetch& fetch,
                     const FetchRing& fetch_ring, const Advance& advance, const Body& body) {
  if (begin >= end) return;
  MF_UNROLL for (int d = 0; d < DEPTH - 1; ++d) {
    if (begin + d * step < end) fetch_ring(row_of(begin + d * step));
    ptx::copy_commit();
  }
  auto next = row_of(begin);
  fetch(next);
  MF_KEEP_ROWS for (i64 r = begin; r < end; r += step) {
    const auto row = next;
    advance();
    if (r + step < end) {
      next = row_of(r + step);
      fetch(next);
    }
    // The slot filled now is the one the last body read, by this very thread.
    if (r + (DEPTH - 1) * step < end) fetch_ring(row_of(r + (DEPTH - 1) * step));
    ptx::copy_commit();
    ptx::copy_wait<DEPTH - 1>();
    body(row);
  }
  ptx::copy_wait<0>();
}

// The same for a row too long for registers: nothing is kept, at() reads memory every time.
template <class C, class T, int A, bool SPLAT, bool FRESH, class Col>
struct LongStream {
  Col col;
  const T *next, *current;
  template <class Team>
  MF_FN void fetch(const Team&, const T* row) { next = row; }
  MF_FN void advance() { current = next; }
  template <class Team>
  MF_FN Vec<C::lanes> at(const Team& team, int j) const {
    Tile<C, T, A, SPLAT> tile;
    tile.template load<typename ReaderFor<FRESH, Kept>::type>(team, j, current, col);
    return tile.unpack();
  }
};
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN LongStream<C, T, A, false, FRESH, Col> long_stream(Col col) {
  return {col, nullptr, nullptr};
}
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN LongStream<C, T, A, true, FRESH, Col> long_splat(Col col) {
  return {col, nullptr, nullptr};
}
template <class C, class T, int A, class Team, class Col>
MF_FN LongStream<C, T, A, false, false, Col> long_hold(const Team&, const T* base, Col col) {
  return {col, base, base};
}

// A tensor that every row reads at the same place (parameters): loaded once, packed.
template <class C, class T, int A, bool SPLAT>
struct Hold {
  Tile<C, T, A, SPLAT> tile[C::steps];
  template <class Team>
  MF_FN Vec<C::lanes> at(const Team&, int j) const { return tile[j].unpack(); }
};
template <class C, class T, int A, bool SPLAT = false, class Team, class Col>
MF_FN Hold<C, T, A, SPLAT> hold(const Team& team, const T* base, Col col) {
  Hold<C, T, A, SPLAT> h;
  MF_STEPS(j, C) h.tile[j].template load<Once>(team, j, base, col);
  return h;
}
template <class C, class T, int A, class Team, class Col>
MF_FN Hold<C, T, A, true> hold_splat(const Team& team, const T* base, Col col) {
  return hold<C, T, A, true>(team, base, col);
}

// One value a row, fetched one row ahead by every thread of the team (one line, one request).
template <class T, bool FRESH = false>
struct Scalar {
  Raw<sizeof(T)> next, current;
  MF_FN void fetch(const T* p) {
    ReaderFor<FRESH, Once>::type::template load<sizeof(T)>(next, p);
  }
  MF_FN void advance() { current = next; }
  MF_FN real value() const { return Storage<T>::get(current.w, 0); }
};

// ---- writing ------------------------------------------------------------------------------------

// Writes vector j of the row at `base`, in aligned runs of A columns.
template <class C, class T, int A, class Team, class Col>
MF_FN void store(const Team& team, int j, T* base, const Col& col, const Vec<C::lanes>& v) {
  constexpr int V = C::lanes, RUN = A < V ? A : V, BYTES = RUN * int(sizeof(T));
  static_assert(V % RUN == 0 && A % RUN == 0, "runs must tile the vector, or vectors the run");
  const int c = C::column(team, j);
  if (C::live(team, j) == 0) return;
  MF_LANES(p, V / RUN) {
    Raw<BYTES> r;
    Storage<T>::put(r.w, v.e + p * RUN, RUN);
    write_raw<BYTES>(base + col(c + p * RUN), r);
  }
}

// ---- sums over rows -----------------------------------------------------------------------------

// Eight or fewer neighbouring partials, 16 bytes at a time where the vector's width allows.
template <int V>
MF_FN void write_partials(float* p, const real* v) {
  constexpr int RUN = V % 4 == 0 ? 4 : V % 2 == 0 ? 2 : 1;
  MF_LANES(i, V / RUN) {
    Raw<4 * RUN> r;
    Storage<float>::put(r.w, v + i * RUN, RUN);
    write_raw<4 * RUN>(p + i * RUN, r);
  }
}

// One float32 partial a column and team, summed in registers over the team's rows in their order
// and written to partials[part * columns + column] at the end. Where storage is float32, every 16
// rows go into memory before that: a register then adds few enough values to keep their low bits,
// and what the addition in memory rounds off stays in the register. MF_WIDE: double registers, and
// one rounding when the partial is written.
template <class C>
struct Column {
  static constexpr unsigned FLUSH = 16;
  float* own;
  real sum[C::steps][C::lanes];
  unsigned rows = 0;
  template <class Team>
  MF_FN Column(const Team& team, float* partials) : own(partials + team.part() * C::columns) {
    MF_STEPS(j, C) MF_LANES(i, C::lanes) sum[j][i] = 0.f;
  }
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<C::lanes>& v) {
    MF_LANES(i, C::lanes) sum[j][i] += v.e[i];
#if !MF_FAST && !MF_WIDE
    if (j == 0) ++rows;
    if (rows % FLUSH == 0 && C::live(team, j)) flush(own + C::column(team, j), sum[j]);
#endif
  }
  template <class Team>
  MF_FN void write(const Team& team) {
    MF_STEPS(j, C)
      if (C::live(team, j)) {
        float* p = own + C::column(team, j);
        if (rows >= FLUSH) MF_LANES(i, C::lanes) sum[j][i] += p[i];
        write_partials<C::lanes>(p, sum[j]);
      }
  }

 private:
  MF_FN void flush(float* p, real (&s)[C::lanes]) const {
    real t[C::lanes];
    MF_LANES(i, C::lanes) {
      const float far = rows == FLUSH ? 0.f : p[i];
      t[i] = far + s[i];
      const float added = t[i] - far, lost = (far - (t[i] - added)) + (s[i] - added);
      s[i] = lost == lost ? lost : 0.f;  // t is infinite or NaN, and stays so
    }
    write_partials<C::lanes>(p, t);
  }
};

// The same for a long row: the partials stay in memory, each column owned by one thread.
template <class C>
struct LongColumn {
  float* own;
  template <class Team>
  MF_FN LongColumn(const Team& team, float* partials) : own(partials + team.part() * C::columns) {
    MF_LOOP(j, C)
      if (C::live(team, j))
        MF_LANES(i, C::lanes) own[C::column(team, j) + i] = 0.f;
  }
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<C::lanes>& v) {
    if (C::live(team, j) == 0) return;
    float* p = own + C::column(team, j);
    real sum[C::lanes];
    MF_LANES(i, C::lanes) sum[i] = p[i] + v.e[i];
    write_partials<C::lanes>(p, sum);
  }
  template <class Team>
  MF_FN void write(const Team&) const {}
};

// Adds the partials of a column sum up: out(k, c) = sum over i < count of
// partials[index(k, i) * n + c]. A block of 32 x 8 threads takes 32 columns; its 8 rows of threads
// take every eighth i in order and are then combined in order, so the grid's size cannot show.
struct Finisher {
#if MF_FAST
  using Wide = float;
#else
  using Wide = double;
#endif
  static constexpr int WIDE = 32, SLICES = 8;
  template <class T, class Index, class Out>
  MF_FN void column(int which, const float* partials, int n, i64 kept, i64 count,
                    const Index& index, const Out& out) const {
    Wide(*slices)[WIDE] = shared();
    if (int(blockIdx.y) != which) return;
    const int x = threadIdx.x, y = threadIdx.y, tiles = (n + WIDE - 1) / WIDE;
    for (i64 tile = blockIdx.x; tile < kept * tiles; tile += gridDim.x) {
      const i64 k = tile / tiles;
      const int c = int(tile % tiles) * WIDE + x;
      Wide sum = 0;
      if (c < n) {
        // Four loads in flight, added in order.
        i64 i = y;
        for (; i + 3 * SLICES < count; i += 4 * SLICES) {
          float part[4];
          MF_LANES(u, 4) part[u] = partials[index(k, i + u * SLICES) * n + c];
          MF_LANES(u, 4) sum += part[u];
        }
        for (; i < count; i += SLICES) sum += partials[index(k, i) * n + c];
      }
      slices[y][x] = sum;
      __syncthreads();
      if (y == 0 && c < n) {
        Wide total = slices[0][x];
        MF_UNROLL for (int s = 1; s < SLICES; ++s) total += slices[s][x];
        write_one<T>(out(k, c), real(total));
      }
      __syncthreads();
    }
  }

 private:
  // Outside the template: a block works on one sum, so all of them share these bytes.
  MF_FN static Wide (*shared())[WIDE] {
    __shared__ Wide slices[SLICES][WIDE];
    return slices;
  }
};

}  // namespace mf

// ---- entry points -------------------------------------------------------------------------------

// Teams beyond the last part leave before anything else, a whole team at a time.
#define MF_KERNEL(NAME)                                                                       \
  extern "C" __global__ void __launch_bounds__(NAME::Team::THREADS, NAME::min_blocks)         \
      NAME(const __grid_constant__ NAME::Args a) {                                            \
    const NAME::Team team;                                                                    \
    if (team.part() < a.parts) NAME::run(team, a);                                            \
  }
// Every team of every block runs: stages meet at block_sync().
#define MF_GROUP_KERNEL(NAME)                                                                 \
  extern "C" __global__ void __launch_bounds__(NAME::Team::THREADS, NAME::min_blocks)         \
      NAME(const __grid_constant__ NAME::Args a) {                                            \
    const NAME::Team team;                                                                    \
    NAME::run(team, a);                                                                       \
  }
// Launch with blocks of 32 x 8 and grid (any, number of sums).
#define MF_FINISH(NAME)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ NAME::Args a) { \
    NAME::run(mf::Finisher(), a);                                                             \
  }

#endif  // MF_TILE_H
