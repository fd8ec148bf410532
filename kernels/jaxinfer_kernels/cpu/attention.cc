// Paged attention in float32: a step's keys and values are written into their pages, then all its queries attend.
// Online softmax (arXiv 1805.02867) over blocks of kBlockTokens keys that start at multiples of it, so that a
// query's result depends on its own sequence alone.
//
// Queries are columns: a kv head's queries of a tile, Q of them with their group, are packed as q^T [H, Q];
// keys times q^T gives logits [S, Q], whose softmax runs down the columns, a vector of queries at once, and
// values^T times the weights adds to outputs [H, Q]. A few queries, as of a decode, would leave most of a vector
// idle: their outputs are [Q, H], and each value is read once for all. Pages are read where they lie, and of them
// only positions that some query sees.
//
// Dims as in layout.py: T tokens, R tiles, B queries a tile, N heads, K kv heads, H head_dim, P pages a sequence.
// Queries, keys and outputs lie feature-major, as products make them and take them (linear.cc).

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
constexpr int kFewQueries = 4;
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// One kind of query tiles, whose rows are [first_row, first_row + R * B).
struct Tiles {
  const int32_t* page_table;  // [R, P]
  const int32_t* start;       // [R]
  const int32_t* kv_len;      // [R]
  int64_t R, B, P, first_row;
};

struct Attention {
  const float* q;      // [N, H, T]
  float* pages;        // [num_pages, 2K, page_size, H]
  const float* sinks;  // [N], or null
  float* out;          // [N, H, T]
  float* lse;          // [N, T]
  int64_t T, N, K, H, page_size;
  float scale, soft_cap;  // soft_cap 0: none
  int32_t window, chunk;  // 0: none
  Tiles tiles;

  int64_t Group() const { return N / K; }

  // The first position that a query sees.
  int32_t FirstSeen(int32_t position) const {
    if (window > 0) return std::max(position - window + 1, 0);
    if (chunk > 0) return position - position % chunk;
    return 0;
  }
};

// Consecutive columns of a kv head's queries in a tile, which are attended to at once.
struct Unit {
  int64_t tile, kv_head;
  int64_t column, num_columns;  // column g * B + b is query b's, of the group's head g
  int32_t first, last;          // positions that any of the queries sees; first > last: none
};

Unit MakeUnit(const Attention& a, int64_t index, int64_t width) {
  const int64_t B = a.tiles.B, num_columns = B * a.Group(), num_panels = CeilDiv(num_columns, width);
  const int64_t tile = index / (a.K * num_panels), column = index % num_panels * width;
  Unit unit{tile, index / num_panels % a.K, column, std::min(width, num_columns - column), 0, 0};
  const bool wraps = column % B + unit.num_columns > B;  // into another head's queries, or to its end
  const int64_t first = wraps ? 0 : column % B, last = wraps ? B - 1 : column % B + unit.num_columns - 1;
  unit.first = a.FirstSeen(a.tiles.start[tile] + static_cast<int32_t>(first));
  unit.last = std::min(a.tiles.start[tile] + static_cast<int32_t>(last), a.tiles.kv_len[tile] - 1);
  return unit;
}

// visit(i, head, query, count) for the unit's columns [i, i + count), which are queries of one head, from
// `query` of the tile on; and only queries that the sequence has.
template <typename Visit>
void ForEachHead(const Attention& a, const Unit& unit, Visit visit) {
  const int64_t num_queries = a.tiles.kv_len[unit.tile] - a.tiles.start[unit.tile];
  for (int64_t i = 0; i < unit.num_columns;) {
    const int64_t column = unit.column + i, query = column % a.tiles.B;
    const int64_t count = std::min(a.tiles.B - query, unit.num_columns - i);
    visit(i, unit.kv_head * a.Group() + column / a.tiles.B, query, std::clamp<int64_t>(num_queries - query, 0, count));
    i += count;
  }
}

