// The second kernel of a product whose k's were split: adds up the float32 sums of the splits, in
// order from the first to the last, and does what the one-pass kernel does to its accumulator.

namespace mf {
namespace sm90 {

// Its parameter: 8-byte members; runtime/split.py fills them in. Strides are in bytes.
struct FinishArgs {
  const float* sums;  // [batch, splits, m, n]
  char* c;
  const char* tensor;
  const char* row[MAX_ROW_OPERANDS];
  i64 row_stride[MAX_ROW_OPERANDS];
  i64 c_batch, c_row, tensor_batch, tensor_row;
  i64 batch, m, n, splits;
};

// Columns of one thread, threads of a block, and loads of a thread on their way at a time. (Without
// the launch bound of 8 blocks the assembler saves registers, and few are.)
constexpr int FINISH_LANES = 4, FINISH_THREADS = 64, IN_FLIGHT = 16;

// F: rows, tensor, Row, Tensor, Out and epilogue, as a product in one pass has them. n is a multiple
// of 8, and the runtime lets no index exceed 32 bits.
template <class F>
MF_FN void finish_product(const FinishArgs& a) {
  begin();
  const u32 pieces = u32(a.n) / FINISH_LANES, at = blockIdx.x * FINISH_THREADS + threadIdx.x;
  const u32 line = at / pieces, column = (at - line * pieces) * FINISH_LANES;
  const u32 batch = line / u32(a.m), row = line - batch * u32(a.m);
  if (batch >= u32(a.batch)) return;

  const i64 plane = a.m * a.n;
  const float* from = a.sums + batch * a.splits * plane + row * a.n + column;
  float sum[FINISH_LANES] = {};
  const int splits = int(a.splits);
  _Pragma("unroll 1") for (int s = 0; s < splits; s += IN_FLIGHT) {
    u32 part[IN_FLIGHT][FINISH_LANES];
    MF_UNROLL for (int i = 0; i < IN_FLIGHT; ++i)
      ptx::load_if(part[i], from + i * plane, s + i < splits);
    MF_UNROLL for (int i = 0; i < IN_FLIGHT; ++i)
    MF_UNROLL for (int l = 0; l < FINISH_LANES; ++l) sum[l] += __uint_as_float(part[i][l]);
    from += IN_FLIGHT * plane;
  }

  using Row = typename F::Row;
  Raw<FINISH_LANES * int(sizeof(Row))> rows[F::rows + 1];
  MF_UNROLL for (int r = 0; r < F::rows; ++r)
    Kept::load(rows[r], a.row[r] + batch * a.row_stride[r] + column * sizeof(Row));
  Raw<FINISH_LANES * 2> words = {};
  if constexpr (F::tensor)
    Once::load(words, a.tensor + batch * a.tensor_batch + row * a.tensor_row + column * 2);
  float v[FINISH_LANES];
  MF_UNROLL for (int l = 0; l < FINISH_LANES; ++l) {
    float of_rows[F::rows + 1];
    MF_UNROLL for (int r = 0; r < F::rows; ++r) of_rows[r] = Storage<Row>::get(rows[r].w, l);
    v[l] = F::epilogue(sum[l], of_rows, Storage<typename F::Tensor>::get(words.w, l));
  }
  Storage<typename F::Out>::put(words.w, v, FINISH_LANES);
  mf::ptx::write_global(a.c + batch * a.c_batch + row * a.c_row + column * 2, words);
}

}  // namespace sm90
}  // namespace mf
