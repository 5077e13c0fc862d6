// The best pools of each row: scores stay in registers and only those above the row's running cut are looked at.
#include <algorithm>
#include <cmath>
#include <vector>
#include <omp.h>
#include "../native/vector.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t ROWS = 4, STEP = 2 * LANES;  // of one pass of the inner loop
constexpr int64_t POOL_BLOCK = 1024;
// Of one thread at a time. Packing the keys costs 1 % of scoring 128 rows and 5 % of 64 (4 heads of width 32).
constexpr int64_t MANY_ROWS = 128, FEW_ROWS = 64;

static inline uint32_t above(Lanes v, float cut) {  // one bit per lane
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(cut), _CMP_GT_OQ);
#else
  IntLanes m = v > cut;
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (uint32_t)(m[i] & 1) << i;
  return bits;
#endif
}

// The best `count` seen so far and some that may yet drop out, by ascending id: a later tie is never better. Scores of
// minus infinity and NaN never come in: they are below every cut.
struct Row {
  std::vector<int32_t> keys, ids;  // keys order as the scores do
  int64_t size = 0;
  float cut = -INFINITY;

  void reserve(int64_t n) { keys.resize(padded(n), INT32_MIN), ids.resize(padded(n)); }

  void push(float score, int32_t id) {
    int32_t bits;
    score += 0.0f;  // -0 becomes 0: they tie
    std::memcpy(&bits, &score, sizeof bits);
    keys[size] = bits ^ ((bits >> 31) & INT32_MAX), ids[size++] = id;
  }

  int64_t at_least(int32_t key) const {
    IntLanes number = {};
    for (int64_t i = 0; i < size; i += LANES) {
      IntLanes block;
      std::memcpy(&block, keys.data() + i, sizeof block);
      number -= block >= key;
    }
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += number[i];
    return total;
  }

  // Keeps the best `count`: bisects for their lowest key, then drops the lower ones and the latest ties.
  void prune(int64_t count) {
    if (size <= count) return;
    for (int64_t i = size; i < padded(size); i++) keys[i] = INT32_MIN;
    int64_t low = INT32_MIN + 1LL, high = INT32_MAX;  // at_least(low) >= count
    while (low < high) {
      int64_t middle = low + (high - low + 1) / 2;
      if (at_least((int32_t)middle) >= count)
        low = middle;
      else
        high = middle - 1;
    }
    int32_t lowest = (int32_t)low, bits = lowest ^ ((lowest >> 31) & INT32_MAX);
    std::memcpy(&cut, &bits, sizeof cut);
    int64_t ties = count - (lowest == INT32_MAX ? 0 : at_least(lowest + 1)), to = 0;
    for (int64_t i = 0; i < size; i++) {
      if (keys[i] < lowest || (keys[i] == lowest && ties-- <= 0)) continue;
      keys[to] = keys[i], ids[to++] = ids[i];
    }
    size = to;
  }

  // `count` ids, ascending: the kept ones, and where these are fewer the lowest others from `first` on.
  void write(int64_t first, int64_t count, int32_t* to) const {
    int64_t others = count - size, next = first;
    for (int64_t n = 0, i = 0; n < count; n++) {
      bool kept = i < size && (others == 0 || ids[i] == next);
      to[n] = kept ? ids[i++] : (int32_t)next;
      if (!kept) others--;
      next++;
    }
  }
};

template <class S> struct Problem {
  const float *q, *weights;  // [T, H, D] scaled, [T, H]; three rows more than T
  const S* keys;             // [P, D], rows `stride` apart
  const int64_t *first, *visible;
  int64_t tokens, heads, width, count, pools, stride;
};

// Columns of the keys of pools [begin, end): [pools / 16, D, 16], whole steps. Beyond the last key it is repeated: no
// row sees it there.
template <class S> void pack(const Problem<S>& p, int64_t begin, int64_t end, float* packed) {
  for (int64_t pool = begin; pool < begin + (end - begin + STEP - 1) / STEP * STEP; pool += LANES)
    columns_of([&](int64_t i) { return p.keys + min64(pool + i, p.pools - 1) * p.stride; }, p.width,
               packed + (pool - begin) * padded(p.width));
}

// Products of one head's queries of four rows with 32 keys.
OWN_REGISTERS void products(const float* q0, int64_t stride, const float* keys, int64_t width,
                                        Lanes (&out)[ROWS][2]) {
  Lanes acc[ROWS][2] = {};
  const float* next = keys + padded(width) * LANES;
  for (int64_t d = 0; d < width; d++) {
    Lanes a = load(keys + d * LANES), b = load(next + d * LANES);
    in_register(a), in_register(b);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      Lanes q = splat(q0[r * stride + d]);
      acc[r][0] += q * a, acc[r][1] += q * b;
    }
  }
  for (int r = 0; r < ROWS; r++) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

