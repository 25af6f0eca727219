// Stands in for ptx.cuh: CUDA's threads as fibers of one CPU thread, so that the device header runs,
// barriers, shuffles and all, where there is no GPU. Blocks run one after the other. A barrier that
// some thread never reaches, a shuffle from a lane outside its mask, a misaligned load and an access to
// memory before the wait for the kernel before end the process with a message instead of hanging or
// reading nonsense.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
#define MF_DYNAMIC_SHARED(NAME) unsigned char* NAME = emulated::dynamic_shared
namespace emulated { alignas(16) inline unsigned char dynamic_shared[1 << 18]; }
inline size_t __cvta_generic_to_shared(const void* p) {
  return size_t((const unsigned char*)p - emulated::dynamic_shared);
}
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

namespace emulated {
struct Dim { unsigned x = 1, y = 1; };
// Threads that wait for each other: a barrier, or the lanes of one shuffle mask.
struct Meeting { unsigned arrived = 0; unsigned long long round = 0; double value[2][32]; };
struct Fiber { ucontext_t context; Dim index; unsigned number; bool done, waited; };

inline Dim grid, block, block_index;
inline Fiber* self;
inline ucontext_t scheduler;
inline const std::function<void()>* body;
inline unsigned long long arrivals;
inline std::map<std::pair<unsigned, unsigned>, Meeting> shuffles;
inline std::map<int, Meeting> barriers;
constexpr size_t STACK = 1 << 17;
inline std::vector<std::unique_ptr<char[]>> stacks;  // one a thread, for every block in turn

inline void fail(const char* why) {
  std::fprintf(stderr, "emulated device: %s\n", why);
  std::abort();
}
// Of a thread about to touch global memory.
inline void touch() {
  if (!self->waited) fail("a thread touches memory that the kernel before may still write");
}
inline void meet(Meeting& m, unsigned expected) {
  ++arrivals;
  const auto round = m.round;
  if (++m.arrived == expected) {
    m.arrived = 0;
    ++m.round;
    return;
  }
  while (m.round == round) swapcontext(&self->context, &scheduler);
}
inline double exchange(unsigned mask, double value, unsigned from) {
  const unsigned lane = self->number % 32;
  if (!(mask >> lane & 1)) fail("a thread shuffles under a mask without itself");
  if (!(mask >> from & 1)) fail("a shuffle reads a lane outside its mask");
  Meeting& m = shuffles[{self->number / 32, mask}];
  double* slots = m.value[m.round & 1];
  slots[lane] = value;
  meet(m, unsigned(__builtin_popcount(mask)));
  return slots[from];
}
inline void enter() {
  (*body)();
  self->done = true;
  ++arrivals;
  swapcontext(&self->context, &scheduler);
}
inline void run_block() {
  std::vector<Fiber> fibers(block.x * block.y);
  shuffles.clear();
  barriers.clear();
  for (unsigned i = 0; i < fibers.size(); ++i) {
    Fiber& f = fibers[i];
    if (i == stacks.size()) stacks.emplace_back(new char[STACK]);
    f.index = {i % block.x, i / block.x};
    f.number = i;
    f.done = f.waited = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks[i].get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  // Up and down in turn, so that neither order hides a missing barrier.
  for (bool upward = true, alive = true; alive; upward = !upward) {
    const auto before = arrivals;
    alive = false;
    for (size_t i = 0; i < fibers.size(); ++i) {
      Fiber& f = fibers[upward ? i : fibers.size() - 1 - i];
      if (f.done) continue;
      alive = true;
      self = &f;
      swapcontext(&scheduler, &f.context);
    }
    if (alive && arrivals == before) fail("deadlock: threads wait for one that never comes");
  }
}
inline void launch(long long gx, long long gy, long long bx, long long by,
                   const std::function<void()>& kernel) {
  grid = {unsigned(gx), unsigned(gy)};
  block = {unsigned(bx), unsigned(by)};
  body = &kernel;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = {x, y};
      run_block();
    }
}
}  // namespace emulated

