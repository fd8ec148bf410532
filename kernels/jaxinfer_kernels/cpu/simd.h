// Vectors as wide as the machine has them, and the one product that everything here is made of.
//
// Written in the vector extensions of GCC and Clang, and compiled for the machine at hand (build.py): one
// source gives AVX-512, AVX2 and NEON.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jaxinfer {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#endif

using Vector = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

inline Vector Load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void Store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

inline Vector Broadcast(float x) { return Vector{} + x; }

// Columns of a product that are computed together, in vectors: a panel of b. One will do for the last few.
constexpr int kPanelVectors = 2;

// Rows that are computed together: sums, a panel's vectors and a factor fill the registers.
template <int kVectors>
constexpr int kBlockRows = kVectors == 1 ? 8 : kRegisters >= 32 ? 12 : 6;

// out[m][n] = (add ? out[m][n] : 0) + sum over k of a[m * a_row + k * a_column] * b[k][n], the terms in
// order: an element depends on its own row and column alone, bit for bit.
//
// b [depth][kVectors * kLanes] and out's rows are contiguous. `ahead` is what will be read in a's place next,
// which is fetched meanwhile, or null.
template <int kRows, int kVectors>
__attribute__((noinline)) void MultiplyBlock(const float* a, ptrdiff_t a_row, ptrdiff_t a_column,
                                             const float* b, int depth, float* out, ptrdiff_t out_row,
                                             bool add, const float* ahead) {
  constexpr int kLineFloats = 16;
  Vector sums[kRows][kVectors];
#pragma GCC unroll 32
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) sums[m][n] = add ? Load(out + m * out_row + n * kLanes) : Vector{};
  for (int begin = 0; begin < depth; begin += kLineFloats) {
    const int end = begin + kLineFloats < depth ? begin + kLineFloats : depth;
    if (ahead != nullptr) {
#pragma GCC unroll 32
      for (int m = 0; m < kRows; ++m) __builtin_prefetch(ahead + m * a_row + begin * a_column, 0, 2);
    }
    for (int k = begin; k < end; ++k) {
      Vector columns[kVectors];
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) columns[n] = Load(b + (k * kVectors + n) * kLanes);
#pragma GCC unroll 32
      for (int m = 0; m < kRows; ++m) {
        const float factor = a[m * a_row + k * a_column];
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n) sums[m][n] += factor * columns[n];
      }
    }
  }
#pragma GCC unroll 32
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) Store(out + m * out_row + n * kLanes, sums[m][n]);
}

// The same for any number of rows: blocks of kRows, and of halves of the power of two below for the rest.
template <int kVectors, int kRows = kBlockRows<kVectors>>
void Multiply(int64_t rows, const float* a, ptrdiff_t a_row, ptrdiff_t a_column, const float* b, int depth,
              float* out, ptrdiff_t out_row, bool add, bool fetch_ahead = false) {
  for (; rows >= kRows; rows -= kRows, a += kRows * a_row, out += kRows * out_row)
    MultiplyBlock<kRows, kVectors>(a, a_row, a_column, b, depth, out, out_row, add,
                                   fetch_ahead && rows >= 2 * kRows ? a + kRows * a_row : nullptr);
  if constexpr (kRows > 1) {
    constexpr int kHalf = kRows > 8 ? 8 : kRows > 4 ? 4 : kRows / 2;
    if (rows > 0)
      Multiply<kVectors, kHalf>(rows, a, a_row, a_column, b, depth, out, out_row, add, fetch_ahead);
  }
}

// The sum of a vector's elements, by halves.
inline float Sum(Vector x) {
  float sums[kLanes];
  Store(sums, x);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) sums[i] += sums[half + i];
  return sums[0];
}

}  // namespace jaxinfer
