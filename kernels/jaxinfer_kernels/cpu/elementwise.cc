// What stands between the products: the norm and the rotary embedding, feature-major as they are.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

using Floats1 = ffi::BufferR1<ffi::F32>;
using Floats2 = ffi::BufferR2<ffi::F32>;
using Floats3 = ffi::BufferR3<ffi::F32>;

struct Norm {
  const float *x, *delta, *weight;
  float *sum, *out;  // [D, T], as x and delta
  int64_t D, T;
  float eps;
};

// The columns [t, t + kVectors * kLanes): an element's terms are those of its own column, in order.
template <int kVectors>
void NormColumns(const Norm& n, int64_t t) {
  Vector squares[kVectors] = {};
  for (int64_t d = 0, at = t; d < n.D; ++d, at += n.T) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const Vector x = Load(n.x + at + i * kLanes) + Load(n.delta + at + i * kLanes);
      squares[i] += x * x;
      Store(n.sum + at + i * kLanes, x);
    }
  }
  Vector scales[kVectors];
  for (int i = 0; i < kVectors; ++i)
    for (int lane = 0; lane < kLanes; ++lane)
      scales[i][lane] = 1.0f / std::sqrt(squares[i][lane] / static_cast<float>(n.D) + n.eps);
  for (int64_t d = 0, at = t; d < n.D; ++d, at += n.T) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i)
      Store(n.out + at + i * kLanes, Load(n.sum + at + i * kLanes) * scales[i] * n.weight[d]);
  }
}

// A column that fills no vector.
void NormColumn(const Norm& n, int64_t t) {
  float squares = 0;
  for (int64_t d = 0, at = t; d < n.D; ++d, at += n.T) {
    const float x = n.x[at] + n.delta[at];
    squares += x * x;
    n.sum[at] = x;
  }
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n.D) + n.eps);
  for (int64_t d = 0, at = t; d < n.D; ++d, at += n.T) n.out[at] = n.sum[at] * scale * n.weight[d];
}

ffi::Error AddRmsNorm(ffi::ThreadPool threads, Floats2 x, Floats2 delta, Floats1 weight,
                      ffi::Result<Floats2> sum, ffi::Result<Floats2> out, float eps) {
  constexpr int kVectors = 4;
  const Norm norm{x.typed_data(),    delta.typed_data(), weight.typed_data(), sum->typed_data(),
                  out->typed_data(), x.dimensions()[0],  x.dimensions()[1],   eps};
  const int num_threads = static_cast<int>(threads.num_threads());
  const int64_t num_vectors = CeilDiv(norm.T, kLanes);
  const int64_t share = CeilDiv(num_vectors, std::max(1, num_threads));
  const int64_t size = std::clamp<int64_t>(share, 1, kVectors) * kLanes;
  Team::Get().Run(num_threads, CeilDiv(norm.T, size), [&](int64_t task) {
    int64_t t = task * size;
    const int64_t end = std::min(norm.T, t + size);
    for (; t + kVectors * kLanes <= end; t += kVectors * kLanes) NormColumns<kVectors>(norm, t);
    for (; t + kLanes <= end; t += kLanes) NormColumns<1>(norm, t);
    for (; t < end; ++t) NormColumn(norm, t);
  });
  return ffi::Error::Success();
}

// Heads [N + 2K, H, T], those of q, k and v one after the other, of which q's and k's are rotated: the halves
// of a head are the pairs' first and second members.
ffi::Error RotateQkv(ffi::ThreadPool threads, Floats3 heads, Floats2 cos, Floats2 sin, ffi::Result<Floats3> q,
                     ffi::Result<Floats3> k, ffi::Result<Floats3> v) {
  const int64_t N = q->dimensions()[0], K = k->dimensions()[0], H = q->dimensions()[1],
                T = q->dimensions()[2];
  const int64_t pairs = H / 2 * T;
  Team::Get().Run(static_cast<int>(threads.num_threads()), N + 2 * K, [&](int64_t head) {
    const float* from = heads.typed_data() + head * H * T;
    if (head >= N + K) {
      std::copy_n(from, H * T, v->typed_data() + (head - N - K) * H * T);
      return;
    }
    float* to = head < N ? q->typed_data() + head * H * T : k->typed_data() + (head - N) * H * T;
    const float *first = from, *second = from + pairs, *c = cos.typed_data(), *s = sin.typed_data();
    for (int64_t i = 0; i < pairs; ++i) {
      to[i] = first[i] * c[i] - second[i] * s[i];
      to[pairs + i] = second[i] * c[i] + first[i] * s[i];
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxinferAddRmsNorm, AddRmsNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats2>()
                                  .Arg<Floats2>()
                                  .Arg<Floats1>()
                                  .Ret<Floats2>()
                                  .Ret<Floats2>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxinferRotateQkv, RotateQkv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats3>()
                                  .Arg<Floats2>()
                                  .Arg<Floats2>()
                                  .Ret<Floats3>()
                                  .Ret<Floats3>()
                                  .Ret<Floats3>());

}  // namespace jaxinfer
