// Norms, gates and activations: one pass over rows each way. Widths need not be whole vectors.
#include <cmath>
#include <vector>
#include <omp.h>
#include "vector.h"

namespace {

// Adds up what each thread found for a row of `width` values, in the order of the threads.
struct Partial {
  int threads = omp_get_max_threads();
  int64_t width;
  std::vector<float> values;
  explicit Partial(int64_t n) : width(padded(n)), values(threads * padded(n), 0.0f) {}
  float* mine() { return values.data() + omp_get_thread_num() * width; }
  void add_to(float* out, int64_t n) const {
    for (int thread = 0; out && thread < threads; thread++)
      for (int64_t i = 0; i < n; i++) out[i] += values[thread * width + i];
  }
};

template <class X> float reciprocal_norm(const X* row, int64_t width, float eps) {
  Lanes square = {};
  for (int64_t c = 0; c < width; c += LANES) {
    Lanes v = load(row + c, width - c);
    square += v * v;
  }
  return 1.0f / std::sqrt(sum(square) / width + eps);
}

// y = x rstd weight, times sigmoid(gate) where there is a gate; X is x's type, S that of gate and y.
template <class X, class S>
void norm_forward(const X* x, const S* gate, const float* weight, int64_t rows, int64_t width, float eps, S* y) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    float rstd = reciprocal_norm(x + r * width, width, eps);
    for (int64_t c = 0; c < width; c += LANES) {
      int64_t n = width - c, at = r * width + c;
      Lanes v = load(x + at, n) * rstd * load(weight + c, n);
      store(y + at, gate ? v * sigmoid(load(gate + at, n)) : v, n);
    }
  }
}

template <class X, class S>
void norm_backward(const X* x, const S* gate, const float* weight, const S* dy, int64_t rows, int64_t width, float eps,
                   X* dx, S* d_gate, float* d_weight) {
  Partial weights(width);
#pragma omp parallel num_threads(weights.threads)
  {
    float* mine = weights.mine();
    std::vector<float> row(2 * padded(width));
    float *normed = row.data(), *above = normed + padded(width);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      Lanes dot = {};
      float rstd = reciprocal_norm(x + r * width, width, eps);
      for (int64_t c = 0; c < width; c += LANES) {
        int64_t n = width - c, at = r * width + c;
        Lanes v = load(x + at, n) * rstd, d = load(dy + at, n), w = load(weight + c, n);
        if (gate) {
          Lanes open = sigmoid(load(gate + at, n));
          store(d_gate + at, d * v * w * open * (1.0f - open), n);
          d *= open;
        }
        store(mine + c, load(mine + c) + d * v);
        d *= w;
        dot += d * v;
        store(normed + c, v);
        store(above + c, d);
      }
      float mean = sum(dot) / width;
      for (int64_t c = 0; c < width; c += LANES)
        store(dx + r * width + c, (load(above + c) - load(normed + c) * mean) * rstd, width - c);
    }
  }
  weights.add_to(d_weight, width);
}

// silu(min(gate, limit)) clamp(up, -limit, limit); a row of `both` holds the gate, then the up part.
template <class S> void swiglu_forward(const S* both, int64_t rows, int64_t width, float limit, S* y) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < width; c += LANES) {
      int64_t n = width - c;
      Lanes gate = load(both + 2 * r * width + c, n), up = load(both + (2 * r + 1) * width + c, n);
      gate = gate > limit ? splat(limit) : gate;
      up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
      store(y + r * width + c, gate * sigmoid(gate) * up, n);
    }
}

template <class S> void swiglu_backward(const S* both, const S* dy, int64_t rows, int64_t width, float limit, S* d_both) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < width; c += LANES) {
      int64_t n = width - c, at = 2 * r * width + c;
      Lanes gate = load(both + at, n), up = load(both + at + width, n), d = load(dy + r * width + c, n), zero = {};
      Lanes g = gate > limit ? splat(limit) : gate;
      Lanes u = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
      Lanes open = sigmoid(g), silu = g * open;
      Lanes d_gate = open * (1.0f + g - silu) * d * u, d_up = d * silu;
      store(d_both + at, g == gate ? d_gate : zero, n);
      store(d_both + at + width, u == up ? d_up : zero, n);
    }
}

