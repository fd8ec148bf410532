// Paged attention of one kind of query tiles, in float32: online softmax (arXiv 1805.02867) over blocks of
// kBlockTokens keys that start at multiples of it, so that a query's result depends on its own sequence alone.
//
// Queries are columns: a kv head's queries of a tile, Q of them with their group, are packed as q^T [H, Q];
// keys times q^T gives logits [S, Q], whose softmax runs down the columns, a vector of queries at once, and
// values^T times the weights adds to outputs [H, Q]. Pages are read where they lie, each once a panel of
// queries, and of those only positions that some query sees.
//
// Dims as in layout.py: R tiles, B queries a tile, N heads, K kv heads, H head_dim, P pages a sequence.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

constexpr int kBlockTokens = 64;

// exp(x) for x up to 0 to within 1 unit of the last place: 2^n * exp(r), as Cephes' expf. 0 below -87.
inline Vector Exp(Vector x) {
  const Ints tiny = x < -87.0f;
  const Vector scaled = x * 1.44269504088896341f - 0.5f;
  const Ints n = tiny ? Ints{} : __builtin_convertvector(scaled, Ints);  // rounds to 0, up: nearest
  const Vector whole = __builtin_convertvector(n, Vector);
  const Vector r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (n + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  return tiny ? Vector{} : p * scale;
}

// tanh, from exp(-2 |x|).
inline Vector Tanh(Vector x) {
  const Vector e = Exp(-2.0f * (x < 0.0f ? -x : x));
  const Vector y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

struct Attention {
  const float* q;       // [R, B, N, H]
  const float* pages;   // [num_pages, 2K, page_size, H]
  const int32_t* page_table;  // [R, P]
  const int32_t* start;       // [R]
  const int32_t* kv_len;      // [R]
  const float* sinks;         // [N], or null
  float* out;                 // [R, B, N, H]
  float* lse;                 // [R, B, N]
  int64_t R, B, N, K, H, P, page_size;
  float scale, soft_cap;  // soft_cap 0: none
  int32_t window, chunk;  // 0: none

  int64_t Group() const { return N / K; }

  // The first position that a query sees.
  int32_t FirstSeen(int32_t position) const {
    if (window > 0) return std::max(position - window + 1, 0);
    if (chunk > 0) return position - position % chunk;
    return 0;
  }
};

// What a thread works in: a panel of queries, and what has come of it.
template <int kVectors>
struct Panel {
  static constexpr int kWidth = kVectors * kLanes;

  explicit Panel(int64_t head_dim)
      : queries(head_dim * kWidth), sums(head_dim * kWidth), weights(kBlockTokens * kWidth) {}

  std::vector<float> queries;  // [H, width], scaled
  std::vector<float> sums;     // [H, width], of weighted values
  std::vector<float> weights;  // [kBlockTokens, width]
  int32_t first[kWidth], last[kWidth];  // positions that each query sees
  float largest[kWidth], total[kWidth];  // of its logits, and of exp(logit - largest)
};

// The logits of a block's keys [begin, end) in the columns, capped and masked, become weights; the sums that
// there are already are scaled to the new largest logit.
template <int kVectors>
void Soften(const Attention& a, Panel<kVectors>& panel, int32_t begin, int32_t end) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  const float masked = -std::numeric_limits<float>::infinity();
  for (int n = 0; n < kWidth; n += kLanes) {
    Ints first, last;
    std::memcpy(&first, panel.first + n, sizeof first);
    std::memcpy(&last, panel.last + n, sizeof last);
    const Vector before = Load(panel.largest + n);
    Vector largest = before;
    for (int32_t s = begin; s < end; ++s) {
      float* at = panel.weights.data() + (s - begin) * kWidth + n;
      Vector logits = Load(at);
      if (a.soft_cap > 0) logits = a.soft_cap * Tanh(logits / a.soft_cap);
      logits = ((first <= s) & (last >= s)) ? logits : Broadcast(masked);
      largest = logits > largest ? logits : largest;
      Store(at, logits);
    }
    // A query that has seen nothing yet keeps zeros: -inf less -inf is no number.
    const Vector shift = largest == masked ? Vector{} : largest;
    const Vector rescale = Exp(before - shift);
    Vector total = Load(panel.total + n) * rescale;
    for (int32_t s = begin; s < end; ++s) {
      float* at = panel.weights.data() + (s - begin) * kWidth + n;
      const Vector weights = Exp(Load(at) - shift);
      total += weights;
      Store(at, weights);
    }
    Store(panel.largest + n, largest);
    Store(panel.total + n, total);
    for (int64_t h = 0; h < a.H; ++h) {
      float* at = panel.sums.data() + h * kWidth + n;
      Store(at, Load(at) * rescale);
    }
  }
}

// The keys [begin, end) of one block.
template <int kVectors>
void AttendBlock(const Attention& a, Panel<kVectors>& panel, const int32_t* page_table, int64_t kv_head,
                 int32_t begin, int32_t end) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  auto each_page = [&](auto visit) {
    for (int32_t s = begin; s < end;) {
      const int32_t offset = s % a.page_size;
      const int32_t size = std::min<int32_t>(a.page_size - offset, end - s);
      const int64_t head = page_table[s / a.page_size] * 2 * a.K + 2 * kv_head;
      visit(a.pages + (head * a.page_size + offset) * a.H, size, panel.weights.data() + (s - begin) * kWidth);
      s += size;
    }
  };
  each_page([&](const float* keys, int32_t size, float* logits) {
    Multiply<kVectors>(size, keys, a.H, 1, panel.queries.data(), a.H, logits, kWidth, false);
  });
  Soften(a, panel, begin, end);
  each_page([&](const float* keys, int32_t size, float* weights) {
    const float* values = keys + a.page_size * a.H;
    Multiply<kVectors>(a.H, values, 1, a.H, weights, size, panel.sums.data(), kWidth, true);
  });
}

