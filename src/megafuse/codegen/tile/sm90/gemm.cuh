// A persistent, warp-specialised batched product C[b] = epilogue(A[b] @ B[b]) for Hopper.
//
// 384 threads: warpgroup 0 moves data (warp 0 loads tiles of A and B, warp 1 loads the row operands
// of the epilogue, warps 2 and 3 each serve one consumer's staging slots), warpgroups 1 and 2 hold
// the accumulators. A block walks tiles q, q + grid, ...; m is fastest, so that blocks running at the
// same time share their tiles of B.
//
// The epilogue is deferred: at the end of a tile the accumulator is finished and packed into 16-bit
// words, and those leave for the staging slots while the tensor cores already work on the next tile.
// The same registers then receive, in the middle of the next tile, the tensor operand of its own
// epilogue (a residual), so that neither direction is waited for.
//
// A tail (S::tail, tail.cuh) takes the place of plain staging: more pointwise work on the finished tile,
// with tensors of its own, under the products of the next one.
//
// Where k is split (S::split) a tile is one split's share of one tile of C. Its accumulator goes
// straight to memory in float32, past staging and epilogue; finish.cuh does the rest.

namespace mf {
namespace sm90 {

// ---- warpgroup 0: one thread each ---------------------------------------------------------------

template <class S>
MF_FN void load_operands(const Args& args, const Shared<S>& shared) {
  using A = Operand<S::a_k_major>;
  using B = Operand<S::b_k_major>;
  Ring<S::stages> ring;
  MF_TILES(q, args) {
    const Tile tile = tile_at<S>(args, q);
    const int a_batch = tile.batch * args.a_step, b_batch = tile.batch * args.b_step;
    _Pragma("unroll 1") for (int block = 0; block < tile.blocks; ++block) {
      ptx::wait(shared.empty(ring.stage), ring.phase ^ 1);
      ptx::jitter(1);
      const u32 full = shared.full(ring.stage);
      ptx::arrive_expecting(full, Shared<S>::stage_bytes);
      A::template load<Shared<S>::tile_m>(shared.a(ring.stage), &args.a, full, tile.m,
                                          (tile.first + block) * BLOCK_K, a_batch);
      B::template load<Shared<S>::tile_n>(shared.b(ring.stage), &args.b, full, tile.n,
                                          (tile.first + block) * BLOCK_K, b_batch);
      ring.next();
    }
  }
  // What is left takes about as long as a launch. Earlier, the next kernel's blocks would crowd
  // on the multiprocessors that this one leaves free.
  mf::ptx::let_successor_start();
}

template <class S>
MF_FN void load_rows(const Args& args, const Shared<S>& shared) {
  if constexpr (S::rows > 0) {
    u32 phase = 1;
    MF_TILES(q, args) {
      const Tile tile = tile_at<S>(args, q);
      const int left = args.n - tile.n, width = left < Shared<S>::tile_n ? left : Shared<S>::tile_n;
      const u32 bytes = width * (u32)sizeof(typename S::Row);
      ptx::wait(shared.rows_empty(), phase);
      ptx::jitter(2);
      ptx::arrive_expecting(shared.rows_full(), S::rows * bytes);
      MF_UNROLL for (int i = 0; i < S::rows; ++i) {
        const char* row = (const char*)args.row[i] + tile.batch * args.row_stride[i];
        ptx::load_bytes(shared.row(i), row + (i64)tile.n * sizeof(typename S::Row), bytes,
                        shared.rows_full());
      }
      phase ^= 1;
    }
  }
}

// Serves the staging slots of consumer `group`. Chunk j uses slot j % slots. For every tile: the
// tensor operand's chunks in, one after the other, then the result's chunks out. A slot that just
// brought the last chunk in stays with the consumer, which writes its result there; a slot that just
// sent the last chunk out stays here, for the next tile's operand.
template <class S>
MF_FN void serve_staging(const Args& args, const Shared<S>& shared, int group) {
  using Sh = Shared<S>;
  u32 phases = 0;  // one bit a slot
  const auto receive = [&](int s) {
    ptx::wait(shared.to_mover(group, s), phases >> s & 1);
    phases ^= 1u << s;
    ptx::jitter(3);
  };
  const auto give_back = [&](int j) {
    if (!S::tensor || j + Sh::places < Sh::chunks) ptx::arrive(shared.to_consumer(group, j % Sh::places));
  };
  MF_TILES(q, args) {
    const Tile tile = tile_at<S>(args, q);
    const int row = first_row<S>(tile, group), column = first_column<S>(tile, group);
    if constexpr (S::tensor) {
      MF_UNROLL for (int j = 0; j < Sh::chunks; ++j) {
        const int s = j % Sh::places;
        if (j >= Sh::places) receive(s);
        ptx::arrive_expecting(shared.to_consumer(group, s), CHUNK_BYTES);
        ptx::load_box(shared.slot(group, s), &args.tensor, shared.to_consumer(group, s),
                      column + j * CHUNK, row, tile.batch * args.tensor_step);
      }
    }
    MF_UNROLL for (int j = 0; j < Sh::chunks; ++j) {
      const int s = j % Sh::places;
      receive(s);
      if (row < args.m && column + j * CHUNK < args.n)
        ptx::store_box(&args.c, shared.slot(group, s), column + j * CHUNK, row, tile.batch);
      ptx::commit_stores();
      if (j > 0) {
        ptx::stores_have_read<1>();
        give_back(j - 1);
      }
    }
    ptx::stores_have_read<0>();
    give_back(Sh::chunks - 1);
  }
  ptx::stores_are_done();
}

// ---- warpgroups 1 and 2 -------------------------------------------------------------------------

// A consumer warp's side of its staging slots. A warp writes and reads its own 16 rows only, so
// warps need not wait for each other. words: the packed tile, four to each 16x16 block.
template <class S>
struct Staging {
  using Sh = Shared<S>;
  const Sh& shared;
  int group;
  u32 row_at, swizzle, half;  // of the 16-byte piece this lane addresses in each 16x16 block
  u32 phases = S::tensor ? 0u : ~0u;  // without a tensor operand the slots start on this side

