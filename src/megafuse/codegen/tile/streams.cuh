// Rows on their way from memory into registers, and back. Part of cuda.cuh.

namespace mf {

// ---- reading rows -------------------------------------------------------------------------------

// One row's worth of a tensor in this thread's registers. Every aligned run of A columns lies
// together in memory (SPLAT: shares the one element at its first column's offset).
template <class C, class T, int A, bool SPLAT>
struct Tile {
  static constexpr int V = C::lanes, RUN = A < V ? A : V, RUNS = V / RUN;
  static constexpr int BYTES = (SPLAT ? 1 : RUN) * int(sizeof(T));
  static_assert(C::columns % V == 0, "on the device a vector is whole or dead");
  static_assert(V % RUN == 0 && A % RUN == 0, "runs must tile the vector, or vectors the run");
  Raw<BYTES> raw[RUNS];

  template <class Reader, class Team, class Col>
  MF_FN void load(const Team& team, int j, const T* base, const Col& col) {
    const int c = C::column(team, j);
    if (C::live(team, j) == V) {
      MF_LANES(p, RUNS) Reader::template load<BYTES>(raw[p], base + col(c + p * RUN));
    } else {
      MF_LANES(p, RUNS) MF_LANES(i, Raw<BYTES>::words) raw[p].w[i] = 0u;
    }
  }
  MF_FN Vec<V> unpack() const {
    Vec<V> v;
    MF_LANES(i, V) v.e[i] = Storage<T>::get(raw[i / RUN].w, SPLAT ? 0 : i % RUN);
    return v;
  }
};

template <bool FRESH, class Reader>
struct ReaderFor { using type = Reader; };
template <class Reader>
struct ReaderFor<true, Reader> { using type = Fresh; };

// A tensor read along the rows: the current row and, on its way, the next one. FRESH: this launch
// wrote it.
template <class C, class T, int A, bool SPLAT, bool FRESH, class Col>
struct Stream {
  Col col;
  Tile<C, T, A, SPLAT> next[C::steps], current[C::steps];
  MF_FN explicit Stream(Col c) : col(c) {}
  template <class Team>
  MF_FN void fetch(const Team& team, const T* row) {
    MF_STEPS(j, C) next[j].template load<typename ReaderFor<FRESH, Once>::type>(team, j, row, col);
  }
  MF_FN void advance() { MF_STEPS(j, C) current[j] = next[j]; }
  template <class Team>
  MF_FN Vec<C::lanes> at(const Team&, int j) const { return current[j].unpack(); }
};
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN auto stream(Col col) { return Stream<C, T, A, false, FRESH, Col>(col); }
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN auto splat(Col col) { return Stream<C, T, A, true, FRESH, Col>(col); }

#ifndef MF_DYNAMIC_SHARED
#define MF_DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) unsigned char NAME[]
#endif

// A tensor read along the rows with DEPTH rows on their way, in shared memory instead of registers.
// Each thread copies and reads back its own vectors only, so no thread waits for another. OFFSET:
// where in the block's shared memory the slots of this tensor begin. Used inside mf::rows_ring.
template <class C, class T, int A, int DEPTH, int OFFSET, int THREADS, class Col>
struct Ring {
  static constexpr int V = C::lanes, RUN = A < V ? A : V, BYTES = RUN * int(sizeof(T));
  static constexpr int PIECE = BYTES < 16 ? BYTES : 16, PIECES = V * int(sizeof(T)) / PIECE;
  // Slot layout [depth][step][piece][thread][PIECE]: neighbouring threads, neighbouring banks.
  static constexpr int PER_PIECE = THREADS * PIECE, PER_ROW = C::steps * PIECES * PER_PIECE;
  Col col;
  unsigned head = DEPTH - 1, tail = DEPTH - 1;  // the slot being read; the last one filled
  MF_FN explicit Ring(Col c) : col(c) {}
  MF_FN static unsigned own() {
    MF_DYNAMIC_SHARED(mf_shared);
    return unsigned(__cvta_generic_to_shared(mf_shared)) + OFFSET + threadIdx.x * PIECE;
  }
  template <class Team>
  MF_FN void fetch(const Team& team, const T* row) {
    tail = tail + 1 == DEPTH ? 0 : tail + 1;
    MF_STEPS(j, C) {
      const int c = C::column(team, j);
      if (C::live(team, j) == V) {
        MF_LANES(p, PIECES) {
          constexpr int PER = PIECE / int(sizeof(T));  // columns of a piece
          const int at = p * PER;
          const T* from = row + col(c + at / RUN * RUN) + at % RUN;
          ptx::copy_async<PIECE>(own() + tail * PER_ROW + (j * PIECES + p) * PER_PIECE, from);
        }
      }
    }
  }
  MF_FN void advance() { head = head + 1 == DEPTH ? 0 : head + 1; }
  template <class Team>
  MF_FN Vec<V> at(const Team& team, int j) const {
    Raw<V * int(sizeof(T))> raw;
    if (C::live(team, j) == V) {
      MF_LANES(p, PIECES) {
        Raw<PIECE> piece;
        ptx::read_shared<PIECE>(piece.w, own() + head * PER_ROW + (j * PIECES + p) * PER_PIECE);
        MF_LANES(i, Raw<PIECE>::words) raw.w[p * (PIECE / 4) + i] = piece.w[i];
      }
    } else {
      MF_LANES(i, Raw<V * int(sizeof(T))>::words) raw.w[i] = 0u;
    }
    Vec<V> v;
    MF_LANES(i, V) v.e[i] = Storage<T>::get(raw.w, i);
    return v;
  }
};
template <class C, class T, int A, int DEPTH, int OFFSET, int THREADS, class Col>
MF_FN auto ring(Col col) { return Ring<C, T, A, DEPTH, OFFSET, THREADS, Col>(col); }

// mf::rows with the rings DEPTH - 1 rows ahead of the body; fetch_ring starts their copies.
template <int DEPTH, class RowOf, class Fetch, class FetchRing, class Advance, class Body>
MF_FN void rows_ring(i64 begin, i64 end, i64 step, const RowOf& row_of, const Fetch& fetch,
                     const FetchRing& fetch_ring, const Advance& advance, const Body& body) {
  if (begin >= end) return;
  MF_UNROLL for (int d = 0; d < DEPTH - 1; ++d) {
    if (begin + d * step < end) fetch_ring(row_of(begin + d * step));
    ptx::copy_commit();
  }
  auto next = row_of(begin);
  fetch(next);
  MF_KEEP_ROWS for (i64 r = begin; r < end; r += step) {
    const auto row = next;
    advance();
    if (r + step < end) {
      next = row_of(r + step);
      fetch(next);
    }
    // The slot filled now is the one the last body read, by this very thread.
    if (r + (DEPTH - 1) * step < end) fetch_ring(row_of(r + (DEPTH - 1) * step));
    ptx::copy_commit();
    ptx::copy_wait<DEPTH - 1>();
    body(row);
  }
  ptx::copy_wait<0>();
}

// The same for a row too long for registers: nothing is kept, at() reads memory every time.
template <class C, class T, int A, bool SPLAT, bool FRESH, class Col>
struct LongStream {
  Col col;
  const T *next, *current;
  template <class Team>
  MF_FN void fetch(const Team&, const T* row) { next = row; }
  MF_FN void advance() { current = next; }
  template <class Team>
  MF_FN Vec<C::lanes> at(const Team& team, int j) const {
    Tile<C, T, A, SPLAT> tile;
    tile.template load<typename ReaderFor<FRESH, Kept>::type>(team, j, current, col);
    return tile.unpack();
  }
};
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN LongStream<C, T, A, false, FRESH, Col> long_stream(Col col) {
  return {col, nullptr, nullptr};
}
template <class C, class T, int A, bool FRESH = false, class Col>
MF_FN LongStream<C, T, A, true, FRESH, Col> long_splat(Col col) {
  return {col, nullptr, nullptr};
}
template <class C, class T, int A, class Team, class Col>
MF_FN LongStream<C, T, A, false, false, Col> long_hold(const Team&, const T* base, Col col) {
  return {col, base, base};
}

// A tensor that every row reads at the same place (parameters): loaded once, packed.
template <class C, class T, int A, bool SPLAT>
struct Hold {
  Tile<C, T, A, SPLAT> tile[C::steps];
  template <class Team>
  MF_FN Vec<C::lanes> at(const Team&, int j) const { return tile[j].unpack(); }
};
template <class C, class T, int A, bool SPLAT = false, class Team, class Col>
MF_FN Hold<C, T, A, SPLAT> hold(const Team& team, const T* base, Col col) {
  Hold<C, T, A, SPLAT> h;
  MF_STEPS(j, C) h.tile[j].template load<Once>(team, j, base, col);
  return h;
}
template <class C, class T, int A, class Team, class Col>
MF_FN Hold<C, T, A, true> hold_splat(const Team& team, const T* base, Col col) {
  return hold<C, T, A, true>(team, base, col);
}

// One value a row, fetched one row ahead by every thread of the team (one line, one request).
template <class T, bool FRESH = false>
struct Scalar {
  Raw<sizeof(T)> next, current;
  MF_FN void fetch(const T* p) {
    ReaderFor<FRESH, Once>::type::template load<sizeof(T)>(next, p);
  }
  MF_FN void advance() { current = next; }
  MF_FN real value() const { return Storage<T>::get(current.w, 0); }
};

// ---- writing ------------------------------------------------------------------------------------

// Writes vector j of the row at `base`, in aligned runs of A columns.
template <class C, class T, int A, class Team, class Col>
MF_FN void store(const Team& team, int j, T* base, const Col& col, const Vec<C::lanes>& v) {
  constexpr int V = C::lanes, RUN = A < V ? A : V, BYTES = RUN * int(sizeof(T));
  static_assert(V % RUN == 0 && A % RUN == 0, "runs must tile the vector, or vectors the run");
  const int c = C::column(team, j);
  if (C::live(team, j) == 0) return;
  MF_LANES(p, V / RUN) {
    Raw<BYTES> r;
    Storage<T>::put(r.w, v.e + p * RUN, RUN);
    write_raw<BYTES>(base + col(c + p * RUN), r);
  }
}

}  // namespace mf
