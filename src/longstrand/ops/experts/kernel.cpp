// Tokens grouped by expert: where each choice lies, its row there and back.
#include <algorithm>
#include <omp.h>
#include "../native/vector.h"

namespace {

struct Sizes {
  int64_t tokens, active, width;
};

template <class S> void gather(const Sizes& s, const S* x, const int64_t* place, S* grouped) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < s.tokens * s.active; i++)
    std::memcpy(grouped + place[i] * s.width, x + i / s.active * s.width, s.width * sizeof(S));
}

// out[t] = sum_a weights[t, a] rows[place[t, a]]; without weights they are 1.
template <class S>
void combine(const Sizes& s, const S* rows, const int64_t* place, const float* weights, S* out) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < s.tokens; t++)
    for (int64_t c = 0; c < s.width; c += LANES) {
      Lanes acc = {};
      for (int64_t i = t * s.active; i < (t + 1) * s.active; i++)
        acc += (weights ? weights[i] : 1.0f) * load(rows + place[i] * s.width + c, s.width - c);
      store(out + t * s.width + c, acc, s.width - c);
    }
}

template <class S>
void combine_backward(const Sizes& s, const S* rows, const int64_t* place, const float* weights, const S* d_out,
                      S* d_rows, float* d_weights) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < s.tokens * s.active; i++) {
    Lanes dot = {};
    const S *row = rows + place[i] * s.width, *up = d_out + i / s.active * s.width;
    for (int64_t c = 0; c < s.width; c += LANES) {
      Lanes d = load(up + c, s.width - c);
      dot += d * load(row + c, s.width - c);
      store(d_rows + place[i] * s.width + c, weights[i] * d, s.width - c);
    }
    d_weights[i] = sum(dot);
  }
}

}  // namespace

extern "C" void experts_count(const int64_t* ids, int64_t choices, int64_t experts, int64_t* counts) {
  std::fill(counts, counts + experts, 0);
  for (int64_t i = 0; i < choices; i++) counts[ids[i]]++;
}

// place[i]: row of choice i, tokens in order; next[e]: an expert's first row, then the one after its last.
extern "C" void experts_place(const int64_t* ids, int64_t choices, int64_t* next, int64_t* place) {
  for (int64_t i = 0; i < choices; i++) place[i] = next[ids[i]]++;
}

#define EXPORT(S, NAME)                                                                                               \
  extern "C" void experts_gather_##NAME(const S* x, const int64_t* place, int64_t tokens, int64_t active,             \
                                        int64_t width, S* grouped) {                                                  \
    gather<S>({tokens, active, width}, x, place, grouped);                                                            \
  }                                                                                                                   \
  extern "C" void experts_combine_##NAME(const S* rows, const int64_t* place, const float* weights, int64_t tokens,   \
                                         int64_t active, int64_t width, S* out) {                                     \
    combine<S>({tokens, active, width}, rows, place, weights, out);                                                   \
  }                                                                                                                   \
  extern "C" void experts_combine_backward_##NAME(const S* rows, const int64_t* place, const float* weights,          \
                                                  const S* d_out, int64_t tokens, int64_t active, int64_t width,      \
                                                  S* d_rows, float* d_weights) {                                      \
    combine_backward<S>({tokens, active, width}, rows, place, weights, d_out, d_rows, d_weights);                     \
  }
EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
