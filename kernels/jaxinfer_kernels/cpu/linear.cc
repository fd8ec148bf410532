// out [M, T] = weight [M, K] times x [K, T], in float32; or its transpose, [T, M].
//
// Up to kFewColumns tokens it is bound by reading the weights: vectors lie along K, a row of the weights is
// read once, from front to back, and multiplied by all columns. Above that the vectors lie along T (simd.h).

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kFewColumns = 8;
constexpr int64_t kPanelWidth = kPanelVectors * kLanes;
constexpr int64_t kDepth = 1024;         // of K at a time, so that a panel of x stays in the cache
constexpr int64_t kRowTasksAThread = 4;  // fewer than of other work: a task reads all of x
constexpr int64_t kRowsAhead = 4;        // that are fetched before they are needed

struct Product {
  const float* weight;
  const float* x;  // [K, T]
  float* out;
  float* packed;  // room for x as each path wants it
  int64_t M, K, T;
  int64_t out_row, out_column;  // strides
};

// ---- few columns ----

// packed [T][K]
void TransposeColumns(const Product& p) {
  for (int64_t k = 0; k < p.K; ++k)
    for (int64_t t = 0; t < p.T; ++t) p.packed[t * p.K + k] = p.x[k * p.T + t];
}

template <int kRows, int kColumns>
void MultiplyFew(const Product& p, int64_t row) {
  const float* weight = p.weight + row * p.K;
  Vector sums[kRows][kColumns] = {};
  int64_t k = 0;
  for (; k + kLanes <= p.K; k += kLanes) {
    Vector columns[kColumns];
#pragma GCC unroll 8
    for (int t = 0; t < kColumns; ++t) columns[t] = Load(p.packed + t * p.K + k);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const float* from = weight + m * p.K + k;
      Fetch(from + kRowsAhead * p.K);
      const Vector factors = Load(from);
#pragma GCC unroll 8
      for (int t = 0; t < kColumns; ++t) sums[m][t] += factors * columns[t];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int t = 0; t < kColumns; ++t) {
      float sum = Sum(sums[m][t]);
      for (int64_t rest = k; rest < p.K; ++rest) sum += weight[m * p.K + rest] * p.packed[t * p.K + rest];
      p.out[(row + m) * p.out_row + t * p.out_column] = sum;
    }
  }
}

template <int kColumns>
void MultiplyFewRows(const Product& p, int64_t begin, int64_t end) {
  constexpr int kRows = kColumns > 4 ? 2 : 4;
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) MultiplyFew<kRows, kColumns>(p, row);
  for (; row < end; ++row) MultiplyFew<1, kColumns>(p, row);
}

template <int kColumns = kFewColumns>
void MultiplyFewColumns(const Product& p, int64_t begin, int64_t end) {
  if (p.T == kColumns) return MultiplyFewRows<kColumns>(p, begin, end);
  if constexpr (kColumns > 1) MultiplyFewColumns<kColumns - 1>(p, begin, end);
}

// ---- many columns ----

int64_t NumPanels(int64_t T) { return (T + kPanelWidth - 1) / kPanelWidth; }

// Whether x is one whole panel as it is.
bool IsPanel(const Product& p) { return p.T == kPanelWidth || p.T == kLanes; }

// packed [panels][K][kPanelWidth], zeros in the columns past T; the last has one vector if that suffices.
void PackPanel(const Product& p, int64_t panel) {
  const int64_t first = panel * kPanelWidth;
  const int64_t columns = std::min(p.T - first, kPanelWidth);
  const int64_t width = columns > kLanes ? kPanelWidth : kLanes;
  float* packed = p.packed + panel * p.K * kPanelWidth;
  const float* x = p.x + first;
  for (int64_t k = 0; k < p.K; ++k, x += p.T, packed += width) {
    if (columns == kPanelWidth) {
      for (int64_t n = 0; n < kPanelWidth; n += kLanes) Store(packed + n, Load(x + n));
    } else {
      std::copy_n(x, columns, packed);
      std::fill_n(packed + columns, width - columns, 0.0f);
    }
  }
}

// Rows [begin, end) of a panel, for the k in [depth_begin, depth_end).
template <int kVectors>
void MultiplyPanel(const Product& p, int64_t panel, int64_t begin, int64_t end, int64_t depth_begin,
                   int64_t depth_end) {
  constexpr int64_t kRows = kBlockRows<kVectors>, kWidth = kVectors * kLanes;
  const int64_t column = panel * kPanelWidth;
  const int64_t columns = std::min(p.T - column, kWidth);
  const float* weight_part = p.weight + depth_begin;
  const float* ahead = panel == 0 ? weight_part + kRows * p.K : nullptr;  // the next rows
  const Factor::Part part{weight_part, static_cast<int>(depth_end - depth_begin), ahead};
  const Factor weight{p.K, 1, &part, 1};
  const float* b = (IsPanel(p) ? p.x : p.packed + panel * p.K * kPanelWidth) + depth_begin * kWidth;
  const bool add = depth_begin > 0;
  if (columns == kWidth && p.out_column == 1)
    return Multiply<kVectors>(weight, begin, end, b, p.out + begin * p.out_row + column, p.out_row, add);
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t rows = std::min(kRows, end - row);
    float block[kRows * kWidth];
    float* out = p.out + row * p.out_row + column * p.out_column;
    for (int64_t n = 0; add && n < columns; ++n)
      for (int64_t m = 0; m < rows; ++m) block[m * kWidth + n] = out[m * p.out_row + n * p.out_column];
    Multiply<kVectors>(weight, row, row + rows, b, block, kWidth, add);
    for (int64_t n = 0; n < columns; ++n)
      for (int64_t m = 0; m < rows; ++m) out[m * p.out_row + n * p.out_column] = block[m * kWidth + n];
  }
}

