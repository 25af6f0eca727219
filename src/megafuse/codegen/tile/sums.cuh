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
// and written to partials[part * columns + column] at the end. Where storage is float32, every 16
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
    MF_STEPS(j, C)
      if (C::live(team, j)) {
        float* p = own + C::column(team, j);
        if (rows >= FLUSH) MF_LANES(i, C::lanes) sum[j][i] += p[i];
        write_partials<C::lanes>(p, sum[j]);
      }
  }

 private:
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

// The same with the sums in shared memory, where they cost no registers: every thread adds to its
// own columns. OFFSET: where in the block's shared memory. For 16-bit storage only.
template <class C, int OFFSET, int THREADS>
struct SharedColumn {
  static constexpr int V = C::lanes, RUN = V % 4 == 0 ? 4 : V % 2 == 0 ? 2 : 1, BYTES = 4 * RUN;
  float* own;
  template <class Team>
  MF_FN SharedColumn(const Team& team, float* partials)
      : own(partials + team.part() * C::columns) {
    const float zero[RUN] = {};
    MF_STEPS(j, C) MF_LANES(p, V / RUN) put(slot(j, p), zero);
  }
  template <class Team>
  MF_FN void add(const Team&, int j, const Vec<V>& v) {
    MF_LANES(p, V / RUN) {
      float sum[RUN];
      get(sum, slot(j, p));
      MF_LANES(i, RUN) sum[i] += float(v.e[p * RUN + i]);
      put(slot(j, p), sum);
    }
  }
  template <class Team>
  MF_FN void write(const Team& team) {
    MF_STEPS(j, C)
      if (C::live(team, j)) {
        MF_LANES(p, V / RUN) {
          float sum[RUN];
          get(sum, slot(j, p));
          MF_LANES(i, RUN) own[C::column(team, j) + p * RUN + i] = sum[i];
        }
      }
  }

 private:
  MF_FN static unsigned slot(int j, int p) {
    return own_shared<BYTES>(OFFSET) + (j * (V / RUN) + p) * THREADS * BYTES;
  }
  MF_FN static void get(float* v, unsigned from) {
    unsigned w[RUN];
    ptx::read_shared<BYTES>(w, from);
    MF_LANES(i, RUN) v[i] = __uint_as_float(w[i]);
  }
  MF_FN static void put(unsigned to, const float* v) {
    unsigned w[RUN];
    MF_LANES(i, RUN) w[i] = __float_as_uint(v[i]);
    ptx::write_shared<BYTES>(to, w);
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
  static constexpr int WIDE = 32, SLICES = 8;
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
        // Four loads in flight, added in order.
        i64 i = y;
        for (; i + 3 * SLICES < count; i += 4 * SLICES) {
          float part[4];
          MF_LANES(u, 4) part[u] = partials[index(k, i + u * SLICES) * n + c];
          MF_LANES(u, 4) sum += part[u];
        }
        for (; i < count; i += SLICES) sum += partials[index(k, i) * n + c];
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
