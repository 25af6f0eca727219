// Stands in for sm90/ptx.cuh on top of tests/tile/emulated.h: the copy engine, mbarriers and wgmma of
// one block on a CPU. What is asynchronous on the device happens here as late as it may, or at a
// random moment in between, so that data read too early or overwritten too early gives a wrong
// result, and a barrier that never opens ends the process with a message.

namespace emulated {
inline unsigned char shared_memory[256 << 10];

struct Barrier { int expected = 0, pending = 0; long long bytes = 0; unsigned long long phase = 0; };
inline std::map<unsigned, Barrier> mbarriers;
inline std::vector<std::function<void()>> copies;       // loads on their way
struct Queue { std::vector<std::vector<std::function<void()>>> groups; std::vector<std::function<void()>> open; };
inline std::map<unsigned, Queue> stores, products;      // of each thread
inline unsigned random_state = 12345;
inline unsigned random_number() { return (random_state = random_state * 1664525u + 1013904223u) >> 8; }

inline Barrier& barrier_at(unsigned at) {
  if (!mbarriers.count(at)) fail("a barrier that was never initialised");
  return mbarriers[at];
}
inline void settle(Barrier& b) {
  if (b.pending < 0) fail("more arrivals than a barrier expects");
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.pending = b.expected;
  }
  ++arrivals;
}
inline void close(Queue& q) {
  q.groups.push_back(std::move(q.open));
  q.open.clear();
}
inline void drain(Queue& q, size_t left) {
  while (q.groups.size() > left) {
    for (auto& f : q.groups.front()) f();
    q.groups.erase(q.groups.begin());
  }
}
// Of boxes with rows of 128 or 64 bytes.
inline unsigned swizzled(unsigned at, unsigned row = 128) {
  return at ^ (at >> 7 & (row / 16 - 1)) << 4;
}

// Meets the lanes of this warp; `value` of each lane is then readable.
inline std::map<unsigned, Meeting> warps;
inline unsigned posted[32][32];
inline void meet_warp() { meet(warps[self->number / 32], 32); }
}  // namespace emulated

inline void __syncwarp() { emulated::meet_warp(); }
inline void __trap() { emulated::fail("a trap"); }
inline int __all_sync(unsigned, int mine) {
  const unsigned warp = emulated::self->number / 32;
  emulated::posted[warp][emulated::self->number % 32] = mine != 0;
  emulated::meet_warp();
  int all = 1;
  for (unsigned lane = 0; lane < 32; ++lane) all &= int(emulated::posted[warp][lane]);
  emulated::meet_warp();
  return all;
}