// Keys of one kv head at the positions [begin, end), within kBlockTokens from a multiple of it.
struct Block {
  int32_t begin, end;
  int num_pages;
  const float* keys[kBlockTokens];  // by page; the values lie a head further
  int depths[kBlockTokens];         // tokens of each
};

// The unit's block that holds position `at`.
Block MakeBlock(const Attention& a, const Unit& unit, int32_t at) {
  Block block{at, std::min(at / kBlockTokens * kBlockTokens + kBlockTokens, unit.last + 1), 0, {}, {}};
  for (int32_t s = block.begin; s < block.end; s += block.depths[block.num_pages++]) {
    const int32_t page = a.tiles.page_table[unit.tile * a.tiles.P + s / a.page_size], offset = s % a.page_size;
    const int64_t row = page * 2 * a.K + 2 * unit.kv_head;
    block.keys[block.num_pages] = a.pages + (row * a.page_size + offset) * a.H;
    block.depths[block.num_pages] = std::min<int32_t>(a.page_size - offset, block.end - s);
  }
  return block;
}

// What a thread works in: a unit's queries as columns, and what has come of them.
template <int kVectors>
struct Panel {
  static constexpr int kWidth = kVectors * kLanes;

  explicit Panel(const Attention& a)
      : few(a.tiles.B * a.Group() <= kFewQueries),
        query_stride(few ? CeilDiv(a.H, kLanes) * kLanes : 1),
        element_stride(few ? 1 : kWidth),
        queries(std::max(a.H * kWidth, kFewQueries * query_stride)),
        sums(std::max(a.H * kWidth, kFewQueries * query_stride)),
        weights(kBlockTokens * kWidth) {}

  const bool few;  // queries: the sums are [Q, H], else [H, width]
  const int64_t query_stride, element_stride;
  std::vector<float> queries;  // [H, width], scaled
  std::vector<float> sums;     // of weighted values
  std::vector<float> weights;  // [kBlockTokens, width]
  int32_t first[kWidth], last[kWidth];   // positions that each query sees
  float largest[kWidth], total[kWidth];  // of its logits, and of exp(logit - largest)
  float rescale[kWidth];                 // of the sums, for a new block's largest logit
};

template <int kVectors>
void Begin(const Attention& a, const Unit& unit, Panel<kVectors>& panel) {
  std::fill(panel.queries.begin(), panel.queries.end(), 0.0f);
  std::fill(panel.sums.begin(), panel.sums.end(), 0.0f);
  std::fill_n(panel.first, panel.kWidth, 0);
  std::fill_n(panel.last, panel.kWidth, -1);
  std::fill_n(panel.largest, panel.kWidth, kMasked);
  std::fill_n(panel.total, panel.kWidth, 0.0f);
  ForEachHead(a, unit, [&](int64_t i, int64_t head, int64_t query, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
      const int32_t position = a.tiles.start[unit.tile] + static_cast<int32_t>(query + n);
      panel.first[i + n] = a.FirstSeen(position);
      panel.last[i + n] = position;
      if (a.sinks != nullptr) panel.largest[i + n] = a.sinks[head], panel.total[i + n] = 1.0f;
    }
    const float* q = a.q + head * a.H * a.T + a.tiles.first_row + unit.tile * a.tiles.B + query;
    float* to = panel.queries.data() + i * panel.query_stride;
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t n = 0; n < count; ++n)
        to[h * panel.element_stride + n * panel.query_stride] = q[h * a.T + n] * a.scale;
  });
}

// The logits of a block's keys, capped and masked, become weights; the sums that there are already are scaled
// to the new largest logit.
template <int kVectors>
void Soften(const Attention& a, Panel<kVectors>& panel, int32_t begin, int32_t end) {
  constexpr int kWidth = Panel<kVectors>::kWidth;
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
      logits = ((first <= s) & (last >= s)) ? logits : Broadcast(kMasked);
      largest = logits > largest ? logits : largest;
      Store(at, logits);
    }
    // A query that has seen nothing yet keeps zeros: -inf less -inf is no number.
    const Vector shift = largest == kMasked ? Vector{} : largest;
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
    Store(panel.rescale + n, rescale);
  }
}

