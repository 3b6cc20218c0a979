"""Planted faults: each must be caught by the checks that the kernels' own tests make. What a check cannot see, it does not prove."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks_conv import check_extreme_gates, check_fresh, check_two_forwards
from checks_gdn import Shape, check_prefill, check_replay_bits, check_two_rounds
from checks_kv import check_attention, check_far
from checks_qmv import check_codes, check_rows, check_scales, draw

from mlxspec.kernels import conv_qkv, gdn_prefill, gdn_round, kv_attend, launch, qmm_few, qmv_rows
from mlxspec.kernels.quantized_weight import MICROSCALING
from mlxspec.platform.resources import metal_source

KERNELS = {
    "gdn_round": gdn_round._kernel,
    "gdn_prefill": gdn_prefill._kernel,
    "conv_qkv": conv_qkv._kernel,
    "qmv_rows": qmv_rows._metal,
    "qmm_few": qmm_few._metal,
    "kv_attend": kv_attend._attend,
    "kv_join": kv_attend._join,
}


def check_gdn_round() -> None:
    shape = Shape(key_dim=64)
    check_two_rounds(shape, first=(4, 1, 6), kept=(2, 1, 5), second=(1, 3, 2), extra=5)
    check_replay_bits(shape, width=5)


def check_conv_qkv() -> None:
    check_two_forwards(first=(4, 1, 2), kept=(3, 0, 2), second=(1, 20, 2), extra=3)
    check_two_forwards(first=(1, 2), kept=(1, 1), second=(3, 1), dtype=mx.float16, whole=False)
    check_fresh((3, 1, 17))
    check_extreme_gates()


def check_gdn_prefill() -> None:
    check_prefill(Shape(key_dim=64, value_dim=64), (37, 5))


def check_qmv_rows() -> None:
    check_rows(*draw(3, 22, 1024, bits=4))
    check_rows(*draw(2, 9, 512, bits=8, group=32))


def check_qmv_rows_fp() -> None:
    for mode in MICROSCALING:
        check_rows(*draw(2, 9, 1024, mode=mode))
    for flush in (False, True):
        with emulator.settings(flush=flush):
            for mode in MICROSCALING:
                check_codes(mode, place=5)
                check_scales(mode)


def check_qmm_few() -> None:
    check_rows(*draw(11, 41, 704, bits=4), qmm_few.KERNEL)
    check_rows(*draw(6, 9, 640, bits=8, group=32), qmm_few.KERNEL)


def check_qmm_few_fp() -> None:
    for mode in MICROSCALING:
        check_rows(*draw(6, 9, 640, mode=mode), qmm_few.KERNEL)
        with emulator.settings(flush=True):
            check_codes(mode, place=5, kernel=qmm_few.KERNEL)


def check_kv_attend() -> None:
    check_attention(3, 300, heads=6, kv=2, ends=np.array([20, 299, 300]))
    check_attention(2, 150, heads=6, kv=2, bits=4, dtype=mx.bfloat16, scale=1.0)
    check_attention(5, 270, heads=4, kv=1, dim=128, bits=4)
    check_attention(1, 41, heads=1, kv=1, bits=4, room=0)
    check_far(1)


def check_kv_join() -> None:
    with mock.patch.object(kv_attend, "num_parts", return_value=3):
        check_attention(3, 300, heads=6, kv=2, ends=np.array([20, 299, 300]))
    check_far(3)


CHECKS: dict[str, Callable[[], None]] = {
    "gdn_round": check_gdn_round,
    "gdn_prefill": check_gdn_prefill,
    "conv_qkv": check_conv_qkv,
    "qmv_rows": check_qmv_rows,
    "qmv_rows_fp": check_qmv_rows_fp,  # of the same text
    "qmm_few": check_qmm_few,
    "qmm_few_fp": check_qmm_few_fp,  # of the same text
    "kv_attend": check_kv_attend,
    "kv_join": check_kv_join,
}

# kernel, what is wrong, the right text, the wrong text
FAULTS = [
    ("gdn_round", "a reduction step is missing", "  x += simd_shuffle_xor(x, 4);\n", ""),
    ("gdn_round", "a reduction step twice", "simd_shuffle_xor(x, 4)", "simd_shuffle_xor(x, 2)"),
    ("gdn_round", "room left unwritten", "t < span[1]; ++t", "t < span[0]; ++t"),
    ("gdn_round", "the last token is left out", "t < end; ++t", "t < end - 1; ++t"),
    ("gdn_round", "one token too many", "t < end; ++t", "t <= end; ++t"),
    ("gdn_round", "one replayed token too few", "t < begin + kept[b]; ++t", "t < begin + kept[b] - 1; ++t"),
    ("gdn_round", "a write past the end", "t < span[1]; ++t", "t <= span[1]; ++t"),
    ("gdn_round", "wrong head mapping", "head / (Hv / Hk)", "head % Hk"),
    (
        "gdn_round",
        "an output left unwritten",
        "if (lane == r) {\n      y",
        "if (lane == r && r > 0) {\n      y",
    ),
    ("gdn_round", "every lane writes", "if (lane == r) {\n      y", "if (lane >= r) {\n      y"),
    ("gdn_round", "kept of another row", "t < begin + kept[b]; ++t", "t < begin + kept[0]; ++t"),
    (
        "gdn_round",
        "half-precision accumulation",
        "sum[r] = fma(s[r][e], share[e], sum[r]);\n    }\n    sum",
        "sum[r] = float(half(fma(s[r][e], share[e], sum[r])));\n    }\n    sum",
    ),
    (
        "gdn_round",
        "replay in another order",
        "tape_log_g[t * Hv + head]",
        "tape_log_g[(2 * begin + kept[b] - 1 - t) * Hv + head]",
    ),
    (
        "gdn_round",
        "replay rounds otherwise",
        "s[r][e] = advance(decayed(s[r][e], decay), d, key[e]);",
        "s[r][e] = s[r][e] * decay + d * key[e];",
    ),
    ("gdn_round", "rows mixed up on the flat axis", "begin = tape_starts[b]", "begin = starts[b]"),
    (
        "gdn_round",
        "rows mixed up in the state",
        "first = ((ulong(b) * Hv",
        "first = ((ulong(b / 2) * Hv",
    ),
    (
        "gdn_round",
        "the state written before the replay",
        "if (!ADVANCES) {\n  UNROLL",
        "if (!ADVANCES && kept[b] == 0) {\n  UNROLL",
    ),
    (
        "gdn_round",
        "lanes diverge at a shuffle",
        "sum[r] = sum_of_row(sum[r]);\n    const int place",
        "if (lane < 4) sum[r] = sum_of_row(sum[r]);\n    const int place",
    ),
    (
        "gdn_round",
        "a read one token ahead",
        "static_cast<float>(v[place])",
        "static_cast<float>(v[place] + 0.0f * v[place + Hv * Dv])",
    ),
    ("conv_qkv", "kept of another row", "row.kept = REPLAY ? kept[b]", "row.kept = REPLAY ? kept[0]"),
    ("conv_qkv", "kept ignored", "row.kept = REPLAY ? kept[b] : 0", "row.kept = 0"),
    ("conv_qkv", "window picked one input late", "row.kept + 3 + at", "row.kept + 2 + at"),
    ("conv_qkv", "the window's end read as inputs", "if (joined < 3) {", "if (joined < 2) {"),
    ("conv_qkv", "the last forward's rows mixed up", "REPLAY ? last_starts[b]", "REPLAY ? starts[b]"),
    ("conv_qkv", "the last forward's stride", "* LAST_STRIDE + channel", "* STRIDE + channel"),
    ("conv_qkv", "history lost between segments", "row, first - 3 + i, channel", "row, i - 3, channel"),
    ("conv_qkv", "segments overlap", "first + SEGMENT)", "first + SEGMENT + 1)"),
    ("conv_qkv", "taps in the wrong order", "weight[i * C", "weight[(3 - i) * C"),
    ("conv_qkv", "no norm across lanes", "simd_sum(squares)", "squares"),
    ("conv_qkv", "eps on the mean", "simd_sum(squares) + 1e-6f", "simd_sum(squares) + 1e-6f * Dk * 1000.0f"),
    ("conv_qkv", "q not scaled", "if (unit < Hk) {\n    scale", "if (unit < 0) {\n    scale"),
    ("conv_qkv", "b and a exchanged", "projected[gates + Hv]", "projected[gates]"),
    ("conv_qkv", "the last token's gates unwritten", "first + lane < end", "first + lane < end - 1"),
    ("conv_qkv", "window after certain one too early", "FACTS ? width - 3 + i", "FACTS ? width - 4 + i"),
    ("conv_qkv", "every segment writes the window", "if (segment == 0) {", "if (segment >= 0) {"),
    (
        "conv_qkv",
        "the next forward's inputs of another channel",
        "inputs_out[token * C + channel",
        "inputs_out[token * C",
    ),
    (
        "conv_qkv",
        "the next forward's inputs written for certain",
        "if (!FACTS) {\n        inputs_out[token",
        "{\n        inputs_out[token",
    ),
    (
        "conv_qkv",
        "room left unwritten",
        "for (int t = span[0]; t < span[1]; ++t)",
        "for (int t = span[0]; t < span[0]; ++t)",
    ),
    (
        "conv_qkv",
        "softplus loses small values",
        "u == 1.0f ? e : precise::log(u) * (e / (u - 1.0f))",
        "precise::log(u)",
    ),
    (
        "gdn_prefill",
        "no barrier before the next chunk",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last",
        "  // the last",
    ),
    (
        "gdn_prefill",
        "no barrier after loading",
        "  }\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  // k . k",
        "  }\n\n  // k . k",
    ),
    (
        "gdn_prefill",
        "no barrier after the products",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int i = thread_index; i",
        "\n  for (int i = thread_index; i",
    ),
    (
        "gdn_prefill",
        "no barrier before substitution",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  if (lane < 8)",
        "\n  if (lane < 8)",
    ),
    (
        "gdn_prefill",
        "no barrier after substitution",
        "  simdgroup_barrier(mem_flags::mem_threadgroup);\n\n  UNROLL",
        "\n  UNROLL",
    ),
    (
        "gdn_prefill",
        "no barrier before y is written",
        "  simdgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int i = lane",
        "\n  for (int i = lane",
    ),
    (
        "gdn_prefill",
        "no barrier before the state",
        "  simdgroup_barrier(mem_flags::mem_threadgroup);\n\n  simdgroup_float8x8 delta",
        "\n  simdgroup_float8x8 delta",
    ),
    (
        "gdn_prefill",
        "a barrier of the wrong memory",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  if (lane < 8)",
        "threadgroup_barrier(mem_flags::mem_device);\n\n  if (lane < 8)",
    ),
    ("gdn_prefill", "the diagonal left out", "earlier <= t ? scores", "earlier < t ? scores"),
    (
        "gdn_prefill",
        "coupling without its step size",
        "coupling[i] * decay * steps[t]",
        "coupling[i] * decay",
    ),
    ("gdn_prefill", "the state not decayed", "s[j].thread_elements()[1] *= carry;", ""),
    (
        "gdn_prefill",
        "the rest of the chunk not zeroed",
        "keys[i + j] = t < num ? static_cast<float>(k[from + j]) : 0.0f",
        "keys[i + j] = static_cast<float>(k[from + j])",
    ),
    (
        "gdn_prefill",
        "a matrix not turned",
        "simdgroup_load(tile, from, row_length, ulong2(0, 0), true)",
        "simdgroup_load(tile, from, row_length, ulong2(0, 0), false)",
    ),
    (
        "gdn_prefill",
        "threadgroup memory too large",
        "threadgroup float keys[C * Dk];",
        "threadgroup float keys[9 * C * Dk];",
    ),
    (
        "qmv_rows",
        "codes in the wrong order",
        "(BITS * (i % PER_WORD + j))) & ",
        "(BITS * (PER_WORD - 1 - i % PER_WORD - j))) & ",
    ),
    ("qmv_rows", "the second word forgotten", "i < PER_WORD ? packed.x : packed.y", "packed.x"),
    (
        "qmv_rows",
        "a group's scale for the next",
        "(K / GROUP) + at / GROUP;",
        "(K / GROUP) + (at + VALUES) / GROUP;",
    ),
    ("qmv_rows", "the bias of one row of x for all", "sum[m] * bias", "sum[0] * bias"),
    ("qmv_rows", "outputs past the end read", "first + min(r, last)", "first + r"),
    ("qmv_rows", "outputs past the end stored", "lane == 0 && r <= last", "lane == 0"),
    (
        "qmv_rows",
        "half-precision accumulation",
        "result[r][m] += part",
        "result[r][m] = float(half(result[r][m])) + part",
    ),
    ("qmv_rows", "no sum over lanes", "simd_sum(result[r][m])", "result[r][m]"),
    ("qmv_rows", "the last block left out", "at < K; at", "at < K - 32 * VALUES; at"),
    ("qmv_rows", "rows of y exchanged", "y[m * N + first + r]", "y[(M - 1 - m) * N + first + r]"),
    (
        "qmm_few",
        "codes taken for the next ones",
        "(BITS == 4 ? 6 : 2) - BITS * p;",
        "(BITS == 4 ? 6 : 2) - BITS * p - BITS;",
    ),
    ("qmm_few", "the offset of codes left in", "- OFFSET * scale[r]", ""),
    ("qmm_few", "a group's scale for another", "(at + 8 * column) / GROUP;", "(at + 8 * row) / GROUP;"),
    ("qmm_few", "words of another column", "(at + 8 * column) * BITS / 32;", "(at + 8 * row) * BITS / 32;"),
    ("qmm_few", "rows past the end read", "min(8 * t + column + i, M - 1) * K", "(8 * t + column + i) * K"),
    ("qmm_few", "outputs past the end read", "min(first + 8 * r + row, N - 1)", "(first + 8 * r + row)"),
    ("qmm_few", "outputs past the end stored", "if (first + output < N) {", "{"),
    ("qmm_few", "no barrier before the sums", "threadgroup_barrier(mem_flags::mem_threadgroup);\n", ""),
    ("qmm_few", "the last simdgroup left out", "g < SIMDGROUPS; ++g", "g < SIMDGROUPS - 1; ++g"),
    ("qmm_few", "the first 64 twice", "at += 64 * SIMDGROUPS", "at += 64 * (SIMDGROUPS - 1)"),
    (
        "qmm_few",
        "one block of outputs for all",
        "(group * OUTPUTS + 8 * r) * ROWS",
        "(group * OUTPUTS) * ROWS",
    ),
    ("qmm_few", "rows of a tile exchanged", "mine[t][1][j + HALF * k]", "mine[t][0][j + HALF * k]"),
    ("qmm_few", "the second half of a word as the first", "mine[t][0][j + HALF * k]", "mine[t][0][j]"),
    (
        "qmm_few",
        "halves of a pair exchanged",
        "low = static_cast<float>(codes.x)",
        "low = static_cast<float>(codes.y)",
    ),
    ("qmm_few", "half-precision sums", "total += sums_of", "total = float(half(total)) + sums_of"),
    (
        "qmm_few_fp",
        "units of e2m1 forgotten",
        "half(16384.0f)",
        "half(1.0f)",
    ),
    (
        "qmm_few_fp",
        "codes widened before they are multiplied",
        "half2(codes.x * factor, codes.y * factor)",
        "half2(half(float(codes.x) * float(factor)), half(float(codes.y) * float(factor)))",
    ),
    ("qmm_few_fp", "codes of the next half", "word >> (BITS * p);", "word >> (BITS * (16 / BITS - 1 - p));"),
    ("qmv_rows_fp", "the second word forgotten", "i < PER_WORD ? packed.x : packed.y", "packed.x"),
    (
        "qmv_rows_fp",
        "codes in the wrong order",
        "halves_of_e2m1(word >> (BITS * j))",
        "halves_of_e2m1(word >> (BITS * (HALF - 1 - j)))",
    ),
    (
        "qmv_rows_fp",
        "a word's halves exchanged",
        "i % PER_WORD < HALF ? both.x : both.y",
        "i % PER_WORD < HALF ? both.y : both.x",
    ),
    ("qmv_rows_fp", "half of each word forgotten", "      to[j + HALF] = static_cast<float>(both.y);\n", ""),
    ("qmv_rows_fp", "e2m1 without signs", "((codes & 0x00080008u) << 12) | ", ""),
    ("qmv_rows_fp", "e2m1 without subnormals", "codes & 0x00070007u", "codes & 0x00060006u"),
    ("qmv_rows_fp", "e2m1 with another exponent", "0x00070007u) << 9)", "0x00070007u) << 10)"),
    ("qmv_rows_fp", "e4m3 without signs", "((codes & 0x00800080u) << 8) | ", ""),
    ("qmv_rows_fp", "e4m3 with a number for what is none", "low + 0x00010001u", "low"),
    ("qmv_rows_fp", "e4m3 with another exponent", "(low << 7);", "((low + 0x00080008u) << 7);"),
    (
        "qmv_rows_fp",
        "the second e4m3 code's sign for the first",
        "codes & 0x00800080u",
        "codes >> 16 & 0x00800080u",
    ),
    ("qmv_rows_fp", "one unit for both kinds of code", "half(256.0f)", "half(16384.0f)"),
    (
        "qmv_rows_fp",
        "codes widened before they are multiplied",
        "half2(codes.x * factor, codes.y * factor)",
        "half2(half(float(codes.x) * float(factor)), half(float(codes.y) * float(factor)))",
    ),
    ("qmv_rows_fp", "nvfp4 scales taken for e8m0", "return GROUP == 16 ?", "return GROUP == 64 ?"),
    ("qmv_rows_fp", "e8m0 scales taken for e4m3", "return GROUP == 16 ?", "return GROUP <= 32 ?"),
    (
        "qmv_rows_fp",
        "scales in another unit",
        "static_cast<float>(halves_of_e4m3(code).x)",
        "0.5f * static_cast<float>(halves_of_e4m3(code).x)",
    ),
    ("qmv_rows_fp", "e8m0 off by one", "0x00400000u : code << 23", "0x00400000u : (code - 1) << 23"),
    ("qmv_rows_fp", "the smallest e8m0 taken for zero", "code == 0 ? 0x00400000u : code << 23", "code << 23"),
    (
        "qmv_rows_fp",
        "the first group's scale for all",
        "(scales[group])",
        "(scales[group - at / GROUP])",
    ),
    ("qmv_rows_fp", "a row of x for all", "(x + m * K + at + i)", "(x + at + i)"),
    ("qmv_rows_fp", "outputs past the end read", "first + min(r, last)", "first + r"),
    ("gdn_round", "the gate of another head", "step = beta[t * Hv + head]", "step = beta[t * Hv]"),
    (
        "kv_attend",
        "codes of keys in the wrong order",
        "(word >> (BITS * j)) & MASK",
        "(word >> (BITS * (PER_WORD - 1 - j))) & MASK",
    ),
    (
        "kv_attend",
        "codes of values in the wrong order",
        "(BITS * (lane % PER_WORD))",
        "(BITS * (PER_WORD - 1 - lane % PER_WORD))",
    ),
    ("kv_attend", "a bias forgotten", "& MASK), bias)", "& MASK), 0.0f)"),
    (
        "kv_attend",
        "the first group's scale for all",
        "key_scales[key * GROUPS + g / 64]",
        "key_scales[key * GROUPS]",
    ),
    (
        "kv_attend",
        "the first group's scale of values",
        "value_scales[scaled]",
        "value_scales[scaled - own / 64]",
    ),
    ("kv_attend", "the head of another", "tokens = ulong(head) * CAPACITY", "tokens = ulong(0) * CAPACITY"),
    (
        "kv_attend",
        "the queries of another head",
        "(ulong(head) * M + first_row + m) * D",
        "(ulong(0) * M + first_row + m) * D",
    ),
    ("kv_attend", "a query sees one token more", "token < min(end, ends[", "token <= min(end, ends["),
    (
        "kv_attend",
        "all queries see what the last one does",
        "min(end, ends[(first_row + mine + m) % W])",
        "end",
    ),
    (
        "kv_attend",
        "ends by head and not by token",
        "(first_row + mine + m) % W",
        "(first_row + mine + m) * W / M",
    ),
    ("kv_attend", "tokens past the row's end read", "min(token, end - 1)", "token"),
    (
        "kv_attend",
        "values past the row's end",
        "tokens + min(at + t + u + lane / SHARED, end - 1)",
        "tokens + at + t + u + lane / SHARED",
    ),
    (
        "kv_attend",
        "scales past the row's end",
        "(tokens + min(at + t + lane, end - 1)) * GROUPS",
        "(tokens + at + t + lane) * GROUPS",
    ),
    ("kv_attend", "a word of another token", "SHARED * (v - u) + lane / PER_WORD", "lane / PER_WORD"),
    ("kv_attend", "the scale of another token", "simd_broadcast(scales, v)", "simd_broadcast(scales, u)"),
    ("kv_attend", "a chunk of queries for another", "+ c + i % CHUNK]", "+ i % CHUNK]"),
    (
        "kv_attend",
        "words of the first chunk",
        "key * WORDS + n / PER_WORD",
        "key * WORDS + (n - c) / PER_WORD",
    ),
    ("kv_attend", "queries of a tile left unwritten", "i < ROWS * CHUNK; i", "i < ROWS * CHUNK / 2; i"),
    ("kv_attend", "the first half of many queries twice", "first = MV * (simd / NS)", "first = 0"),
    (
        "kv_attend",
        "no barrier behind the staged queries",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for (int g",
        "    for (int g",
    ),
    (
        "kv_attend",
        "no barrier before the next queries are staged",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n  }\n  UNROLL",
        "  }\n  UNROLL",
    ),
    (
        "kv_attend",
        "the last token's value left out",
        "v < min(u + PER_WORD, end - at - t)",
        "v < min(u + PER_WORD, end - at - t - 1)",
    ),
    ("kv_attend", "only the first tokens of a block", "token = at + 32 * along + lane", "token = at + lane"),
    (
        "kv_attend",
        "weights of another query",
        "fours[((t + v) * ROWS + first + m) / 4]",
        "fours[(t + v) * ROWS / 4]",
    ),
    ("kv_attend", "no maximum over lanes", "simd_max(score[m])", "score[m]"),
    ("kv_attend", "no sum over lanes", "simd_sum(weight)", "weight"),
    ("kv_attend", "the maximum of a block alone", "float most = row_best[row];", "float most = LEAST;"),
    ("kv_attend", "sums of earlier blocks not shrunk", "    acc[m] *= shrink[first + m];\n", ""),
    ("kv_attend", "totals of earlier blocks not shrunk", "row_total[m] * shrink[m]", "row_total[m]"),
    (
        "kv_attend",
        "half-precision accumulation",
        "acc[m + k] = fma(weight[k], number, acc[m + k]);",
        "acc[m + k] = float(half(fma(weight[k], number, acc[m + k])));",
    ),
    (
        "kv_attend",
        "no barrier after the scores",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  // weights",
        "\n  // weights",
    ),
    (
        "kv_attend",
        "no barrier before the values",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  // values",
        "\n  // values",
    ),
    (
        "kv_attend",
        "no barrier before the next block",
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n}",
        "}",
    ),
    ("kv_attend", "a total left unwritten", "  total[place + m] = row_total[m];\n", ""),
    (
        "kv_attend",
        "queries that are none written",
        "  if (first + m < num_rows) {\n    sums",
        "  if (first + m < ROWS) {\n    sums",
    ),
    ("kv_attend", "the numbers of another simdgroup", "own = 32 * (simd % NS) + lane", "own = lane"),
    ("kv_join", "the maximum of the first part", "int s = 1; s < S", "int s = S; s < S"),
    (
        "kv_join",
        "the last part left out",
        "float all = 0.0f, sum = 0.0f;\nfor (int s = 0; s < S",
        "float all = 0.0f, sum = 0.0f;\nfor (int s = 0; s < S - 1",
    ),
    ("kv_join", "parts not weighed", "precise::exp(best[at] - most)", "1.0f"),
    ("kv_join", "not divided", "sum / all", "sum"),
    ("kv_join", "the sums of another query", "sums[at * D + d]", "sums[(at - m) * D + d]"),
]


@pytest.fixture
def plant(monkeypatch):
    """plant(kernel, old, new): launchers read the changed text until the test ends."""

    def change(name: str, old: str, new: str) -> None:
        of_file = launch._texts.get(name, name)
        text, other = metal_source(of_file), launch.metal_source
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the text of {name}"
        changed = text.replace(old, new)
        monkeypatch.setattr(
            launch, "metal_source", lambda asked: changed if asked == of_file else other(asked)
        )

    for kernel in KERNELS.values():
        monkeypatch.setattr(kernel, "_built", {})
    return change


@pytest.mark.parametrize("name", CHECKS)
def test_the_right_kernel_passes(emulated, name):
    with emulated():
        CHECKS[name]()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    # every second one in the fast tier
    [pytest.param(n, o, w, marks=[pytest.mark.slow] * (i % 2)) for i, (n, _, o, w) in enumerate(FAULTS)],
    ids=[f"{n}-{what}" for n, what, _, _ in FAULTS],
)
def test_a_planted_fault_is_caught(emulated, plant, name, old, new):
    plant(name, old, new)
    with emulated(), pytest.raises((AssertionError, emulator.EmulationError)) as caught:
        CHECKS[name]()
    assert "the compiler does not take" not in str(caught.value), (
        f"the fault is caught for the wrong reason: {caught.value}"
    )


def test_at_least_ten_faults_are_planted():
    assert len(FAULTS) >= 10
