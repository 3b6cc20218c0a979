// Codes and scales of MLX's quantized formats. A .metal file that has the line #include "quantized_formats.h" gets this text in its place.

// Two e4m3 codes, in bits 0 to 7 and 16 to 23, each as the half that is 2^-8 of it: the exponent's bias is 15 instead of 7. 0x7f and 0xff
// are not numbers.
inline half2 halves_of_e4m3(uint codes) {
  const uint low = codes & 0x007f007fu;
  return as_type<half2>(((codes & 0x00800080u) << 8) | (((low + 0x00010001u) & 0x00800080u) << 7) | (low << 7));
}

// Two e2m1 codes, in bits 0 to 3 and 16 to 19, each as the half that is 2^-14 of it: the exponent's bias is 15 instead of 1.
inline half2 halves_of_e2m1(uint codes) {
  return as_type<half2>(((codes & 0x00080008u) << 12) | ((codes & 0x00070007u) << 9));
}

// A group's scale from what is stored of it. The e8m0 code 0 is 2^-127, which has no exponent of its own in a float.
template <int GROUP, int AFFINE, typename S>
inline float scale_of(S stored) {
  if (AFFINE) {
    return static_cast<float>(stored);
  }
  const uint code = static_cast<uint>(stored);
  return GROUP == 16 ? 256.0f * static_cast<float>(halves_of_e4m3(code).x) : as_type<float>(code == 0 ? 0x00400000u : code << 23);
}
