// Kimi delta attention, one chunk of sixteen tokens and one head at a time, all of it in cache.
//
// With G the running sum of the log decay in a chunk and S the state [K, V] before it:
//     scores[r, c] = q_r . (k_c exp(G_r - G_c)), c <= r        lower[r, c] = beta_r k_r . (k_c exp(G_r - G_c)), c < r
//     (I + lower) v_new = beta (v - k_in S)                    out = q_in S + scores v_new
//     S' = diag(decay) S + k_out^T v_new
// with q_in = q exp(G), k_in = k exp(G), k_out = k exp(G_end - G), decay = exp(G_end). The system is solved by
// substitution. Exponents are taken relative to the middle of blocks of eight rows, so no positive one exceeds 20.
#include <cmath>
#include <vector>
#include <omp.h>
#include "../native/vector.h"

namespace {

constexpr int64_t C = 16, BLOCK = 8;

struct Sizes {
  int64_t batch, length, heads, key, value;
  int64_t q_stride, k_stride, v_stride, g_stride;  // values from one token to the next; heads follow one another
  int64_t chunks() const { return (length + C - 1) / C; }
};

struct Inputs {
  const float *q, *k, *v, *g, *beta;
  const uint8_t* first;  // where documents start, or null
};

// What both directions need of one chunk; rows beyond the end are zero. Widths are padded to whole vectors.
struct Chunk {
  int64_t K, V, count, seen, reach;  // rows before `seen` see the carry, rows from `reach` on reach the next chunk
  bool passes;                       // the carry passes the chunk: no document starts in it
  std::vector<float> space;
  float *q, *k, *v, *q_rstd, *k_rstd, *grow, *shrink, *qm, *km, *kr, *kx, *q_in, *k_in, *k_out, *decay, *start, *rest,
      *between, *G, *transposed, *scores, *lower, *low0, *beta;
  int document[C];

  Chunk(int64_t key, int64_t value) : K(padded(key)), V(padded(value)) {
    space.assign(12 * C * K + C * V + 8 * K + 2 * K * C + 3 * C * C + 3 * C, 0.0f);
    float* p = space.data();
    auto take = [&](float*& part, int64_t n) { part = p, p += n; };
    for (float** part : {&q, &k, &grow, &shrink, &qm, &km, &kr, &kx, &q_in, &k_in, &k_out, &G}) take(*part, C * K);
    take(v, C * V);
    for (float** part : {&decay, &start, &rest, &between}) take(*part, 2 * K);
    take(transposed, 2 * K * C);
    for (float** part : {&scores, &lower, &low0}) take(*part, C * C);
    for (float** part : {&q_rstd, &k_rstd, &beta}) take(*part, C);
  }

  void read(const Sizes& s, const Inputs& in, int64_t b, int64_t h, int64_t chunk);

