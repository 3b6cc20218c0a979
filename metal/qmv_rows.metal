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
// Threads: grid (32, ceil(N / OUTPUTS), 1): a simdgroup takes OUTPUTS outputs for all rows. No threadgroup memory, no barriers.
//
// A thread holds two sums for each row and output, and 4 values of one row at a time: all values of 8 rows would need more registers than a
// thread has.

#include "quantized_formats.h"

#define UNROLL _Pragma("clang loop unroll(full)")

// Codes i to i + 3 of the lane's codes of one output as floats: integers of an affine format, else the numbers of e2m1 or e4m3 codes.
template <int BITS, int AFFINE>
inline void unpack(uint2 packed, int i, thread float* to) {
  constexpr int PER_WORD = 32 / BITS;
  constexpr int HALF = PER_WORD / 2;
  const uint word = i < PER_WORD ? packed.x : packed.y;
  if (AFFINE) {
    UNROLL
    for (int j = 0; j < 4; ++j) {
      to[j] = static_cast<float>((word >> (BITS * (i % PER_WORD + j))) & ((1u << BITS) - 1u));
    }
  } else if (BITS == 4) {
    UNROLL
    for (int j = 0; j < 4; ++j) {
      const half2 both = halves_of_e2m1(word >> (BITS * j));
      to[j] = static_cast<float>(i % PER_WORD < HALF ? both.x : both.y);
    }
  } else {
    UNROLL
    for (int j = 0; j < HALF; ++j) {
      const half2 both = halves_of_e4m3(word >> (BITS * j));
      to[j] = static_cast<float>(both.x);
      to[j + HALF] = static_cast<float>(both.y);
    }
  }
}

//// body
constexpr int VALUES = 64 / BITS;
const int N = scales_shape[0], K = x_shape[1];
const int lane = thread_index_in_simdgroup;
const int first = OUTPUTS * thread_position_in_grid.y;
const int last = min(OUTPUTS - 1, N - 1 - first);  // outputs past the end repeat the last one and are not stored

float result[OUTPUTS][M];
UNROLL
for (int r = 0; r < OUTPUTS; ++r) {
  UNROLL
  for (int m = 0; m < M; ++m) {
    result[r][m] = 0.0f;
  }
}

for (int at = lane * VALUES; at < K; at += 32 * VALUES) {
  uint2 packed[OUTPUTS];
  float sum[M], products[OUTPUTS][M];
  UNROLL
  for (int r = 0; r < OUTPUTS; ++r) {
    packed[r] = *(const device uint2*)(w + (first + min(r, last)) * (K * BITS / 32) + at * BITS / 32);
  }
  UNROLL
  for (int m = 0; m < M; ++m) {
    sum[m] = 0.0f;
    UNROLL
    for (int r = 0; r < OUTPUTS; ++r) {
      products[r][m] = 0.0f;
    }
  }
  UNROLL
  for (int i = 0; i < VALUES; i += 4) {
    float code[OUTPUTS][4];
    UNROLL
    for (int r = 0; r < OUTPUTS; ++r) {
      unpack<BITS, AFFINE>(packed[r], i, code[r]);
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      const vec<T, 4> four = *(const device vec<T, 4>*)(x + m * K + at + i);
      const float a = four.x, b = four.y, c = four.z, d = four.w;
      if (BITS == 4) {
        sum[m] += a + b + c + d;
      } else {
        sum[m] += a;
        sum[m] += b;
        sum[m] += c;
        sum[m] += d;
      }
      UNROLL
      for (int r = 0; r < OUTPUTS; ++r) {
        if (BITS == 4) {
          products[r][m] += a * code[r][0] + b * code[r][1] + c * code[r][2] + d * code[r][3];
        } else {
          products[r][m] += a * code[r][0];
          products[r][m] += b * code[r][1];
          products[r][m] += c * code[r][2];
          products[r][m] += d * code[r][3];
        }
      }
    }
  }
  UNROLL
  for (int r = 0; r < OUTPUTS; ++r) {
    const int group = (first + min(r, last)) * (K / GROUP) + at / GROUP;
    const float scale = scale_of<GROUP, AFFINE>(scales[group]);
    const float bias = AFFINE ? static_cast<float>(biases[group]) : 0.0f;
    UNROLL
    for (int m = 0; m < M; ++m) {
      const float product = products[r][m];
      // a statement of its own, as in MLX's kernel: a compiler may fuse products and sums within one, not beyond
      const float part = AFFINE ? scale * product + sum[m] * bias : scale * product;
      result[r][m] += part;
    }
  }
}

UNROLL
for (int r = 0; r < OUTPUTS; ++r) {
  UNROLL
  for (int m = 0; m < M; ++m) {
    const float total = simd_sum(result[r][m]);
    if (lane == 0 && r <= last) {
      y[m * N + first + r] = static_cast<T>(total);
    }
  }
}