  MF_FN Staging(const Sh& s, int g) : shared(s), group(g) {
    const u32 row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
    row_at = row * 128;
    swizzle = row % 8;
    half = threadIdx.x % 32 / 16;
  }

  MF_FN u32 block(int s, int i) const {
    return shared.slot(group, s) + row_at + ((2 * i + half ^ swizzle) << 4);
  }
  MF_FN void receive(int s) {
    ptx::wait(shared.to_consumer(group, s), phases >> s & 1);
    phases ^= 1u << s;
  }
  MF_FN void hand_over(int s) {
    ptx::fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(shared.to_mover(group, s));
  }

  MF_FN void put(const u32 (&words)[S::width / 4], int j) {
    const int s = j % Sh::places;
    if (!S::tensor || j >= Sh::places) receive(s);
    MF_UNROLL for (int i = 0; i < 4; ++i) {
      const u32* w = words + 16 * j + 4 * i;
      ptx::store_matrices(block(s, i), w[0], w[1], w[2], w[3]);
    }
    hand_over(s);
  }
  MF_FN void fetch(u32 (&words)[S::width / 4], int j) {
    const int s = j % Sh::places;
    receive(s);
    MF_UNROLL for (int i = 0; i < 4; ++i) {
      u32* w = words + 16 * j + 4 * i;
      ptx::load_matrices(block(s, i), w[0], w[1], w[2], w[3]);
    }
    if (j + Sh::places < Sh::chunks) hand_over(s);
  }
};

// Accumulator to result: two columns of one row a word. On entry `words` holds the tensor operand.
template <class S>
MF_FN void finish(const float (&acc)[S::width / 2], u32 (&words)[S::width / 4],
                  const Shared<S>& shared, int group) {
  using Row = typename S::Row;
  constexpr int row_words = sizeof(Row) / 2;
  const u32 first = ((S::split_n > 1 ? group * S::width : 0) + threadIdx.x % 4 * 2) * sizeof(Row);
  MF_UNROLL for (int i = 0; i < S::width / 8; ++i) {
    float low[S::rows + 1], high[S::rows + 1];
    MF_UNROLL for (int r = 0; r < S::rows; ++r) {
      u32 pair[row_words];
      ptx::load_words(shared.row(r) + first + i * 8 * (u32)sizeof(Row), pair);
      low[r] = Storage<Row>::get(pair, 0);
      high[r] = Storage<Row>::get(pair, 1);
    }
    MF_UNROLL for (int h = 0; h < 2; ++h) {  // rows r and r + 8
      u32& word = words[2 * i + h];
      float t[2] = {0.f, 0.f};
      if constexpr (S::tensor) {
        t[0] = Storage<typename S::Tensor>::get(&word, 0);
        t[1] = Storage<typename S::Tensor>::get(&word, 1);
      }
      const float v[2] = {S::epilogue(acc[4 * i + 2 * h], low, t[0]),
                          S::epilogue(acc[4 * i + 2 * h + 1], high, t[1])};
      Storage<typename S::Out>::put(&word, v, 2);
    }
  }
}

// Where k is split: a thread's sums as they lie, two columns of one row at a time. Four threads write
// a whole sector, and nothing waits for the stores.
template <class S>
MF_FN void store_sums(const Args& args, const float (&acc)[S::width / 2], const Tile& tile,
                      int group) {
  const int row = first_row<S>(tile, group) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int column = first_column<S>(tile, group) + threadIdx.x % 4 * 2;
  float* const sums = (float*)args.row[0] + ((i64)tile.plane * args.m + row) * args.n + column;
  MF_UNROLL for (int h = 0; h < 2; ++h) {  // rows r and r + 8
    if (row + 8 * h >= args.m) break;
    MF_UNROLL for (int i = 0; i < S::width / 8; ++i) {
      const float* v = acc + 4 * i + 2 * h;
      const Raw<8> pair = {{__float_as_uint(v[0]), __float_as_uint(v[1])}};
      if (column + 8 * i < args.n) mf::ptx::write_global(sums + h * 8 * (i64)args.n + 8 * i, pair);
    }
  }
}

// The k-block at which this tile's epilogue operand is fetched: late enough to have arrived, after
// the previous tile has left the slots; and the blocks between its two halves.
constexpr int FETCH_AT = 8, FETCH_EVERY = 4;

template <bool FIRST, class A, class B>
struct Either { using type = A; };
template <class A, class B>
struct Either<false, A, B> { using type = B; };

constexpr int BURST = 2;  // pieces of a tail that go with one k-block at the most

// each: pieces of the tail that go with a k-block, times 256.
template <class S>
MF_FN void consume(const Args& args, int each, const Shared<S>& shared, int group) {
  using A = Operand<S::a_k_major>;
  using B = Operand<S::b_k_major>;
  constexpr int chunks = Shared<S>::chunks, pairs = (chunks + 1) / 2;
  const u32 a_part = S::split_m > 1 ? group * ROWS * 128 : 0;
  const u32 b_part = S::split_n > 1 ? group * S::width * 128 : 0;
  const bool leader = threadIdx.x % 32 == 0;

  float acc[S::width / 2];
  u32 words[S::width / 4];
  typename Either<S::tail, Tail<S>, Staging<S>>::type staging(shared, group);
  Ring<S::stages> ring;
  bool pending = false;  // words hold a finished tile that has not left yet
  u32 row_phase = 0;

  MF_TILES(q, args) {
    const Tile tile = tile_at<S>(args, q);
    int last = 0;  // the stage whose products may still be running
    _Pragma("unroll 1") for (int block = 0; block < tile.blocks; ++block) {
      ptx::wait(shared.full(ring.stage), ring.phase);
      ptx::jitter(4);
      const u32 a = A::descriptor(shared.a(ring.stage) + a_part);
      const u32 b = B::descriptor(shared.b(ring.stage) + b_part);
      ptx::mma_fence();
      MF_UNROLL for (int k = 0; k < BLOCK_K / MMA_K; ++k)
        S::mma(acc, a + k * (A::step >> 4), b + k * (B::step >> 4), (block | k) != 0);
      ptx::mma_commit();
      const auto release = [&] {  // the stage before, whose products have ended
        if (block > 0) {
          ptx::mma_wait<1>();
          if (leader) ptx::arrive(shared.empty(last));
        }
      };
      if (S::tail) release();  // a piece takes long: the next operands are on their way meanwhile
      // Under these products: the previous tile leaves, then this tile's operand arrives.
      if constexpr (S::tail) {
        // What was late may catch up, but not so fast that the tensor cores run dry.
        staging.advance(words, min(each * (block + 1) >> 8, staging.piece() + BURST), false);
      } else {
        MF_UNROLL for (int p = 0; p < pairs; ++p) {
          if (pending && block == p) {
            MF_UNROLL for (int j = 2 * p; j < 2 * p + 2 && j < chunks; ++j) staging.put(words, j);
          }
          if constexpr (S::tensor) {
            if (block == FETCH_AT + p * FETCH_EVERY) {
              MF_UNROLL for (int j = 2 * p; j < 2 * p + 2 && j < chunks; ++j)
                staging.fetch(words, j);
            }
          }
        }
      }
      if (!S::tail) release();
      last = ring.stage;
      ring.next();
    }
    ptx::mma_wait<0>();
    ptx::mma_settled(acc);
    if (leader) ptx::arrive(shared.empty(last));

    if constexpr (S::split) {
      store_sums<S>(args, acc, tile, group);
    } else {
      // What a short product left no k-blocks for.
      if constexpr (S::tail) {
        staging.advance(words, S::width / 16, true);
      } else {
        MF_UNROLL for (int p = 0; p < pairs; ++p) {
          if (pending && tile.blocks <= p) {
            MF_UNROLL for (int j = 2 * p; j < 2 * p + 2 && j < chunks; ++j) staging.put(words, j);
          }
        }
      }
      if constexpr (S::tensor) {
        MF_UNROLL for (int p = 0; p < pairs; ++p) {
          if (tile.blocks <= FETCH_AT + p * FETCH_EVERY) {
            MF_UNROLL for (int j = 2 * p; j < 2 * p + 2 && j < chunks; ++j) staging.fetch(words, j);
          }
        }
      }

      if constexpr (S::rows > 0) ptx::wait(shared.rows_full(), row_phase);
      finish<S>(acc, words, shared, group);
      if constexpr (S::rows > 0) {
        row_phase ^= 1;
        ptx::fence_async_shared();
        __syncwarp();
        if (leader) ptx::arrive(shared.rows_empty());
      }
      pending = true;
      if constexpr (S::tail) staging.begin(args, q);
    }
  }
  if constexpr (S::tail) {
    staging.advance(words, S::width / 16, true);
  } else if (pending) {
    MF_UNROLL for (int j = 0; j < chunks; ++j) staging.put(words, j);
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

MF_FN const Args& base_of(const Args& args) { return args; }
MF_FN const Args& base_of(const TailArgs& args) { return args.base; }
MF_FN int pieces_of(const Args&) { return 0; }
MF_FN int pieces_of(const TailArgs& args) { return args.pieces; }

// A: Args, or TailArgs where S has a tail.
template <class S, class A>
MF_FN void gemm(const A& all) {
  const Args& args = base_of(all);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  static_assert(Shared<S>::bytes <= S::shared_bytes, "what the launch asks for");
  const Shared<S> shared{ptx::shared_address(dynamic)};
  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) __trap();
    shared.init();
    ptx::prefetch(&args.a);
    ptx::prefetch(&args.b);
  }
  __syncthreads();
  mf::ptx::wait_for_predecessor();  // the maps are parameters, all else is memory

  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
  if (warpgroup == 0) {
    ptx::give_registers<MOVER_REGISTERS>();
    if (S::tail && warp >= 2) {
      if constexpr (S::tail) serve_tail<S>(all, shared, warp - 2);
    } else if (threadIdx.x % 32 == 0) {
      if (warp == 0) {
        load_operands<S>(args, shared);
      } else if (warp == 1) {
        load_rows<S>(args, shared);
      } else if constexpr (!S::split && !S::tail) {
        serve_staging<S>(args, shared, warp - 2);
      }
    }
  } else {
    ptx::take_registers<CONSUMER_REGISTERS>();
    consume<S>(args, pieces_of(all), shared, warpgroup - 1);
  }
}

}  // namespace sm90
}  // namespace mf
