// What follows a product inside its kernel where it reads and writes whole tensors: "the tail".
//
// A finished tile waits in registers, rounded and packed as it would lie in memory, and is worked off
// under the products of the next tile, a piece of 16 columns at a time. A chunk of 32 columns has a
// place in staging, `depth` tensors deep: the operands come in, and the results leave from the same
// bytes. A place belongs to the mover or to the consumer, and barriers hand it over. Chunks are half
// as wide as those of a plain result: two places then fit beside four pipeline stages, and while the
// consumer is at one the mover turns the other round.
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
  int pieces;  // of a finished tile for each k-block of the next, times 256
};

constexpr int CHUNK_SUMS = 4 * TAIL_CHUNK;  // floats: a row of sums of each warp

template <class S>
MF_FN u32 sums_at(const Shared<S>& shared, int group, int place, int sum) {
  return shared.sums() + (((group * Shared<S>::places + place) * S::sums + sum) * CHUNK_SUMS << 2);
}

// ---- a mover's whole warp -----------------------------------------------------------------------

// The chunks of a consumer's tiles, one after the other. A tile's place takes divisions, which a lone
// thread is slow at, so it is worked out once a tile.
template <class S>
struct Walk {
  int q, j = 0, row, column, batch;

  MF_FN Walk(const Args& args, int group) : q(blockIdx.x) { place(args, group); }
  MF_FN bool more(const Args& args) const { return q < args.tiles; }
  MF_FN void next(const Args& args, int group) {
    column += TAIL_CHUNK;
    if (++j == Shared<S>::chunks) {
      j = 0;
      q += gridDim.x;
      place(args, group);
    }
  }

 private:
  MF_FN void place(const Args& args, int group) {
    const Tile tile = tile_at<S>(args, q);
    row = first_row<S>(tile, group);
    column = first_column<S>(tile, group);
    batch = tile.batch;
  }
};

template <class S>
MF_FN void bring(const TailArgs& all, const Shared<S>& shared, int group, const Walk<S>& at, int place) {
  const u32 full = shared.to_consumer(group, place);
  ptx::jitter(3);
  ptx::arrive_expecting(full, S::ins * TAIL_CHUNK_BYTES);
  MF_UNROLL for (int i = 0; i < S::ins; ++i) {
    const int step = i == 0 ? all.base.tensor_step : all.in_step[i - 1];
    ptx::load_box(shared.slot(group, place, i), i == 0 ? &all.base.tensor : &all.in[i - 1], full,
                  at.column, at.row, at.batch * step);
  }
}

template <class S>
MF_FN void serve_tail(const TailArgs& all, const Shared<S>& shared, int group) {
  using Sh = Shared<S>;
  const Args& args = all.base;
  const int lane = threadIdx.x % 32;
  Walk<S> in(args, group), out = in;
  for (int place = 0; place < Sh::places; ++place) {
    if (lane == 0 && in.more(args)) bring<S>(all, shared, group, in, place);
    in.next(args, group);
  }
  Ring<Sh::places> ring;
  _Pragma("unroll 1") for (; out.more(args); out.next(args, group)) {
    const int place = ring.stage;
    ptx::wait(shared.to_mover(group, place), ring.phase);
    ptx::jitter(5);
    if (lane == 0) {
      if (out.row < args.m && out.column < args.n) {
        MF_UNROLL for (int o = 0; o < S::outs; ++o)
          ptx::store_box(o == 0 ? &args.c : &all.out[o - 1], shared.slot(group, place, o), out.column,
                         out.row, out.batch);
      }
      ptx::commit_stores();
    }
    MF_UNROLL for (int s = 0; s < S::sums; ++s) {
      const u32 from = sums_at(shared, group, place, s) + 4 * lane;
      float total = 0.f;
      MF_UNROLL for (int warp = 0; warp < 4; ++warp) {
        u32 word[1];
        ptx::load_words(from + 4 * TAIL_CHUNK * warp, word);
        total += __uint_as_float(word[0]);
      }
      if (out.row < args.m && out.column + lane < args.n) {
        const i64 blocks = (args.m + ROWS - 1) / ROWS;
        all.sums[s][(out.batch * blocks + out.row / ROWS) * args.n + out.column + lane] = total;
      }
    }
    __syncwarp();
    if (lane == 0 && in.more(args)) {
      ptx::stores_have_read<0>();
      bring<S>(all, shared, group, in, place);
    }
    in.next(args, group);
    ring.next();
  }
  if (lane == 0) ptx::stores_are_done();
}

