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
// Abramowitz and Stegun, 7.1.26: within 2e-7; below 0.4 four terms of the series, within 2^-17 of the
// value. Half the instructions of erff.
MF_FN float erf(float x) {
  const float a = ::fabsf(x), t = ptx::rcp(::fmaf(0.3275911f, a, 1.f)), y = x * x;
  float p = ::fmaf(::fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f);
  p = ::fmaf(::fmaf(p, t, -0.284496736f), t, 0.254829592f) * t;
  const float large = ::copysignf(::fmaf(-p, ptx::ex2(-1.44269504f * y), 1.f), x);
  float q = ::fmaf(::fmaf(-0.0268661706f, y, 0.112837917f), y, -0.376126389f);
  q = ::fmaf(q, y, 1.12837917f) * x;
  return a < 0.4f ? q : large;
}
#else
MF_FN float erf(float x) { return ::erff(x); }
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

template <class T>
MF_FN void write_one(T* p, real v) {
  Raw<sizeof(T)> r;
  Storage<T>::put(r.w, &v, 1);
  ptx::write_global(p, r);
}
}  // namespace mf

#include "common.h"
#include "team.cuh"
#include "streams.cuh"
#include "turn.cuh"
#include "sums.cuh"

// ---- entry points -------------------------------------------------------------------------------

namespace mf {
// A row kernel's first act. The next kernel may start at once: by then all blocks of this one have
// their places, and what it does first is wait.
MF_FN void begin() {
  ptx::wait_for_predecessor();
  ptx::let_successor_start();
}
}  // namespace mf

// Teams beyond the last part leave before anything else, a whole team at a time.
#define MF_KERNEL(NAME)                                                                       \
  extern "C" __global__ void __launch_bounds__(NAME::Team::THREADS, NAME::min_blocks)         \
      NAME(const __grid_constant__ NAME::Args a) {                                            \
    mf::begin();                                                                              \
    const NAME::Team team;                                                                    \
    if (team.part() < a.parts) NAME::run(team, a);                                            \
  }
// Every team of every block runs: stages meet at block_sync().
#define MF_GROUP_KERNEL(NAME)                                                                 \
  extern "C" __global__ void __launch_bounds__(NAME::Team::THREADS, NAME::min_blocks)         \
      NAME(const __grid_constant__ NAME::Args a) {                                            \
    mf::begin();                                                                              \
    const NAME::Team team;                                                                    \
    NAME::run(team, a);                                                                       \
  }
// Launch with blocks of 32 x 8 and grid (any, number of sums).
#define MF_FINISH(NAME)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ NAME::Args a) { \
    mf::begin();                                                                              \
    NAME::run(mf::Finisher(), a);                                                             \
  }

#endif  // MF_TILE_H