// Logits [S, kLanes] of a page's keys for kQueries queries, which are rows [Q, stride].
template <int kQueries>
void Score(const Factor& keys, const float* queries, int64_t stride, int64_t num_keys, float* logits) {
  const auto [start, head_dim, ahead] = keys.parts[0];
  for (int64_t s = 0; s < num_keys; ++s) {
    Vector sums[kQueries] = {};
    const float* key = start + s * head_dim;
    for (int64_t h = 0; h < head_dim; h += kLanes) {
      if (ahead != nullptr) Fetch(ahead + s * head_dim + h);
      const Vector elements = h + kLanes <= head_dim ? Load(key + h) : Load(key + h, head_dim - h);
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) sums[q] += elements * Load(queries + q * stride + h);
    }
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) logits[s * kLanes + q] = Sum(sums[q]);
  }
}

template <int kQueries = kFewQueries>
void ScoreFew(int64_t num_queries, const Factor& keys, const float* queries, int64_t stride, int64_t num_keys,
              float* logits) {
  if constexpr (kQueries > 1) {
    if (num_queries < kQueries)
      return ScoreFew<kQueries - 1>(num_queries, keys, queries, stride, num_keys, logits);
  }
  Score<kQueries>(keys, queries, stride, num_keys, logits);
}

// The sums [Q, stride] of kQueries queries are scaled, and a block's weighted values are added, for the elements
// [h, h + kVectors * kLanes) of a head, or as many of them as it has. An element's terms are added in order, as
// in the product of many queries.
template <int kQueries, int kVectors>
void AddElements(const Factor& values, const float* weights, const float* rescale, float* sums,
                 int64_t stride, int64_t h) {
  const int64_t head_dim = values.column, count = std::min<int64_t>(kLanes, head_dim - h);
  Vector added[kQueries][kVectors];
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) added[q][i] = Load(sums + q * stride + h + i * kLanes) * rescale[q];
  for (int part = 0; part < values.num_parts; ++part) {
    const auto [start, depth, ahead] = values.parts[part];
    for (int s = 0; s < depth; ++s, weights += kLanes) {
      const float* value = start + s * head_dim + h;
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        if (ahead != nullptr) Fetch(ahead + s * head_dim + h + i * kLanes);
        const Vector elements = kVectors > 1 || count == kLanes ? Load(value + i * kLanes) : Load(value, count);
#pragma GCC unroll 4
        for (int q = 0; q < kQueries; ++q) added[q][i] += weights[q] * elements;
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) Store(sums + q * stride + h + i * kLanes, added[q][i]);
}

// The same for whole heads of up to kQueries queries.
template <int kQueries = kFewQueries>
void AddValues(int64_t num_queries, const Factor& values, const float* weights, const float* rescale,
               float* sums, int64_t stride) {
  if constexpr (kQueries > 1) {
    if (num_queries < kQueries)
      return AddValues<kQueries - 1>(num_queries, values, weights, rescale, sums, stride);
  }
  constexpr int kVectors = kRegisters >= 32 ? 4 : 2;
  int64_t h = 0;
  for (; h + kVectors * kLanes <= values.column; h += kVectors * kLanes)
    AddElements<kQueries, kVectors>(values, weights, rescale, sums, stride, h);
  for (; h < values.column; h += kLanes)
    AddElements<kQueries, 1>(values, weights, rescale, sums, stride, h);
}

