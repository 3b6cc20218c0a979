// gdn_round: one verify round of the gated delta rule for B rows on a flat token axis, rollback included.
//
//   per v-head:  S' = g S,  delta = beta (v - S' k),  S = S' + delta k^T,  y = S q,  with g = exp(log_g)
//
// REPLAY: the first kept[b] entries of the last forward's tape (tape_k, tape_delta, tape_log_g) are applied to the row's state first. Then
// the row's own tokens run. ADVANCES 0: the state before them is given back, and what they do to it as delta, with room for span[1] tokens
// instead of the span[0] = N there are, zeros behind the last. ADVANCES 1: the state after them is given back, and no delta; all of these
// tokens stand. With FLUSH there are none. Numbers of tokens are no template arguments, as each new value of one costs a compilation.
//
// q, k (N, Hk, Dk), v (N, Hv, Dv) in T; y, delta (N, Hv, Dv), log_g, beta (N, Hv), state (B, Hv, Dv, Dk) in float; starts (B + 1), kept (B).
// Threads: grid (32, Dv / (4 ROWS), B Hv). 8 lanes share a row of the state, 4 x ROWS rows a simdgroup; the state stays in registers. No
// threadgroup memory, no barriers. Knows nothing of convolution, gates or norms.
//
// Replay and forward must agree bit for bit, so both use `decayed` and `advance` and nothing is left for the compiler to contract.

#define UNROLL _Pragma("clang loop unroll(full)")  // arrays of a thread stay in registers only where every index is known

// Sum over the 8 lanes of a row, the same in each of them.
inline float sum_of_row(float x) {
  x += simd_shuffle_xor(x, 1);
  x += simd_shuffle_xor(x, 2);
  x += simd_shuffle_xor(x, 4);
  return x;
}

// A lane's share of a vector of 8 * N: runs of 4, so that the 8 lanes read one line of memory at a time.
template <int N, typename T>
inline void read_share(const device T* from, int lane, thread float* to) {
  UNROLL
  for (int j = 0; j < N / 4; ++j) {
    const vec<T, 4> four = *(const device vec<T, 4>*)(from + (j * 8 + lane) * 4);
    UNROLL
    for (int i = 0; i < 4; ++i) {
      to[j * 4 + i] = static_cast<float>(four[i]);
    }
  }
}

template <int N>
inline void write_share(const thread float* from, int lane, device float* to) {
  UNROLL
  for (int j = 0; j < N / 4; ++j) {
    *(device float4*)(to + (j * 8 + lane) * 4) = float4(from[j * 4], from[j * 4 + 1], from[j * 4 + 2], from[j * 4 + 3]);
  }
}

inline float decayed(float state, float decay) {
  return state * decay;
}

inline float advance(float state, float delta, float key) {
  return fma(delta, key, state);
}

//// body
constexpr int SHARE = Dk / 8;
const int lane = thread_index_in_simdgroup % 8;
const int head = thread_position_in_grid.z % Hv;
const int b = thread_position_in_grid.z / Hv;
const int key_head = head / (Hv / Hk);
const int first_row = (thread_position_in_grid.y * 4 + thread_index_in_simdgroup / 8) * ROWS;

const ulong first = ((ulong(b) * Hv + head) * Dv + first_row) * Dk;  // of this thread's rows of the state

float s[ROWS][SHARE];
UNROLL
for (int r = 0; r < ROWS; ++r) {
  read_share<SHARE>(state + first + r * Dk, lane, s[r]);
}

if (REPLAY) {
  const int begin = tape_starts[b];
  for (int t = begin; t < begin + kept[b]; ++t) {
    const float decay = precise::exp(tape_log_g[t * Hv + head]);
    float key[SHARE];
    read_share<SHARE>(tape_k + (t * Hk + key_head) * Dk, lane, key);
    UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const float d = tape_delta[(t * Hv + head) * Dv + first_row + r];
      UNROLL
      for (int e = 0; e < SHARE; ++e) {
        s[r][e] = advance(decayed(s[r][e], decay), d, key[e]);
      }
    }
  }
}

const int begin = starts[b], end = starts[b + 1];
if (!ADVANCES) {
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    write_share<SHARE>(s[r], lane, state_out + first + r * Dk);
  }
}

for (int t = begin; t < end; ++t) {
  const float decay = precise::exp(log_g[t * Hv + head]), step = beta[t * Hv + head];
  float share[SHARE], sum[ROWS];
  read_share<SHARE>(k + (t * Hk + key_head) * Dk, lane, share);
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = 0.0f;
    UNROLL
    for (int e = 0; e < SHARE; ++e) {
      s[r][e] = decayed(s[r][e], decay);
      sum[r] = fma(s[r][e], share[e], sum[r]);
    }
  }
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = sum_of_row(sum[r]);
    const int place = (t * Hv + head) * Dv + first_row + r;
    const float d = step * (static_cast<float>(v[place]) - sum[r]);
    UNROLL
    for (int e = 0; e < SHARE; ++e) {
      s[r][e] = advance(s[r][e], d, share[e]);
    }
    if (!ADVANCES && lane == r) {
      delta[place] = d;
    }
  }
  read_share<SHARE>(q + (t * Hk + key_head) * Dk, lane, share);
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = 0.0f;
    UNROLL
    for (int e = 0; e < SHARE; ++e) {
      sum[r] = fma(s[r][e], share[e], sum[r]);
    }
    sum[r] = sum_of_row(sum[r]);
    if (lane == r) {
      y[(t * Hv + head) * Dv + first_row + r] = sum[r];
    }
  }
}

if (ADVANCES) {
  UNROLL
  for (int r = 0; r < ROWS; ++r) {
    write_share<SHARE>(s[r], lane, state_out + first + r * Dk);
  }
}

if (!ADVANCES && b == 0) {  // zeros where there is room and no token
  for (int t = span[0]; t < span[1]; ++t) {
    UNROLL
    for (int r = 0; r < ROWS; ++r) {
      if (lane == r) {
        delta[(t * Hv + head) * Dv + first_row + r] = 0.0f;
      }
    }
  }
}

// What this mode does not give back must not stay unwritten: its outputs have one element.
if (thread_position_in_grid.x == 0 && thread_position_in_grid.y == 0 && thread_position_in_grid.z == 0) {
  if (ADVANCES) {
    delta[0] = 0.0f;
  }
  if (FLUSH) {
    y[0] = 0.0f;
  }
}