// Columns [column, column + columns) of a kv head's queries in a tile; column b * group + g is query b's.
template <int kVectors>
void AttendPanel(const Attention& a, int64_t tile, int64_t kv_head, int64_t column, int64_t columns) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
  Panel<kVectors> panel(a.H);
  const int32_t start = a.start[tile], kv_len = a.kv_len[tile];
  int32_t first = kv_len, last = -1;  // that any of the queries sees
  for (int64_t i = 0; i < kWidth; ++i) {
    const int64_t query = (column + i) / a.Group();
    const int32_t position = start + static_cast<int32_t>(query);
    const int64_t head = kv_head * a.Group() + (column + i) % a.Group();
    const bool is_query = i < columns && position < kv_len;
    panel.first[i] = is_query ? a.FirstSeen(position) : 0;
    panel.last[i] = is_query ? position : -1;
    const bool has_sink = is_query && a.sinks != nullptr;
    panel.largest[i] = has_sink ? a.sinks[head] : -std::numeric_limits<float>::infinity();
    panel.total[i] = has_sink ? 1.0f : 0.0f;
    if (!is_query) continue;
    first = std::min(first, panel.first[i]);
    last = std::max(last, position);
    const float* q = a.q + ((tile * a.B + query) * a.N + head) * a.H;
    for (int64_t h = 0; h < a.H; ++h) panel.queries[h * kWidth + i] = q[h] * a.scale;
  }
  const int32_t* page_table = a.page_table + tile * a.P;
  for (int32_t block = first / kBlockTokens * kBlockTokens; block <= last; block += kBlockTokens)
    AttendBlock(a, panel, page_table, kv_head, std::max(block, first), std::min(block + kBlockTokens, last + 1));
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t row = (tile * a.B + (column + i) / a.Group()) * a.N + kv_head * a.Group() +
                        (column + i) % a.Group();
    const float total = std::max(panel.total[i], 1e-30f);
    for (int64_t h = 0; h < a.H; ++h) a.out[row * a.H + h] = panel.sums[h * kWidth + i] / total;
    a.lse[row] = panel.largest[i] + std::log(total);
  }
}

ffi::Error PagedAttention(ffi::ThreadPool threads, ffi::BufferR4<ffi::F32> q, ffi::BufferR4<ffi::F32> pages,
                          ffi::BufferR2<ffi::S32> page_table, ffi::BufferR1<ffi::S32> start,
                          ffi::BufferR1<ffi::S32> kv_len, ffi::BufferR1<ffi::F32> sinks,
                          ffi::ResultBufferR4<ffi::F32> out, ffi::ResultBufferR3<ffi::F32> lse, float scale,
                          float soft_cap, int32_t window, int32_t chunk) {
  const auto sizes = q.dimensions();
  const Attention a{q.typed_data(),
                    pages.typed_data(),
                    page_table.typed_data(),
                    start.typed_data(),
                    kv_len.typed_data(),
                    sinks.element_count() > 0 ? sinks.typed_data() : nullptr,
                    out->typed_data(),
                    lse->typed_data(),
                    sizes[0],
                    sizes[1],
                    sizes[2],
                    pages.dimensions()[1] / 2,
                    sizes[3],
                    page_table.dimensions()[1],
                    pages.dimensions()[2],
                    scale,
                    soft_cap,
                    window,
                    chunk};
  const int64_t num_columns = a.B * a.Group();
  const int64_t width = num_columns > kLanes ? kPanelVectors * kLanes : kLanes;
  const int64_t num_panels = (num_columns + width - 1) / width;
  ParallelFor(threads, a.R * a.K * num_panels, [&](int64_t task) {
    const int64_t tile = task / (a.K * num_panels), kv_head = task / num_panels % a.K;
    const int64_t column = task % num_panels * width;
    const int64_t columns = std::min(width, num_columns - column);
    if (width == kLanes)
      AttendPanel<1>(a, tile, kv_head, column, columns);
    else
      AttendPanel<kPanelVectors>(a, tile, kv_head, column, columns);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxinferPagedAttention, PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR4<ffi::F32>>()
                                  .Ret<ffi::BufferR3<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("chunk"));

}  // namespace jaxinfer