// One block of keys; `ahead` is the next one, of this unit or another.
template <int kVectors>
void AttendBlock(const Attention& a, Panel<kVectors>& panel, const Block& block, const Block& ahead) {
  const int64_t head_floats = a.page_size * a.H;
  Factor::Part values[kBlockTokens];
  float* logits = panel.weights.data();
  for (int page = 0; page < block.num_pages; ++page) {
    const float* keys_ahead = page < ahead.num_pages ? ahead.keys[page] : nullptr;
    const Factor::Part keys{block.keys[page], static_cast<int>(a.H), keys_ahead};
    if (panel.few) {
      ScoreFew(a.tiles.B * a.Group(), {a.H, 1, &keys, 1}, panel.queries.data(), panel.query_stride,
               block.depths[page], logits);
    } else {
      Multiply<kVectors>({a.H, 1, &keys, 1}, 0, block.depths[page], panel.queries.data(), logits,
                         panel.kWidth, false);
    }
    logits += block.depths[page] * panel.kWidth;
    const float* values_ahead = keys_ahead == nullptr ? nullptr : keys_ahead + head_floats;
    values[page] = {block.keys[page] + head_floats, block.depths[page], values_ahead};
  }
  Soften(a, panel, block.begin, block.end);
  const Factor factor{1, a.H, values, block.num_pages};
  if (panel.few) {
    AddValues(a.tiles.B * a.Group(), factor, panel.weights.data(), panel.rescale, panel.sums.data(),
              panel.query_stride);
  } else {
    for (int64_t h = 0; h < a.H; ++h)
      for (int n = 0; n < panel.kWidth; n += kLanes) {
        float* at = panel.sums.data() + h * panel.kWidth + n;
        Store(at, Load(at) * Load(panel.rescale + n));
      }
    Multiply<kVectors>(factor, 0, a.H, panel.weights.data(), panel.sums.data(), panel.kWidth, true);
  }
}

template <int kVectors>
void End(const Attention& a, const Unit& unit, const Panel<kVectors>& panel) {
  ForEachHead(a, unit, [&](int64_t i, int64_t head, int64_t query, int64_t count) {
    const int64_t row = a.tiles.first_row + unit.tile * a.tiles.B + query;
    float inverse[panel.kWidth];
    for (int64_t n = 0; n < count; ++n) {
      const float total = std::max(panel.total[i + n], 1e-30f);
      inverse[n] = 1.0f / total;
      a.lse[head * a.T + row + n] = panel.largest[i + n] + std::log(total);
    }
    const float* sums = panel.sums.data() + i * panel.query_stride;
    float* out = a.out + head * a.H * a.T + row;
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t n = 0; n < count; ++n)
        out[h * a.T + n] = sums[h * panel.element_stride + n * panel.query_stride] * inverse[n];
  });
}

// Units [begin, end), one after the other, so that each one's first keys are fetched during the last.
template <int kVectors>
void Attend(const Attention& a, int64_t begin, int64_t end) {
  Panel<kVectors> panel(a);
  Unit unit = MakeUnit(a, begin, panel.kWidth);
  Block block = MakeBlock(a, unit, unit.first);
  for (int64_t index = begin; index < end; ++index) {
    Begin(a, unit, panel);
    const Unit next = index + 1 < end ? MakeUnit(a, index + 1, panel.kWidth) : Unit{};
    const Block next_units = index + 1 < end ? MakeBlock(a, next, next.first) : Block{};
    while (block.num_pages > 0) {
      const bool is_last = block.end > unit.last;
      const Block ahead = is_last ? next_units : MakeBlock(a, unit, block.end);
      AttendBlock(a, panel, block, ahead);
      if (is_last) break;
      block = ahead;
    }
    End(a, unit, panel);
    unit = next;
    block = next_units;
  }
}

void AttendAll(const Attention& a, int num_threads) {
  const int64_t num_columns = a.tiles.B * a.Group();
  const bool narrow = num_columns <= kLanes;
  const int64_t num_panels = CeilDiv(num_columns, narrow ? kLanes : kPanelVectors * kLanes);
  const int64_t num_units = a.tiles.R * a.K * num_panels;
  const int64_t num_tasks = std::min(num_units, kTasksAThread * std::max(1, num_threads));
  Team::Get().Run(num_threads, num_tasks, [&](int64_t task) {
    const int64_t begin = num_units * task / num_tasks, end = num_units * (task + 1) / num_tasks;
    narrow ? Attend<1>(a, begin, end) : Attend<kPanelVectors>(a, begin, end);
  });
}

