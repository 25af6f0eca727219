// What a block of the product knows: the kernel's parameter, its shared memory with every barrier in
// it, and which tile it is at.

namespace mf {
namespace sm90 {

constexpr int THREADS = 384, CONSUMERS = 2, CONSUMER_WARPS = 8;
constexpr int MOVER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(MOVER_REGISTERS + 2 * CONSUMER_REGISTERS <= 504, "what 384 threads can hold");

constexpr int MAX_ROW_OPERANDS = 2;

// The kernel's one parameter; runtime/matmul.py fills it in.
struct Args {
  TensorMap a, b, c, tensor;
  // [batch, n], or [n] with stride 0. Where k is split the first is the float32 sums' place instead,
  // [batch, splits, m, n].
  const void* row[MAX_ROW_OPERANDS];
  i64 row_stride[MAX_ROW_OPERANDS];     // bytes from one batch to the next
  int m, n, m_tiles, n_tiles, tiles, k_blocks;
  int a_step, b_step, tensor_step;  // 0 where all batches share the operand, else 1
  int splits;                       // runs of k-blocks of equal length, the last one what is left
};

// ---- shared memory ------------------------------------------------------------------------------

template <class S>
struct Shared {
  static constexpr int tile_m = ROWS * S::split_m, tile_n = S::width * S::split_n;
  static constexpr int a_bytes = tile_m * 128, b_bytes = tile_n * 128;
  static constexpr int stage_bytes = a_bytes + b_bytes;
  static constexpr int chunk = S::tail ? TAIL_CHUNK : CHUNK;  // columns that move together
  static constexpr int chunk_bytes = S::tail ? TAIL_CHUNK_BYTES : CHUNK_BYTES;
  static constexpr int chunks = S::width / chunk;          // of a consumer's tile
  static constexpr int places = S::places;                 // of them in staging at a time
  static constexpr int depth = S::depth;                   // tensors of a place
  static constexpr int row_bytes = tile_n * int(sizeof(typename S::Row));
  static constexpr int staging_at = S::stages * stage_bytes;
  static constexpr int rows_at = staging_at + CONSUMERS * places * depth * chunk_bytes;
  static constexpr int sums_at = rows_at + S::rows * row_bytes;
  static constexpr int barriers_at = sums_at + CONSUMERS * places * S::sums * 16 * TAIL_CHUNK;
  static constexpr int barriers = 2 * S::stages + 2 * CONSUMERS * places + 2;
  static constexpr int bytes = barriers_at + 8 * barriers;
  static_assert(S::split_m * S::split_n == CONSUMERS, "one product a consumer");
  static_assert(S::width % CHUNK == 0 && S::width <= 256, "a wgmma has at most 256 columns");

  u32 base;  // a multiple of 1024, as the swizzle wants

  MF_FN u32 a(int stage) const { return base + stage * stage_bytes; }
  MF_FN u32 b(int stage) const { return a(stage) + a_bytes; }
  MF_FN u32 slot(int group, int place, int i = 0) const {
    return base + staging_at + ((group * places + place) * depth + i) * chunk_bytes;
  }
  MF_FN u32 row(int i) const { return base + rows_at + i * row_bytes; }
  MF_FN u32 sums() const { return base + sums_at; }  // float32, a row of a chunk for every warp

  MF_FN u32 barrier(int i) const { return base + barriers_at + 8 * i; }
  MF_FN u32 full(int stage) const { return barrier(stage); }
  MF_FN u32 empty(int stage) const { return barrier(S::stages + stage); }
  // A place belongs to the consumer or to its mover; these hand it over.
  MF_FN u32 to_mover(int group, int p) const { return barrier(2 * S::stages + group * places + p); }
  MF_FN u32 to_consumer(int group, int p) const {
    return barrier(2 * S::stages + (CONSUMERS + group) * places + p);
  }
  MF_FN u32 rows_full() const { return barrier(barriers - 2); }
  MF_FN u32 rows_empty() const { return barrier(barriers - 1); }

  MF_FN void init() const {
    MF_UNROLL for (int s = 0; s < S::stages; ++s) {
      ptx::barrier_init(full(s), 1);
      ptx::barrier_init(empty(s), CONSUMER_WARPS);
    }
    MF_UNROLL for (int g = 0; g < CONSUMERS; ++g)
    MF_UNROLL for (int p = 0; p < places; ++p) {
      ptx::barrier_init(to_mover(g, p), 4);
      ptx::barrier_init(to_consumer(g, p), 1);
    }
    ptx::barrier_init(rows_full(), 1);
    ptx::barrier_init(rows_empty(), CONSUMER_WARPS);
    ptx::fence_barrier_init();
  }
};

// ---- where a block is ---------------------------------------------------------------------------

// A position in the ring of stages. `phase` is the parity of the lap.
template <int STAGES>
struct Ring {
  int stage = 0;
  u32 phase = 0;
  MF_FN void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Tile {
  int batch, m, n;    // m and n in elements
  int first, blocks;  // the k-blocks that are summed over
  int plane;          // [m, n] matrix that the sum belongs in: batch * splits + split
};

template <class S>
MF_FN Tile tile_at(const Args& args, int q) {
  const int tiles = args.m_tiles * args.n_tiles, plane = q / tiles, rest = q - plane * tiles;
  const int n = rest / args.m_tiles, m = rest - n * args.m_tiles;
  int batch = plane, first = 0, blocks = args.k_blocks;
  if constexpr (S::split) {
    const int run = (args.k_blocks + args.splits - 1) / args.splits;
    batch = plane / args.splits;
    first = (plane - batch * args.splits) * run;
    blocks = args.k_blocks - first < run ? args.k_blocks - first : run;
  }
  return {batch, m * Shared<S>::tile_m, n * Shared<S>::tile_n, first, blocks, plane};
}

#define MF_TILES(q, args) \
  _Pragma("unroll 1") for (int q = blockIdx.x; q < (args).tiles; q += gridDim.x)

// Where consumer `group`'s part of a tile starts.
template <class S>
MF_FN int first_row(const Tile& tile, int group) {
  return tile.m + (S::split_m > 1 ? group * ROWS : 0);
}
template <class S>
MF_FN int first_column(const Tile& tile, int group) {
  return tile.n + (S::split_n > 1 ? group * S::width : 0);
}

}  // namespace sm90
}  // namespace mf
