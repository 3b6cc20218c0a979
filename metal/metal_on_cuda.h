// The part of Metal's language that the kernels use, for nvcc: a simdgroup is a warp, a threadgroup a block.
// Knows no kernel. Collectives name all 32 lanes, so kernels must keep whole simdgroups on one way; the emulator checks that they do.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef __CUDACC_RTC__
#include <stdint.h>
#include <string.h>
#endif

namespace metal {

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;

// As aligned as Metal's vectors are, so that reading one is one access to memory.
template <typename T, int N>
struct alignas(N * sizeof(T)) vec {};

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  __device__ vec(T a, T b) : x(a), y(b) {}
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  __device__ vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  __device__ T operator[](int i) const { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};

typedef vec<float, 4> float4;
typedef vec<uint, 2> uint2;
typedef vec<ulong, 2> ulong2;
typedef vec<__half, 2> half2;

struct uint3 {
  uint x, y, z;
};

// The sizes of an input, passed by value.
struct Sizes {
  int of[4];
  __device__ int operator[](int i) const { return of[i]; }
};

template <typename T, typename U>
__device__ __forceinline__ T as_type(U from) {
  static_assert(sizeof(T) == sizeof(U), "as_type keeps the size");
  T to;
  memcpy(&to, &from, sizeof(T));
  return to;
}

__device__ __forceinline__ int min(int a, int b) { return b < a ? b : a; }
__device__ __forceinline__ float min(float a, float b) { return ::fminf(a, b); }
__device__ __forceinline__ float max(float a, float b) { return ::fmaxf(a, b); }
__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }

namespace precise {
__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ float log(float x) { return ::logf(x); }
__device__ __forceinline__ float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
}  // namespace precise

__device__ __forceinline__ uint simd_shuffle(uint x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ float simd_broadcast(float x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ float simd_shuffle_xor(float x, ushort mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

__device__ __forceinline__ float simd_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    x += simd_shuffle_xor(x, mask);
  }
  return x;
}

__device__ __forceinline__ float simd_max(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    x = max(x, simd_shuffle_xor(x, mask));
  }
  return x;
}

__device__ __forceinline__ float simd_prefix_inclusive_sum(float x) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, x, by);
    x += threadIdx.x % 32 >= by ? before : 0.0f;
  }
  return x;
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

__device__ __forceinline__ void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ __forceinline__ void simdgroup_barrier(mem_flags) { __syncwarp(); }

// An 8 x 8 matrix of which a lane holds two neighbours of a row, those that a lane of an Apple GPU holds.
struct simdgroup_float8x8 {
  float held[2];
  __device__ float* thread_elements() { return held; }
};

__device__ __forceinline__ int matrix_row() { return ((threadIdx.x % 32 / 4) & 4) + threadIdx.x / 2 % 4; }
__device__ __forceinline__ int matrix_column() { return ((threadIdx.x % 32 / 4) & 2) * 2 + threadIdx.x % 2 * 2; }
__device__ __forceinline__ int matrix_lane(int row, int column) {
  return (row & 4) * 4 + (column & 4) * 2 + row % 4 * 2 + column % 4 / 2;
}

template <typename T, int N>
__device__ __forceinline__ simdgroup_float8x8 make_filled_simdgroup_matrix(T value) {
  return {{value, value}};
}

__device__ __forceinline__ void simdgroup_load(simdgroup_float8x8& to, const float* from, ulong row_length, ulong2, bool turned) {
  const int row = matrix_row(), column = matrix_column();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to.held[i] = turned ? from[(column + i) * row_length + row] : from[row * row_length + column + i];
  }
}

__device__ __forceinline__ void simdgroup_store(const simdgroup_float8x8& from, float* to, ulong row_length) {
  const int row = matrix_row(), column = matrix_column();
  to[row * row_length + column] = from.held[0];
  to[row * row_length + column + 1] = from.held[1];
}

// to = a b + c. An Apple GPU has one instruction for it. METAL_COUNTS_INSTRUCTIONS puts another single instruction on the same registers in
// its place: what is compiled so is for counting, and gives wrong results.
__device__ __forceinline__ void simdgroup_multiply_accumulate(
    simdgroup_float8x8& to, const simdgroup_float8x8& a, const simdgroup_float8x8& b, const simdgroup_float8x8& c) {
#ifdef METAL_COUNTS_INSTRUCTIONS
  const auto pair = [](const float* held) { return __hiloint2double(__float_as_int(held[1]), __float_as_int(held[0])); };
  double sum = pair(c.held);
  asm volatile("fma.rn.f64 %0, %1, %2, %0;" : "+d"(sum) : "d"(pair(a.held)), "d"(pair(b.held)));
  to.held[0] = __int_as_float(__double2loint(sum));
  to.held[1] = __int_as_float(__double2hiint(sum));
#else
  const int row = matrix_row(), column = matrix_column();
  float sums[2] = {c.held[0], c.held[1]};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float left = __shfl_sync(0xffffffffu, a.held[k % 2], matrix_lane(row, k));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = fma(left, __shfl_sync(0xffffffffu, b.held[i], matrix_lane(k, column)), sums[i]);
    }
  }
  to.held[0] = sums[0];
  to.held[1] = sums[1];
#endif
}

}  // namespace metal

// Where the text goes. The names that CUDA has too are declared, so that they hide CUDA's.
#define METAL_NAMES         \
  using namespace metal;    \
  using metal::float4;      \
  using metal::fma;         \
  using metal::half2;       \
  using metal::max;         \
  using metal::min;         \
  using metal::uint2;       \
  using metal::uint3;       \
  using metal::ulong2;
#define METAL_BEGINS namespace metal_text { METAL_NAMES
#define METAL_ENDS }