namespace mf {
namespace sm90 {
using u32 = unsigned;
using u64 = unsigned long long;
struct alignas(64) TensorMap { u64 opaque[16]; };

// What the test puts into a TensorMap.
struct Described { u64 base, extents[3], strides[2], box[2]; };

namespace ptx {
constexpr u32 SHARED_START = 1024;
inline u32 shared_address(const void* p) {
  return u32((const unsigned char*)p - emulated::shared_memory) + SHARED_START;
}
inline unsigned char* place(u32 at) {
  if (at < 1024 || at - SHARED_START >= sizeof emulated::shared_memory)
    emulated::fail("outside shared memory");
  return emulated::shared_memory + (at - SHARED_START);
}
inline void jitter(u32) {}
inline void barrier_init(u32 at, u32 n) {
  if (at % 8) emulated::fail("a misaligned barrier");
  emulated::mbarriers[at] = {int(n), int(n), 0, 0};
}
inline void fence_barrier_init() {  // a block starts
  std::memset(emulated::shared_memory, 0xff, sizeof emulated::shared_memory);
  if (!emulated::copies.empty()) emulated::fail("the last block ended before its loads");
  for (auto& q : emulated::stores)
    if (!q.second.groups.empty()) emulated::fail("the last block ended before its stores");
  emulated::stores.clear();
  emulated::products.clear();
  emulated::warps.clear();
}
inline void arrive(u32 at) {
  auto& b = emulated::barrier_at(at);
  --b.pending;
  emulated::settle(b);
}
inline void arrive_expecting(u32 at, u32 bytes) {
  emulated::barrier_at(at).bytes += bytes;
  arrive(at);
}
inline void wait(u32 at, u32 parity) {
  if (parity > 1) emulated::fail("a parity is 0 or 1");
  while ((emulated::barrier_at(at).phase & 1) == parity) {
    auto& copies = emulated::copies;
    if (!copies.empty() && emulated::random_number() % 8 == 0) {
      const size_t i = emulated::random_number() % copies.size();
      auto f = std::move(copies[i]);
      copies.erase(copies.begin() + i);
      f();
    } else if (!copies.empty()) {
      ++emulated::arrivals;  // not stuck yet
    }
    swapcontext(&emulated::self->context, &emulated::scheduler);
  }
}
inline bool has_passed_now(u32 at, u32 parity) {
  if (emulated::random_number() % 4 == 0) {  // let others get on, and do not say no for ever
    ++emulated::arrivals;
    swapcontext(&emulated::self->context, &emulated::scheduler);
  }
  return (emulated::barrier_at(at).phase & 1) != parity;
}
inline void prefetch(const TensorMap*) {}

// Loads read an extent exactly; stores go on to the end of a piece of 16 bytes.
template <class F>
void each_element(const TensorMap* map, u32 at, int x, int y, int z, u64 piece, F f) {
  const Described d = *(const Described*)map;
  if (at % 1024) emulated::fail("a box must start at a multiple of 1024 bytes");
  if (z < 0 || u64(z) >= d.extents[2]) emulated::fail("a batch that is not there");
  if (d.base % 16 || d.strides[0] % 16 || d.strides[1] % 16) emulated::fail("a misaligned map");
  const u64 end = (d.extents[0] + piece - 1) / piece * piece;
  for (u64 r = 0; r < d.box[1]; ++r)
    for (u64 c = 0; c < d.box[0]; ++c) {
      const bool inside = x + c < end && y + r < d.extents[1];
      char* element = (char*)d.base + (x + c) * 2 + (y + r) * d.strides[0] + z * d.strides[1];
      const unsigned row = d.box[0] * 2;
      f(place(emulated::swizzled(at + r * row + c * 2, row)), inside ? element : nullptr);
    }
}
inline void landed(u32 barrier, u32 bytes) {
  auto& b = emulated::barrier_at(barrier);
  b.bytes -= bytes;
  emulated::settle(b);
}
inline void load_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z) {
  emulated::touch();
  emulated::copies.push_back([=] {
    u32 bytes = 0;
    each_element(map, to, x, y, z, 1, [&](unsigned char* here, char* there) {
      if (there) std::memcpy(here, there, 2); else std::memset(here, 0, 2);
      bytes += 2;
    });
    landed(barrier, bytes);
  });
}
inline void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  emulated::touch();
  if (to % 16 || u64(from) % 16 || bytes % 16) emulated::fail("a misaligned bulk copy");
  emulated::copies.push_back([=] {
    std::memcpy(place(to), from, bytes);
    landed(barrier, bytes);
  });
}
inline void store_box(const TensorMap* map, u32 from, int x, int y, int z) {
  emulated::touch();
  emulated::stores[emulated::self->number].open.push_back([=] {
    each_element(map, from, x, y, z, 8, [&](unsigned char* here, char* there) {
      if (there) std::memcpy(there, here, 2);
    });
  });
}
inline void commit_stores() { emulated::close(emulated::stores[emulated::self->number]); }
template <int N>
void stores_have_read() { emulated::drain(emulated::stores[emulated::self->number], N); }
inline void stores_are_done() { emulated::drain(emulated::stores[emulated::self->number], 0); }
inline void fence_async_shared() {}

// The .aligned instructions, which the lanes of a warp execute together.
inline void mma_fence() { emulated::meet_warp(); }
inline void mma_commit() { emulated::close(emulated::products[emulated::self->number]); }
template <int N>
void mma_wait() {
  emulated::meet_warp();
  emulated::drain(emulated::products[emulated::self->number], N);
  emulated::meet_warp();
}
template <int N>
void mma_settled(float (&)[N]) {}

template <int N>
void take_registers() {}
template <int N>
void give_registers() {}

// Row l / 4 of matrix q, two elements from column l % 4 * 2: where this lane's register q lives.
inline unsigned char* in_matrix(int q) {
  const unsigned lane = emulated::self->number % 32, warp = emulated::self->number / 32;
  return place(emulated::posted[warp][8 * q + lane / 4] + lane % 4 * 4);
}
inline void post(u32 at) {
  if (at % 16) emulated::fail("a misaligned matrix row");
  emulated::posted[emulated::self->number / 32][emulated::self->number % 32] = at;
  emulated::meet_warp();
}
inline void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  post(to);
  const u32 words[4] = {a, b, c, d};
  for (int q = 0; q < 4; ++q) std::memcpy(in_matrix(q), &words[q], 4);
  emulated::meet_warp();
}
inline void load_matrices(u32 from, u32& a, u32& b, u32& c, u32& d) {
  post(from);
  u32* words[4] = {&a, &b, &c, &d};
  for (int q = 0; q < 4; ++q) std::memcpy(words[q], in_matrix(q), 4);
  emulated::meet_warp();
}
inline void store_matrices(u32 to, u32 a, u32 b) {
  post(to);
  const u32 words[2] = {a, b};
  for (int q = 0; q < 2; ++q) std::memcpy(in_matrix(q), &words[q], 4);
  emulated::meet_warp();
}
inline void load_matrices(u32 from, u32& a, u32& b) {
  post(from);
  u32* words[2] = {&a, &b};
  for (int q = 0; q < 2; ++q) std::memcpy(words[q], in_matrix(q), 4);
  emulated::meet_warp();
}
inline u32 thread() { return emulated::self->number; }
inline void store_word(u32 to, u32 word) { std::memcpy(place(to), &word, 4); }
inline void load_if(u32 (&w)[4], const void* from, bool wanted) {
  emulated::touch();
  if (wanted && u64(from) % 16) emulated::fail("a misaligned load");
  if (wanted) std::memcpy(w, from, 16); else std::memset(w, 0, 16);
}
template <int WORDS>
void load_words(u32 from, u32 (&w)[WORDS]) { std::memcpy(w, place(from), 4 * WORDS); }