// ---- a consumer warp ----------------------------------------------------------------------------

template <class S>
struct Tail {
  using Sh = Shared<S>;
  using Word = typename S::Out;
  static constexpr int PIECES = S::width / 16, IN_CHUNK = TAIL_CHUNK / 16;

  const Sh& shared;
  int group;
  Ring<Sh::places> ring;
  // Registers are scarce: the next piece of the tile that waits (PIECES: none does), and from bit 8 on
  // how many of rows r and r + 8 of this lane are rows of C.
  int state = PIECES;

  MF_FN Tail(const Sh& s, int g) : shared(s), group(g) {}

  MF_FN int piece() const { return state & 255; }

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
      if (i == 0) {
        const u32 full = shared.to_consumer(group, ring.stage);
        if (all) {
          ptx::wait(full, ring.phase);
        } else if (!__all_sync(~0u, ptx::has_passed_now(full, ring.phase))) {
          return;
        }
      }
      u32 x[4];
      take<0, PIECES>(words, x);
      one(x, i);
      if (i == IN_CHUNK - 1) {
        ptx::fence_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::arrive(shared.to_mover(group, ring.stage));
        ring.next();
      }
    }
  }

 private:
  // The words of the piece, which is one of FIRST to END - 1: registers have no addresses.
  template <int FIRST, int END>
  MF_FN void take(const u32 (&words)[S::width / 4], u32 (&x)[4]) const {
    if constexpr (END - FIRST == 1) {
      MF_UNROLL for (int w = 0; w < 4; ++w) x[w] = words[4 * FIRST + w];
    } else {
      constexpr int middle = (FIRST + END) / 2;
      if (piece() < middle)
        take<FIRST, middle>(words, x);
      else
        take<middle, END>(words, x);
    }
  }

  // Columns 16 * i to 16 * i + 15 of the chunk. All operands are asked for at once, and the two halves
  // are independent, because two warps of a scheduler hide little of each other's latencies.
  MF_FN void one(const u32 (&x)[4], int i) const {
    // This lane's 16 bytes of the chunk's first 8 columns; two rows of 64 bytes share a swizzle.
    const u32 lane = ptx::thread(), row = lane % 128 / 32 * 16 + lane % 16;
    const u32 from = shared.slot(group, ring.stage) + row * 64 + (row / 2 % 4 << 4);
    float added[S::sums + 1][4] = {};
    u32 in[S::ins + 1][4];  // words 0 and 1: columns 0 to 7, rows r and r + 8; 2 and 3: columns 8 to 15
    MF_UNROLL for (int k = 0; k < S::ins; ++k)
    MF_UNROLL for (int g = 0; g < 2; ++g)
      ptx::load_matrices((from ^ u32(2 * i + g) << 4) + k * TAIL_CHUNK_BYTES, in[k][2 * g],
                         in[k][2 * g + 1]);
    MF_UNROLL for (int g = 0; g < 2; ++g) {
      u32 out[S::outs][2];
      MF_UNROLL for (int h = 0; h < 2; ++h) {
        const int w = 2 * g + h;
        float y[S::outs][2];
        MF_UNROLL for (int e = 0; e < 2; ++e) {
          float t[S::ins + 1], results[S::outs], sums[S::sums + 1];
          MF_UNROLL for (int k = 0; k < S::ins; ++k) t[k] = Storage<Word>::get(&in[k][w], e);
          S::after(Storage<Word>::get(&x[w], e), t, results, sums);
          MF_UNROLL for (int o = 0; o < S::outs; ++o) y[o][e] = results[o];
          MF_UNROLL for (int s = 0; s < S::sums; ++s)
            added[s][2 * g + e] += h < state >> 8 ? sums[s] : 0.f;
        }
        MF_UNROLL for (int o = 0; o < S::outs; ++o) Storage<Word>::put(&out[o][h], y[o], 2);
      }
      MF_UNROLL for (int o = 0; o < S::outs; ++o)
        ptx::store_matrices((from ^ u32(2 * i + g) << 4) + o * TAIL_CHUNK_BYTES, out[o][0],
                            out[o][1]);
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
      ptx::store_word(sums_at(shared, group, ring.stage, sum) + 4 * (warp * TAIL_CHUNK + column),
                      __float_as_uint(c));
  }
};

}  // namespace sm90
}  // namespace mf
