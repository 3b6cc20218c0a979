// qmv_rows: y = x W^T for a few rows of x at once, W in one of MLX's quantized formats, each weight read once for all rows.
//
// Every row is added up in the very order of MLX's own one-row kernel for these shapes (K a multiple of 512): a lane takes VALUES neighbours
// of every 32 * VALUES, 4 at a time in the 4-bit formats, scales each lane's part, then the lanes are summed. So a verify of several tokens
// can be bit for bit their plain steps.
//
// AFFINE 1: a weight is scale * code + bias, the code an unsigned integer of BITS bits; scales and biases (N, K / GROUP) are in T.
// AFFINE 0: a weight is scale * code, the code e2m1 (BITS 4) or e4m3 (BITS 8); scales are bytes, e4m3 for groups of 16 (nvfp4) and e8m0
// for others (mxfp4, mxfp8). There are no biases: the parameter stands for nothing and is not read.
//
// x (M, K) and y (M, N) in T; w (N, K * BITS / 32) uint, the first code in the lowest bits. M up to 8.
// Threads: grid (32, ceil(N / 4), 1): a simdgroup takes 4 outputs for all rows. No threadgroup memory, no barriers.

#include "quantized_formats.h"

#define UNROLL _Pragma("clang loop unroll(full)")

// The lane's codes of one output as floats: integers of an affine format, else the numbers that e2m1 or e4m3 codes stand for.
template <int BITS, int AFFINE, int VALUES>
inline void unpack(const device uint* from, thread float* to) {
  const uint2 packed = *(const device uint2*)from;
  constexpr int PER_WORD = 32 / BITS;
  constexpr int HALF = PER_WORD / 2;
  UNROLL
  for (int i = 0; i < VALUES; ++i) {
    const uint word = i < PER_WORD ? packed.x : packed.y;
    if (AFFINE) {
      to[i] = static_cast<float>((word >> (BITS * (i % PER_WORD))) & ((1u << BITS) - 1u));
    } else if (i % PER_WORD < HALF) {
      const uint codes = word >> (BITS * (i % PER_WORD));
      const half2 both = BITS == 4 ? halves_of_e2m1(codes) : halves_of_e4m3(codes);
      to[i] = static_cast<float>(both.x);
      to[i + HALF] = static_cast<float>(both.y);
    }
  }
}

template <int BITS, int VALUES, typename T>
inline float sum_of(const thread T* x) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < VALUES; i += BITS == 4 ? 4 : 1) {
    if (BITS == 4) {
      sum += float(x[i]) + float(x[i + 1]) + float(x[i + 2]) + float(x[i + 3]);
    } else {
      sum += float(x[i]);
    }
  }
  return sum;
}

template <int BITS, int VALUES, typename T>
inline float product_of(const thread T* x, const thread float* code) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < VALUES; i += BITS == 4 ? 4 : 1) {
    if (BITS == 4) {
      sum += float(x[i]) * code[i] + float(x[i + 1]) * code[i + 1] + float(x[i + 2]) * code[i + 2] + float(x[i + 3]) * code[i + 3];
    } else {
      sum += float(x[i]) * code[i];
    }
  }
  return sum;
}

//// body
constexpr int VALUES = 64 / BITS;
const int N = scales_shape[0], K = x_shape[1];
const int lane = thread_index_in_simdgroup;
const int first = 4 * thread_position_in_grid.y;
const int last = min(3, N - 1 - first);  // outputs past the end repeat the last one and are not stored

float result[4][M];
UNROLL
for (int r = 0; r < 4; ++r) {
  UNROLL
  for (int m = 0; m < M; ++m) {
    result[r][m] = 0.0f;
  }
}

for (int at = lane * VALUES; at < K; at += 32 * VALUES) {
  T mine[M][VALUES];
  float sum[M], code[VALUES];
  UNROLL
  for (int m = 0; m < M; ++m) {
    UNROLL
    for (int i = 0; i < VALUES; i += 4) {
      const vec<T, 4> four = *(const device vec<T, 4>*)(x + m * K + at + i);
      mine[m][i] = four.x;
      mine[m][i + 1] = four.y;
      mine[m][i + 2] = four.z;
      mine[m][i + 3] = four.w;
    }
    sum[m] = AFFINE ? sum_of<BITS, VALUES>(mine[m]) : 0.0f;
  }
  UNROLL
  for (int r = 0; r < 4; ++r) {
    const int row = first + min(r, last);
    const int group = row * (K / GROUP) + at / GROUP;
    unpack<BITS, AFFINE, VALUES>(w + row * (K * BITS / 32) + at * BITS / 32, code);
    const float scale = scale_of<GROUP, AFFINE>(scales[group]);
    const float bias = AFFINE ? static_cast<float>(biases[group]) : 0.0f;
    UNROLL
    for (int m = 0; m < M; ++m) {
      const float product = product_of<BITS, VALUES>(mine[m], code);
      // a statement of its own, as in MLX's kernel: a compiler may fuse products and sums within one, not beyond
      const float part = AFFINE ? scale * product + sum[m] * bias : scale * product;
      result[r][m] += part;
    }
  }
}

UNROLL
for (int r = 0; r < 4; ++r) {
  UNROLL
  for (int m = 0; m < M; ++m) {
    const float total = simd_sum(result[r][m]);
    if (lane == 0 && r <= last) {
      y[m * N + first + r] = static_cast<T>(total);
    }
  }
}
