// Hyper-connections, sixteen tokens at a time: their small matrices stay in registers, one token per lane.
#include <type_traits>
#include <vector>
#include <omp.h>
#include "../native/vector.h"

namespace {

template <int R> constexpr int OUTPUTS = R * (2 + R);
constexpr int MAX_PASSES = 127;  // 2 x KERNEL_ITERATIONS - 1 of fused.py

// Dot products of two rows with G rows of fn.
template <int G, class S>
inline void dots(const S* xa, const S* xb, const float* fn, int64_t width, float* out, int64_t a, int64_t b) {
  Lanes sa[G] = {}, sb[G] = {};
  for (int64_t c = 0; c < width; c += LANES) {
    int64_t n = width - c;
    Lanes va = load(xa + c, n), vb = load(xb + c, n);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      Lanes f = load(fn + g * width + c, n);
      sa[g] += va * f;
      sb[g] += vb * f;
    }
  }
  for (int g = 0; g < G; g++) {
    out[g * LANES + a] = sum(sa[g]);
    out[g * LANES + b] = sum(sb[g]);
  }
}

template <int M, class S>
inline void all_dots(const S* xa, const S* xb, const float* fn, int64_t width, float* out, int64_t a, int64_t b) {
  constexpr int G = M % 12 == 0 ? 12 : M % 8 == 0 ? 8 : M % 5 == 0 ? 5 : M;
  for (int m = 0; m < M; m += G) dots<G>(xa, xb, fn + m * width, width, out + m * LANES, a, b);
}

template <int R> struct Gates {
  Lanes gate[2 * R];   // sigmoid of pre and post
  Lanes soft[R][R];    // softmax over the outputs
};

template <int R>
inline Gates<R> open_gates(const float* logits, const float* base, const float* scale) {
  Gates<R> g;
  for (int m = 0; m < 2 * R; m++)
    g.gate[m] = sigmoid(base[m] + load(logits + m * LANES) * scale[m < R ? 0 : 1]);
  for (int i = 0; i < R; i++) {
    Lanes z[R], top;
    for (int j = 0; j < R; j++) {
      int m = 2 * R + i * R + j;
      z[j] = base[m] + load(logits + m * LANES) * scale[2];
      top = j ? larger(top, z[j]) : z[j];
    }
    Lanes total = {};
    for (int j = 0; j < R; j++) total += z[j] = exponential(z[j] - top);
    for (int j = 0; j < R; j++) g.soft[i][j] = z[j] / total;
  }
  return g;
}

// One normalisation: over the inputs (even passes) or the outputs; keeps the reciprocals of its divisors.
template <int R> inline void normalise(Lanes (&m)[R][R], int pass, float eps, Lanes* inverse) {
  for (int a = 0; a < R; a++) {
    Lanes total = splat(eps);
    for (int b = 0; b < R; b++) total += pass % 2 ? m[a][b] : m[b][a];
    inverse[a] = 1.0f / total;
    for (int b = 0; b < R; b++) (pass % 2 ? m[a][b] : m[b][a]) *= inverse[a];
  }
}

template <int R> inline void normalise_backward(Lanes (&grad)[R][R], Lanes (&m)[R][R], int pass, const Lanes* inverse) {
  for (int a = 0; a < R; a++) {
    Lanes dot = {}, divisor = 1.0f / inverse[a];
    for (int b = 0; b < R; b++) dot += pass % 2 ? grad[a][b] * m[a][b] : grad[b][a] * m[b][a];
    for (int b = 0; b < R; b++) {
      Lanes& d = pass % 2 ? grad[a][b] : grad[b][a];
      d = (d - dot) * inverse[a];
      (pass % 2 ? m[a][b] : m[b][a]) *= divisor;
    }
  }
}

