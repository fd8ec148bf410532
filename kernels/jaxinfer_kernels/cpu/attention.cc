// Paged attention in float32: a step's keys and values are written into their pages, then all its queries
// attend.
//
// Online softmax (arXiv 1805.02867) over blocks of kBlockTokens keys that start at multiples of it, so that a
// query's result depends on its own sequence alone. Pages are read where they lie, and of them only positions
// that some query sees.

#include "attention.h"

#include <algorithm>
#include <cstdint>

#include "attention_few.h"
#include "attention_many.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

// Units [begin, end), one after the other, so that each one's first keys are fetched during the last.
template <typename Queries>
void AttendUnits(const Attention& a, int64_t begin, int64_t end) {
  Queries queries(a);
  Unit unit = MakeUnit(a, begin, Queries::kWidth);
  Block block = MakeBlock(a, unit, unit.first);
  for (int64_t index = begin; index < end; ++index) {
    queries.Begin(unit);
    const bool is_last_unit = index + 1 == end;
    const Unit next = is_last_unit ? Unit{} : MakeUnit(a, index + 1, Queries::kWidth);
    const Block next_block = is_last_unit ? Block{} : MakeBlock(a, next, next.first);
    while (block.num_pages > 0) {
      const bool is_last_block = block.end > unit.last;
      const Block ahead = is_last_block ? next_block : MakeBlock(a, unit, block.end);
      queries.AttendBlock(block, ahead);
      if (is_last_block) break;
      block = ahead;
    }
    queries.End(unit);
    unit = next;
    block = next_block;
  }
}

template <typename Queries>
void AttendTiles(const Attention& a, int num_threads) {
  const int64_t num_units = a.tiles.R * a.K * CeilDiv(a.tiles.B * a.Group(), Queries::kWidth);
  const int64_t num_tasks = std::min(num_units, kTasksAThread * std::max(1, num_threads));
  Team::Get().Run(num_threads, num_tasks, [&](int64_t task) {
    AttendUnits<Queries>(a, num_units * task / num_tasks, num_units * (task + 1) / num_tasks);
  });
}

template <int kQueries = kFewQueries>
void AttendFew(const Attention& a, int num_threads) {
  if (a.Group() == kQueries) return AttendTiles<FewQueries<kQueries>>(a, num_threads);
  if constexpr (kQueries > 1) AttendFew<kQueries - 1>(a, num_threads);
}

void Attend(const Attention& a, int num_threads) {
  if (a.tiles.B == 1 && a.Group() <= kFewQueries)
    AttendFew(a, num_threads);
  else if (a.tiles.B * a.Group() <= kLanes)
    AttendTiles<ManyQueries<1>>(a, num_threads);
  else
    AttendTiles<ManyQueries<kPanelVectors>>(a, num_threads);
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
  return {page_table.typed_data(),
          start.typed_data(),
          kv_len.typed_data(),
          num_tiles,
          num_tiles ? num_rows / num_tiles : 0,
          page_table.dimensions()[1],
          first_row};
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
  Attend(a, num_threads);
  a.tiles = MakeTiles(prefill_pages, prefill_start, prefill_len, num_decodes, T - num_decodes);
  Attend(a, num_threads);
  return ffi::Error::Success();
}

ffi::Error Unwritten(ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

}  // namespace

// An array of whatever its memory holds.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxinferUnwritten, Unwritten, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

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
