// Attention of each token to the latents of its selected pools and of its own incomplete one, without gathering them.
#include <cmath>
#include <vector>
#include <omp.h>
#include "../native/vector.h"

namespace {

constexpr int64_t BLOCK = 64;  // tokens between whose two backward stages the threads meet

struct Sizes {
  int64_t tokens, heads, width, selected, kpool;
  int64_t rows() const { return padded((selected + 1) * kpool); }
};

// The latents' rows that a token sees, in the order of its slots.
struct Seen {
  std::vector<int64_t> row;
  std::vector<int> slot;
  explicit Seen(const Sizes& s) : row(s.rows()), slot(s.rows()) {}
  int64_t count = 0, padded_count = 0;

  void find(const Sizes& s, const int32_t* pools, int64_t own) {
    count = 0;
    for (int64_t i = 0; i < s.selected; i++)
      for (int64_t j = 0; pools[i] >= 0 && j < s.kpool; j++) row[count] = pools[i] * s.kpool + j, slot[count++] = (int)i;
    if (own % s.kpool != s.kpool - 1)  // a complete own pool is seen only when selected
      for (int64_t r = own / s.kpool * s.kpool; r <= own; r++) row[count] = r, slot[count++] = -1;
    padded_count = padded(count);
    for (int64_t i = count; i < padded_count; i++) row[i] = row[0];
  }
};

// scores[h, n] = q[h] . latents[row n] for 16 rows, given by columns, and four heads (fewer: the first is repeated).
OWN_REGISTERS void score_heads(const float* columns, int64_t W, const float* q, int64_t heads, float* scores, int64_t N) {
  constexpr int HEADS = 4;
  for (int64_t h = 0; h < heads; h += HEADS) {
    const float* at[HEADS];
    Lanes acc[HEADS][2] = {};
    for (int64_t i = 0; i < HEADS; i++) at[i] = q + (h + i < heads ? h + i : h) * W;
    for (int64_t c = 0; c < W; c += 2) {
      Lanes u = load(columns + c * LANES), v = load(columns + (c + 1) * LANES);
      in_register(u), in_register(v);
#pragma GCC unroll 4
      for (int i = 0; i < HEADS; i++) acc[i][0] += at[i][c] * u, acc[i][1] += at[i][c + 1] * v;
    }
    for (int64_t i = 0; i < HEADS && h + i < heads; i++) store(scores + (h + i) * N, acc[i][0] + acc[i][1]);
  }
}

// Scores of all that a token sees, for one or two sets of queries at once.
template <class S>
void score(const Sizes& s, const Seen& seen, const S* latents, const float* a, float* to_a, const float* b, float* to_b,
           float* columns) {
  int64_t W = padded(s.width), N = s.rows();
  for (int64_t n = 0; n < seen.padded_count; n += LANES) {
    columns_of([&](int64_t i) { return latents + seen.row[n + i] * s.width; }, s.width, columns);
    score_heads(columns, W, a, s.heads, to_a + n, N);
    if (b) score_heads(columns, W, b, s.heads, to_b + n, N);
  }
}

// In place; what lies beyond the seen rows becomes 0.
void softmax(const Sizes& s, const Seen& seen, float scale, float* scores) {
  for (int64_t h = 0; h < s.heads; h++) {
    float* row = scores + h * s.rows();
    for (int64_t n = seen.count; n < seen.padded_count; n++) row[n] = -INFINITY;
    Lanes top = splat(-INFINITY), total = {};
    for (int64_t n = 0; n < seen.padded_count; n += LANES) top = larger(load(row + n), top);
    float most = top[0];
    for (int i = 1; i < LANES; i++) most = top[i] > most ? top[i] : most;
    for (int64_t n = 0; n < seen.padded_count; n += LANES) {
      Lanes e = exponential((load(row + n) - most) * scale);
      if (n + LANES > seen.count)
        for (int64_t i = seen.count - n; i < LANES; i++) e[i] = 0;
      store(row + n, e);
      total += e;
    }
    float inverse = 1.0f / sum(total);
    for (int64_t n = 0; n < seen.padded_count; n += LANES) store(row + n, load(row + n) * inverse);
  }
}

// out[h] = sum_n weights[h, n] latents[row n], for four heads and VECTORS vectors of columns at once.
template <int VECTORS, class S>
OWN_REGISTERS void mix_columns(const Sizes& s, const Seen& seen, const S* latents, const float* weights, int64_t heads, int64_t n_last,
                 S* out) {
  int64_t N = s.rows();
  const float* w[4];
  Lanes acc[4][VECTORS] = {};
  for (int64_t i = 0; i < 4; i++) w[i] = weights + (i < heads ? i : 0) * N;
  for (int64_t n = 0; n < seen.count; n++) {
    Lanes row[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      row[v] = load(latents + seen.row[n] * s.width + v * LANES, v == VECTORS - 1 ? n_last : LANES);
      in_register(row[v]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      Lanes weight = splat(w[i][n]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) acc[i][v] += weight * row[v];
    }
  }
  for (int64_t i = 0; i < heads; i++)
    for (int v = 0; v < VECTORS; v++) store(out + i * s.width + v * LANES, acc[i][v], v == VECTORS - 1 ? n_last : LANES);
}

template <class S>
void mix(const Sizes& s, const Seen& seen, const S* latents, const float* weights, S* out) {
  for (int64_t h = 0; h < s.heads; h += 4) {
    int64_t heads = min64(4, s.heads - h), c = 0;
    for (; c + 2 * LANES <= s.width; c += 2 * LANES)
      mix_columns<2>(s, seen, latents + c, weights + h * s.rows(), heads, LANES, out + h * s.width + c);
    for (; c < s.width; c += LANES)
      mix_columns<1>(s, seen, latents + c, weights + h * s.rows(), heads, s.width - c, out + h * s.width + c);
  }
}

template <class S> void widen(const Sizes& s, const S* rows, float* out) {  // heads of one token, padded with zeros
  int64_t W = padded(s.width);
  for (int64_t h = 0; h < s.heads; h++)
    for (int64_t c = 0; c < W; c += LANES) store(out + h * W + c, load(rows + h * s.width + c, s.width - c));
}

template <class S>
void forward(const Sizes& s, const S* q, const S* latents, const int32_t* pools, const int64_t* slots, float scale,
             S* out, float* mass) {
#pragma omp parallel
  {
    Seen seen(s);
    int64_t W = padded(s.width), N = s.rows();
    std::vector<float> queries(s.heads * W), scores(s.heads * N), columns(W * LANES);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s.tokens; t++) {
      seen.find(s, pools + t * s.selected, slots[t]);
      widen(s, q + t * s.heads * s.width, queries.data());
      float* none = nullptr;
      score(s, seen, latents, queries.data(), scores.data(), none, none, columns.data());
      softmax(s, seen, scale, scores.data());
      mix(s, seen, latents, scores.data(), out + t * s.heads * s.width);
      float* m = mass + t * s.selected;
      for (int64_t i = 0; i < s.selected; i++) m[i] = 0;
      for (int64_t h = 0; h < s.heads; h++)
        for (int64_t n = 0; n < seen.count && seen.slot[n] >= 0; n++) m[seen.slot[n]] += scores[h * N + n];
    }
  }
}

// Stage 1, by tokens: probabilities, gradients of the scores, dq. Stage 2, by columns of the latents: no two threads
// add to the same value, so the sum's order never changes.
template <class S>
void backward(const Sizes& s, const S* q, const S* latents, const int32_t* pools, const int64_t* slots, const S* d_out,
              float scale, S* dq, float* d_latents) {
  int64_t W = padded(s.width), N = s.rows(), H = s.heads;
  std::vector<Seen> seen(min64(BLOCK, s.tokens), Seen(s));
  std::vector<float> weights(seen.size() * 2 * H * N), wide(seen.size() * 2 * H * W);
#pragma omp parallel
  {
    std::vector<float> columns(W * LANES);
    for (int64_t first = 0; first < s.tokens; first += BLOCK) {
      int64_t count = min64(BLOCK, s.tokens - first);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; i++) {
        int64_t t = first + i, at = t * H * s.width;
        float *p = weights.data() + i * 2 * H * N, *ds = p + H * N;
        float *queries = wide.data() + i * 2 * H * W, *above = queries + H * W;
        seen[i].find(s, pools + t * s.selected, slots[t]);
        widen(s, q + at, queries);
        widen(s, d_out + at, above);
        score(s, seen[i], latents, queries, p, above, ds, columns.data());
        softmax(s, seen[i], scale, p);
        for (int64_t h = 0; h < H; h++) {
          Lanes dot = {};
          float *ph = p + h * N, *dh = ds + h * N;
          for (int64_t n = 0; n < seen[i].padded_count; n += LANES) dot += load(ph + n) * load(dh + n);
          float mean = sum(dot);
          for (int64_t n = 0; n < seen[i].padded_count; n += LANES)
            store(dh + n, load(ph + n) * (load(dh + n) - mean) * scale);
        }
        mix(s, seen[i], latents, ds, dq + at);
      }
#pragma omp for schedule(static)
      for (int64_t c = 0; c < s.width; c += LANES)
        for (int64_t i = 0; i < count; i++) {
          const float *p = weights.data() + i * 2 * H * N, *ds = p + H * N;
          const float *queries = wide.data() + i * 2 * H * W, *above = queries + H * W;
          for (int64_t h0 = 0; h0 < H; h0 += 4) {
            int64_t some = min64(4, H - h0);
            Lanes qh[4], ah[4];
            const float *ps[4], *dss[4];
            for (int64_t j = 0; j < 4; j++) {
              int64_t h = h0 + (j < some ? j : 0);
              qh[j] = j < some ? load(queries + h * W + c) : (Lanes){};
              ah[j] = j < some ? load(above + h * W + c) : (Lanes){};
              ps[j] = p + h * N, dss[j] = ds + h * N;
            }
            for (int64_t n = 0; n < seen[i].count; n++) {
              float* to = d_latents + seen[i].row[n] * s.width + c;
              Lanes acc = load(to, s.width - c), more = {};
#pragma GCC unroll 4
              for (int j = 0; j < 4; j++) acc += dss[j][n] * qh[j], more += ps[j][n] * ah[j];
              store(to, acc + more, s.width - c);
            }
          }
        }
    }
  }
}

}  // namespace

#define EXPORT(S, NAME)                                                                                              \
  extern "C" void sparse_attention_forward_##NAME(const S* q, const S* latents, const int32_t* pools,                \
                                                  const int64_t* slots, int64_t tokens, int64_t heads, int64_t width, \
                                                  int64_t selected, int64_t kpool, float scale, S* out, float* mass) { \
    forward<S>({tokens, heads, width, selected, kpool}, q, latents, pools, slots, scale, out, mass);                 \
  }                                                                                                                  \
  extern "C" void sparse_attention_backward_##NAME(                                                                  \
      const S* q, const S* latents, const int32_t* pools, const int64_t* slots, const S* d_out, int64_t tokens,      \
      int64_t heads, int64_t width, int64_t selected, int64_t kpool, float scale, S* dq, float* d_latents) {         \
    backward<S>({tokens, heads, width, selected, kpool}, q, latents, pools, slots, d_out, scale, dq, d_latents);     \
  }
EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