template <int R, class S>
void gather_forward(const S* x, const float* fn, const float* base, const float* scale, int64_t tokens, int64_t width,
                    float eps, float norm_eps, int passes, S* h, float* post, float* comb, float* saved) {
  constexpr int M = OUTPUTS<R>;
  int64_t all = R * width, blocks = (tokens + LANES - 1) / LANES;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; block++) {
    int64_t first = block * LANES, count = min64(LANES, tokens - first);
    const S* rows = x + first * all;
    float* logits = saved + block * (M + 1) * LANES;  // M rows of logits, one of reciprocal norms
    float* rstd = logits + M * LANES;
    std::memset(logits, 0, (M + 1) * LANES * sizeof(float));
    for (int64_t t = 0; t < count; t += 2) {
      int64_t u = t + 1 < count ? t + 1 : t;
      all_dots<M>(rows + t * all, rows + u * all, fn, all, logits, t, u);
    }
    for (int64_t t = 0; t < count; t++) {
      Lanes square = {};
      for (int64_t c = 0; c < all; c += LANES) {
        Lanes v = load(rows + t * all + c, all - c);
        square += v * v;
      }
      rstd[t] = 1.0f / __builtin_sqrtf(sum(square) / all + norm_eps);
    }
    for (int m = 0; m < M; m++) store(logits + m * LANES, load(logits + m * LANES) * load(rstd));
    Gates<R> g = open_gates<R>(logits, base, scale);
    Lanes matrix[R][R], inverse[R];
    for (int i = 0; i < R; i++)
      for (int j = 0; j < R; j++) matrix[i][j] = g.soft[i][j] + eps;
    for (int pass = 0; pass < passes; pass++) normalise<R>(matrix, pass, eps, inverse);
    for (int64_t t = 0; t < count; t++) {
      for (int i = 0; i < R; i++) {
        post[(first + t) * R + i] = 2 * g.gate[R + i][t];
        for (int j = 0; j < R; j++) comb[((first + t) * R + i) * R + j] = matrix[i][j][t];
      }
      const S* row = rows + t * all;
      for (int64_t c = 0; c < width; c += LANES) {
        int64_t n = width - c;
        Lanes acc = {};
        for (int r = 0; r < R; r++) acc += (g.gate[r][t] + eps) * load(row + r * width + c, n);
        store(h + (first + t) * width + c, acc, n);
      }
    }
  }
}