 private:
  void normalise(float* rows, float* rstd, float scale);
  void mark_documents(const uint8_t* first);
};

inline void transpose_rows(const float* rows, int64_t width, float* out) {  // [16, width] -> [width, 16]
  for (int64_t j = 0; j < width; j += LANES) transpose(rows + j, width, out + j * C, C);
}
inline void transpose_state(const float* state, int64_t K, int64_t V, float* out) {  // [K, V] -> [V, K]
  for (int64_t i = 0; i < K; i += LANES)
    for (int64_t j = 0; j < V; j += LANES) transpose(state + i * V + j, V, out + j * K + i, K);
}

void Chunk::normalise(float* rows, float* rstd, float scale) {
  for (int64_t r = 0; r < C; r++) {
    Lanes square = {};
    for (int64_t j = 0; j < K; j += LANES) square += load(rows + r * K + j) * load(rows + r * K + j);
    rstd[r] = 1.0f / std::sqrt(sum(square) + 1e-6f);
    for (int64_t j = 0; j < K; j += LANES) store(rows + r * K + j, load(rows + r * K + j) * (rstd[r] * scale));
  }
}

void Chunk::mark_documents(const uint8_t* first) {
  int number = 0;
  seen = C, reach = 0;
  for (int64_t r = 0; r < C; r++) {
    if (first && r < count && first[r]) {
      number++;
      if (seen == C) seen = r;
      reach = r;
    }
    document[r] = number;
  }
  passes = number == 0;
}

void Chunk::read(const Sizes& s, const Inputs& in, int64_t b, int64_t h, int64_t chunk) {
  int64_t begin = chunk * C;
  count = min64(C, s.length - begin);
  int64_t token = b * s.length + begin;
  std::memset(q, 0, C * K * sizeof(float));
  std::memset(k, 0, C * K * sizeof(float));
  std::memset(v, 0, C * V * sizeof(float));
  Lanes zero = {};
  for (int64_t r = 0; r < C; r++) {
    bool real = r < count;
    const float* g = in.g + (token + r) * s.g_stride + h * s.key;
    for (int64_t j = 0; j < s.key; j += LANES) {
      int64_t n = s.key - j;
      Lanes before = r ? load(G + (r - 1) * K + j) : zero;
      store(G + r * K + j, real ? before + load(g + j, n) : before);
      if (!real) continue;
      store(q + r * K + j, load(in.q + (token + r) * s.q_stride + h * s.key + j, n));
      store(k + r * K + j, load(in.k + (token + r) * s.k_stride + h * s.key + j, n));
    }
    for (int64_t j = 0; real && j < s.value; j += LANES)
      store(v + r * V + j, load(in.v + (token + r) * s.v_stride + h * s.value + j, s.value - j));
    beta[r] = real ? in.beta[(token + r) * s.heads + h] : 0.0f;
  }
  normalise(q, q_rstd, 1.0f / std::sqrt((float)s.key));
  normalise(k, k_rstd, 1.0f);
  mark_documents(in.first ? in.first + token : nullptr);

  for (int64_t j = 0; j < K; j += LANES) {
    Lanes middle[2] = {load(G + (BLOCK / 2) * K + j), load(G + (BLOCK + BLOCK / 2) * K + j)};
    Lanes end = load(G + (C - 1) * K + j), gap = exponential(middle[1] - middle[0]);
    store(between + j, gap);
    store(decay + j, passes ? exponential(end) : zero);
    for (int b = 0; b < 2; b++) {
      Lanes from = exponential(middle[b]), to = exponential(end - middle[b]);
      store(start + b * K + j, from);
      store(rest + b * K + j, to);
      for (int64_t r = b * BLOCK; r < (b + 1) * BLOCK; r++) {
        int64_t at = r * K + j;
        Lanes up = exponential(load(G + at) - middle[b]), down = 1.0f / up, keys = load(k + at);
        store(grow + at, up);
        store(shrink + at, down);
        store(qm + at, load(q + at) * up);
        store(km + at, keys * up);
        store(kr + at, keys * down);
        store(kx + at, b ? keys * down : keys * down * gap);  // as block 1 sees it
        store(q_in + at, r < seen ? load(qm + at) * from : zero);
        store(k_in + at, r < seen ? load(km + at) * from : zero);
        store(k_out + at, r >= reach ? load(kr + at) * to : zero);
      }
    }
  }
  transpose_rows(kr, K, transposed);
  transpose_rows(kx, K, transposed + K * C);
  for (int b = 0; b < 2; b++) {
    const float* keys = transposed + b * K * C;
    int64_t at = b * BLOCK;
    product(scores + at * C, C, qm + at * K, K, 1, keys, C, BLOCK, C, K, 1, 0);
    product(low0 + at * C, C, km + at * K, K, 1, keys, C, BLOCK, C, K, 1, 0);
  }
  for (int64_t r = 0; r < C; r++)
    for (int64_t c = 0; c < C; c++) {
      bool same = document[r] == document[c];
      if (c > r || !same) scores[r * C + c] = 0;
      if (c >= r || !same) low0[r * C + c] = 0;
      lower[r * C + c] = low0[r * C + c] * beta[r];
    }
}

// v - k_in S
void subtract_carried(const Chunk& c, const float* state, float* residual) {
  std::memcpy(residual, c.v, C * c.V * sizeof(float));
  product(residual, c.V, c.k_in, c.K, 1, state, c.V, C, c.V, c.K, -1, 1);
}

// The residual's product with beta, solved against I + lower.
void solve(const Chunk& c, const float* residual, float* v_new) {
  for (int64_t j = 0; j < c.V; j += LANES) {
    Lanes rows[C];
#pragma GCC unroll 16
    for (int r = 0; r < C; r++) {
      Lanes x = c.beta[r] * load(residual + r * c.V + j);
#pragma GCC unroll 16
      for (int i = 0; i < r; i++) x -= c.lower[r * C + i] * rows[i];
      rows[r] = x;
      store(v_new + r * c.V + j, x);
    }
  }
}

void scan(const Sizes& s, const Inputs& in, const float* state_in, float* out, float* state_out, float* states,
          float* v_news) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < s.batch * s.heads; row++) {
    int64_t b = row / s.heads, h = row % s.heads;
    Chunk c(s.key, s.value);
    int64_t K = c.K, V = c.V;
    std::vector<float> space(K * V + 3 * C * V, 0.0f);
    float *S = space.data(), *residual = S + K * V, *v_new = residual + C * V, *o = v_new + C * V;
    for (int64_t i = 0; i < s.key; i++)
      std::memcpy(S + i * V, state_in + (row * s.key + i) * s.value, s.value * sizeof(float));
    for (int64_t chunk = 0; chunk < s.chunks(); chunk++) {
      c.read(s, in, b, h, chunk);
      if (states) std::memcpy(states + (chunk * s.batch * s.heads + row) * K * V, S, K * V * sizeof(float));
      subtract_carried(c, S, residual);
      solve(c, residual, v_new);
      product(o, V, c.q_in, K, 1, S, V, C, V, K, 1, 0);
      product(o, V, c.scores, C, 1, v_new, V, C, V, C, 1, 1);
      if (v_news) std::memcpy(v_news + (chunk * s.batch * s.heads + row) * C * V, v_new, C * V * sizeof(float));
      for (int64_t r = 0; r < c.count; r++)
        std::memcpy(out + ((b * s.length + chunk * C + r) * s.heads + h) * s.value, o + r * V, s.value * sizeof(float));
      for (int64_t i = 0; i < K; i++)
        for (int64_t j = 0; j < V; j += LANES) store(S + i * V + j, c.decay[i] * load(S + i * V + j));
      product(S, V, c.k_out, 1, K, v_new, V, K, V, C, 1, 1);
    }
    for (int64_t i = 0; i < s.key; i++)
      std::memcpy(state_out + (row * s.key + i) * s.value, S + i * V, s.value * sizeof(float));
  }
}

