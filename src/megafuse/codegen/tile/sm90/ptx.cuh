// Hopper's own words: every PTX instruction the matmul kernels use, behind a name.
// Shared-memory addresses are 32-bit numbers in the shared window throughout.

namespace mf {
namespace sm90 {

using u32 = unsigned;
using u64 = unsigned long long;

// What cuTensorMapEncodeTiled fills in: opaque, read by the copy engine alone.
struct alignas(64) TensorMap { u64 opaque[16]; };

namespace ptx {

MF_FN u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A random pause of up to 4 us where a test asks for one: an ordering that only usually holds fails.
MF_FN void jitter(u32 where) {
#ifdef MF_JITTER
  u32 x = (u32)clock64() * 2654435761u + where * 40503u + blockIdx.x * 9176u;
  x ^= x >> 15;
  if (x & 64u) __nanosleep(x >> 20);
#endif
}

// ---- mbarriers ----------------------------------------------------------------------------------

MF_FN void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialised barriers known to the copy engine.
MF_FN void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The .cta scope is the default spelled without a cluster address: a cluster-wide release here
// would cost a fence of the whole GPU every k-block.
MF_FN void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and keeps the phase open until `bytes` more have landed.
MF_FN void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
MF_FN bool has_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}
// The same, without suspending the thread for a while.
MF_FN bool has_passed_now(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}
// Until the phase of this parity is complete. A fresh barrier counts its phase of parity 1 as done.
MF_FN void wait(u32 barrier, u32 parity) {
#ifdef MF_DEBUG
  // A wait that never ends is a fault of this kernel: stop it where a debugger can see it. Each try
  // suspends the thread for a while, so this many take seconds. (Counted, because reading a clock
  // here costs the registers that the consumers do not have.)
  if (has_passed(barrier, parity)) return;
  _Pragma("unroll 1") for (int tries = 0; tries < (1 << 22); ++tries)
    if (has_passed(barrier, parity)) return;
  __trap();
#else
  while (!has_passed(barrier, parity)) {
  }
#endif
}

// ---- the copy engine ----------------------------------------------------------------------------

MF_FN void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box of `map` at (x, y, z), zero outside the tensor; its bytes count towards `barrier`.
MF_FN void load_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}
// Writes a box, leaving out what lies outside the tensor.
MF_FN void store_box(const TensorMap* map, u32 from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
      ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
}
// `bytes` consecutive bytes; addresses and size are multiples of 16.
MF_FN void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
MF_FN void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the newest N groups of stores have read their shared memory ...
template <int N>
MF_FN void stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// ... and until all have been written.
MF_FN void stores_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's ordinary accesses to shared memory before later ones of the copy engine.
MF_FN void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tensor cores -------------------------------------------------------------------------------

MF_FN void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MF_FN void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
MF_FN void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// After the wait: keeps the compiler from moving uses of the accumulator up in front of it, which a
// register operand alone does not forbid.
template <int N>
MF_FN void mma_settled(float (&acc)[N]) {
  MF_UNROLL for (int i = 0; i < N; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// threadIdx.x, read where it is asked for and not kept in a register.
MF_FN u32 thread() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// ---- registers and shared memory ----------------------------------------------------------------

template <int N>
MF_FN void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
MF_FN void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 and
// holds two neighbouring elements of each, as wgmma lays out its accumulator.
MF_FN void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
MF_FN void load_matrices(u32 from, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
}
// Two matrices, rows 0 to 7 and 8 to 15 of 8 columns: lanes 0 to 15 give the addresses.
MF_FN void store_matrices(u32 to, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               ::"r"(to), "r"(a), "r"(b) : "memory");
}
MF_FN void load_matrices(u32 from, u32& a, u32& b) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(a), "=r"(b) : "r"(from) : "memory");
}
// 16 bytes of global memory that are read once; zero, and no access, where they are not wanted. One
// predicate and no branch, so that many can be on their way.
MF_FN void load_if(u32 (&w)[4], const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(w[0]), "=&r"(w[1]), "=&r"(w[2]), "=&r"(w[3]) : "l"(from), "r"(int(wanted)));
}
MF_FN void store_word(u32 to, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
template <int WORDS>
MF_FN void load_words(u32 from, u32 (&w)[WORDS]) {
  static_assert(WORDS == 1 || WORDS == 2, "a pair of 2-byte or 4-byte elements");
  if constexpr (WORDS == 1) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(from) : "memory");
  } else {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(from) : "memory");
  }
}

}  // namespace ptx
}  // namespace sm90
}  // namespace mf
