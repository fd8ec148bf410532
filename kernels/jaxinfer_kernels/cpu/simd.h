// Vectors as wide as the machine has them, and the one product that everything here is made of.
//
// Written in the vector extensions of GCC and Clang, and compiled for the machine at hand (build.py): one
// source gives AVX-512, AVX2 and NEON.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace jaxinfer {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
#endif

using Vector = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

inline Vector Load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Vector Load(const float* from, int64_t count) {
  Vector x{};
  std::memcpy(&x, from, count * sizeof(float));
  return x;
}

inline void Store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

constexpr int kLineFloats = 16;  // of a line of the cache

// Has a line fetched into the second level of the cache.
inline void Fetch(const float* from) { __builtin_prefetch(from, 0, 2); }

// Has a line fetched into the first level, to be written.
inline void FetchToWrite(const float* to) { __builtin_prefetch(to, 1, 3); }

inline Vector Broadcast(float x) { return Vector{} + x; }

// Columns of a product that are computed together, in vectors: a panel of b. One will do for the last few.
constexpr int kPanelVectors = 2;

// Rows that are computed together: sums, a panel's vectors and a factor fill the registers.
template <int kVectors>
constexpr int kBlockRows = kVectors == 1      ? 8
                           : kRegisters >= 32 ? 12
                                              : 6;

// The left factor of a product, [rows, depth]: element (m, k) lies at m * row + k * column from its start,
// or, where the depth is cut into parts, as that of values into pages, from the start of k's part. Either
// stride is 1.
struct Factor {
  struct Part {
    const float* start;
    int depth;
    const float* ahead;  // what lies like this part and is needed soon, which is fetched meanwhile; or null
  };

  ptrdiff_t row, column;
  const Part* parts;
  int num_parts;
};

// out[m][n] = (add ? out[m][n] : 0) + sum over k of a[m][k] * b[k][n] for the rows m from `first` on, the
// terms in order: an element depends on its own row and column alone, bit for bit.
//
// b [depth][kVectors * kLanes] and out's rows are contiguous.
template <int kRows, int kVectors>
__attribute__((noinline)) void MultiplyBlock(const Factor& a, int64_t first, const float* b, float* out,
                                             ptrdiff_t out_row, bool add) {
  Vector sums[kRows][kVectors];
#pragma GCC unroll 32
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      float* to = out + m * out_row + n * kLanes;
      if (!add) FetchToWrite(to);
      sums[m][n] = add ? Load(to) : Vector{};
    }
  // The products of a column of `a`, and b's next row.
  const auto multiply = [&](const float* factors) __attribute__((always_inline)) {
    Vector columns[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) columns[n] = Load(b + n * kLanes);
#pragma GCC unroll 32
    for (int m = 0; m < kRows; ++m) {
      const float factor = factors[m * a.row];
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) sums[m][n] += factor * columns[n];
    }
    b += kVectors * kLanes;
  };
  for (int part = 0; part < a.num_parts; ++part) {
    const auto [start, depth, ahead] = a.parts[part];
    const float* factors = start + first * a.row;
    int k = 0;
    if (ahead != nullptr && a.column == 1) {
      // Rows that follow each other are fetched as one piece, from front to back.
      const bool whole = depth == a.row;
      const ptrdiff_t to_row = whole ? kLineFloats : a.row,
                      to_next = whole ? kRows * kLineFloats : kLineFloats;
      const float* lines = ahead + first * a.row;
      for (; k + kLineFloats <= depth; k += kLineFloats, lines += to_next) {
#pragma GCC unroll 16
        for (int i = 0; i < kLineFloats; ++i, ++factors) {
          if (i < kRows) Fetch(lines + i * to_row);
          multiply(factors);
        }
      }
    } else if (ahead != nullptr) {
      for (const float* line = ahead + first; k < depth; ++k, factors += a.column, line += a.column) {
        Fetch(line);
        multiply(factors);
      }
    }
#pragma GCC unroll 4
    for (; k < depth; ++k, factors += a.column) multiply(factors);
  }
#pragma GCC unroll 32
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) Store(out + m * out_row + n * kLanes, sums[m][n]);
}

// The same for the rows [first, end): in blocks of kRows, and of smaller ones for the rest.
template <int kVectors, int kRows = kBlockRows<kVectors>>
void Multiply(const Factor& a, int64_t first, int64_t end, const float* b, float* out, ptrdiff_t out_row,
              bool add) {
  for (; end - first >= kRows; first += kRows, out += kRows * out_row)
    MultiplyBlock<kRows, kVectors>(a, first, b, out, out_row, add);
  if constexpr (kRows > 1) {
    constexpr int kSmaller = kRows > 8 ? 8 : kRows > 4 ? 4 : kRows / 2;
    if (first < end) Multiply<kVectors, kSmaller>(a, first, end, b, out, out_row, add);
  }
}

template <int kCount, size_t... kIndex>
inline Vector Rotate(Vector x, std::index_sequence<kIndex...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, x, ((kIndex + kCount) % kLanes)...);
#else
  return __builtin_shuffle(x, Ints{((kIndex + kCount) % kLanes)...});
#endif
}

// The sum of a vector's elements: of its halves' sum's halves, and so on.
template <int kHalf = kLanes / 2>
inline float Sum(Vector x) {
  x += Rotate<kHalf>(x, std::make_index_sequence<kLanes>());
  if constexpr (kHalf > 1) return Sum<kHalf / 2>(x);
  return x[0];
}

// The largest element.
template <int kHalf = kLanes / 2>
inline float Largest(Vector x) {
  const Vector other = Rotate<kHalf>(x, std::make_index_sequence<kLanes>());
  x = x > other ? x : other;
  if constexpr (kHalf > 1) return Largest<kHalf / 2>(x);
  return x[0];
}

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

// cap * tanh(x / cap), or x where the cap is 0.
inline Vector Cap(Vector x, float cap) { return cap > 0 ? cap * Tanh(x / cap) : x; }

}  // namespace jaxinfer
