// What follows a product inside its kernel where it reads and writes whole tensors: "the tail".
//
// A finished tile waits in registers, rounded and packed as it would lie in memory, and is worked off
// under the products of the next tile. A chunk of 64 columns has a place in staging, `depth` tensors
// deep: the operands come in, the tile's own words join them behind, and the results leave from the
// same bytes. A place belongs to the mover or to the consumer, and barriers hand it over. A piece is
// 16 columns; all of a chunk are read from staging, so that one copy of the code does for every piece.
//
// Column sums: a warp adds up its 16 rows by shuffles, the mover adds up the four warps and writes one
// float32 row for every 64 rows of C. Row regions' second step adds those up. All in a fixed order.

namespace mf {
namespace sm90 {

constexpr int MAX_INS = 3, MAX_OUTS = 3, MAX_SUMS = 4;

// The parameter of a kernel with a tail. The first operand and the first result are `base.tensor` and
// `base.c`. sums: [batch, ceil(m / 64), n] each.
struct TailArgs {
  Args base;
  TensorMap in[MAX_INS - 1], out[MAX_OUTS - 1];
  float* sums[MAX_SUMS];
  int in_step[MAX_INS - 1];
  int pieces;  // of a finished tile that are worked off with each k-block of the next
};

constexpr int CHUNK_SUMS = 4 * CHUNK;  // floats: a row of sums of each warp

template <class S>
MF_FN u32 sums_at(const Shared<S>& shared, int group, int place, int sum) {
  return shared.sums() + (((group * Shared<S>::places + place) * S::sums + sum) * CHUNK_SUMS << 2);
}

// ---- a mover's whole warp -----------------------------------------------------------------------

template <class S>
MF_FN void serve_tail(const TailArgs& all, const Shared<S>& shared, int group) {
  using Sh = Shared<S>;
  const Args& args = all.base;
  const int lane = threadIdx.x % 32;
  const int tiles = args.tiles > int(blockIdx.x) ? (args.tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;
  const int chunks = tiles * Sh::chunks;

  const auto bring = [&](int c, int place) {
    const Tile tile = tile_at<S>(args, blockIdx.x + c / Sh::chunks * gridDim.x);
    const int row = first_row<S>(tile, group);
    const int column = first_column<S>(tile, group) + c % Sh::chunks * CHUNK;
    const u32 full = shared.to_consumer(group, place);
    ptx::jitter(3);
    ptx::arrive_expecting(full, S::ins * CHUNK_BYTES);
    MF_UNROLL for (int i = 0; i < S::ins; ++i) {
      const int step = i == 0 ? args.tensor_step : all.in_step[i - 1];
      ptx::load_box(shared.slot(group, place, i), i == 0 ? &args.tensor : &all.in[i - 1], full,
                    column, row, tile.batch * step);
    }
  };
  if (lane == 0) {
    for (int c = 0; c < Sh::places && c < chunks; ++c) bring(c, c);
  }
  Ring<Sh::places> ring;
  _Pragma("unroll 1") for (int c = 0; c < chunks; ++c) {
    const int place = ring.stage;
    const Tile tile = tile_at<S>(args, blockIdx.x + c / Sh::chunks * gridDim.x);
    const int row = first_row<S>(tile, group);
    const int column = first_column<S>(tile, group) + c % Sh::chunks * CHUNK;
    ptx::wait(shared.to_mover(group, place), ring.phase);
    ptx::jitter(5);
    if (lane == 0) {
      if (row < args.m && column < args.n) {
        MF_UNROLL for (int o = 0; o < S::outs; ++o)
          ptx::store_box(o == 0 ? &args.c : &all.out[o - 1], shared.slot(group, place, o), column, row,
                         tile.batch);
      }
      ptx::commit_stores();
    }
    MF_UNROLL for (int s = 0; s < S::sums; ++s)
    _Pragma("unroll 1") for (int half = 0; half < 2; ++half) {
      const int at = lane + 32 * half;
      const u32 from = sums_at(shared, group, place, s) + 4 * at;
      float total = 0.f;
      MF_UNROLL for (int warp = 0; warp < 4; ++warp) {
        u32 word[1];
        ptx::load_words(from + 4 * CHUNK * warp, word);
        total += __uint_as_float(word[0]);
      }
      if (row < args.m && column + at < args.n) {
        const i64 blocks = (args.m + ROWS - 1) / ROWS;
        all.sums[s][(tile.batch * blocks + row / ROWS) * args.n + column + at] = total;
      }
    }
    __syncwarp();
    if (lane == 0 && c + Sh::places < chunks) {
      ptx::stores_have_read<0>();
      bring(c + Sh::places, place);
    }
    ring.next();
  }
  if (lane == 0) ptx::stores_are_done();
}

// ---- a consumer warp ----------------------------------------------------------------------------

template <class S>
struct Tail {
  using Sh = Shared<S>;
  using Word = typename S::Out;
  static constexpr int PIECES = S::width / 16, IN_CHUNK = CHUNK / 16;

  const Sh& shared;
  int group;
  Ring<Sh::places> ring;
  // Registers are scarce: the next piece of the tile that waits (PIECES: none does), and from bit 8 on
  // how many of rows r and r + 8 of this lane are rows of C.
  int state = PIECES;

  MF_FN Tail(const Sh& s, int g) : shared(s), group(g) {}

  // Tile `q` is finished; nothing of the one before may be left.
  MF_FN void begin(const Args& args, int q) {
    state = 0;
    if constexpr (S::sums > 0) {
      const int lane = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      const int left = args.m - first_row<S>(tile_at<S>(args, q), group) - lane;
      state = left > 8 ? 2 << 8 : left > 0 ? 1 << 8 : 0;
    }
  }

  // Works off pieces up to `target`; without `all` only as far as operands have arrived.
  MF_FN void advance(const u32 (&words)[S::width / 4], int target, bool all) {
    _Pragma("unroll 1") for (; piece() < target && piece() < PIECES; ++state) {
      const int i = piece() % IN_CHUNK;
      const u32 lane = ptx::thread(), row = lane % 128 / 32 * 16 + lane % 16;
      const u32 from = shared.slot(group, ring.stage) + row * 128 + (row % 8 << 4);
      if (i == 0) {
        const u32 full = shared.to_consumer(group, ring.stage);
        if (all) {
          ptx::wait(full, ring.phase);
        } else if (!__all_sync(~0u, ptx::has_passed_now(full, ring.phase))) {
          return;
        }
        MF_UNROLL for (int j = 0; j < Sh::chunks; ++j) {
          if (piece() == j * IN_CHUNK) {
            MF_UNROLL for (int w = 0; w < 8; ++w)
              ptx::store_matrices(at(from, S::ins, w), words[16 * j + 2 * w],
                                  words[16 * j + 2 * w + 1]);
          }
        }
      }
      one(from, i);
      if (i == IN_CHUNK - 1) {
        ptx::fence_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::arrive(shared.to_mover(group, ring.stage));
        ring.next();
      }
    }
  }

 private:
  MF_FN int piece() const { return state & 255; }

  // Where this lane addresses 8 columns of a chunk. `from`: of the first 8, in the first tensor.
  MF_FN static u32 at(u32 from, int tensor, int columns) {
    return (from ^ u32(columns) << 4) + tensor * CHUNK_BYTES;
  }

  // Columns 16 * i to 16 * i + 15 of the chunk, 8 at a time: registers are scarce.
  MF_FN void one(u32 from, int i) const {
    float added[S::sums + 1][4] = {};
    MF_UNROLL for (int g = 0; g < 2; ++g) {
      u32 in[S::ins + 1][2], out[S::outs][2];  // the last of `in` is the product
      const u32 here = at(from, 0, 2 * i + g);
      MF_UNROLL for (int k = 0; k < S::ins + 1; ++k)
        ptx::load_matrices(here + k * CHUNK_BYTES, in[k][0], in[k][1]);
      // A word holds two neighbouring columns, of row r or r + 8.
      MF_UNROLL for (int h = 0; h < 2; ++h) {
        float y[S::outs][2];
        MF_UNROLL for (int e = 0; e < 2; ++e) {
          float t[S::ins + 1], results[S::outs], sums[S::sums + 1];
          MF_UNROLL for (int k = 0; k < S::ins + 1; ++k) t[k] = Storage<Word>::get(&in[k][h], e);
          S::after(t[S::ins], t, results, sums);
          MF_UNROLL for (int o = 0; o < S::outs; ++o) y[o][e] = results[o];
          MF_UNROLL for (int s = 0; s < S::sums; ++s)
            added[s][2 * g + e] += h < state >> 8 ? sums[s] : 0.f;
        }
        MF_UNROLL for (int o = 0; o < S::outs; ++o) Storage<Word>::put(&out[o][h], y[o], 2);
      }
      MF_UNROLL for (int o = 0; o < S::outs; ++o)
        ptx::store_matrices(here + o * CHUNK_BYTES, out[o][0], out[o][1]);
    }
    MF_UNROLL for (int s = 0; s < S::sums; ++s) add_rows(added[s], s, i);
  }

  // The sums of 8 rows by shuffles: four columns on every lane become one, on two lanes.
  MF_FN void add_rows(const float (&v)[4], int sum, int i) const {
    const int lane = threadIdx.x % 32;
    const bool right = lane & 16, odd = lane & 8;
    float a = right ? v[2] : v[0], b = right ? v[3] : v[1];
    a += __shfl_xor_sync(~0u, right ? v[0] : v[2], 16);
    b += __shfl_xor_sync(~0u, right ? v[1] : v[3], 16);
    float c = odd ? b : a;
    c += __shfl_xor_sync(~0u, odd ? a : b, 8);
    c += __shfl_xor_sync(~0u, c, 4);
    const int column = 16 * i + (right ? 8 : 0) + lane % 4 * 2 + (odd ? 1 : 0);
    const int warp = threadIdx.x % 128 / 32;
    if (!(lane & 4))
      ptx::store_word(sums_at(shared, group, ring.stage, sum) + 4 * (warp * CHUNK + column),
                      __float_as_uint(c));
  }
};

}  // namespace sm90
}  // namespace mf