#define threadIdx (emulated::self->index)
#define blockIdx (emulated::block_index)
#define gridDim (emulated::grid)
inline void __syncthreads() {
  emulated::meet(emulated::barriers[0], emulated::block.x * emulated::block.y);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int o) {
  return T(emulated::exchange(mask, v, (emulated::self->number % 32) ^ unsigned(o)));
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  const unsigned lane = emulated::self->number % 32, w = unsigned(width);
  return T(emulated::exchange(mask, v, (lane & ~(w - 1)) | (unsigned(from) & (w - 1))));
}

namespace mf {
template <int BYTES>
struct Raw {
  static_assert(BYTES > 0 && (BYTES & (BYTES - 1)) == 0, "a run is 1, 2, 4, 8, 16, ... bytes");
  static constexpr int words = BYTES > 4 ? BYTES / 4 : 1;
  unsigned w[words];
};

namespace ptx {
inline float max_nan(float a, float b) { return a > b || a != a ? a : b; }
inline float min_nan(float a, float b) { return a < b || a != a ? a : b; }
inline float ex2(float x) { return exp2f(x); }
inline float rcp(float x) { return 1.f / x; }
inline float rsqrt(float x) { return 1.f / sqrtf(x); }
inline unsigned bf16_of(float x) {
  const unsigned u = __float_as_uint(x);
  return x != x ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}
inline unsigned pair_bf16(float low, float high) { return bf16_of(high) << 16 | bf16_of(low); }
inline unsigned f16_of(float x) {
  const _Float16 h = _Float16(x);
  unsigned short u;
  std::memcpy(&u, &h, 2);
  return u;
}
inline unsigned pair_f16(float low, float high) { return f16_of(high) << 16 | f16_of(low); }
inline float low_f16(unsigned w) {
  const unsigned short u = (unsigned short)w;
  _Float16 h;
  std::memcpy(&h, &u, 2);
  return float(h);
}
inline float high_f16(unsigned w) { return low_f16(w >> 16); }
// An asynchronous copy may land at once: nothing may rely on it landing late.
template <int BYTES>
void copy_async(unsigned shared, const void* global) {
  emulated::touch();
  if ((unsigned long long)global % BYTES || shared % BYTES) emulated::fail("a misaligned copy");
  std::memcpy(emulated::dynamic_shared + shared, global, BYTES);
}
inline void copy_commit() {}
template <int PENDING>
void copy_wait() {}
template <int BYTES>
void read_shared(unsigned* w, unsigned shared) {
  if (shared % BYTES) emulated::fail("a misaligned read of shared memory");
  if (BYTES < 4) w[0] = 0;
  std::memcpy(w, emulated::dynamic_shared + shared, BYTES);
}
template <int BYTES>
void write_shared(unsigned shared, const unsigned* w) {
  if (shared % BYTES) emulated::fail("a misaligned write of shared memory");
  std::memcpy(emulated::dynamic_shared + shared, w, BYTES);
}
template <class T>
T hidden(T x) { return x; }
template <int BYTES>
void write_global(void* p, const Raw<BYTES>& r) {
  emulated::touch();
  if ((unsigned long long)p % (BYTES < 16 ? BYTES : 16)) emulated::fail("a misaligned store");
  std::memcpy(p, r.w, BYTES);
}
template <int THREADS>
void named_barrier(int id) {
  if (id < 1 || id > 15) emulated::fail("there are 16 barriers, and number 0 is the block's");
  emulated::meet(emulated::barriers[id], THREADS);
}
inline void wait_for_predecessor() { emulated::self->waited = true; }
inline void let_successor_start() {
  if (!emulated::self->waited) emulated::fail("the next kernel may start before this one does");
}
}  // namespace ptx

struct Reader {
  template <int BYTES>
  static void load(Raw<BYTES>& r, const void* p) {
    emulated::touch();
    if ((unsigned long long)p % (BYTES < 16 ? BYTES : 16)) emulated::fail("a misaligned load");
    r.w[0] = 0;
    std::memcpy(r.w, p, BYTES);
  }
};
struct Once : Reader {};
struct Kept : Reader {};
struct Fresh : Reader {};
}  // namespace mf
