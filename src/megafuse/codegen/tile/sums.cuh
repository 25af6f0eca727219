// Sums over rows: partials of each team, then a second step in a fixed order. Part of cuda.cuh.

namespace mf {

// ---- sums over rows -----------------------------------------------------------------------------

// Eight or fewer neighbouring partials, 16 bytes at a time where the vector's width allows.
template <int V>
MF_FN void write_partials(float* p, const real* v) {
  constexpr int RUN = V % 4 == 0 ? 4 : V % 2 == 0 ? 2 : 1;
  MF_LANES(i, V / RUN) {
    Raw<4 * RUN> r;
    Storage<float>::put(r.w, v + i * RUN, RUN);
    ptx::write_global(p + i * RUN, r);
  }
}

// One float32 partial a column and team, summed in registers over the team's rows in their order
// and written to partials[part * columns + column] at the end; or one a block, in the place of its
// first team's, where all teams of a block sum the same. Where storage is float32, every 16
// rows go into memory before that: a register then adds few enough values to keep their low bits,
// and what the addition in memory rounds off stays in the register. MF_WIDE: double registers, and
// one rounding when the partial is written.
template <class C>
struct Column {
  static constexpr unsigned FLUSH = 16;
  float* own;
  real sum[C::steps][C::lanes];
  unsigned rows = 0;
  template <class Team>
  MF_FN Column(const Team& team, float* partials) : own(partials + team.part() * C::columns) {
    MF_STEPS(j, C) MF_LANES(i, C::lanes) sum[j][i] = 0.f;
  }
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<C::lanes>& v) {
    MF_LANES(i, C::lanes) sum[j][i] += v.e[i];
#if !MF_FAST && !MF_WIDE
    if (j == 0) ++rows;
    if (rows % FLUSH == 0 && C::live(team, j)) flush(own + C::column(team, j), sum[j]);
#endif
  }
  template <class Team>
  MF_FN void write(const Team& team) {
    recall(team);
    put(team);
  }

  // The upper half of the teams hands its sums to the lower half, until one team has them all.
  // Dynamic shared memory holds half a block's sums; nothing else uses it any more.
  template <class Team>
  MF_FN void write_block(const Team& team) {
    MF_DYNAMIC_SHARED(mf_shared);
    constexpr int SIZE = C::steps * C::lanes * Team::LENGTH;
    recall(team);
    MF_UNROLL for (int n = Team::COUNT; n > 1; n = (n + 1) / 2) {
      const int half = (n + 1) / 2, index = team.index();
      real* slot = (real*)mf_shared + (index % half) * SIZE + team.rank();
      team.block_sync();
      if (index >= half && index < n)
        MF_STEPS(j, C) MF_LANES(i, C::lanes) slot[(j * C::lanes + i) * Team::LENGTH] = sum[j][i];
      team.block_sync();
      if (index + half < n)
        MF_STEPS(j, C) MF_LANES(i, C::lanes) sum[j][i] += slot[(j * C::lanes + i) * Team::LENGTH];
    }
    if (team.index() == 0) put(team);
  }

 private:
  // Adds what went into memory on the way.
  template <class Team>
  MF_FN void recall(const Team& team) {
    if (rows < FLUSH) return;
    MF_STEPS(j, C)
      if (C::live(team, j))
        MF_LANES(i, C::lanes) sum[j][i] += own[C::column(team, j) + i];
  }
  template <class Team>
  MF_FN void put(const Team& team) const {
    MF_STEPS(j, C)
      if (C::live(team, j)) write_partials<C::lanes>(own + C::column(team, j), sum[j]);
  }
  MF_FN void flush(float* p, real (&s)[C::lanes]) const {
    real t[C::lanes];
    MF_LANES(i, C::lanes) {
      const float far = rows == FLUSH ? 0.f : p[i];
      t[i] = far + s[i];
      const float added = t[i] - far, lost = (far - (t[i] - added)) + (s[i] - added);
      s[i] = lost == lost ? lost : 0.f;  // t is infinite or NaN, and stays so
    }
    write_partials<C::lanes>(p, t);
  }
};

// The same for a long row: the partials stay in memory, each column owned by one thread.
template <class C>
struct LongColumn {
  float* own;
  template <class Team>
  MF_FN LongColumn(const Team& team, float* partials) : own(partials + team.part() * C::columns) {
    MF_LOOP(j, C)
      if (C::live(team, j))
        MF_LANES(i, C::lanes) own[C::column(team, j) + i] = 0.f;
  }
  template <class Team>
  MF_FN void add(const Team& team, int j, const Vec<C::lanes>& v) {
    if (C::live(team, j) == 0) return;
    float* p = own + C::column(team, j);
    real sum[C::lanes];
    MF_LANES(i, C::lanes) sum[i] = p[i] + v.e[i];
    write_partials<C::lanes>(p, sum);
  }
  template <class Team>
  MF_FN void write(const Team&) const {}
};

// Adds the partials of a column sum up: out(k, c) = sum over i < count of
// partials[index(k, i) * n + c]. A block of 32 x 8 threads takes 32 columns; its 8 rows of threads
// take every eighth i in order and are then combined in order, so the grid's size cannot show.
struct Finisher {
#if MF_FAST
  using Wide = float;
#else
  using Wide = double;
#endif
  static constexpr int WIDE = 32, SLICES = 8, FLIGHT = 16;
  template <class T, class Index, class Out>
  MF_FN void column(int which, const float* partials, int n, i64 kept, i64 count,
                    const Index& index, const Out& out) const {
    Wide(*slices)[WIDE] = shared();
    if (int(blockIdx.y) != which) return;
    const int x = threadIdx.x, y = threadIdx.y, tiles = (n + WIDE - 1) / WIDE;
    for (i64 tile = blockIdx.x; tile < kept * tiles; tile += gridDim.x) {
      const i64 k = tile / tiles;
      const int c = int(tile % tiles) * WIDE + x;
      Wide sum = 0;
      if (c < n) {
        // Loads in flight, added in order; what is past the end adds nothing.
        for (i64 i = y; i < count; i += FLIGHT * SLICES) {
          float part[FLIGHT];
          MF_LANES(u, FLIGHT) {
            const i64 at = i + u * SLICES;
            part[u] = at < count ? partials[index(k, at) * n + c] : 0.f;
          }
          MF_LANES(u, FLIGHT) sum += part[u];
        }
      }
      slices[y][x] = sum;
      __syncthreads();
      if (y == 0 && c < n) {
        Wide total = slices[0][x];
        MF_UNROLL for (int s = 1; s < SLICES; ++s) total += slices[s][x];
        write_one<T>(out(k, c), real(total));
      }
      __syncthreads();
    }
  }

 private:
  // Outside the template: a block works on one sum, so all of them share these bytes.
  MF_FN static Wide (*shared())[WIDE] {
    __shared__ Wide slices[SLICES][WIDE];
    return slices;
  }
};

}  // namespace mf
