// kv_attend: attention of a few queries of one row to keys and values in 8 or 4 bits, each of which is read once for all queries that share
// it: those of all heads of its group and of all tokens of a verify.
//
// A number of a key is scale * code + bias. Codes are unsigned integers of BITS bits, the first in the lowest; scales and biases (T) are one
// for 64 numbers. Buffers have CAPACITY tokens: codes (1, Hkv, CAPACITY, D * BITS / 32) uint, scales and biases (1, Hkv, CAPACITY, D / 64).
// q (Hkv, M, D) in T: of each key head its M queries, W tokens after another for each of its heads. ends (W) int, rising: how many tokens
// each of the W tokens sees, at least 1; q is scaled. Tokens behind the last of ends are not read. Sums are float.
//
// A threadgroup takes up to ROWS queries of one key head and one of S parts of the row, whose softmax it takes alone. best, total (Hkv, S, M)
// float: the largest score and the sum of the weights against it; sums (Hkv, S, M, D) float: the values by those weights. A part of which
// a query sees nothing has the total 0 and LEAST for the largest score.
//
// SIMDGROUPS: D / 32, and twice as many for 64 ROWS. For scores they are KS along tokens, 32 each, a lane a token, and the others along
// queries. CHUNK numbers of each query at a time are staged in threadgroup memory, where the weights are stored later. For values a simdgroup
// has 32 numbers of the head, a lane one of them, and MV queries, and goes over all tokens. A lane loads a word, a scale and a bias that other
// lanes need too, and all lanes share them by shuffles.
// Threads: grid (32 * Hkv, SIMDGROUPS, S * ceil(M / ROWS)), threadgroup (32, SIMDGROUPS, 1).

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr float LEAST = -3.402823466e38f;  // of what is not seen

//// body
constexpr int NS = D / 32;
constexpr int KS = 16 * NS / ROWS >= NS ? NS : 16 * NS / ROWS > 0 ? 16 * NS / ROWS : 1;  // simdgroups along tokens
constexpr int SIMDGROUPS = ROWS > 32 ? 2 * NS : NS;
constexpr int MT = ROWS / (SIMDGROUPS / KS);  // queries of a simdgroup, for scores
constexpr int MV = ROWS / (SIMDGROUPS / NS);  // for values
constexpr int BLOCK = 32 * KS;
constexpr int PER_WORD = 32 / BITS;
constexpr int WORDS = D / PER_WORD;  // of a key
constexpr int GROUPS = D / 64;
constexpr uint MASK = (1u << BITS) - 1u;
constexpr int CHUNK = D < BLOCK ? D : BLOCK;
constexpr int SPAN = CHUNK < 64 ? CHUNK : 64;  // numbers of a chunk that share a scale
constexpr int SHARED = 32 / PER_WORD;          // words of a token's 32 numbers

threadgroup float4 fours[BLOCK * ROWS / 4];
threadgroup float* weights = reinterpret_cast<threadgroup float*>(fours);  // (BLOCK, ROWS)
threadgroup float block_best[KS * ROWS];
threadgroup float block_total[KS * ROWS];
threadgroup float row_best[ROWS];
threadgroup float row_total[ROWS];
threadgroup float shrink[ROWS];

const int M = q_shape[1], W = ends_shape[0], CAPACITY = key_codes_shape[2];
const int lane = thread_index_in_simdgroup, simd = thread_position_in_threadgroup.y;
const int thread_index = 32 * simd + lane;
const int head = threadgroup_position_in_grid.x;
const int num_tiles = (M + ROWS - 1) / ROWS;
const int part = threadgroup_position_in_grid.z / num_tiles;
const int first_row = ROWS * (threadgroup_position_in_grid.z % num_tiles);
const int num_parts = threads_per_grid.z / num_tiles;
const int num_rows = min(ROWS, M - first_row);
const int along = simd % KS, mine = MT * (simd / KS);  // which 32 tokens of a block, and from which query on
const int last = ends[W - 1];
const int each = ((last + num_parts - 1) / num_parts + BLOCK - 1) / BLOCK * BLOCK;
const int begin = part * each, end = min(begin + each, last);
const int own = 32 * (simd % NS) + lane, first = MV * (simd / NS);  // for values: number of the head, and from which query on
const ulong tokens = ulong(head) * CAPACITY;

float acc[MV];
UNROLL
for (int m = 0; m < MV; ++m) {
  acc[m] = 0.0f;
}
for (int m = thread_index; m < ROWS; m += 32 * SIMDGROUPS) {
  row_best[m] = LEAST;
  row_total[m] = 0.0f;
}