// Scores of four rows from `t` on against 32 pools.
template <class S>
inline void score(const Problem<S>& p, int64_t t, const float* keys, Lanes (&total)[ROWS][2]) {
  Lanes zero = {}, found[ROWS][2];
  for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = zero;
  for (int64_t h = 0; h < p.heads; h++) {
    products(p.q + (t * p.heads + h) * p.width, p.heads * p.width, keys, p.width, found);
    for (int r = 0; r < ROWS; r++) {
      float w = p.weights[(t + r) * p.heads + h];
      total[r][0] += w * larger(zero, found[r][0]);  // in this order NaN stays NaN
      total[r][1] += w * larger(zero, found[r][1]);
    }
  }
}

template <class S> void select_rows(const Problem<S>& p, int64_t from, int64_t until, int32_t* chosen) {
  int64_t capacity = 4 * p.count + STEP, W = padded(p.width);
  std::vector<Row> rows(until - from);
  int64_t low = p.pools, high = 0;  // the pools that some row must choose among
  for (int64_t t = from; t < until; t++) {
    if (p.visible[t] <= p.count) continue;
    rows[t - from].reserve(capacity + STEP);
    low = std::min(low, p.first[t]), high = std::max(high, p.first[t] + p.visible[t]);
  }
  low = low / STEP * STEP;
  std::vector<float> packed(high > low ? min64(POOL_BLOCK, high - low + STEP) * W : 0);
  for (int64_t block = low; block < high; block += POOL_BLOCK) {
    pack(p, block, min64(block + POOL_BLOCK, high), packed.data());
    for (int64_t t = from; t < until; t += ROWS) {
      int64_t row[ROWS], least = p.pools, most = 0;
      bool any = false;
      for (int r = 0; r < ROWS; r++) {
        row[r] = min64(t + r, until - 1);
        if (p.visible[row[r]] <= p.count) continue;
        any = true;
        least = std::min(least, p.first[row[r]]), most = std::max(most, p.first[row[r]] + p.visible[row[r]]);
      }
      if (!any) continue;
      int64_t stop = std::min(most, min64(block + POOL_BLOCK, high));
      int64_t start = std::max(block, least / STEP * STEP);
      for (int64_t pool = start; pool < stop; pool += STEP) {
        Lanes total[ROWS][2];
        score(p, t, packed.data() + (pool - block) * W, total);
        for (int r = 0; r < ROWS && t + r < until; r++) {
          if (p.visible[row[r]] <= p.count) continue;
          Row& mine = rows[row[r] - from];
          uint32_t bits = above(total[r][0], mine.cut) | above(total[r][1], mine.cut) << LANES;
          for (; bits; bits &= bits - 1) {
            int lane = __builtin_ctz(bits);
            int64_t id = pool + lane;
            if (id >= p.first[row[r]] && id < p.first[row[r]] + p.visible[row[r]])
              mine.push(total[r][lane / LANES][lane % LANES], (int32_t)id);
          }
          if (mine.size > capacity) mine.prune(p.count);
        }
      }
    }
  }
  for (int64_t t = from; t < until; t++) {
    int32_t* to = chosen + t * p.count;
    int64_t n = std::min(p.visible[t], p.count);
    rows[t - from].prune(p.count);
    rows[t - from].write(p.first[t], n, to);
    for (int64_t i = n; i < p.count; i++) to[i] = -1;
  }
}

template <class S> void select(const Problem<S>& p, int32_t* chosen) {
  int64_t step = p.tokens >= MANY_ROWS * omp_get_max_threads() ? MANY_ROWS : FEW_ROWS;
#pragma omp parallel for schedule(dynamic)
  for (int64_t from = 0; from < p.tokens; from += step)
    select_rows(p, from, std::min(from + step, p.tokens), chosen);
}

}  // namespace

#define EXPORT(S, NAME)                                                                                               \
  extern "C" void select_pools_##NAME(const float* q, const float* weights, const S* keys, const int64_t* first,      \
                                      const int64_t* visible, int64_t tokens, int64_t heads, int64_t width,           \
                                      int64_t count, int64_t pools, int64_t stride, int32_t* chosen) {                \
    select<S>({q, weights, keys, first, visible, tokens, heads, width, count, pools, stride}, chosen);                \
  }
EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
