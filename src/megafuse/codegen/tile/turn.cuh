// Tensors that lie across the rows of a stage, through shared memory. Part of cuda.cuh.

namespace mf {

// ROWS consecutive rows of COLS elements that a tensor holds the other way round: the rows of a
// column lie together. In shared memory they lie as rows, where teams read and write them a vector
// at a time (mf::Shelf). W: rows of a column that one access to memory takes, aligned. Every W rows
// begin SKEW bytes later, so that the threads that place a column's rows meet different banks.
template <class T, int COLS, int ROWS, int W, int PITCH, int SKEW>
struct Sheet {
  using Type = T;
  static constexpr int SIZE = int(sizeof(T)), WIDTH = W;
  // A thread turns two columns of a 16-bit type at once: whole words on either side.
  static constexpr int PAIR = SIZE == 2 && COLS % 2 == 0 ? 2 : 1;
  static constexpr int DOWN = ROWS / W, PIECES = COLS / PAIR * DOWN, BYTES = PAIR * SIZE;
  static_assert(ROWS % W == 0 && (SIZE == 2 || SIZE == 4), "a sheet is cut into whole pieces");
  static_assert(PITCH % 16 == 0 && SKEW % 16 == 0, "rows are read in vectors of 16 bytes");
  int row, column;  // where a piece begins
  MF_FN explicit Sheet(int piece) : row(piece % DOWN * W), column(piece / DOWN * PAIR) {}
  MF_FN static bool live(int piece, int rows) { return piece < PIECES && piece % DOWN * W < rows; }
  MF_FN static unsigned place(int row) { return unsigned(row * PITCH + row / W * SKEW); }
  MF_FN unsigned at(int i) const { return place(row + i) + unsigned(column * SIZE); }
};

// Brings the first `rows` rows of the tensor to the block's shared memory at `to`: base is the first
// one's, col says where a column begins. Every thread of the block takes part, a batch of loads at a
// time.
template <class S, class Team, class Col>
MF_FN void turn_in(const Team&, const typename S::Type* base, const Col& col, int rows,
                   unsigned to) {
  constexpr int THREADS = Team::THREADS, EACH = (S::PIECES + THREADS - 1) / THREADS;
  constexpr int W = S::WIDTH, P = S::PAIR, MOST = W * S::BYTES > 16 ? 128 / (W * S::BYTES) : 8;
  constexpr int BATCH = EACH < MOST ? EACH : MOST;
  const typename S::Type* from = ptx::hidden(base);
  MF_KEEP_ROWS for (int first = threadIdx.x; first < S::PIECES; first += THREADS * BATCH) {
    Raw<W * S::SIZE> raw[BATCH][P];
    MF_LANES(b, BATCH) {
      const int piece = first + b * THREADS;
      const S s(piece);
      if (S::live(piece, rows))
        MF_LANES(p, P) Once::load<W * S::SIZE>(raw[b][p], from + col(s.column + p) + s.row);
    }
    MF_LANES(b, BATCH) {
      const int piece = first + b * THREADS;
      const S s(piece);
      if (S::live(piece, rows))
        MF_LANES(i, W) {
          unsigned word = raw[b][0].w[i * S::SIZE / 4];
          if constexpr (S::SIZE == 2) {
            if (i % 2) word >>= 16;
            if constexpr (P == 2) {
              const unsigned next = raw[b][1].w[i / 2];
              word = (word & 0xffffu) | (i % 2 ? next & 0xffff0000u : next << 16);
            }
          }
          ptx::write_shared<S::BYTES>(on_shelf(to + s.at(i)), &word);
        }
    }
  }
}

// The way back: writes the first `rows` rows at `from` to memory.
template <class S, class Team, class Col>
MF_FN void turn_out(const Team&, typename S::Type* base, const Col& col, int rows, unsigned from) {
  constexpr int W = S::WIDTH, P = S::PAIR;
  typename S::Type* to = ptx::hidden(base);
  MF_KEEP_LOOP for (int piece = threadIdx.x; piece < S::PIECES; piece += Team::THREADS) {
    const S s(piece);
    if (!S::live(piece, rows)) continue;
    unsigned words[W];
    MF_LANES(i, W) ptx::read_shared<S::BYTES>(words + i, on_shelf(from + s.at(i)));
    MF_LANES(p, P) {
      Raw<W * S::SIZE> raw;
      MF_LANES(i, W) {
        if constexpr (S::SIZE == 4) {
          raw.w[i] = words[i];
        } else {
          const unsigned half = p ? words[i] >> 16 : words[i] & 0xffffu;
          raw.w[i / 2] = i % 2 ? raw.w[i / 2] | half << 16 : half;
        }
      }
      ptx::write_global(to + col(s.column + p) + s.row, raw);
    }
  }
}

}  // namespace mf
