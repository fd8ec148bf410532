// Attention of a decode: one position of a sequence, and few heads to a kv head, which see the same keys.
//
// As columns they would leave most of a vector idle, so that vectors lie along a head here, and each key and
// each value is read once for all queries.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "simd.h"

namespace jaxinfer {

constexpr int kFewQueries = 8;

template <int kQueries>
class FewQueries {
 public:
  static constexpr int kWidth = kQueries;

  explicit FewQueries(const Attention& a)
      : a_(a),
        stride_(CeilDiv(a.H, kLanes) * kLanes),
        queries_(kQueries * stride_),
        sums_(kQueries * stride_) {}

  void Begin(const Unit& unit) {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    for (int q = 0; q < kQueries; ++q) {
      const int64_t head = unit.kv_head * kQueries + q;
      largest_[q] = a_.sinks == nullptr ? kMasked : a_.sinks[head];
      total_[q] = a_.sinks == nullptr ? 0.0f : 1.0f;
      const float* from = a_.q + head * a_.H * a_.T + a_.Row(unit, 0);
      for (int64_t h = 0; h < a_.H; ++h) queries_[q * stride_ + h] = from[h * a_.T] * a_.scale;
    }
  }

  // `ahead` is the block after this one, of this unit or the next.
  void AttendBlock(const Block& block, const Block& ahead) {
    int s = 0;
    for (int page = 0; page < block.num_pages; s += block.depths[page++])
      Score(block.keys[page], block.depths[page], page < ahead.num_pages ? ahead.keys[page] : nullptr, s);
    for (int q = 0; q < kQueries; ++q) Soften(q, block.end - block.begin);
    constexpr int kVectors = kRegisters / (kQueries > 4 ? 16 : 8);  // all queries' sums fill half of them
    int64_t h = 0;
    for (; h + kVectors * kLanes <= a_.H; h += kVectors * kLanes) AddValues<kVectors>(block, ahead, h);
    for (; h < a_.H; h += kLanes) AddValues<1>(block, ahead, h);
  }

  void End(const Unit& unit) {
    for (int q = 0; q < kQueries; ++q) {
      const int64_t head = unit.kv_head * kQueries + q, row = a_.Row(unit, 0);
      const float total = std::max(total_[q], kSmallestTotal), inverse = 1.0f / total;
      a_.lse[head * a_.T + row] = largest_[q] + std::log(total);
      float* out = a_.out + head * a_.H * a_.T + row;
      for (int64_t h = 0; h < a_.H; ++h) out[h * a_.T] = sums_[q * stride_ + h] * inverse;
    }
  }

 private:
  Vector LoadHead(const float* from, int64_t h) const {
    return h + kLanes <= a_.H ? Load(from + h) : Load(from + h, a_.H - h);
  }

  // The logits of a page's keys, from place s of the block on.
  void Score(const float* keys, int num_keys, const float* ahead, int s) {
    for (int i = 0; i < num_keys; ++i, keys += a_.H) {
      Vector sums[kQueries] = {};
      for (int64_t h = 0; h < a_.H; h += kLanes) {
        if (ahead != nullptr) Fetch(ahead + i * a_.H + h);
        const Vector key = LoadHead(keys, h);
#pragma GCC unroll 8
        for (int q = 0; q < kQueries; ++q) sums[q] += key * Load(queries_.data() + q * stride_ + h);
      }
#pragma GCC unroll 8
      for (int q = 0; q < kQueries; ++q) weights_[q][s + i] = Sum(sums[q]);
    }
  }

  // A query's logits become weights, and its total is scaled to the new largest logit.
  void Soften(int q, int num_keys) {
    float* weights = weights_[q];
    const int padded = static_cast<int>(CeilDiv(num_keys, kLanes)) * kLanes;
    std::fill(weights + num_keys, weights + padded, kMasked);
    Vector largest = Broadcast(largest_[q]);
    for (int s = 0; s < padded; s += kLanes) {
      // The padding stays masked: a cap would make it a number.
      const Vector raw = Load(weights + s), logits = raw == kMasked ? raw : Cap(raw, a_.soft_cap);
      largest = logits > largest ? logits : largest;
      Store(weights + s, logits);
    }
    const float shift = Largest(largest);
    Vector total{};
    for (int s = 0; s < padded; s += kLanes) {
      const Vector weight = Exp(Load(weights + s) - shift);
      total += weight;
      Store(weights + s, weight);
    }
    rescale_[q] = std::exp(largest_[q] - shift);
    largest_[q] = shift;
    total_[q] = total_[q] * rescale_[q] + Sum(total);
  }

  // The sums are scaled, and a block's weighted values added, in kVectors vectors of a head from h on.
  template <int kVectors>
  void AddValues(const Block& block, const Block& ahead, int64_t h) {
    const int64_t head_floats = a_.page_size * a_.H;
    Vector sums[kQueries][kVectors];
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i)
        sums[q][i] = Load(sums_.data() + q * stride_ + h + i * kLanes) * rescale_[q];
    for (int page = 0, s = 0; page < block.num_pages; ++page) {
      const float* values = block.keys[page] + head_floats;
      const float* next = page < ahead.num_pages ? ahead.keys[page] + head_floats : nullptr;
      for (int row = 0; row < block.depths[page]; ++row, ++s, values += a_.H) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
          if (next != nullptr) Fetch(next + row * a_.H + h + i * kLanes);
          const Vector value = kVectors > 1 ? Load(values + h + i * kLanes) : LoadHead(values, h);
#pragma GCC unroll 8
          for (int q = 0; q < kQueries; ++q) sums[q][i] += weights_[q][s] * value;
        }
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) Store(sums_.data() + q * stride_ + h + i * kLanes, sums[q][i]);
  }

  const Attention& a_;
  const int64_t stride_;
  std::vector<float> queries_;                 // [kQueries, stride], scaled; zeros past H
  std::vector<float> sums_;                    // [kQueries, stride], of weighted values
  float weights_[kQueries][kBlockTokens];      // logits at first
  float largest_[kQueries], total_[kQueries];  // of a query's logits, and of exp(logit - largest)
  float rescale_[kQueries];                    // of the sums, for a block's largest logit
};

}  // namespace jaxinfer