void MultiplyManyColumns(const Product& p, int64_t begin, int64_t end) {
  for (int64_t depth = 0; depth < p.K; depth += kDepth) {
    const int64_t depth_end = std::min(p.K, depth + kDepth);
    for (int64_t panel = 0; panel < NumPanels(p.T); ++panel) {
      if (p.T - panel * kPanelWidth > kLanes)
        MultiplyPanel<kPanelVectors>(p, panel, begin, end, depth, depth_end);
      else
        MultiplyPanel<1>(p, panel, begin, end, depth, depth_end);
    }
  }
}

// ---- both ----

// Makes x what the rows' products want. Returns false where `packed` has no room for it.
bool Pack(const Product& p, int64_t room, int num_threads) {
  if (p.T <= kFewColumns) {
    if (room < p.T * p.K) return false;
    TransposeColumns(p);
  } else if (!IsPanel(p)) {
    if (room < NumPanels(p.T) * p.K * kPanelWidth) return false;
    Team::Get().Run(num_threads, NumPanels(p.T), [&](int64_t panel) { PackPanel(p, panel); });
  }
  return true;
}

void MultiplyRange(const Product& p, int64_t begin, int64_t end) {
  p.T <= kFewColumns ? MultiplyFewColumns(p, begin, end) : MultiplyManyColumns(p, begin, end);
}

// work(begin, end) for all rows, cut into pieces of whole blocks.
template <typename Work>
void ForRows(int64_t num_rows, int num_threads, const Work& work) {
  constexpr int64_t kRows = kBlockRows<kPanelVectors>;
  const int64_t share = CeilDiv(num_rows, kRowTasksAThread * std::max(1, num_threads));
  const int64_t size = std::max<int64_t>(1, CeilDiv(share, kRows)) * kRows;
  Team::Get().Run(num_threads, CeilDiv(num_rows, size),
                  [&](int64_t task) { work(task * size, std::min(num_rows, (task + 1) * size)); });
}

const ffi::Error kMisfit = ffi::Error::InvalidArgument("the shapes of weight, x and packed do not fit");

ffi::Error Linear(ffi::ThreadPool threads, ffi::BufferR2<ffi::F32> weight, ffi::BufferR2<ffi::F32> x,
                  ffi::ResultBufferR2<ffi::F32> out, ffi::ResultBufferR1<ffi::F32> packed, bool transpose) {
  const int64_t M = weight.dimensions()[0], K = weight.dimensions()[1], T = x.dimensions()[1];
  const Product p{weight.typed_data(), x.typed_data(),   out->typed_data(), packed->typed_data(), M, K, T,
                  transpose ? 1 : T,   transpose ? M : 1};
  const int num_threads = static_cast<int>(threads.num_threads());
  if (x.dimensions()[0] != K || !Pack(p, packed->element_count(), num_threads)) return kMisfit;
  ForRows(M, num_threads, [&](int64_t begin, int64_t end) { MultiplyRange(p, begin, end); });
  return ffi::Error::Success();
}

// x * sigmoid(x).
Vector Silu(Vector x) {
  const Vector e = Exp(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : Broadcast(1.0f)) / (1.0f + e);
}

// x times the normal distribution's integral, by tanh (arXiv 1606.08415).
Vector Gelu(Vector x) { return 0.5f * x * (1.0f + Tanh(0.79788456080286536f * (x + 0.044715f * x * x * x))); }

void Gate(float* gate, const float* up, int64_t count, bool gelu) {
  const auto act = [gelu](Vector x) { return gelu ? Gelu(x) : Silu(x); };
  const int64_t rest = count % kLanes;
  for (int64_t i = 0; i < count - rest; i += kLanes) Store(gate + i, act(Load(gate + i)) * Load(up + i));
  const Vector last = act(Load(gate + count - rest, rest)) * Load(up + count - rest, rest);
  std::memcpy(gate + count - rest, &last, rest * sizeof(float));
}

// act(gate x) * (up x), where weight is gate and up [2M, K], one above the other.
ffi::Error GatedLinear(ffi::ThreadPool threads, ffi::BufferR2<ffi::F32> weight, ffi::BufferR2<ffi::F32> x,
                       ffi::ResultBufferR2<ffi::F32> out, ffi::ResultBufferR2<ffi::F32> up_out,
                       ffi::ResultBufferR1<ffi::F32> packed, bool gelu) {
  const int64_t M = weight.dimensions()[0] / 2, K = weight.dimensions()[1], T = x.dimensions()[1];
  const Product gate{
      weight.typed_data(), x.typed_data(), out->typed_data(), packed->typed_data(), M, K, T, T, 1};
  Product up = gate;
  up.weight += M * K;
  up.out = up_out->typed_data();
  const int num_threads = static_cast<int>(threads.num_threads());
  if (x.dimensions()[0] != K || !Pack(gate, packed->element_count(), num_threads)) return kMisfit;
  ForRows(M, num_threads, [&](int64_t begin, int64_t end) {
    // A panel's blocks alternate, so that both weights are read from front to back.
    const int64_t step = T <= kPanelWidth ? kBlockRows<kPanelVectors> : end - begin;
    for (int64_t row = begin; row < end; row += step) {
      const int64_t row_end = std::min(end, row + step);
      MultiplyRange(gate, row, row_end);
      MultiplyRange(up, row, row_end);
      Gate(gate.out + row * T, up.out + row * T, (row_end - row) * T, gelu);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxinferLinear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Attr<bool>("transpose"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxinferGatedLinear, GatedLinear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Attr<bool>("gelu"));

}  // namespace jaxinfer
