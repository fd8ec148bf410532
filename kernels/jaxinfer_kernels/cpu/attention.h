// What paged attention works on: a step's arguments, the units that the work is cut into, and a unit's keys.
//
// Dims as in layout.py: T tokens, R tiles, B queries a tile, N heads, K kv heads, H head_dim, P pages a
// sequence. Queries, keys and outputs lie feature-major, as products make them and take them (linear.cc).

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "parallel.h"

namespace jaxinfer {

constexpr int kBlockTokens = 64;
constexpr float kSmallestTotal = 1e-30f;  // of a query that sees nothing
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Consecutive columns of a kv head's queries in a tile, which are attended to at once.
struct Unit {
  int64_t tile, kv_head;
  int64_t column, num_columns;  // column g * B + b is query b's, of the group's head g
  int32_t first, last;          // positions that any of the queries sees; first > last: none
};

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

  // Of a unit's query, among all tokens.
  int64_t Row(const Unit& unit, int64_t query) const { return tiles.first_row + unit.tile * tiles.B + query; }

  int64_t Group() const { return N / K; }

  // The first position that a query sees.
  int32_t FirstSeen(int32_t position) const {
    if (window > 0) return std::max(position - window + 1, 0);
    if (chunk > 0) return position - position % chunk;
    return 0;
  }
};

inline Unit MakeUnit(const Attention& a, int64_t index, int64_t width) {
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
    visit(i, unit.kv_head * a.Group() + column / a.tiles.B, query,
          std::clamp<int64_t>(num_queries - query, 0, count));
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
inline Block MakeBlock(const Attention& a, const Unit& unit, int32_t at) {
  Block block{at, std::min(at / kBlockTokens * kBlockTokens + kBlockTokens, unit.last + 1), 0, {}, {}};
  for (int32_t s = block.begin; s < block.end; s += block.depths[block.num_pages++]) {
    const int32_t page = a.tiles.page_table[unit.tile * a.tiles.P + s / a.page_size],
                  offset = s % a.page_size;
    const int64_t row = page * 2 * a.K + 2 * unit.kv_head;
    block.keys[block.num_pages] = a.pages + (row * a.page_size + offset) * a.H;
    block.depths[block.num_pages] = std::min<int32_t>(a.page_size - offset, block.end - s);
  }
  return block;
}

}  // namespace jaxinfer