// Gradient through x -> x / sqrt(x . x + eps) x scale, from the normalised row times scale.
inline void normalise_backward(const float* normed, const float* grad, float rstd, float scale, int64_t key, int64_t K,
                               float* out) {
  Lanes dot = {};
  for (int64_t j = 0; j < K; j += LANES) dot += load(normed + j) * load(grad + j);
  float along = sum(dot) / (scale * scale);
  for (int64_t j = 0; j < key; j += LANES)
    store(out + j, (load(grad + j) - load(normed + j) * along) * (rstd * scale), key - j);
}

struct Gradients {
  float *q, *k, *v, *g, *beta, *state;
};

void scan_backward(const Sizes& s, const Inputs& in, const float* states, const float* v_news, const float* d_out,
                   const float* d_last, const Gradients& to) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < s.batch * s.heads; row++) {
    int64_t b = row / s.heads, h = row % s.heads, rows = s.batch * s.heads;
    Chunk c(s.key, s.value);
    int64_t K = c.K, V = c.V;
    std::vector<float> space(3 * K * V + 6 * C * V + 6 * C * K + 2 * C * C + K, 0.0f);
    float* p = space.data();
    auto take = [&](int64_t n) { float* part = p; p += n; return part; };
    float *dS = take(K * V), *S_t = take(K * V), *dS_t = take(K * V);
    float *dO = take(C * V), *residual = take(C * V), *d_new = take(C * V), *bd = take(C * V),
          *v_t = take(C * V), *d_rhs = take(C * V);
    float *dqm = take(C * K), *dkm = take(C * K), *dkr = take(C * K), *cross = take(C * K), *d_in = take(C * K),
          *dG = take(C * K);
    float *d_scores = take(C * C), *d_low = take(C * C), *d_end = take(K);
    for (int64_t i = 0; i < s.key; i++)
      std::memcpy(dS + i * V, d_last + (row * s.key + i) * s.value, s.value * sizeof(float));
    float scale = 1.0f / std::sqrt((float)s.key);

    for (int64_t chunk = s.chunks() - 1; chunk >= 0; chunk--) {
      c.read(s, in, b, h, chunk);
      const float* S = states + (chunk * rows + row) * K * V;
      const float* v_new = v_news + (chunk * rows + row) * C * V;
      int64_t token = b * s.length + chunk * C;
      for (int64_t r = 0; r < c.count; r++)
        std::memcpy(dO + r * V, d_out + ((token + r) * s.heads + h) * s.value, s.value * sizeof(float));
      if (c.count < C) std::memset(dO + c.count * V, 0, (C - c.count) * V * sizeof(float));
      subtract_carried(c, S, residual);

      // 1. Back through the output and the next state to v_new, then through the system to its right side.
      product(d_new, V, c.scores, 1, C, dO, V, C, V, C, 1, 0);
      product(d_new, V, c.k_out, K, 1, dS, V, C, V, K, 1, 1);
      for (int64_t j = 0; j < V; j += LANES) {
        Lanes solved[C];
#pragma GCC unroll 16
        for (int r = C - 1; r >= 0; r--) {
          Lanes x = load(d_new + r * V + j);
#pragma GCC unroll 16
          for (int i = C - 1; i > r; i--) x -= c.lower[i * C + r] * solved[i];
          solved[r] = x;
          store(d_rhs + r * V + j, x);
          store(bd + r * V + j, c.beta[r] * x);
        }
      }
      transpose_rows(v_new, V, v_t);
      product(d_scores, C, dO, V, 1, v_t, C, C, C, V, 1, 0);
      product(d_low, C, d_rhs, V, 1, v_t, C, C, C, V, -1, 0);
      for (int64_t r = 0; r < C; r++) {
        Lanes d_beta = {};
        for (int64_t j = 0; j < V; j += LANES) d_beta += load(d_rhs + r * V + j) * load(residual + r * V + j);
        float more = 0;
        for (int64_t i = 0; i < C; i++) {
          bool same = c.document[r] == c.document[i];
          if (i > r || !same) d_scores[r * C + i] = 0;
          if (i >= r || !same) d_low[r * C + i] = 0;
          more += d_low[r * C + i] * c.low0[r * C + i];
          d_low[r * C + i] *= c.beta[r];
        }
        if (r < c.count) {
          to.beta[(token + r) * s.heads + h] = sum(d_beta) + more;
          for (int64_t j = 0; j < s.value; j += LANES)
            store(to.v + ((token + r) * s.heads + h) * s.value + j, load(bd + r * V + j), s.value - j);
        }
      }

      // 2. Back through the products of queries and keys.
      transpose_state(S, K, V, S_t);
      transpose_state(dS, K, V, dS_t);
      for (int block = 0; block < 2; block++) {
        int64_t at = block * BLOCK;
        const float* keys = block ? c.kx : c.kr;
        product(dqm + at * K, K, d_scores + at * C, C, 1, keys, K, BLOCK, K, C, 1, 0);
        product(dkm + at * K, K, d_low + at * C, C, 1, keys, K, BLOCK, K, C, 1, 0);
        product(dkr + at * K, K, d_scores + at * C + at, 1, C, c.qm + at * K, K, BLOCK, K, BLOCK, 1, 0);
        product(dkr + at * K, K, d_low + at * C + at, 1, C, c.km + at * K, K, BLOCK, K, BLOCK, 1, 1);
      }
      product(cross, K, d_scores + BLOCK * C, 1, C, c.qm + BLOCK * K, K, BLOCK, K, BLOCK, 1, 0);
      product(cross, K, d_low + BLOCK * C, 1, C, c.km + BLOCK * K, K, BLOCK, K, BLOCK, 1, 1);
      for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t j = 0; j < K; j += LANES)
          store(dkr + r * K + j, load(dkr + r * K + j) + load(cross + r * K + j) * load(c.between + j));

      // 3. Back through what meets the states; the references of the exponents cancel.
      std::memset(d_end, 0, K * sizeof(float));
      for (int64_t v = 0; c.passes && v < V; v++)
        for (int64_t j = 0; j < K; j += LANES)
          store(d_end + j, load(d_end + j) + load(S_t + v * K + j) * load(dS_t + v * K + j));
      for (int64_t j = 0; j < K; j += LANES) store(d_end + j, load(d_end + j) * load(c.decay + j));
      auto add = [&](float* sum_of, const float* left, const float* state_t, const float* factor, int64_t from,
                     int64_t until, float sign) {
        product(d_in, K, left, V, 1, state_t, K, C, K, V, sign, 0);
        for (int64_t r = from; r < until; r++)
          for (int64_t j = 0; j < K; j += LANES)
            store(sum_of + r * K + j, load(sum_of + r * K + j) + load(d_in + r * K + j) * load(factor + r / BLOCK * K + j));
      };
      if (c.seen > 0) {
        add(dqm, dO, S_t, c.start, 0, c.seen, 1);
        add(dkm, bd, S_t, c.start, 0, c.seen, -1);
      }
      add(dkr, v_new, dS_t, c.rest, c.reach, C, 1);
      for (int64_t r = c.reach; r < C; r++)
        for (int64_t j = 0; j < K; j += LANES)
          store(d_end + j, load(d_end + j) + load(d_in + r * K + j) * load(c.k_out + r * K + j));

      for (int64_t r = C - 1; r >= 0; r--) {
        bool real = r < c.count;
        for (int64_t j = 0; j < K; j += LANES) {
          int64_t at = r * K + j;
          Lanes a = load(dqm + at), d = load(dkm + at), e = load(dkr + at);
          Lanes local = load(c.qm + at) * a + load(c.km + at) * d - load(c.kr + at) * e;
          Lanes later = r < C - 1 ? load(dG + at + K) : load(d_end + j);
          store(dG + at, local + later);
          store(dqm + at, a * load(c.grow + at));
          store(dkm + at, d * load(c.grow + at) + e * load(c.shrink + at));
          if (real && j < s.key) store(to.g + ((token + r) * s.heads + h) * s.key + j, load(dG + at), s.key - j);
        }
        if (!real) continue;
        int64_t at = ((token + r) * s.heads + h) * s.key;
        normalise_backward(c.q + r * K, dqm + r * K, c.q_rstd[r], scale, s.key, K, to.q + at);
        normalise_backward(c.k + r * K, dkm + r * K, c.k_rstd[r], 1.0f, s.key, K, to.k + at);
      }

      // 4. The gradient of the state before the chunk.
      for (int64_t i = 0; i < K; i++)
        for (int64_t j = 0; j < V; j += LANES) store(dS + i * V + j, c.decay[i] * load(dS + i * V + j));
      if (c.seen > 0) {
        product(dS, V, c.q_in, 1, K, dO, V, K, V, C, 1, 1);
        product(dS, V, c.k_in, 1, K, bd, V, K, V, C, -1, 1);
      }
    }
    for (int64_t i = 0; i < s.key; i++)
      std::memcpy(to.state + (row * s.key + i) * s.value, dS + i * V, s.value * sizeof(float));
  }
}

}  // namespace

extern "C" void kda_forward(const float* q, const float* k, const float* v, const float* g, const float* beta,
                            const uint8_t* first, const float* state, int64_t batch, int64_t length, int64_t heads,
                            int64_t key, int64_t value, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                            int64_t g_stride, float* out, float* state_out, float* states, float* v_news) {
  Sizes s{batch, length, heads, key, value, q_stride, k_stride, v_stride, g_stride};
  scan(s, {q, k, v, g, beta, first}, state, out, state_out, states, v_news);
}

extern "C" void kda_backward(const float* q, const float* k, const float* v, const float* g, const float* beta,
                             const uint8_t* first, const float* states, const float* v_news, const float* d_out,
                             const float* d_last, int64_t batch, int64_t length, int64_t heads, int64_t key,
                             int64_t value, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t g_stride,
                             float* dq, float* dk, float* dv, float* dg, float* d_beta, float* d_state) {
  Sizes s{batch, length, heads, key, value, q_stride, k_stride, v_stride, g_stride};
  scan_backward(s, {q, k, v, g, beta, first}, states, v_news, d_out, d_last, {dq, dk, dv, dg, d_beta, d_state});
}
