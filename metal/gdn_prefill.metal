// gdn_prefill: the gated delta rule over many tokens that all stand, C of them at a time, as products of 8 x 8 matrices.
//
// With c_t the sum of log_g from the chunk's first token to t, K, Q, V the chunk's rows and S the state (Dv, Dk) before it:
//   (I + A) delta = beta (V - exp(c) K S^T),   A_ti = beta_t exp(c_t - c_i) k_t . k_i for i < t
//   Y = exp(c) Q S^T + P delta,                P_ti = exp(c_t - c_i) q_t . k_i for i <= t
//   S <- exp(c_last) S + (exp(c_last - c) delta)^T K
// (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", with decay). The system is solved by substitution: squaring
// its matrix loses float32 where keys are alike. Not bit for bit what steps give, so only for tokens that need no rollback.
//
// q, k (N, Hk, Dk), v (N, Hv, Dv) in T; y (N, Hv, Dv), log_g, beta (N, Hv), state (B, Hv, Dv, Dk) in float; starts (B + 1).
// Threads: grid (32, Dv / 8, B Hv), threadgroup (32, 4, 1): a simdgroup holds 8 rows of the state in registers, 4 of them share the chunk.
#include <metal_simdgroup_matrix>

#define UNROLL _Pragma("clang loop unroll(full)")

inline simdgroup_float8x8 tile_at(const threadgroup float* from, int row_length) {
  simdgroup_float8x8 tile;
  simdgroup_load(tile, from, row_length, ulong2(0, 0), false);
  return tile;
}

inline simdgroup_float8x8 turned_tile_at(const threadgroup float* from, int row_length) {
  simdgroup_float8x8 tile;
  simdgroup_load(tile, from, row_length, ulong2(0, 0), true);
  return tile;
}

//// body
constexpr int TILES = Dk / 8, BLOCKS = C / 8, THREADS = 128;
threadgroup float keys[C * Dk];
threadgroup float queries[C * Dk];
threadgroup float coupling[C * C];
threadgroup float scores[C * C];
threadgroup float deltas[4 * 8 * C];  // of each simdgroup (8, C): S k, then delta
threadgroup float outputs[4 * 8 * C];  // of each simdgroup (8, C): S q, then y
threadgroup float sums[C];
threadgroup float steps[C];

const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup, thread_index = thread_index_in_threadgroup;
const int head = thread_position_in_grid.z % Hv, b = thread_position_in_grid.z / Hv;
const int key_head = head / (Hv / Hk);
const int first_row = thread_position_in_grid.y * 8;
const int mine = group * 8 * C;
const ulong place = ((ulong(b) * Hv + head) * Dv + first_row) * Dk;
const int begin = starts[b], end = starts[b + 1];

simdgroup_float8x8 s[TILES];
UNROLL
for (int j = 0; j < TILES; ++j) {
  simdgroup_load(s[j], state + place + j * 8, Dk, ulong2(0, 0), false);
}