template <int R, class S>
void gather_backward(const S* x, const float* fn, const float* base, const float* scale, const float* saved,
                     const S* dh, const float* d_post, const float* d_comb, int64_t tokens, int64_t width, float eps,
                     int passes, S* dx, float* d_fn, float* d_base, float* d_scale) {
  constexpr int M = OUTPUTS<R>;
  int64_t all = R * width, blocks = (tokens + LANES - 1) / LANES;
  int threads = omp_get_max_threads();
  int64_t part = M * all + M + 3;  // of one thread: fn, base, scale
  std::vector<float> parts(threads * part, 0.0f);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t block = 0; block < blocks; block++) {
    float* mine = parts.data() + omp_get_thread_num() * part;
    float *mine_base = mine + M * all, *mine_scale = mine_base + M;
    int64_t first = block * LANES, count = min64(LANES, tokens - first);
    const S *rows = x + first * all, *dh_rows = dh + first * width;
    const float* logits = saved + block * (M + 1) * LANES;
    Lanes rstd = load(logits + M * LANES);
    Gates<R> g = open_gates<R>(logits, base, scale);
    Lanes d_gates[M], matrix[R][R], grad[R][R], inverse[MAX_PASSES][R];
    for (int m = 0; m < M; m++) d_gates[m] = (Lanes){};
    for (int i = 0; i < R; i++)
      for (int j = 0; j < R; j++) matrix[i][j] = g.soft[i][j] + eps, grad[i][j] = (Lanes){};
    for (int pass = 0; pass < passes; pass++) normalise<R>(matrix, pass, eps, inverse[pass]);
    for (int64_t t = 0; t < count; t++) {
      Lanes dot[R] = {};
      for (int64_t c = 0; c < width; c += LANES) {
        int64_t n = width - c;
        Lanes d = load(dh_rows + t * width + c, n);
        for (int r = 0; r < R; r++) dot[r] += d * load(rows + t * all + r * width + c, n);
      }
      for (int r = 0; r < R; r++) {
        d_gates[r][t] = sum(dot[r]);
        d_gates[R + r][t] = 2 * d_post[(first + t) * R + r];
        for (int j = 0; j < R; j++) grad[r][j][t] = d_comb[((first + t) * R + r) * R + j];
      }
    }
    for (int pass = passes - 1; pass >= 0; pass--) normalise_backward<R>(grad, matrix, pass, inverse[pass]);
    for (int m = 0; m < 2 * R; m++) d_gates[m] *= g.gate[m] * (1.0f - g.gate[m]);
    for (int i = 0; i < R; i++) {
      Lanes mean = {};
      for (int j = 0; j < R; j++) mean += g.soft[i][j] * grad[i][j];
      for (int j = 0; j < R; j++) d_gates[2 * R + i * R + j] = g.soft[i][j] * (grad[i][j] - mean);
    }
    Lanes coefficient = {};
    alignas(64) float d_logits[LANES][M];  // by token
    for (int m = 0; m < M; m++) {
      Lanes logit = load(logits + m * LANES);
      int group = m < R ? 0 : m < 2 * R ? 1 : 2;
      mine_base[m] += sum(d_gates[m]);
      mine_scale[group] += sum(d_gates[m] * logit);
      Lanes d = d_gates[m] * scale[group];
      coefficient += d * logit;
      d *= rstd;
      for (int t = 0; t < LANES; t++) d_logits[t][m] = d[t];
    }
    coefficient *= rstd * rstd / -(float)all;
    for (int r = 0; r < R; r++)
      for (int64_t c = 0; c < width; c += LANES) {
        int64_t n = width - c, column = r * width + c;
        for (int64_t t0 = 0; t0 < count; t0 += 8) {
          Lanes acc[8];
          int64_t some = min64(8, count - t0);
          for (int64_t i = 0; i < 8; i++) {
            int64_t t = i < some ? t0 + i : t0;
            acc[i] = coefficient[t] * load(rows + t * all + column, n) +
                     (g.gate[r][t] + eps) * load(dh_rows + t * width + c, n);
          }
          for (int m = 0; m < M; m++) {
            Lanes f = load(fn + m * all + column, n);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) acc[i] += d_logits[t0 + i][m] * f;
          }
          for (int64_t i = 0; i < some; i++) store(dx + (first + t0 + i) * all + column, acc[i], n);
        }
        if (d_fn) {
          Lanes acc[M];
#pragma GCC unroll 24
          for (int m = 0; m < M; m++) acc[m] = load(mine + m * all + column, n);
          for (int64_t t = 0; t < count; t++) {
            Lanes v = load(rows + t * all + column, n);
#pragma GCC unroll 24
            for (int m = 0; m < M; m++) acc[m] += d_logits[t][m] * v;
          }
#pragma GCC unroll 24
          for (int m = 0; m < M; m++) store(mine + m * all + column, acc[m], n);
        }
      }
  }
  for (int thread = 0; thread < threads; thread++) {
    const float* one = parts.data() + thread * part;
    if (d_fn)
      for (int64_t i = 0; i < M * all; i++) d_fn[i] += one[i];
    for (int m = 0; m < M; m++) d_base[m] += one[M * all + m];
    for (int i = 0; i < 3; i++) d_scale[i] += one[M * all + M + i];
  }
}

template <int R, class S>
void update_forward(const S* x, const S* out, const float* post, const float* comb, int64_t tokens, int64_t width, S* y) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < width; c += LANES) {
      int64_t n = width - c;
      Lanes in[R], o = load(out + t * width + c, n);
      for (int i = 0; i < R; i++) in[i] = load(x + (t * R + i) * width + c, n);
      for (int j = 0; j < R; j++) {
        Lanes acc = post[t * R + j] * o;
        for (int i = 0; i < R; i++) acc += comb[(t * R + i) * R + j] * in[i];
        store(y + (t * R + j) * width + c, acc, n);
      }
    }
}