// g = bound sigmoid(exp(a[head]) (raw + bias)).
template <class S>
void log_decay_forward(const S* raw, const float* a, const float* bias, int64_t rows, int64_t heads, int64_t key,
                       float bound, float* g) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t c = 0; c < key; c += LANES) {
        int64_t n = key - c, at = h * key + c;
        Lanes x = std::exp(a[h]) * (load(raw + r * heads * key + at, n) + load(bias + at, n));
        store(g + r * heads * key + at, bound * sigmoid(x), n);
      }
}

template <class S>
void log_decay_backward(const S* raw, const float* a, const float* bias, const float* dg, int64_t rows, int64_t heads,
                        int64_t key, float bound, S* d_raw, float* d_a, float* d_bias) {
  int64_t width = heads * key;
  Partial biases(width), as(width);
#pragma omp parallel num_threads(biases.threads)
  {
    float *my_bias = biases.mine(), *my_a = as.mine();
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < key; c += LANES) {
          int64_t n = key - c, at = h * key + c;
          float rate = std::exp(a[h]);
          Lanes x = rate * (load(raw + r * width + at, n) + load(bias + at, n)), s = sigmoid(x);
          Lanes dx = bound * s * (1.0f - s) * load(dg + r * width + at, n);
          store(d_raw + r * width + at, dx * rate, n);
          store(my_bias + at, load(my_bias + at, n) + dx * rate, n);
          store(my_a + at, load(my_a + at, n) + dx * x, n);
        }
  }
  biases.add_to(d_bias, width);
  std::vector<float> by_channel(width, 0.0f);
  as.add_to(by_channel.data(), width);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t c = 0; c < key; c++) d_a[h] += by_channel[h * key + c];
}

}  // namespace

#define EXPORT(S, NAME)                                                                                               \
  extern "C" void rms_norm_forward_##NAME(const S* x, const float* weight, int64_t rows, int64_t width, float eps,    \
                                          S* y) {                                                                     \
    norm_forward<S, S>(x, nullptr, weight, rows, width, eps, y);                                                      \
  }                                                                                                                   \
  extern "C" void rms_norm_backward_##NAME(const S* x, const float* weight, const S* dy, int64_t rows, int64_t width, \
                                           float eps, S* dx, float* d_weight) {                                       \
    S* none = nullptr;                                                                                                \
    norm_backward<S, S>(x, none, weight, dy, rows, width, eps, dx, none, d_weight);                                   \
  }                                                                                                                   \
  extern "C" void gated_norm_forward_##NAME(const float* x, const S* gate, const float* weight, int64_t rows,         \
                                            int64_t width, float eps, S* y) {                                         \
    norm_forward<float, S>(x, gate, weight, rows, width, eps, y);                                                     \
  }                                                                                                                   \
  extern "C" void gated_norm_backward_##NAME(const float* x, const S* gate, const float* weight, const S* dy,         \
                                             int64_t rows, int64_t width, float eps, float* dx, S* d_gate,            \
                                             float* d_weight) {                                                       \
    norm_backward<float, S>(x, gate, weight, dy, rows, width, eps, dx, d_gate, d_weight);                             \
  }                                                                                                                   \
  extern "C" void swiglu_forward_##NAME(const S* both, int64_t rows, int64_t width, float limit, S* y) {              \
    swiglu_forward<S>(both, rows, width, limit, y);                                                                   \
  }                                                                                                                   \
  extern "C" void swiglu_backward_##NAME(const S* both, const S* dy, int64_t rows, int64_t width, float limit,        \
                                         S* d_both) {                                                                 \
    swiglu_backward<S>(both, dy, rows, width, limit, d_both);                                                         \
  }                                                                                                                   \
  extern "C" void log_decay_forward_##NAME(const S* raw, const float* a, const float* bias, int64_t rows,             \
                                           int64_t heads, int64_t key, float bound, float* g) {                       \
    log_decay_forward<S>(raw, a, bias, rows, heads, key, bound, g);                                                   \
  }                                                                                                                   \
  extern "C" void log_decay_backward_##NAME(const S* raw, const float* a, const float* bias, const float* dg,         \
                                            int64_t rows, int64_t heads, int64_t key, float bound, S* d_raw,          \
                                            float* d_a, float* d_bias) {                                              \
    log_decay_backward<S>(raw, a, bias, dg, rows, heads, key, bound, d_raw, d_a, d_bias);                             \
  }
EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)

extern "C" void set_kernel_threads(int64_t threads) { omp_set_num_threads((int)threads); }
extern "C" int64_t kernel_threads() { return omp_get_max_threads(); }
