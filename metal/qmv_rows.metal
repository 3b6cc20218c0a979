// qmv_rows: y = x W^T for a few rows of x at once, W in MLX's affine 4-bit or 8-bit format, each weight read once for all rows.
//
// Every row is added up in the very order of MLX's own one-row kernel for these shapes (K a multiple of 512): a lane takes VALUES neighbours
// of every 32 * VALUES, 4 at a time in the 4-bit format, scales each lane's part, then the lanes are summed. So a verify of several tokens
// can be bit for bit their plain steps. The codes are shifted down instead of x scaled down: multiplying by a power of two changes no bit.
//
// x (M, K), scales and biases (N, K / GROUP), y (M, N) in T; w (N, K * BITS / 32) uint. M up to 8.
// Threads: grid (32, ceil(N / 4), 1): a simdgroup takes 4 outputs for all rows. No threadgroup memory, no barriers.

#define UNROLL _Pragma("clang loop unroll(full)")

// The lane's codes of one output as floats, first code in the lowest bits.
template <int BITS, int VALUES>
inline void unpack(const device uint* from, thread float* to) {
  const uint2 packed = *(const device uint2*)from;
  constexpr int PER_WORD = 32 / BITS;
  UNROLL
  for (int i = 0; i < VALUES; ++i) {
    const uint word = i < PER_WORD ? packed.x : packed.y;
    to[i] = float((word >> (BITS * (i % PER_WORD))) & ((1u << BITS) - 1u));
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
    sum[m] = sum_of<BITS, VALUES>(mine[m]);
  }
  UNROLL
  for (int r = 0; r < 4; ++r) {
    const int row = first + min(r, last);
    unpack<BITS, VALUES>(w + row * (K * BITS / 32) + at * BITS / 32, code);
    const float scale = static_cast<float>(scales[row * (K / GROUP) + at / GROUP]);
    const float bias = static_cast<float>(biases[row * (K / GROUP) + at / GROUP]);
    UNROLL
    for (int m = 0; m < M; ++m) {
      result[r][m] += scale * product_of<BITS, VALUES>(mine[m], code) + sum[m] * bias;
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