template <int R, class S>
void update_backward(const S* x, const S* out, const float* post, const float* comb, const S* dy, int64_t tokens,
                     int64_t width, S* dx, S* d_out, float* d_post, float* d_comb) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    Lanes dots[R][R] = {}, post_dots[R] = {};
    for (int64_t c = 0; c < width; c += LANES) {
      int64_t n = width - c;
      Lanes up[R], o = load(out + t * width + c, n), d = {};
      for (int j = 0; j < R; j++) {
        up[j] = load(dy + (t * R + j) * width + c, n);
        d += post[t * R + j] * up[j];
        post_dots[j] += up[j] * o;
      }
      store(d_out + t * width + c, d, n);
      for (int i = 0; i < R; i++) {
        Lanes in = load(x + (t * R + i) * width + c, n), acc = {};
        for (int j = 0; j < R; j++) {
          acc += comb[(t * R + i) * R + j] * up[j];
          dots[i][j] += in * up[j];
        }
        store(dx + (t * R + i) * width + c, acc, n);
      }
    }
    for (int i = 0; i < R; i++) {
      d_post[t * R + i] = sum(post_dots[i]);
      for (int j = 0; j < R; j++) d_comb[(t * R + i) * R + j] = sum(dots[i][j]);
    }
  }
}

}  // namespace

template <class F> static void by_streams(int64_t streams, F run) {
  if (streams == 1) run(std::integral_constant<int, 1>());
  if (streams == 2) run(std::integral_constant<int, 2>());
  if (streams == 3) run(std::integral_constant<int, 3>());
  if (streams == 4) run(std::integral_constant<int, 4>());
}

#define EXPORT(S, NAME)                                                                                              \
  extern "C" void mhc_gather_forward_##NAME(const S* x, const float* fn, const float* base, const float* scale,      \
                                            int64_t streams, int64_t tokens, int64_t width, float eps,               \
                                            float norm_eps, int64_t passes, S* h, float* post, float* comb,          \
                                            float* saved) {                                                          \
    auto run = [&](auto r) {                                                                                         \
      gather_forward<decltype(r)::value>(x, fn, base, scale, tokens, width, eps, norm_eps, (int)passes, h, post,     \
                                         comb, saved);                                                               \
    };                                                                                                               \
    by_streams(streams, run);                                                                                        \
  }                                                                                                                  \
  extern "C" void mhc_gather_backward_##NAME(                                                                        \
      const S* x, const float* fn, const float* base, const float* scale, const float* saved, const S* dh,           \
      const float* d_post, const float* d_comb, int64_t streams, int64_t tokens, int64_t width, float eps,           \
      int64_t passes, S* dx, float* d_fn, float* d_base, float* d_scale) {                                           \
    auto run = [&](auto r) {                                                                                         \
      gather_backward<decltype(r)::value>(x, fn, base, scale, saved, dh, d_post, d_comb, tokens, width, eps,         \
                                          (int)passes, dx, d_fn, d_base, d_scale);                                   \
    };                                                                                                               \
    by_streams(streams, run);                                                                                        \
  }                                                                                                                  \
  extern "C" void mhc_update_forward_##NAME(const S* x, const S* out, const float* post, const float* comb,          \
                                            int64_t streams, int64_t tokens, int64_t width, S* y) {                  \
    auto run = [&](auto r) { update_forward<decltype(r)::value>(x, out, post, comb, tokens, width, y); };            \
    by_streams(streams, run);                                                                                        \
  }                                                                                                                  \
  extern "C" void mhc_update_backward_##NAME(const S* x, const S* out, const float* post, const float* comb,         \
                                             const S* dy, int64_t streams, int64_t tokens, int64_t width, S* dx,     \
                                             S* d_out, float* d_post, float* d_comb) {                               \
    auto run = [&](auto r) {                                                                                         \
      update_backward<decltype(r)::value>(x, out, post, comb, dy, tokens, width, dx, d_out, d_post, d_comb);         \
    };                                                                                                               \
    by_streams(streams, run);                                                                                        \
  }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
