// Codes and scales of MLX's quantized formats. A .metal file that has the line #include "quantized_formats.h" gets this text in its place.

// Small codes become halves without an exponent (denormal) when their bits are put in place. As in MLX's kernels, a multiplication in half
// gives them one before they are widened to float: a GPU may take a denormal half for zero in a conversion.
inline half2 times(half2 codes, half factor) {
  return half2(codes.x * factor, codes.y * factor);
}

// Two e4m3 codes, in bits 0 to 7 and 16 to 23, as halves. Their exponent's bias is 7, a half's is 15. 0x7f and 0xff are not numbers.
inline half2 halves_of_e4m3(uint codes) {
  const uint low = codes & 0x007f007fu;
  const uint bits = ((codes & 0x00800080u) << 8) | (((low + 0x00010001u) & 0x00800080u) << 7) | (low << 7);
  return times(as_type<half2>(bits), half(256.0f));
}

// Two e2m1 codes, in bits 0 to 3 and 16 to 19, as halves. Their exponent's bias is 1.
inline half2 halves_of_e2m1(uint codes) {
  return times(as_type<half2>(((codes & 0x00080008u) << 12) | ((codes & 0x00070007u) << 9)), half(16384.0f));
}

// A group's scale from what is stored of it. The e8m0 code 0 is 2^-127, which has no exponent of its own in a float.
template <int GROUP, int AFFINE, typename S>
inline float scale_of(S stored) {
  if (AFFINE) {
    return static_cast<float>(stored);
  }
  const uint code = static_cast<uint>(stored);
  return GROUP == 16 ? static_cast<float>(halves_of_e4m3(code).x) : as_type<float>(code == 0 ? 0x00400000u : code << 23);
}
