// The part of Metal's language that gdn_round and qmv_rows use, for nvcc: a simdgroup is a warp, a threadgroup a block.
// Knows no kernel. Collectives name all 32 lanes, so kernels must keep whole simdgroups on one way; the emulator checks that they do.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <string.h>

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
__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }

namespace precise {
__device__ __forceinline__ float exp(float x) { return ::expf(x); }
}  // namespace precise

__device__ __forceinline__ float simd_shuffle_xor(float x, ushort mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

__device__ __forceinline__ float simd_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    x += simd_shuffle_xor(x, mask);
  }
  return x;
}

}  // namespace metal

// Where the text goes. The names that CUDA has too are declared, so that they hide CUDA's.
#define METAL_BEGINS        \
  namespace metal_text {    \
  using namespace metal;    \
  using metal::float4;      \
  using metal::fma;         \
  using metal::half2;       \
  using metal::min;         \
  using metal::uint2;       \
  using metal::uint3;
#define METAL_ENDS }
