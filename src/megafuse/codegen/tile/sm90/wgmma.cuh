// How a tile of A or B sits in shared memory, and what wgmma has to be told about it.
//
// Every tile is made of atoms of 8 rows of 128 bytes, whose eight 16-byte pieces are permuted by the
// 128-byte swizzle: piece p of row r is at p ^ (r % 8). The copy engine writes it so, wgmma reads it
// so, and no access has a bank conflict. An atom starts at a multiple of 1024 bytes.
//
//   K-major    one row per m (or n) of 64 k's: the tile is a column of atoms. A step of 16 k's is
//              32 bytes along the row.
//   MN-major   chunks of 64 m's (or n's); a chunk has one row per k, of 64 m's, so it is a column of
//              8 atoms, 8192 bytes. A step of 16 k's is two atoms.

namespace mf {
namespace sm90 {

constexpr int BLOCK_K = 64;       // k's of one pipeline stage: 128 bytes, one swizzled row
constexpr int MMA_K = 16;         // k's of one wgmma
constexpr int ROWS = 64;          // rows of one warpgroup's product
constexpr int CHUNK = 64;         // columns of one swizzled box
constexpr int CHUNK_BYTES = 64 * 128;
// A tail's chunks are half as wide, with 64-byte rows: piece p of row r is at p ^ (r / 2 % 4).
constexpr int TAIL_CHUNK = 32, TAIL_CHUNK_BYTES = 64 * 64;

template <bool K_MAJOR>
struct Operand {
  // Bytes from one step of 16 k's to the next, and from 64 m's (or n's) to the next 64.
  static constexpr u32 step = K_MAJOR ? MMA_K * 2 : MMA_K * 128;
  // The low half of a matrix descriptor: the address in units of 16 bytes, and from bit 16 the
  // distance between chunks (MN-major; K-major ignores it and takes 1).
  MF_FN static u32 descriptor(u32 address) {
    return (address & 0x3ffffu) >> 4 | (K_MAJOR ? 1u : CHUNK_BYTES / 16u) << 16;
  }
  // The box or boxes of EXTENT m's (or n's) from `first`, and of 64 k's from `k`.
  template <int EXTENT>
  MF_FN static void load(u32 to, const TensorMap* map, u32 barrier, int first, int k, int batch) {
    if constexpr (K_MAJOR) {
      ptx::load_box(to, map, barrier, k, first, batch);
    } else {
      MF_UNROLL for (int c = 0; c < EXTENT / CHUNK; ++c)
        ptx::load_box(to + c * CHUNK_BYTES, map, barrier, first + c * CHUNK, k, batch);
    }
  }
};

// The high half: atoms 1024 bytes apart, 128-byte swizzle.
constexpr u32 DESCRIPTOR_HIGH = 1024u / 16u | 1u << 30;

}  // namespace sm90
}  // namespace mf
