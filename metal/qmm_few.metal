// qmm_few: y = x W^T for 2 to 32 rows of x at once, W in one of MLX's quantized formats, as products of 8 x 8 matrices. Each weight is read
// and unpacked once for all rows.
//
// K is taken 64 at a time, as 8 products: column i of the j-th matrix of weights, and row i of the j-th matrix of x, stand for place 8 i + j
// of the 64. So a lane, which holds two neighbouring columns of a matrix of weights, unpacks whole words, and one that holds a row of x takes
// 8 neighbours of it at once. The 8 simdgroups of a threadgroup take every 8th 64 of the same weights, so that what they read at a time is
// side by side, and add up their sums at the end. A row's sums do not depend on the number of rows. They are added in another order than in
// MLX's one-row kernel.
//
// AFFINE, GROUP, BITS, w, scales and biases as in qmv_rows. x (M, K) and y (M, N) in T, K a multiple of 64.
// TILES: ceil(M / 8), 1 to 4. BLOCKS: a threadgroup takes 8 BLOCKS outputs.
// Threads: grid (32, 8 ceil(N / (8 BLOCKS)), 1), threadgroup (32, 8, 1).
#include <metal_simdgroup_matrix>

#include "quantized_formats.h"

#define UNROLL _Pragma("clang loop unroll(full)")

// Codes p and p + 16 / BITS of a word, as halves that hold: of an affine format 16 (BITS 4) or 256 (BITS 8) more than the code, as its bits
// then stand in the fraction of a number between that and its double; else the number that an e2m1 or e4m3 code stands for.
template <int BITS, int AFFINE>
inline half2 codes_of(uint word, int p) {
  if (AFFINE) {
    const int left = (BITS == 4 ? 6 : 2) - BITS * p;  // from the code's place to the highest bits of the fraction
    const uint moved = left > 0 ? word << (left > 0 ? left : 0) : word >> (left > 0 ? 0 : -left);
    return as_type<half2>(BITS == 4 ? (moved & 0x03c003c0u) | 0x4c004c00u : (moved & 0x03fc03fcu) | 0x5c005c00u);
  }
  const uint moved = word >> (BITS * p);
  return BITS == 4 ? halves_of_e2m1(moved) : halves_of_e4m3(moved);
}

//// body
constexpr int SIMDGROUPS = 8;
constexpr int WORDS = BITS / 4;  // of 8 codes
constexpr int HALF = 16 / BITS;  // codes in half a word
constexpr int OUTPUTS = 8 * BLOCKS, ROWS = 8 * TILES;
constexpr float OFFSET = BITS == 4 ? 16.0f : 256.0f;
threadgroup float sums_of[SIMDGROUPS * OUTPUTS * ROWS];

const int N = scales_shape[0], M = x_shape[0], K = x_shape[1];
const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
// of a matrix a lane holds two neighbours of a row
const int row = ((lane / 4) & 4) + (lane / 2) % 4, column = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
const int first = OUTPUTS * threadgroup_position_in_grid.y;

simdgroup_float8x8 sums[BLOCKS][TILES];
UNROLL
for (int r = 0; r < BLOCKS; ++r) {
  UNROLL
  for (int t = 0; t < TILES; ++t) {
    sums[r][t] = make_filled_simdgroup_matrix<float, 8>(0.0f);
  }
}

for (int at = 64 * group; at < K; at += 64 * SIMDGROUPS) {
  T mine[TILES][2][8];  // of two rows of x; rows past the end repeat the last one, and outputs likewise, and are not stored
  UNROLL
  for (int t = 0; t < TILES; ++t) {
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const device T* from = x + min(8 * t + column + i, M - 1) * K + at + 8 * row;
      UNROLL
      for (int j = 0; j < 8; j += 4) {
        const vec<T, 4> four = *(const device vec<T, 4>*)(from + j);
        mine[t][i][j] = four.x;
        mine[t][i][j + 1] = four.y;
        mine[t][i][j + 2] = four.z;
        mine[t][i][j + 3] = four.w;
      }
    }
  }
  uint words[BLOCKS][2 * WORDS];
  float scale[BLOCKS], bias[BLOCKS];
  UNROLL
  for (int r = 0; r < BLOCKS; ++r) {
    const int output = min(first + 8 * r + row, N - 1);
    const device uint* from = w + output * (K * BITS / 32) + (at + 8 * column) * BITS / 32;
    UNROLL
    for (int i = 0; i < 2 * WORDS; i += 2) {
      const uint2 two = *(const device uint2*)(from + i);
      words[r][i] = two.x;
      words[r][i + 1] = two.y;
    }
    const int place = output * (K / GROUP) + (at + 8 * column) / GROUP;
    scale[r] = scale_of<GROUP, AFFINE>(scales[place]);
    bias[r] = AFFINE ? static_cast<float>(biases[place]) - OFFSET * scale[r] : 0.0f;
  }
  UNROLL
  for (int i = 0; i < WORDS; ++i) {
    UNROLL
    for (int p = 0; p < HALF; ++p) {
      simdgroup_float8x8 left[2], right[2][TILES];  // matrices j and j + HALF
      const int j = 2 * HALF * i + p;
      UNROLL
      for (int t = 0; t < TILES; ++t) {
        UNROLL
        for (int k = 0; k < 2; ++k) {
          right[k][t].thread_elements()[0] = static_cast<float>(mine[t][0][j + HALF * k]);
          right[k][t].thread_elements()[1] = static_cast<float>(mine[t][1][j + HALF * k]);
        }
      }
      UNROLL
      for (int r = 0; r < BLOCKS; ++r) {
        UNROLL
        for (int k = 0; k < 2; ++k) {
          const half2 codes = codes_of<BITS, AFFINE>(words[r][WORDS * k + i], p);
          const float low = static_cast<float>(codes.x), high = static_cast<float>(codes.y);
          left[0].thread_elements()[k] = AFFINE ? fma(scale[r], low, bias[r]) : low * scale[r];
          left[1].thread_elements()[k] = AFFINE ? fma(scale[r], high, bias[r]) : high * scale[r];
        }
        UNROLL
        for (int k = 0; k < 2; ++k) {
          UNROLL
          for (int t = 0; t < TILES; ++t) {
            simdgroup_multiply_accumulate(sums[r][t], left[k], right[k][t], sums[r][t]);
          }
        }
      }
    }
  }
}

UNROLL
for (int r = 0; r < BLOCKS; ++r) {
  UNROLL
  for (int t = 0; t < TILES; ++t) {
    simdgroup_store(sums[r][t], sums_of + (group * OUTPUTS + 8 * r) * ROWS + 8 * t, ROWS);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = thread_index_in_threadgroup; i < OUTPUTS * M; i += 32 * SIMDGROUPS) {
  const int output = i % OUTPUTS, m = i / OUTPUTS;
  float total = 0.0f;
  UNROLL
  for (int g = 0; g < SIMDGROUPS; ++g) {
    total += sums_of[(g * OUTPUTS + output) * ROWS + m];
  }
  if (first + output < N) {
    y[m * N + first + output] = static_cast<T>(total);
  }
}