// One element of an operand as wgmma finds it: from a descriptor's low and high half.
template <bool TRANSPOSED, class T>
float operand_element(u32 low, u32 high, int mn, int k) {
  if (high >> 30 != 1) emulated::fail("no 128-byte swizzle");
  const u32 start = (low & 0x3fff) << 4, between = (low >> 16) * 16, atoms = (high & 0x3fff) * 16;
  const u32 at = TRANSPOSED ? start + mn / 64 * between + k / 8 * atoms + k % 8 * 128 + mn % 64 * 2
                            : start + mn / 8 * atoms + mn % 8 * 128 + k * 2;
  u32 word = 0;
  std::memcpy(&word, place(emulated::swizzled(at)), 2);
  return Storage<T>::get(&word, 0);
}
template <int N, bool A_TRANSPOSED, bool B_TRANSPOSED, class T>
void mma(float (&d)[N / 2], u32 a, u32 b, u32 high, int keep) {
  float* acc = d;
  const int lane = emulated::self->number % 32, warp = emulated::self->number / 32 % 4;
  emulated::products[emulated::self->number].open.push_back([=] {
    float left[2][16];
    for (int h = 0; h < 2; ++h)
      for (int k = 0; k < 16; ++k)
        left[h][k] = operand_element<A_TRANSPOSED, T>(a, high, 16 * warp + lane / 4 + 8 * h, k);
    for (int i = 0; i < N / 8; ++i)
      for (int e = 0; e < 2; ++e) {
        float sum[2] = {0, 0};
        for (int k = 0; k < 16; ++k) {
          const float right =
              operand_element<B_TRANSPOSED, T>(b, high, 8 * i + lane % 4 * 2 + e, k);
          for (int h = 0; h < 2; ++h) sum[h] += left[h][k] * right;
        }
        for (int h = 0; h < 2; ++h) {
          float& out = acc[4 * i + 2 * h + e];
          out = keep ? out + sum[h] : sum[h];
        }
      }
  });
}
}  // namespace ptx
}  // namespace sm90
}  // namespace mf