for (int at = begin; at < end; at += BLOCK) {
  // scores: a lane has one token
  const int token = at + 32 * along + lane;
  const ulong key = tokens + min(token, end - 1);
  float score[MT];
  UNROLL
  for (int m = 0; m < MT; ++m) {
    score[m] = 0.0f;
  }
  for (int c = 0; c < D; c += CHUNK) {
    for (int i = thread_index; i < ROWS * CHUNK; i += 32 * SIMDGROUPS) {
      const int m = i / CHUNK;
      weights[i] = m < num_rows ? static_cast<float>(q[(ulong(head) * M + first_row + m) * D + c + i % CHUNK]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int g = c; g < c + CHUNK; g += SPAN) {
      const float scale = static_cast<float>(key_scales[key * GROUPS + g / 64]);
      const float bias = static_cast<float>(key_biases[key * GROUPS + g / 64]);
      for (int n = g; n < g + SPAN; n += PER_WORD) {
        const uint word = key_codes[key * WORDS + n / PER_WORD];
        float number[PER_WORD];
        UNROLL
        for (int j = 0; j < PER_WORD; ++j) {
          number[j] = fma(scale, static_cast<float>((word >> (BITS * j)) & MASK), bias);
        }
        UNROLL
        for (int m = 0; m < MT; ++m) {
          UNROLL
          for (int j = 0; j < PER_WORD; j += 4) {
            const float4 from = fours[((mine + m) * CHUNK + n - c + j) / 4];
            UNROLL
            for (int k = 0; k < 4; ++k) {
              score[m] = fma(from[k], number[j + k], score[m]);
            }
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL
  for (int m = 0; m < MT; ++m) {
    const bool sees = mine + m < num_rows && token < min(end, ends[(first_row + mine + m) % W]);
    score[m] = sees ? score[m] : LEAST;
    const float most = simd_max(score[m]);
    if (lane == 0) {
      block_best[along * ROWS + mine + m] = most;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // weights, against the largest score so far
  UNROLL
  for (int m = 0; m < MT; ++m) {
    const int row = mine + m;
    float most = row_best[row];
    UNROLL
    for (int k = 0; k < KS; ++k) {
      most = max(most, block_best[k * ROWS + row]);
    }
    const float weight = score[m] > LEAST ? precise::exp(score[m] - most) : 0.0f;
    weights[(32 * along + lane) * ROWS + row] = weight;
    const float sum = simd_sum(weight);
    if (lane == 0) {
      block_total[along * ROWS + row] = sum;
      if (along == 0) {
        shrink[row] = precise::exp(row_best[row] - most);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // values: a lane has one number of the head
  for (int m = thread_index; m < ROWS; m += 32 * SIMDGROUPS) {
    float sum = row_total[m] * shrink[m], most = row_best[m];
    UNROLL
    for (int k = 0; k < KS; ++k) {
      sum += block_total[k * ROWS + m];
      most = max(most, block_best[k * ROWS + m]);
    }
    row_total[m] = sum;
    row_best[m] = most;
  }
  UNROLL
  for (int m = 0; m < MV; ++m) {
    acc[m] *= shrink[first + m];
  }
  for (int t = 0; t < min(BLOCK, end - at); t += 32) {
    const ulong scaled = (tokens + min(at + t + lane, end - 1)) * GROUPS + own / 64;
    const float scales = static_cast<float>(value_scales[scaled]), biases = static_cast<float>(value_biases[scaled]);
    for (int u = 0; u < min(32, end - at - t); u += PER_WORD) {
      const ulong value = tokens + min(at + t + u + lane / SHARED, end - 1);
      const uint words = value_codes[value * WORDS + SHARED * (simd % NS) + lane % SHARED];
      for (int v = u; v < min(u + PER_WORD, end - at - t); ++v) {
        const uint word = simd_shuffle(words, SHARED * (v - u) + lane / PER_WORD);
        const float code = static_cast<float>((word >> (BITS * (lane % PER_WORD))) & MASK);
        const float number = fma(simd_broadcast(scales, v), code, simd_broadcast(biases, v));
        UNROLL
        for (int m = 0; m < MV; m += 4) {
          const float4 weight = fours[((t + v) * ROWS + first + m) / 4];
          UNROLL
          for (int k = 0; k < 4; ++k) {
            acc[m + k] = fma(weight[k], number, acc[m + k]);
          }
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

const ulong place = (ulong(head) * num_parts + part) * M + first_row;
UNROLL
for (int m = 0; m < MV; ++m) {
  if (first + m < num_rows) {
    sums[(place + first + m) * D + own] = acc[m];
  }
}
for (int m = thread_index; m < num_rows; m += 32 * SIMDGROUPS) {
  best[place + m] = row_best[m];
  total[place + m] = row_total[m];
}