// Keys and values [K, H, T] of tokens that have a place, in their pages. Those of padding would go to page 0.
void Write(const Attention& a, const float* keys, const float* values, const int32_t* write_index,
           int num_threads) {
  Team::Get().Run(num_threads, CeilDiv(a.T, kLanes), [&](int64_t task) {
    for (int64_t t = task * kLanes; t < std::min(a.T, (task + 1) * kLanes); ++t) {
      const int64_t page = write_index[t] / a.page_size, offset = write_index[t] % a.page_size;
      if (page == 0) continue;
      for (int64_t row = 0; row < 2 * a.K; ++row) {
        const float* from = (row % 2 ? values : keys) + row / 2 * a.H * a.T + t;
        float* to = a.pages + ((page * 2 * a.K + row) * a.page_size + offset) * a.H;
        for (int64_t h = 0; h < a.H; ++h) to[h] = from[h * a.T];
      }
    }
  });
}

using Floats1 = ffi::BufferR1<ffi::F32>;
using Floats3 = ffi::BufferR3<ffi::F32>;
using Ints1 = ffi::BufferR1<ffi::S32>;
using Ints2 = ffi::BufferR2<ffi::S32>;

Tiles MakeTiles(Ints2 page_table, Ints1 start, Ints1 kv_len, int64_t first_row, int64_t num_rows) {
  const int64_t num_tiles = page_table.dimensions()[0];
  return {page_table.typed_data(), start.typed_data(), kv_len.typed_data(),        num_tiles,
          num_tiles ? num_rows / num_tiles : 0,        page_table.dimensions()[1], first_row};
}

ffi::Error PagedAttention(ffi::ThreadPool threads, Floats3 q, Floats3 k, Floats3 v, ffi::BufferR4<ffi::F32>,
                          Ints1 write_index, Ints2 decode_pages, Ints1 decode_start, Ints1 decode_len,
                          Ints2 prefill_pages, Ints1 prefill_start, Ints1 prefill_len, Floats1 sinks,
                          ffi::Result<Floats3> out, ffi::ResultBufferR2<ffi::F32> lse,
                          ffi::ResultBufferR4<ffi::F32> pages, float scale, float soft_cap, int32_t window,
                          int32_t chunk) {
  const int num_threads = static_cast<int>(threads.num_threads());
  const int64_t T = q.dimensions()[2], num_decodes = decode_pages.dimensions()[0];
  Attention a{q.typed_data(),
              pages->typed_data(),
              sinks.element_count() > 0 ? sinks.typed_data() : nullptr,
              out->typed_data(),
              lse->typed_data(),
              T,
              q.dimensions()[0],
              k.dimensions()[0],
              q.dimensions()[1],
              pages->dimensions()[2],
              scale,
              soft_cap,
              window,
              chunk,
              {}};
  Write(a, k.typed_data(), v.typed_data(), write_index.typed_data(), num_threads);
  a.tiles = MakeTiles(decode_pages, decode_start, decode_len, 0, num_decodes);
  AttendAll(a, num_threads);
  a.tiles = MakeTiles(prefill_pages, prefill_start, prefill_len, num_decodes, T - num_decodes);
  AttendAll(a, num_threads);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxinferPagedAttention, PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats3>()
                                  .Arg<Floats3>()
                                  .Arg<Floats3>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<Ints1>()
                                  .Arg<Ints2>()
                                  .Arg<Ints1>()
                                  .Arg<Ints1>()
                                  .Arg<Ints2>()
                                  .Arg<Ints1>()
                                  .Arg<Ints1>()
                                  .Arg<Floats1>()
                                  .Ret<Floats3>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR4<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("chunk"));

}  // namespace jaxinfer
