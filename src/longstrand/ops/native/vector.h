// Sixteen float lanes, by the compiler's vector extension: one source for every instruction set.
#pragma once
#include <cstdint>
#include <cstring>

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef float UnalignedLanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t HalfLanes __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t WordLanes __attribute__((vector_size(64)));

struct bfloat16 { uint16_t bits; };

constexpr int64_t LANES = 16;

// A constant choice among the lanes of a, then of b; g++ has __builtin_shufflevector only since version 12.
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (IntLanes){__VA_ARGS__})
#endif

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
static inline Lanes splat(float x) { return x - (Lanes){}; }

static inline Lanes load(const float* p) { return *(const UnalignedLanes*)p; }
static inline void store(float* p, Lanes v) { *(UnalignedLanes*)p = v; }
static inline Lanes load(const bfloat16* p) {
  WordLanes w = __builtin_convertvector(*(const HalfLanes*)p, WordLanes) << 16;
  return (Lanes)w;
}
static inline void store(bfloat16* p, Lanes v) {  // to the nearest, ties to even; NaN stays NaN
  WordLanes w = (WordLanes)v;
  WordLanes rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
  WordLanes quiet = (w >> 16) | 0x40;
  *(HalfLanes*)p = __builtin_convertvector(v == v ? rounded : quiet, HalfLanes);
}

// The first n lanes of a row's end; the others are zero, and are not written.
template <class S> static inline Lanes load(const S* p, int64_t n) {
  if (n >= LANES) return load(p);
  S end[LANES];
  std::memset(end, 0, sizeof end);
  std::memcpy(end, p, n * sizeof(S));
  return load(end);
}
template <class S> static inline void store(S* p, Lanes v, int64_t n) {
  if (n >= LANES) return store(p, v);
  S end[LANES];
  store(end, v);
  std::memcpy(p, end, n * sizeof(S));
}

// Keeps a value that several products read in a register: the compiler would load it again for each of them, and loads,
// not products, would set the pace.
static inline void in_register(Lanes& v) {
#ifdef __AVX512F__
  asm("" : "+v"(v));
#else
  (void)v;
#endif
}

// For a product's inner loop: inlined into a large function, its sums would lose their registers.
#define OWN_REGISTERS __attribute__((noinline))

static inline float sum(Lanes v) {
  v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  v += SHUFFLE(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  return (v[0] + v[2]) + (v[1] + v[3]);
}

static inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// e^x to 1.5 units in the last place for x in [-87.3, 88]; beyond, the value at the nearer end. NaN stays NaN.
static inline Lanes exponential(Lanes x) {
  x = x < -87.3f ? splat(-87.3f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  const float magic = 12582912.0f;  // 1.5 x 2^23: adding it rounds to a whole number
  Lanes shifted = x * 1.44269504f + magic;
  Lanes n = shifted - magic;
  Lanes r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Lanes p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntLanes power = ((IntLanes)shifted - 0x4b400000 + 127) << 23;
  return p * (Lanes)power;
}
static inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

// Rows of 16 x 16 become columns.
static inline void transpose(const float* in, int64_t stride_in, float* out, int64_t stride_out) {
  Lanes a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = load(in + i * stride_in);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    b[i] = SHUFFLE(a[i], a[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    b[i + 1] = SHUFFLE(a[i], a[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    if (i & 2) continue;
    a[i] = SHUFFLE(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    a[i + 2] = SHUFFLE(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    if (i & 4) continue;
    b[i] = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    b[i + 4] = SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    if (i & 8) continue;
    a[i] = SHUFFLE(b[i], b[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    a[i + 8] = SHUFFLE(b[i], b[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) store(out + i * stride_out, a[i]);
}

// out[c][i] = value c of row i, for 16 rows of any type that lie anywhere; zero beyond the width, up to a whole vector.
template <class Row> static inline void columns_of(Row row, int64_t width, float* out) {
  for (int64_t c = 0; c < width; c += LANES) {
    alignas(64) float rows[LANES * LANES];
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; i++) store(rows + i * LANES, load(row(i) + c, width - c));
    transpose(rows, LANES, out + c * LANES, LANES);
  }
}

// C[m, n] = alpha A B + beta C for small matrices in cache; m is a multiple of 8, n of 16.
// The element (i, k) of A lies at A[i * a_row + k * a_column], so a transposed A needs no copy.
template <int VECTORS>
static OWN_REGISTERS void product_columns(float* c, int64_t ldc, const float* a, int64_t a_row, int64_t a_column,
                                   const float* b, int64_t ldb, int64_t k, float alpha, float beta) {
  constexpr int ROWS = 8;
  Lanes acc[ROWS][VECTORS] = {};
  for (int64_t l = 0; l < k; l++) {
    Lanes row[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      row[v] = load(b + l * ldb + v * LANES);
      in_register(row[v]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      Lanes left = splat(a[i * a_row + l * a_column]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) acc[i][v] += left * row[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      float* to = c + i * ldc + v * LANES;
      Lanes value = alpha * acc[i][v];
      store(to, beta != 0 ? value + beta * load(to) : value);
    }
}
static inline void product(float* c, int64_t ldc, const float* a, int64_t a_row, int64_t a_column, const float* b,
                           int64_t ldb, int64_t m, int64_t n, int64_t k, float alpha, float beta) {
  for (int64_t i = 0; i < m; i += 8) {
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
      product_columns<2>(c + i * ldc + j, ldc, a + i * a_row, a_row, a_column, b + j, ldb, k, alpha, beta);
    if (j < n) product_columns<1>(c + i * ldc + j, ldc, a + i * a_row, a_row, a_column, b + j, ldb, k, alpha, beta);
  }
}
