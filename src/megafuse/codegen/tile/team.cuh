// Threads that share a row: what each of them adds up, and how they combine it. Part of cuda.cuh.

namespace mf {

// ---- accumulators over one row ------------------------------------------------------------------

// What Sum, Max and Min share: this thread's part of the row. Two chains, even and odd lanes: as
// many fused multiply-adds as one chain, half the waiting. In a long row 32 vectors go into the
// chains, then the chains go into `far`, so that the sum does not lose its low bits.
template <class C, class Op>
struct Accumulator {
  static constexpr bool LONG = C::steps > 32;
  real even = Op::identity(), odd = Op::identity(), far = Op::identity();
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<C::lanes>& v) {
    if (C::live(team, j) == 0) return;
    MF_LANES(i, C::lanes) {
      real& chain = i % 2 ? odd : even;
      chain = Op::apply(chain, v.e[i]);
    }
    if (LONG && (j & 31) == 31) {
      far = Op::apply(far, chains());
      even = odd = Op::identity();
    }
  }
  MF_FN real total() const { return LONG ? Op::apply(far, chains()) : chains(); }

 private:
  MF_FN real chains() const { return C::lanes > 1 ? Op::apply(even, odd) : even; }
};
template <class C> using Sum = Accumulator<C, Add>;
template <class C> using Max = Accumulator<C, Most>;
template <class C> using Min = Accumulator<C, Least>;

// This thread's part of a row's sum and of its squared deviations, for team.moments(). Deviations
// are from the thread's first element, which lies so near its own mean that taking the mean out of
// their squares costs log2 of its number of elements in bits at the worst. Every thread has as many.
template <class C>
struct Moments {
  static constexpr int COUNT = C::steps * C::lanes;
  static_assert(COUNT * C::team == C::columns, "no thread may have more elements than another");
  real first = 0, sums[2] = {0, 0}, squares[2] = {0, 0};  // even and odd lanes, as in Accumulator
  template <class Team>
  MF_FN void add(const Team&, int j, const Vec<C::lanes>& v) {
    if (j == 0) first = v.e[0];
    MF_LANES(i, C::lanes) {
      const real d = v.e[i] - first;
      sums[i % 2] += d;
      squares[i % 2] = scalar::fma(d, d, squares[i % 2]);
    }
  }
  // The sum of deviations from `base`, and of squared ones from this thread's mean.
  MF_FN real total(real base) const {
    return scalar::fma(first - base, real(COUNT), sums[0] + sums[1]);
  }
  MF_FN real spread() const {
    const real s = sums[0] + sums[1];
    return scalar::fma(-s, s * real(1. / COUNT), squares[0] + squares[1]);
  }
};

struct alignas(16) Four { real e[4]; };  // read 16 bytes at a time

constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// ---- the team -----------------------------------------------------------------------------------

// TEAM threads that walk a row together, TEAMS of them in a block. A power of two up to 32 (teams
// share a warp, and may run different numbers of rows: shuffles name this team's lanes only), or
// whole warps (one barrier a reduction).
template <int TEAM, int TEAMS>
struct Team {
  static_assert(TEAM <= 32 ? (TEAM & (TEAM - 1)) == 0 : TEAM % 32 == 0, "see above");
  static_assert(TEAM * TEAMS <= 1024, "a block has at most 1024 threads");
  static_assert(TEAM <= 32 || TEAMS == 1 || TEAMS <= 15, "one named barrier a team, 15 of them");
  static constexpr int THREADS = TEAM * TEAMS, LENGTH = TEAM, COUNT = TEAMS;
  static constexpr int LANES = TEAM < 32 ? TEAM : 32, WARPS = TEAM > 32 ? TEAM / 32 : 1;
  static constexpr int SCHEDULERS = 4;

  // Hidden, or the compiler would rather ask for it again in the middle of every reduction.
  const int thread = ptx::hidden(int(threadIdx.x));
  mutable int phase = 0;  // which half of the exchange buffer the next reduction writes