for (int at = begin; at < end; at += C) {
  const int num = min(C, end - at);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last chunk is no longer read
  for (int i = thread_index * 4; i < C * Dk; i += THREADS * 4) {
    const int t = i / Dk;  // past the end: zeros, which change nothing
    const int from = ((at + t) * Hk + key_head) * Dk + i % Dk;
    UNROLL
    for (int j = 0; j < 4; ++j) {
      keys[i + j] = t < num ? static_cast<float>(k[from + j]) : 0.0f;
      queries[i + j] = t < num ? static_cast<float>(q[from + j]) : 0.0f;
    }
  }
  if (group == 0) {
    const float sum = simd_prefix_inclusive_sum(lane < num ? log_g[(at + lane) * Hv + head] : 0.0f);
    if (lane < C) {
      sums[lane] = sum;
      steps[lane] = lane < num ? beta[(at + lane) * Hv + head] : 0.0f;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // k . k and q . k, on and below the diagonal, shared out among the simdgroups
  for (int i = group; i < 2 * BLOCKS * BLOCKS; i += 4) {
    const int row = i / 2 / BLOCKS, column = i / 2 % BLOCKS;
    if (column <= row) {
      simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8>(0.0f);
      for (int j = 0; j < TILES; ++j) {
        const simdgroup_float8x8 left = tile_at((i % 2 ? queries : keys) + row * 8 * Dk + j * 8, Dk);
        simdgroup_multiply_accumulate(sum, left, turned_tile_at(keys + column * 8 * Dk + j * 8, Dk), sum);
      }
      simdgroup_store(sum, (i % 2 ? scores : coupling) + row * 8 * C + column * 8, C);
    }
  }
  // S k and S q for our rows
  UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    simdgroup_float8x8 seen = make_filled_simdgroup_matrix<float, 8>(0.0f), read = make_filled_simdgroup_matrix<float, 8>(0.0f);
    UNROLL
    for (int j = 0; j < TILES; ++j) {
      simdgroup_multiply_accumulate(seen, s[j], turned_tile_at(keys + i * 8 * Dk + j * 8, Dk), seen);
      simdgroup_multiply_accumulate(read, s[j], turned_tile_at(queries + i * 8 * Dk + j * 8, Dk), read);
    }
    simdgroup_store(seen, deltas + mine + i * 8, C);
    simdgroup_store(read, outputs + mine + i * 8, C);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = thread_index; i < C * C; i += THREADS) {
    const int t = i / C, earlier = i % C;
    const float decay = precise::exp(min(sums[t] - sums[earlier], 0.0f));
    coupling[i] = earlier < t ? coupling[i] * decay * steps[t] : 0.0f;
    scores[i] = earlier <= t ? scores[i] * decay : 0.0f;
  }
  for (int i = lane; i < 8 * C; i += 32) {
    outputs[mine + i] *= precise::exp(sums[i % C]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (lane < 8) {  // a row of the state each
    threadgroup float* delta = deltas + mine + lane * C;
    for (int t = 0; t < C; ++t) {
      const float value = t < num ? static_cast<float>(v[((at + t) * Hv + head) * Dv + first_row + lane]) : 0.0f;
      float x = steps[t] * (value - precise::exp(sums[t]) * delta[t]);
      for (int i = 0; i < t; ++i) {
        x = fma(-coupling[t * C + i], delta[i], x);
      }
      delta[t] = x;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    simdgroup_float8x8 sum = tile_at(outputs + mine + i * 8, C);
    for (int j = 0; j <= i; ++j) {
      simdgroup_multiply_accumulate(sum, tile_at(deltas + mine + j * 8, C), turned_tile_at(scores + i * 8 * C + j * 8, C), sum);
    }
    simdgroup_store(sum, outputs + mine + i * 8, C);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = lane; i < 8 * C; i += 32) {
    const int row = i % 8, t = i / 8;
    if (t < num) {
      y[((at + t) * Hv + head) * Dv + first_row + row] = outputs[mine + row * C + t];
    }
    deltas[mine + row * C + t] *= precise::exp(sums[C - 1] - sums[t]);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_float8x8 delta[BLOCKS];
  UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    delta[i] = tile_at(deltas + mine + i * 8, C);
  }
  const float carry = precise::exp(sums[C - 1]);
  UNROLL
  for (int j = 0; j < TILES; ++j) {
    s[j].thread_elements()[0] *= carry;
    s[j].thread_elements()[1] *= carry;
    UNROLL
    for (int i = 0; i < BLOCKS; ++i) {
      simdgroup_multiply_accumulate(s[j], delta[i], tile_at(keys + i * 8 * Dk + j * 8, Dk), s[j]);
    }
  }
}

UNROLL
for (int j = 0; j < TILES; ++j) {
  simdgroup_store(s[j], state_out + place + j * 8, Dk);
}
