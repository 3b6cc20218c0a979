// conv_qkv: everything between a Gated DeltaNet layer's projection and its recurrence, for B rows on a flat token axis.
//
// Causal depthwise convolution of 4 taps over [the row's last 3 inputs | its new inputs], SiLU, split into q, k, v; q and k divided by their
// L2 norm, q also by sqrt(Dk); log_g = neg_a softplus(a + dt_bias), beta = sigmoid(b).
//
// The 3 inputs before a row's first token stand at kept[b] .. kept[b] + 2 of [window (3) | the last forward's inputs], so rolling back is
// picking another kept. They are given back as the window before this forward, and inputs_out holds this forward's inputs for the next; with
// FACTS the window is the 3 inputs after this forward, and inputs_out has one element.
//
// projected (N, STRIDE) in T, columns q | k | v | z | b | a with C = 2 Hk Dk + Hv Dv before z; last_inputs (M, LAST_STRIDE), its first C columns
// are read; window (B, 3, C) in T; weight (4, C) any float; neg_a, dt_bias (Hv) float; starts, last_starts (B + 1), kept (B).
// k, log_g and inputs_out may have room for more tokens, span[1] instead of span[0] = N: zeros behind the last.
// Threads: grid (32 S, 2 Hk + Hv, B) for S segments of at most SEGMENT tokens: a simdgroup takes one head and one segment of one row, inputs
// and taps in registers. No number of tokens is a template argument, as each new value of one costs a compilation.
// No threadgroup memory, no barriers; sums in float. Knows nothing of the recurrence.

#define UNROLL _Pragma("clang loop unroll(full)")

inline float silu(float x) {
  return x / (1.0f + precise::exp(-x));
}

// log(1 + e) loses e where it is small; the quotient puts it back.
inline float softplus(float x) {
  const float e = precise::exp(-fabs(x)), u = 1.0f + e;
  const float tail = u == 1.0f ? e : precise::log(u) * (e / (u - 1.0f));
  return max(x, 0.0f) + tail;
}

// Where the row's input `at` lies: 0 is its first new token, negative ones come before it.
struct Place {
  int begin, window_row, last_begin, kept;
};

template <int C, int STRIDE, int LAST_STRIDE, typename T>
inline T input_at(const device T* projected, const device T* window, const device T* last_inputs, Place row, int at, int channel) {
  if (at >= 0) {
    return projected[(row.begin + at) * STRIDE + channel];
  }
  const int joined = row.kept + 3 + at;
  if (joined < 3) {
    return window[(row.window_row + joined) * C + channel];
  }
  return last_inputs[(row.last_begin + joined - 3) * LAST_STRIDE + channel];
}

//// body
constexpr int C = 2 * Hk * Dk + Hv * Dv;
constexpr int SHARE = (Dk > Dv ? Dk : Dv) / 32;
const int lane = thread_index_in_simdgroup;
const int unit = thread_position_in_grid.y;  // q heads, then k heads, then v heads
const int b = thread_position_in_grid.z;
const int segment = thread_position_in_grid.x / 32;
const bool is_value = unit >= 2 * Hk;
const int size = is_value ? Dv : Dk;
const int channel = is_value ? 2 * Hk * Dk + (unit - 2 * Hk) * Dv : unit * Dk;
const int width = starts[b + 1] - starts[b];
const int first = segment * SEGMENT, end = min(width, first + SEGMENT);
Place row;
row.begin = starts[b];
row.window_row = 3 * b;
row.last_begin = REPLAY ? last_starts[b] : 0;
row.kept = REPLAY ? kept[b] : 0;

float tap[4][SHARE], x[4][SHARE];
UNROLL
for (int e = 0; e < SHARE; ++e) {
  const int c = e * 32 + lane;
  if (c < size) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      tap[i][e] = static_cast<float>(weight[i * C + channel + c]);
    }
    UNROLL
    for (int i = 0; i < 3; ++i) {
      x[i][e] = first < end ? static_cast<float>(input_at<C, STRIDE, LAST_STRIDE>(projected, window, last_inputs, row, first - 3 + i, channel + c)) : 0.0f;
      if (segment == 0) {
        const int from = FACTS ? width - 3 + i : i - 3;
        window_out[(3 * b + i) * C + channel + c] = input_at<C, STRIDE, LAST_STRIDE>(projected, window, last_inputs, row, from, channel + c);
      }
    }
  }
}

for (int at = first; at < end; ++at) {
  const int token = row.begin + at;
  float mixed[SHARE], squares = 0.0f;
  UNROLL
  for (int e = 0; e < SHARE; ++e) {
    const int c = e * 32 + lane;
    mixed[e] = 0.0f;
    if (c < size) {
      const T given = projected[token * STRIDE + channel + c];
      if (!FACTS) {
        inputs_out[token * C + channel + c] = given;
      }
      x[3][e] = static_cast<float>(given);
      UNROLL
      for (int i = 0; i < 4; ++i) {
        mixed[e] = fma(x[i][e], tap[i][e], mixed[e]);
      }
      UNROLL
      for (int i = 0; i < 3; ++i) {
        x[i][e] = x[i + 1][e];
      }
      mixed[e] = silu(mixed[e]);
      squares = fma(mixed[e], mixed[e], squares);
    }
  }
  float scale = 1.0f;
  if (!is_value) {
    scale = precise::rsqrt(simd_sum(squares) + 1e-6f);
  }
  if (unit < Hk) {
    scale *= precise::rsqrt(float(Dk));
  }
  UNROLL
  for (int e = 0; e < SHARE; ++e) {
    const int c = e * 32 + lane;
    if (c < size) {
      const T out = static_cast<T>(mixed[e] * scale);
      if (unit < Hk) {
        q[token * Hk * Dk + channel + c] = out;
      } else if (!is_value) {
        k[token * Hk * Dk + channel - Hk * Dk + c] = out;
      } else {
        v[token * Hv * Dv + channel - 2 * Hk * Dk + c] = out;
      }
    }
  }
}

if (is_value && first + lane < end) {  // the gates: a token a lane
  const int head = unit - 2 * Hk, token = row.begin + first + lane;
  const int gates = token * STRIDE + C + Hv * Dv + head;
  log_g[token * Hv + head] = neg_a[head] * softplus(static_cast<float>(projected[gates + Hv]) + dt_bias[head]);
  beta[token * Hv + head] = 1.0f / (1.0f + precise::exp(-static_cast<float>(projected[gates])));
}

if (b == 0 && segment == 0) {  // zeros where there is room and no token
  for (int t = span[0]; t < span[1]; ++t) {
    for (int c = lane; c < size; c += 32) {
      if (!FACTS) {
        inputs_out[t * C + channel + c] = static_cast<T>(0.0f);
      }
      if (unit >= Hk && !is_value) {
        k[t * Hk * Dk + channel - Hk * Dk + c] = static_cast<T>(0.0f);
      }
    }
    if (is_value && lane == 0) {
      log_g[t * Hv + unit - 2 * Hk] = 0.0f;
    }
  }
}

// What this mode does not give back must not stay unwritten: it has one element.
if (FACTS && thread_position_in_grid.x == 0 && thread_position_in_grid.y == 0 && thread_position_in_grid.z == 0) {
  inputs_out[0] = static_cast<T>(0.0f);
}