  MF_FN int index() const { return TEAMS == 1 ? 0 : thread / TEAM; }
  // Where a row does not divide evenly, a team's first warps have more of it. A multiprocessor's
  // four schedulers take warps in turn: every round of them begins with another warp of its team.
  MF_FN int rank() const {
    if constexpr (TEAMS == 1) return thread;
    const int own = thread % TEAM;
    if constexpr (WARPS == 1) return own;
    return (own + index() * WARPS / SCHEDULERS * 32) % TEAM;
  }
  MF_FN i64 block() const { return blockIdx.x; }
  MF_FN i64 part() const { return i64(blockIdx.x) * TEAMS + index(); }

  // Position among the LANES lanes of the team that share a warp, and another lane's word.
  MF_FN int lane() const { return thread % LANES; }
  MF_FN unsigned from_lane(unsigned x, int lane) const {
    return __shfl_sync(mask(), x, lane, LANES);
  }

  // Every accumulator combined over the team, in an order the shape alone decides; all threads get
  // the results. Several at once cost far less than one after the other.
  template <class... A>
  MF_FN Pack<sizeof...(A)> sum(const A&... a) const { return reduce<Add>(pack(a.total()...)); }
  template <class... A>
  MF_FN Pack<sizeof...(A)> max(const A&... a) const { return reduce<Most>(pack(a.total()...)); }
  template <class... A>
  MF_FN Pack<sizeof...(A)> min(const A&... a) const { return reduce<Least>(pack(a.total()...)); }

  // The row's sum, and its squared deviations from its mean: pairs of equal parts are put together
  // (Chan, Golub and LeVeque), whose means differ by what their sums differ over their count. Sums
  // are of deviations from one element, so that a mean far from zero takes no bits of them.
  template <class C>
  MF_FN Pack<2> moments(const Moments<C>& a) const {
    constexpr int OWN = Moments<C>::COUNT;
    real base = __shfl_sync(mask(), a.first, 0, LANES);
    real sum = a.total(base), squares = a.spread();
    MF_UNROLL for (int o = 1; o < LANES; o *= 2) {
      const real other = __shfl_xor_sync(mask(), sum, o), apart = sum - other;
      squares = scalar::fma(apart * real(.5 / (OWN * o)), apart,
                            squares + __shfl_xor_sync(mask(), squares, o));
      sum += other;
    }
    if constexpr (WARPS > 1) {
      const real(*all)[3] = gather(sum, squares, base);
      sum = all[0][0], squares = all[0][1], base = all[0][2];
      MF_UNROLL for (int w = 1; w < WARPS; ++w) {  // w warps' parts and one more
        const real other = scalar::fma(all[w][2] - base, real(32 * OWN), all[w][0]);
        const real apart = scalar::fma(other, real(-w), sum);
        squares = scalar::fma(apart * real(1. / (32. * OWN * w * (w + 1))), apart,
                              squares + all[w][1]);
        sum += other;
      }
    }
    return {{scalar::fma(base, real(C::columns), sum), squares}};
  }

  // One thread writes a row's value.
  template <class T>
  MF_FN void store(T* p, real v) const {
    if (rank() == 0) write_one(p, v);
  }

  // All teams of the block, where all of them run.
  MF_FN void block_sync() const { __syncthreads(); }

 private:
  MF_FN unsigned mask() const {
    if constexpr (LANES == 32) {
      return ~0u;
    } else {
      return ((1u << LANES) - 1u) << (thread & 31u & ~unsigned(LANES - 1));
    }
  }
  MF_FN void barrier() const {
    if constexpr (TEAMS == 1) {
      __syncthreads();
    } else {
      ptx::named_barrier<TEAM>(1 + index());
    }
  }

  // K values over WIDTH lanes. While there are several values, the lanes halve the work: each half
  // keeps half of the values and hands the other half over. Value k ends in the WIDTH / P lanes
  // starting at k * (WIDTH / P), P being K rounded up to a power of two.
  template <class Op, int WIDTH, int K>
  MF_FN real fold(const Pack<K>& a) const {
    constexpr int P = power_of_two(K);
    static_assert(P <= WIDTH, "more values than lanes");
    real v[P];
    MF_LANES(i, P) v[i] = i < K ? a.e[i < K ? i : 0] : Op::identity();
    MF_UNROLL for (int o = WIDTH / 2, n = P; o > 0; o /= 2) {
      if (n > 1) {
        n /= 2;
        const bool upper = thread & o;
        MF_LANES(i, P / 2) {
          if (i < n) {
            const real give = upper ? v[i] : v[i + n];
            const real keep = upper ? v[i + n] : v[i];
            v[i] = Op::apply(keep, __shfl_xor_sync(mask(), give, o));
          }
        }
      } else {
        v[0] = Op::apply(v[0], __shfl_xor_sync(mask(), v[0], o));
      }
    }
    return v[0];
  }

