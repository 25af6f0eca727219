// Rows on their way from memory into registers, and back. Part of cuda.cuh.

namespace mf {

// ---- reading rows -------------------------------------------------------------------------------

// Where a column lies: a function of the column, or, where that costs a division, a table of this
// thread's own runs. Tables, and the row's address, are hidden from the compiler: it would put the
// index arithmetic of both together again, for every access. PERIOD: columns after which the offsets
// repeat (0: never). Runs a multiple of it apart then share a register, and what is read there.
template <class C, int RUN>
struct Table { unsigned off[C::steps][C::lanes / RUN]; };
template <class C, int A, int PERIOD = 0, class Team, class Col>
MF_FN auto table(const Team& team, const Col& col) {
  constexpr int RUN = A < C::lanes ? A : C::lanes, RUNS = C::lanes / RUN;
  Table<C, RUN> t;
  MF_STEPS(j, C)
    MF_LANES(p, RUNS) {
      int same = -1;  // the first run that lies whole periods before this one
      MF_LANES(i, j * RUNS + p) {
        const int apart = (j - i / RUNS) * C::team * C::lanes + (p - i % RUNS) * RUN;
        if (PERIOD > 0 && same < 0 && apart % (PERIOD > 0 ? PERIOD : 1) == 0) same = i;
      }
      t.off[j][p] = same < 0 ? unsigned(ptx::hidden(col(C::column(team, j) + p * RUN)))
                             : t.off[same / RUNS][same % RUNS];
    }
  return t;
}
template <class C, class Team, class Col>
MF_FN auto place(const Team& team, const Col& col, int j, int i) {
  return col(C::column(team, j) + i);
}
template <class C, class Team, int RUN>
MF_FN unsigned place(const Team&, const Table<C, RUN>& t, int j, int i) { return t.off[j][i / RUN]; }

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
    const T* row = ptx::hidden(base);
    if (C::live(team, j) == V) {
      MF_LANES(p, RUNS)
      Reader::template load<BYTES>(raw[p], row + place<C>(team, col, j, p * RUN));
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

// A tensor read along the rows whose next rows are on their way in shared memory, not in registers.
// Each thread copies and reads back its own vectors only, so no thread waits for another. OFFSET:
// where in the block's shared memory the slots of this tensor begin. LAZY: a row is read from there
// whenever it is used, instead of once into registers. Used inside mf::rows_ring.
template <class C, class T, int A, int OFFSET, int THREADS, bool LAZY, class Col>
struct Ring {
  static constexpr int V = C::lanes, RUN = A < V ? A : V, BYTES = RUN * int(sizeof(T));
  static constexpr int PIECE = BYTES < 16 ? BYTES : 16, PER = PIECE / int(sizeof(T));
  static constexpr int PIECES = V / PER, WORDS = PIECE / 4;
  static_assert(PIECE >= 4, "the machine copies 4 bytes at least");
  // Slot layout [slot][step][piece][thread][PIECE]: neighbouring threads, neighbouring banks.
  static constexpr int PER_PIECE = THREADS * PIECE, PER_ROW = C::steps * PIECES * PER_PIECE;
  struct Words { unsigned w[PIECES * WORDS]; };
  Col col;
  int slot = 0;
  Words row[LAZY ? 1 : C::steps];
  MF_FN explicit Ring(Col c) : col(c) {}

  template <class Team>
  MF_FN void fetch(const Team& team, const T* base, int into) {
    const T* from = ptx::hidden(base);
    MF_STEPS(j, C) {
      if (C::live(team, j) == V) {
        MF_LANES(p, PIECES)
        ptx::copy_async<PIECE>(shared(into, j, p), from + place<C>(team, col, j, p * PER / RUN * RUN) +
                                                       p * PER % RUN);
      }
    }
  }
  template <class Team>
  MF_FN void advance(const Team& team, int to) {
    slot = to;
    if constexpr (!LAZY) MF_STEPS(j, C) row[j] = read(team, j);
  }
  template <class Team>
  MF_FN Vec<V> at(const Team& team, int j) const {
    Words words;
    if constexpr (LAZY) {
      words = read(team, j);
    } else {
      words = row[j];
    }
    Vec<V> v;
    MF_LANES(i, V) v.e[i] = Storage<T>::get(words.w, i);
    return v;
  }

 private:
  MF_FN static unsigned shared(int in, int j, int p) {
    MF_DYNAMIC_SHARED(mf_shared);
    return unsigned(__cvta_generic_to_shared(mf_shared)) + OFFSET + threadIdx.x * PIECE +
           in * PER_ROW + (j * PIECES + p) * PER_PIECE;
  }
  template <class Team>
  MF_FN Words read(const Team& team, int j) const {
    Words words;
    if (C::live(team, j) == V) {
      MF_LANES(p, PIECES) ptx::read_shared<PIECE>(words.w + p * WORDS, shared(slot, j, p));
    } else {
      MF_LANES(i, PIECES * WORDS) words.w[i] = 0u;
    }
    return words;
  }
};
template <class C, class T, int A, int OFFSET, int THREADS, bool LAZY = false, class Col>
MF_FN auto ring(Col col) { return Ring<C, T, A, OFFSET, THREADS, LAZY, Col>(col); }

// mf::rows with rings: AHEAD rows are on their way. With as many SLOTS, a row's slot is filled again
// once the row is in registers; lazy rings have one more, filled while the row is read. fetch_ring
// starts the copies of a row; body(row, copies) calls copies() once, when it has read what it reads
// from the nearest cache: loads come back in order, and those would wait behind the copies' way to
// memory.
template <int AHEAD, int SLOTS, class I, class RowOf, class Fetch, class FetchRing, class Advance,
          class Body>
MF_FN void rows_ring(I begin, decltype(I()) end, decltype(I()) step, const RowOf& row_of,
                     const Fetch& fetch, const FetchRing& fetch_ring, const Advance& advance,
                     const Body& body) {
  if (begin >= end) return;
  MF_UNROLL for (int d = 0; d < AHEAD; ++d) {
    if (begin + d * step < end) fetch_ring(row_of(begin + d * step), d);
    ptx::copy_commit();
  }
  auto next = row_of(begin);
  fetch(next);
  int read = 0, fill = AHEAD % SLOTS;  // slots, the same in every ring
  MF_KEEP_ROWS for (I r = begin; r < end; r += step) {
    const auto row = next;
    // The slot filled now was read by this very thread, in advance() or by the last body.
    ptx::copy_wait<AHEAD - 1>();
    advance(read);
    next = row_of(r + step < end ? r + step : r);
    fetch(next);
    body(row, [&] {
      if (r + AHEAD * step < end) fetch_ring(row_of(r + AHEAD * step), fill);
      ptx::copy_commit();
    });
    read = read + 1 == SLOTS ? 0 : read + 1;
    fill = fill + 1 == SLOTS ? 0 : fill + 1;
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
template <class C, class T, int A, bool FRESH = false, class Team, class Col>
MF_FN LongStream<C, T, A, false, FRESH, Col> long_hold(const Team&, const T* base, Col col) {
  return {col, base, base};
}

// A tensor that all rows, or all rows of a group, read at the same place: loaded once, packed.
template <class C, class T, int A, bool SPLAT, bool FRESH, class Team, class Col>
struct Hold {
  Tile<C, T, A, SPLAT> tile[C::steps];
  MF_FN Hold(const Team& team, const T* base, const Col& col) {
    MF_STEPS(j, C)
    tile[j].template load<typename ReaderFor<FRESH, Once>::type>(team, j, base, col);
  }
  MF_FN Vec<C::lanes> at(const Team&, int j) const { return tile[j].unpack(); }
};
template <class C, class T, int A, bool FRESH = false, class Team, class Col>
MF_FN auto hold(const Team& team, const T* base, Col col) {
  return Hold<C, T, A, false, FRESH, Team, Col>(team, base, col);
}
template <class C, class T, int A, bool FRESH = false, class Team, class Col>
MF_FN auto hold_splat(const Team& team, const T* base, Col col) {
  return Hold<C, T, A, true, FRESH, Team, Col>(team, base, col);
}

// One element that all rows, or all rows of a group, share.
template <class T>
MF_FN real load(const T& x) {
  Raw<sizeof(T)> r;
  Fresh::load<sizeof(T)>(r, &x);
  return Storage<T>::get(r.w, 0);
}

// One value a row: this lane's row of the next turn, of this one, and the row's at hand.
template <class T, bool FRESH = false>
struct Scalar {
  Raw<sizeof(T)> next, held, now;
  MF_FN void fetch(const T* p) {
    ReaderFor<FRESH, Once>::type::template load<sizeof(T)>(next, p);
  }
  MF_FN void turn() { held = next; }
  template <class Team>
  MF_FN void pick(const Team& team, int lane) {
    MF_LANES(i, Raw<sizeof(T)>::words) now.w[i] = team.from_lane(held.w[i], lane);
  }
  MF_FN real value() const { return Storage<T>::get(now.w, 0); }
};

// ---- a group's slice of a tensor, in shared memory from stage to stage ---------------------------

MF_FN unsigned on_shelf(unsigned at) {
  MF_DYNAMIC_SHARED(mf_shared);
  return unsigned(__cvta_generic_to_shared(mf_shared)) + at;
}

// turn(at) chooses a row, by the byte in the block's shared memory where it begins; at() reads it in
// aligned runs of A columns, col saying where a column lies from there. fetch starts the copies of a
// row to its place, each thread its own vectors. Used inside mf::rows_ring when it fetches.
template <class C, class T, int A, class Col>
struct Shelf {
  static constexpr int V = C::lanes, RUN = A < V ? A : V, BYTES = RUN * int(sizeof(T));
  static constexpr int PIECE = BYTES < 16 ? BYTES : 16, PER = PIECE / int(sizeof(T));
  Col col;
  unsigned row = 0;
  MF_FN explicit Shelf(Col c) : col(c) {}
  template <class Team>
  MF_FN void fetch(const Team& team, const T* base, unsigned to) const {
    const T* from = ptx::hidden(base);
    MF_STEPS(j, C)
      if (C::live(team, j) == V)
        MF_LANES(p, V / PER) {
          const auto c = place<C>(team, col, j, p * PER / RUN * RUN);
          const int i = p * PER % RUN;
          ptx::copy_async<PIECE>(on_shelf(to + (c + i) * unsigned(sizeof(T))), from + c + i);
        }
  }
  MF_FN void turn(unsigned at) { row = on_shelf(at); }
  template <class Team>
  MF_FN Vec<V> at(const Team& team, int j) const {
    Vec<V> v;
    MF_LANES(p, V / PER) {
      unsigned w[(PIECE + 3) / 4] = {};
      if (C::live(team, j) == V) {
        const int c = place<C>(team, col, j, p * PER / RUN * RUN) + p * PER % RUN;
        ptx::read_shared<PIECE>(w, row + c * unsigned(sizeof(T)));
      }
      MF_LANES(i, PER) v.e[p * PER + i] = Storage<T>::get(w, i);
    }
    return v;
  }
};
template <class C, class T, int A, class Col>
MF_FN Shelf<C, T, A, Col> shelf(Col col) { return Shelf<C, T, A, Col>(col); }

// Writes vector j of the row that begins at byte `to`.
template <class C, class T, int A, class Team, class Col>
MF_FN void shelve(const Team& team, int j, unsigned to, const Col& col, const Vec<C::lanes>& v) {
  using S = Shelf<C, T, A, Col>;
  if (C::live(team, j) != S::V) return;
  MF_LANES(p, S::V / S::PER) {
    Raw<S::PIECE> r;
    Storage<T>::put(r.w, v.e + p * S::PER, S::PER);
    const int c = place<C>(team, col, j, p * S::PER / S::RUN * S::RUN) + p * S::PER % S::RUN;
    ptx::write_shared<S::PIECE>(on_shelf(to + c * unsigned(sizeof(T))), r.w);
  }
}

// ---- small tensors in a group's shared memory, unpacked -------------------------------------------

// Puts `count` elements there as float32, once for all rows. All threads of the block meet after it.
template <class T, class Team>
MF_FN void pin(const Team&, const T* from, int count, unsigned to) {
  MF_DYNAMIC_SHARED(mf_shared);
  for (int i = threadIdx.x; i < count; i += Team::THREADS)
    ((float*)(mf_shared + to))[i] = float(load(from[i]));
}

// Reads them in aligned runs of A columns, from byte OFFSET on; turn(at) chooses a row, by its byte
// from there. Ordinary loads: runs that a table says are the same are then read once.
template <class C, int A, int OFFSET, class Col>
struct Pinned {
  static constexpr int V = C::lanes, RUN = A < V ? A : V, PER = RUN < 4 ? RUN : 4;
  struct alignas(4 * PER) Piece { float e[PER]; };
  Col col;
  unsigned row = 0;
  MF_FN explicit Pinned(Col c) : col(c) {}
  MF_FN void turn(unsigned at) { row = at; }
  template <class Team>
  MF_FN Vec<V> at(const Team& team, int j) const {
    MF_DYNAMIC_SHARED(mf_shared);
    Vec<V> v(0.f);
    if (C::live(team, j) != V) return v;
    MF_LANES(p, V / PER) {
      const int c = place<C>(team, col, j, p * PER / RUN * RUN) + p * PER % RUN;
      const Piece piece = *(const Piece*)(mf_shared + (row + c * 4u) + OFFSET);
      MF_LANES(i, PER) v.e[p * PER + i] = piece.e[i];
    }
    return v;
  }
};
template <class C, int A, int OFFSET, class Col>
MF_FN Pinned<C, A, OFFSET, Col> pinned(Col col) { return Pinned<C, A, OFFSET, Col>(col); }

// ---- writing ------------------------------------------------------------------------------------

// Writes vector j of the row at `base`, in aligned runs of A columns.
template <class C, class T, int A, class Team, class Col>
MF_FN void store(const Team& team, int j, T* base, const Col& col, const Vec<C::lanes>& v) {
  constexpr int V = C::lanes, RUN = A < V ? A : V, BYTES = RUN * int(sizeof(T));
  static_assert(V % RUN == 0 && A % RUN == 0, "runs must tile the vector, or vectors the run");
  if (C::live(team, j) == 0) return;
  T* row = ptx::hidden(base);
  MF_LANES(p, V / RUN) {
    Raw<BYTES> r;
    Storage<T>::put(r.w, v.e + p * RUN, RUN);
    ptx::write_global(row + place<C>(team, col, j, p * RUN), r);
  }
}

}  // namespace mf
