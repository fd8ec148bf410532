// Attention of many queries to a kv head, as of a chunk of a prompt.
//
// Queries are columns: keys times q^T [H, width] gives logits [S, width], whose softmax runs down the
// columns, a vector of queries at once, and values^T times the weights adds to sums [H, width].

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "simd.h"

namespace jaxinfer {

template <int kVectors>
class ManyQueries {
 public:
  static constexpr int kWidth = kVectors * kLanes;

  explicit ManyQueries(const Attention& a)
      : a_(a), queries_(a.H * kWidth), sums_(a.H * kWidth), weights_(kBlockTokens * kWidth) {}

  void Begin(const Unit& unit) {
    std::fill(queries_.begin(), queries_.end(), 0.0f);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    std::fill_n(first_, kWidth, 0);
    std::fill_n(last_, kWidth, -1);
    std::fill_n(largest_, kWidth, kMasked);
    std::fill_n(total_, kWidth, 0.0f);
    ForEachHead(a_, unit, [&](int64_t i, int64_t head, int64_t query, int64_t count) {
      for (int64_t n = i; n < i + count; ++n) {
        last_[n] = a_.tiles.start[unit.tile] + static_cast<int32_t>(query + n - i);
        first_[n] = a_.FirstSeen(last_[n]);
        if (a_.sinks != nullptr) largest_[n] = a_.sinks[head], total_[n] = 1.0f;
      }
      const float* q = a_.q + head * a_.H * a_.T + a_.Row(unit, query);
      for (int64_t h = 0; h < a_.H; ++h)
        for (int64_t n = 0; n < count; ++n) queries_[h * kWidth + i + n] = q[h * a_.T + n] * a_.scale;
    });
  }

  // `ahead` is the block after this one, of this unit or the next.
  void AttendBlock(const Block& block, const Block& ahead) {
    const int64_t head_floats = a_.page_size * a_.H;
    Factor::Part values[kBlockTokens];
    float* logits = weights_.data();
    for (int page = 0; page < block.num_pages; ++page) {
      const float* keys_ahead = page < ahead.num_pages ? ahead.keys[page] : nullptr;
      const float* values_ahead = keys_ahead == nullptr ? nullptr : keys_ahead + head_floats;
      const Factor::Part keys{block.keys[page], static_cast<int>(a_.H), keys_ahead};
      Multiply<kVectors>({a_.H, 1, &keys, 1}, 0, block.depths[page], queries_.data(), logits, kWidth, false);
      logits += block.depths[page] * kWidth;
      values[page] = {block.keys[page] + head_floats, block.depths[page], values_ahead};
    }
    for (int n = 0; n < kWidth; n += kLanes) Soften(block, n);
    Multiply<kVectors>({1, a_.H, values, block.num_pages}, 0, a_.H, weights_.data(), sums_.data(), kWidth,
                       true);
  }

  void End(const Unit& unit) {
    ForEachHead(a_, unit, [&](int64_t i, int64_t head, int64_t query, int64_t count) {
      const int64_t row = a_.Row(unit, query);
      float inverse[kWidth];
      for (int64_t n = 0; n < count; ++n) {
        const float total = std::max(total_[i + n], kSmallestTotal);
        inverse[n] = 1.0f / total;
        a_.lse[head * a_.T + row + n] = largest_[i + n] + std::log(total);
      }
      float* out = a_.out + head * a_.H * a_.T + row;
      for (int64_t h = 0; h < a_.H; ++h)
        for (int64_t n = 0; n < count; ++n) out[h * a_.T + n] = sums_[h * kWidth + i + n] * inverse[n];
    });
  }

 private:
  // The logits of a block's keys become weights in the columns [n, n + kLanes), capped and masked; the sums
  // that there are already are scaled to the new largest logit.
  void Soften(const Block& block, int n) {
    Ints first, last;
    std::memcpy(&first, first_ + n, sizeof first);
    std::memcpy(&last, last_ + n, sizeof last);
    const Vector before = Load(largest_ + n);
    Vector largest = before;
    float* at = weights_.data() + n;
    for (int32_t s = block.begin; s < block.end; ++s, at += kWidth) {
      const Vector capped = Cap(Load(at), a_.soft_cap);
      const Vector logits = ((first <= s) & (last >= s)) ? capped : Broadcast(kMasked);
      largest = logits > largest ? logits : largest;
      Store(at, logits);
    }
    // A query that has seen nothing yet keeps zeros: -inf less -inf is no number.
    const Vector shift = largest == kMasked ? Vector{} : largest;
    const Vector rescale = Exp(before - shift);
    Vector total = Load(total_ + n) * rescale;
    at = weights_.data() + n;
    for (int32_t s = block.begin; s < block.end; ++s, at += kWidth) {
      const Vector weights = Exp(Load(at) - shift);
      total += weights;
      Store(at, weights);
    }
    Store(largest_ + n, largest);
    Store(total_ + n, total);
    at = sums_.data() + n;
    for (int64_t h = 0; h < a_.H; ++h, at += kWidth) Store(at, Load(at) * rescale);
  }

  const Attention& a_;
  std::vector<float> queries_;             // [H, width], scaled
  std::vector<float> sums_;                // [H, width], of weighted values
  std::vector<float> weights_;             // [kBlockTokens, width]
  int32_t first_[kWidth], last_[kWidth];   // positions that each query sees
  float largest_[kWidth], total_[kWidth];  // of its logits, and of exp(logit - largest)
};

}  // namespace jaxinfer