  template <class Op, int WIDTH, int K>
  MF_FN Pack<K> spread(real v) const {
    Pack<K> r;
    if constexpr (K == 1) {
      r.e[0] = v;
    } else {
      MF_LANES(k, K) r.e[k] = __shfl_sync(mask(), v, k * (WIDTH / power_of_two(K)), LANES);
    }
    return r;
  }

  // Every warp's three values, in an exchange buffer of its own: see reduce().
  MF_FN const real (*gather(real a, real b, real c) const)[3] {
    __shared__ real exchange[2][TEAMS][WARPS][3];
    real(*own)[3] = exchange[phase][index()];
    phase ^= 1;
    if ((thread & 31) == 0) {
      real* to = own[rank() / 32];
      to[0] = a, to[1] = b, to[2] = c;
    }
    barrier();
    return own;
  }

  template <class Op, int K>
  MF_FN Pack<K> reduce(Pack<K> a) const {
    constexpr int P = power_of_two(K);
    if constexpr (P > LANES) {  // a tiny team with many sums: value by value
      MF_LANES(k, K)
      MF_UNROLL for (int o = LANES / 2; o > 0; o /= 2)
        a.e[k] = Op::apply(a.e[k], __shfl_xor_sync(mask(), a.e[k], o));
      return a;
    } else if constexpr (WARPS == 1) {
      return spread<Op, LANES, K>(fold<Op, LANES, K>(a));
    } else {
      // Double-buffered: a thread still reading one half cannot be overtaken twice, because the
      // reduction in between has a barrier of its own.
      constexpr int ROW = (WARPS + 3) / 4 * 4;
      alignas(16) __shared__ real exchange[2][TEAMS][K][ROW];
      real(*own)[ROW] = exchange[phase][index()];
      phase ^= 1;
      const int here = thread & 31, warp = rank() / 32, k = here / (32 / P);
      const real mine = fold<Op, 32, K>(a);
      if (here % (32 / P) == 0 && k < K) own[k][warp] = mine;
      barrier();
      constexpr int GROUP = 32 / P;  // lanes that combine the warps' parts of one value
      if constexpr (K * WARPS <= 12) {
        Pack<K> r;
        MF_LANES(i, K) {
          Four q[ROW / 4];
          MF_LANES(w, ROW / 4) q[w] = *(const Four*)&own[i][4 * w];
          r.e[i] = q[0].e[0];
          MF_UNROLL for (int w = 1; w < WARPS; ++w) r.e[i] = Op::apply(r.e[i], q[w / 4].e[w % 4]);
        }
        return r;
      } else {
        // Four parts a lane, SOME lanes having all of them, and so on in turn. Lanes of values beyond
        // K do as the last one's.
        constexpr int QUADS = ROW / 4, SOME = power_of_two(QUADS < GROUP ? QUADS : GROUP);
        real v = Op::identity();
        MF_UNROLL for (int q = 0; q < QUADS; q += SOME) {
          const int mine = q + here % SOME, part = 4 * mine;
          const Four four = *(const Four*)&own[k < K ? k : K - 1][mine < QUADS ? part : ROW - 4];
          const real low = part + 1 < WARPS ? Op::apply(four.e[0], four.e[1]) : four.e[0];
          const real high = part + 3 < WARPS ? Op::apply(four.e[2], four.e[3]) : four.e[2];
          const real all = part + 2 < WARPS ? Op::apply(low, high) : low;
          v = part >= WARPS ? v : q > 0 ? Op::apply(v, all) : all;
        }
        MF_UNROLL for (int o = SOME / 2; o > 0; o /= 2)
          v = Op::apply(v, __shfl_xor_sync(~0u, v, o));
        return spread<Op, 32, K>(v);
      }
    }
  }
};

}  // namespace mf
