// What our kernels use of the Metal Shading Language's library, declared for clang with Metal's address spaces: device, constant and
// threadgroup memory are types of their own, and a pointer of one is none of another. Declarations only; nothing is run.
// Vectors are clang's, because a class would have its functions for one address space each. front_end.py makes `float4(` into `make_float4(`.
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline __attribute__((always_inline))

namespace metal {
typedef _Float16 half;
typedef __bf16 bfloat;
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

template <class T, class U> T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type keeps the size");
  return __builtin_bit_cast(T, u);
}

#define VECTORS(T)                                                                                                   \
  typedef vec<T, 2> T##2;                                                                                            \
  typedef vec<T, 3> T##3;                                                                                            \
  typedef vec<T, 4> T##4;                                                                                            \
  inline T##2 make_##T##2(T a) { return T##2{a, a}; }                                                                \
  inline T##2 make_##T##2(T a, T b) { return T##2{a, b}; }                                                           \
  inline T##3 make_##T##3(T a) { return T##3{a, a, a}; }                                                             \
  inline T##3 make_##T##3(T a, T b, T c) { return T##3{a, b, c}; }                                                   \
  inline T##4 make_##T##4(T a) { return T##4{a, a, a, a}; }                                                          \
  inline T##4 make_##T##4(T a, T b, T c, T d) { return T##4{a, b, c, d}; }                                           \
  template <class U> T##2 make_##T##2(vec<U, 2> o) { return __builtin_convertvector(o, T##2); }                       \
  template <class U> T##3 make_##T##3(vec<U, 3> o) { return __builtin_convertvector(o, T##3); }                       \
  template <class U> T##4 make_##T##4(vec<U, 4> o) { return __builtin_convertvector(o, T##4); }
VECTORS(float) VECTORS(half) VECTORS(bfloat) VECTORS(int) VECTORS(uint) VECTORS(ushort) VECTORS(uchar) VECTORS(ulong) VECTORS(long)

// One overload for each type, as Metal has them: an int beside a uint is ambiguous here and there.
#define ORDERED(T) T min(T, T); T max(T, T); T clamp(T, T, T); T select(T, T, bool);
ORDERED(char) ORDERED(int8_t) ORDERED(uchar) ORDERED(short) ORDERED(ushort) ORDERED(int) ORDERED(uint) ORDERED(long) ORDERED(ulong)
ORDERED(half) ORDERED(bfloat) ORDERED(float)
#define FLOATS(T) T exp(T); T exp2(T); T log(T); T log2(T); T sqrt(T); T rsqrt(T); T tanh(T); T floor(T); T ceil(T); T round(T);             \
  T fabs(T); T abs(T); T sign(T); T fma(T, T, T); bool isnan(T); bool isinf(T); bool isfinite(T); bool signbit(T);
FLOATS(float) FLOATS(half)
int abs(int);
uint popcount(uint);
uint clz(uint);
namespace precise { float exp(float); float log(float); float sqrt(float); float rsqrt(float); float tanh(float); }
namespace fast { float exp(float); float log(float); float sqrt(float); float rsqrt(float); }

#define OF_A_SIMDGROUP __attribute__((convergent))
#define LANES(T)                                                                                                     \
  T simd_sum(T) OF_A_SIMDGROUP; T simd_max(T) OF_A_SIMDGROUP; T simd_min(T) OF_A_SIMDGROUP;                          \
  T simd_shuffle(T, ushort) OF_A_SIMDGROUP; T simd_broadcast(T, ushort) OF_A_SIMDGROUP;                              \
  T simd_shuffle_xor(T, ushort) OF_A_SIMDGROUP; T simd_shuffle_up(T, ushort) OF_A_SIMDGROUP;                         \
  T simd_shuffle_down(T, ushort) OF_A_SIMDGROUP; T simd_prefix_inclusive_sum(T) OF_A_SIMDGROUP;                      \
  T simd_prefix_exclusive_sum(T) OF_A_SIMDGROUP;
LANES(float) LANES(half) LANES(int) LANES(uint) LANES(short) LANES(ushort) LANES(float2) LANES(float4)
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags) OF_A_SIMDGROUP;
void simdgroup_barrier(mem_flags) OF_A_SIMDGROUP;

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T x) : elements{x, x} {}
  vec<T, 2>& thread_elements() { return elements; }

 private:
  vec<T, 2> elements;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
template <class T, int C, int R = C> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x) { return simdgroup_matrix<T, C, R>(x); }
// By value, so that a matrix is two numbers of a lane and no memory.
template <class T> vec<T, 2> loaded_matrix(const void*, ulong, bool) OF_A_SIMDGROUP;
template <class T> void stored_matrix(vec<T, 2>, void*, ulong, bool) OF_A_SIMDGROUP;
template <class T, class U, class V, class W> vec<T, 2> multiplied_matrices(vec<U, 2>, vec<V, 2>, vec<W, 2>) OF_A_SIMDGROUP;
#define MATRIX_AT(SPACE)                                                                                             \
  template <class T, int C, int R>                                                                                   \
  void simdgroup_load(simdgroup_matrix<T, C, R>& to, const SPACE T* from, ulong row = C, ulong2 = 0, bool turned = false) { \
    to.thread_elements() = loaded_matrix<T>((const void*)from, row, turned);                                         \
  }                                                                                                                  \
  template <class T, int C, int R>                                                                                   \
  void simdgroup_store(simdgroup_matrix<T, C, R> from, SPACE T* to, ulong row = C, ulong2 = 0, bool turned = false) { \
    stored_matrix<T>(from.thread_elements(), (void*)to, row, turned);                                                \
  }
MATRIX_AT(device) MATRIX_AT(threadgroup)
template <class T, class U, class V, class W, int A, int B, int C>
void simdgroup_multiply_accumulate(
    simdgroup_matrix<T, A, C>& to, simdgroup_matrix<U, B, C> a, simdgroup_matrix<V, A, B> b, simdgroup_matrix<W, A, C> c) {
  to.thread_elements() = multiplied_matrices<T>(a.thread_elements(), b.thread_elements(), c.thread_elements());
}
}  // namespace metal
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
