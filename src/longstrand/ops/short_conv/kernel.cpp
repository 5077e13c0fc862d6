// The depthwise causal convolution and its silu, row by row. Row t < 0 of the input is row t of the tail before it.
#include <vector>
#include <omp.h>
#include "../native/vector.h"

namespace {

struct Sizes {
  int64_t batch, length, channels, taps, stride;  // stride: values from one token of x to the next
};

template <class S> struct Rows {
  const S *x, *tail;
  const Sizes& s;
  const S* at(int64_t b, int64_t t) const {
    return t >= 0 ? x + (b * s.length + t) * s.stride : tail + (b * (s.taps - 1) + s.taps - 1 + t) * s.channels;
  }
};

// Taps by lag, so that one lag's channels lie together.
std::vector<float> by_lag(const float* weight, const Sizes& s) {
  std::vector<float> taps(s.taps * padded(s.channels), 0.0f);
  for (int64_t c = 0; c < s.channels; c++)
    for (int64_t lag = 0; lag < s.taps; lag++) taps[lag * padded(s.channels) + c] = weight[c * s.taps + s.taps - 1 - lag];
  return taps;
}

template <class S>
inline Lanes convolve(const Rows<S>& rows, const float* taps, int64_t b, int64_t t, int64_t reach, int64_t c) {
  int64_t width = padded(rows.s.channels), n = rows.s.channels - c;
  Lanes acc = {};
  for (int64_t lag = 0; lag <= reach; lag++) acc += load(taps + lag * width + c) * load(rows.at(b, t - lag) + c, n);
  return acc;
}

template <class S>
void forward(const Sizes& s, const S* x, const S* tail, const float* weight, const int64_t* offsets, S* out) {
  std::vector<float> taps = by_lag(weight, s);
  Rows<S> rows{x, tail, s};
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < s.batch * s.length; row++) {
    int64_t b = row / s.length, t = row % s.length, reach = min64(offsets[t], s.taps - 1);
    for (int64_t c = 0; c < s.channels; c += LANES) {
      Lanes v = convolve(rows, taps.data(), b, t, reach, c);
      store(out + row * s.channels + c, v * sigmoid(v), s.channels - c);
    }
  }
}

template <class S>
void backward(const Sizes& s, const S* x, const S* tail, const float* weight, const int64_t* offsets, const S* dy,
              S* dx, S* d_tail, float* d_weight) {
  std::vector<float> taps = by_lag(weight, s);
  int64_t width = padded(s.channels), before = s.taps - 1;
  int threads = omp_get_max_threads();
  std::vector<float> d_sum(s.batch * s.length * width), d_taps(threads * s.taps * width, 0.0f);
  Rows<S> rows{x, tail, s};
#pragma omp parallel num_threads(threads)
  {
    float* mine = d_taps.data() + omp_get_thread_num() * s.taps * width;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s.batch * s.length; row++) {
      int64_t b = row / s.length, t = row % s.length, reach = min64(offsets[t], before);
      for (int64_t c = 0; c < s.channels; c += LANES) {
        int64_t n = s.channels - c;
        Lanes v = convolve(rows, taps.data(), b, t, reach, c), open = sigmoid(v);
        Lanes d = load(dy + row * s.channels + c, n) * open * (1.0f + v * (1.0f - open));
        store(d_sum.data() + row * width + c, d);
        for (int64_t lag = 0; d_weight && lag <= reach; lag++) {
          float* to = mine + lag * width + c;
          store(to, load(to) + d * load(rows.at(b, t - lag) + c, n));
        }
      }
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s.batch * (s.length + before); row++) {
      int64_t b = row / (s.length + before), t = row % (s.length + before) - before;
      S* to = t >= 0 ? dx + (b * s.length + t) * s.channels : d_tail + (b * before + before + t) * s.channels;
      for (int64_t c = 0; c < s.channels; c += LANES) {
        Lanes acc = {};
        for (int64_t lag = t < 0 ? -t : 0; lag < s.taps && t + lag < s.length; lag++)
          if (offsets[t + lag] >= lag)
            acc += load(taps.data() + lag * width + c) * load(d_sum.data() + (b * s.length + t + lag) * width + c);
        store(to + c, acc, s.channels - c);
      }
    }
  }
  for (int thread = 0; d_weight && thread < threads; thread++)
    for (int64_t c = 0; c < s.channels; c++)
      for (int64_t lag = 0; lag < s.taps; lag++)
        d_weight[c * s.taps + s.taps - 1 - lag] += d_taps[(thread * s.taps + lag) * width + c];
}

}  // namespace

#define EXPORT(S, NAME)                                                                                              \
  extern "C" void short_conv_forward_##NAME(const S* x, const S* tail, const float* weight, const int64_t* offsets,  \
                                            int64_t batch, int64_t length, int64_t channels, int64_t taps,           \
                                            int64_t stride, S* out) {                                                \
    forward<S>({batch, length, channels, taps, stride}, x, tail, weight, offsets, out);                              \
  }                                                                                                                  \
  extern "C" void short_conv_backward_##NAME(const S* x, const S* tail, const float* weight, const int64_t* offsets, \
                                             const S* dy, int64_t batch, int64_t length, int64_t channels,           \
                                             int64_t taps, int64_t stride, S* dx, S* d_tail, float* d_weight) {      \
    backward<S>({batch, length, channels, taps, stride}, x, tail, weight, offsets, dy, dx, d_tail, d_weight);        \
  }
EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
