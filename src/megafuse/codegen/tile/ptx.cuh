// The machine's own words: every PTX instruction the row kernels use, behind a name.
// A test replaces this file by plain C++ and runs the device header on a CPU.

namespace mf {

// BYTES of one row as raw words; unpacked only where they are used, so that a prefetched row costs
// half the registers of its float32 form. Less than 4 bytes still take a register of their own:
// joining them would wait for the load.
template <int BYTES>
struct Raw {
  static_assert(BYTES > 0 && (BYTES & (BYTES - 1)) == 0, "a run is 1, 2, 4, 8, 16, ... bytes");
  static constexpr int words = BYTES > 4 ? BYTES / 4 : 1;
  unsigned w[words];
};

namespace ptx {

// The same value, and the compiler does not know that.
MF_FN int hidden(int x) {
  asm("" : "+r"(x));
  return x;
}
template <class T>
MF_FN T* hidden(T* p) {
  asm("" : "+l"(p));
  return p;
}

// The larger or smaller, and a NaN comes through: one instruction.
MF_FN float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
MF_FN float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// 2^x, 1 / x and 1 / sqrt(x) within 2^-22, subnormals flushed: one instruction each.
MF_FN float ex2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
MF_FN float rcp(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
MF_FN float rsqrt(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Two floats rounded to 16 bits each, in one word; and a half out of such a word.
MF_FN unsigned pair_bf16(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
MF_FN unsigned pair_f16(float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
MF_FN float low_f16(unsigned w) {
  float r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(w));
  return r;
}
MF_FN float high_f16(unsigned w) {
  float r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(w));
  return r;
}

// Stores to global memory, as wide as they are written: from a C++ structure of four words the
// compiler may make four stores, and a warp then sends every sector four times.
template <int BYTES>
MF_FN void write_global(void* p, const Raw<BYTES>& r) {
  if constexpr (BYTES == 1) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(r.w[0]) : "memory");
  } else if constexpr (BYTES == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"((unsigned short)r.w[0]) : "memory");
  } else if constexpr (BYTES == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(r.w[0]) : "memory");
  } else if constexpr (BYTES == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]) : "memory");
  } else {
    MF_UNROLL for (int i = 0; i < BYTES / 16; ++i) asm volatile(
        "st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"((char*)p + 16 * i), "r"(r.w[4 * i]),
        "r"(r.w[4 * i + 1]), "r"(r.w[4 * i + 2]), "r"(r.w[4 * i + 3]) : "memory");
  }
}

// Copies from global to shared memory that no register waits for. Groups complete in order.
template <int BYTES>
MF_FN void copy_async(unsigned shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "what cp.async can copy");
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES)
                 : "memory");
  }
}
template <int BYTES>
MF_FN void read_shared(unsigned* w, unsigned shared) {
  if constexpr (BYTES == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(shared));
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(shared));
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(shared));
  } else {
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(w[0]) : "r"(shared));
  }
}
template <int BYTES>
MF_FN void write_shared(unsigned shared, const unsigned* w) {
  if constexpr (BYTES == 16) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
  } else if constexpr (BYTES == 8) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared), "r"(w[0]), "r"(w[1]) : "memory");
  } else if constexpr (BYTES == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(w[0]) : "memory");
  } else {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"((unsigned short)w[0]) : "memory");
  }
}
MF_FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
MF_FN void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// THREADS threads meet at barrier `id` (0 is __syncthreads).
template <int THREADS>
MF_FN void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// A kernel of ours may start while the one before it on the stream still runs. Every thread waits
// for that one's end, and for all it wrote, before it touches memory ...
MF_FN void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// ... and a block says when it does not mind the next kernel's blocks beside it.
MF_FN void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ptx

// The three ways to read memory. None is .nc: that path is for what nobody writes while the kernel
// runs, and a kernel that starts early runs while its predecessor writes. All are volatile, so that
// none moves up in front of the wait.
//   Once    streamed rows: not kept in L1; stays where it was written in the program, because a
//           prefetch that drifts down to its use is no prefetch
//   Kept    parameters and re-read rows: cached
//   Fresh   what this launch itself has written: ordered with its stores
#define MF_READER(NAME, HOW, MEMORY)                                                            \
  struct NAME {                                                                                  \
    template <int BYTES>                                                                         \
    MF_FN static void load(Raw<BYTES>& r, const void* p) {                                       \
      if constexpr (BYTES == 1) {                                                                \
        asm volatile("ld.global" HOW ".u8 %0, [%1];" : "=r"(r.w[0]) : "l"(p) MEMORY);            \
      } else if constexpr (BYTES == 2) {                                                         \
        unsigned short half;                                                                     \
        asm volatile("ld.global" HOW ".u16 %0, [%1];" : "=h"(half) : "l"(p) MEMORY);             \
        r.w[0] = half;                                                                           \
      } else if constexpr (BYTES == 4) {                                                         \
        asm volatile("ld.global" HOW ".u32 %0, [%1];" : "=r"(r.w[0]) : "l"(p) MEMORY);           \
      } else if constexpr (BYTES == 8) {                                                         \
        asm volatile("ld.global" HOW ".v2.u32 {%0, %1}, [%2];"                                   \
            : "=r"(r.w[0]), "=r"(r.w[1]) : "l"(p) MEMORY);                                       \
      } else {                                                                                   \
        MF_UNROLL for (int i = 0; i < BYTES / 16; ++i) asm volatile(                             \
            "ld.global" HOW ".v4.u32 {%0, %1, %2, %3}, [%4];"                                    \
            : "=r"(r.w[4 * i]), "=r"(r.w[4 * i + 1]), "=r"(r.w[4 * i + 2]), "=r"(r.w[4 * i + 3]) \
            : "l"((const char*)p + 16 * i) MEMORY);                                              \
      }                                                                                          \
    }                                                                                            \
  };
#define MF_ORDERED : "memory"
MF_READER(Once, ".L1::no_allocate", )
MF_READER(Kept, "", )
MF_READER(Fresh, "", MF_ORDERED)
#undef MF_READER
#undef MF_ORDERED

}  // namespace mf
