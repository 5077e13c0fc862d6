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
constexpr int64_t ROW_BLOCK = 64, POOL_BLOCK = 1024;

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

// The best `count` seen so far and some that may yet drop out, by ascending id: a later tie is never better.
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
};

struct Problem {
  const float *q, *weights;  // [T, H, D] scaled, [T, H]; three rows more than T
  const float* packed;       // [pools / 16, D, 16]
  const int64_t *first, *visible;
  int64_t tokens, heads, width, count, begin, end;  // pools [begin, end) are packed
};

// Products of one head's queries of four rows with 32 keys.
OWN_REGISTERS void products(const float* q0, int64_t stride, const float* keys, int64_t width,
                                        Lanes (&out)[ROWS][2]) {
  Lanes acc[ROWS][2] = {};
  for (int64_t d = 0; d < width; d++) {
    Lanes a = load(keys + d * LANES), b = load(keys + (width + d) * LANES);
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
inline void score(const Problem& p, int64_t t, const float* keys, Lanes (&total)[ROWS][2]) {
  Lanes zero = {}, found[ROWS][2];
  for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = zero;
  for (int64_t h = 0; h < p.heads; h++) {
    products(p.q + (t * p.heads + h) * p.width, p.heads * p.width, keys, p.width, found);
    for (int r = 0; r < ROWS; r++) {
      float w = p.weights[(t + r) * p.heads + h];
      total[r][0] += w * larger(found[r][0], zero);
      total[r][1] += w * larger(found[r][1], zero);
    }
  }
}

void select_block(const Problem& p, int64_t from, int64_t until, int32_t* chosen) {
  int64_t capacity = 4 * p.count + STEP;
  std::vector<Row> rows(until - from);
  int64_t low = p.end, high = p.begin;  // the pools that some row must choose among
  for (int64_t t = from; t < until; t++) {
    if (p.visible[t] <= p.count) continue;
    rows[t - from].reserve(capacity + STEP);
    low = std::min(low, p.first[t]), high = std::max(high, p.first[t] + p.visible[t]);
  }
  low = p.begin + (low - p.begin) / STEP * STEP;
  for (int64_t block = low; block < high; block += POOL_BLOCK)
    for (int64_t t = from; t < until; t += ROWS) {
      int64_t row[ROWS], least = p.end, most = p.begin;
      bool any = false;
      for (int r = 0; r < ROWS; r++) {
        row[r] = min64(t + r, until - 1);
        if (p.visible[row[r]] <= p.count) continue;
        any = true;
        least = std::min(least, p.first[row[r]]), most = std::max(most, p.first[row[r]] + p.visible[row[r]]);
      }
      if (!any) continue;
      int64_t stop = std::min(most, min64(block + POOL_BLOCK, high));
      int64_t start = std::max(block, p.begin + (least - p.begin) / STEP * STEP);
      for (int64_t pool = start; pool < stop; pool += STEP) {
        Lanes total[ROWS][2];
        score(p, t, p.packed + (pool - p.begin) * p.width, total);
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
  for (int64_t t = from; t < until; t++) {
    int32_t* to = chosen + t * p.count;
    int64_t n = std::min(p.visible[t], p.count);
    if (p.visible[t] <= p.count) {
      for (int64_t i = 0; i < n; i++) to[i] = (int32_t)(p.first[t] + i);
    } else {
      Row& mine = rows[t - from];
      mine.prune(p.count);
      n = mine.size;
      std::copy(mine.ids.begin(), mine.ids.begin() + n, to);
    }
    for (int64_t i = n; i < p.count; i++) to[i] = -1;
  }
}

}  // namespace

extern "C" void select_pack_keys(const float* keys, int64_t pools, int64_t width, float* packed) {
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < pools; block += LANES)
    for (int64_t i = 0; i < LANES; i++)
      for (int64_t d = 0; d < width; d++)
        packed[block * width + d * LANES + i] = block + i < pools ? keys[(block + i) * width + d] : 0.0f;
}

extern "C" void select_pools(const float* q, const float* weights, const float* packed, const int64_t* first,
                             const int64_t* visible, int64_t tokens, int64_t heads, int64_t width, int64_t count,
                             int64_t begin, int64_t end, int32_t* chosen) {
  Problem p{q, weights, packed, first, visible, tokens, heads, width, count, begin, end};
#pragma omp parallel for schedule(dynamic)
  for (int64_t from = 0; from < tokens; from += ROW_BLOCK)
    select_block(p, from, std::min(from + ROW_BLOCK, tokens), chosen);
}
