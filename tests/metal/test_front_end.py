"""A second reader of every kernel variant: clang with Metal's address spaces. And that the emulator, which asks it, refuses what Apple's
compiler refuses."""

from __future__ import annotations

import re
from pathlib import Path

import compile_kernels
import emulator
import mlx.core as mx
import pytest
from emulator import front_end

from mlxspec.kernels import launch
from mlxspec.platform import device

ROOT = Path(__file__).resolve().parents[2]
OUT = "o[thread_position_in_grid.x] = "


@pytest.fixture(autouse=True)
def _front_end() -> None:
    if reason := front_end.missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Metal source of every variant, by kernel."""
    found: dict[str, list[str]] = {}
    with device.private_kernels():
        for variant, text in compile_kernels.variants().items():
            found.setdefault(variant.kernel, []).append(text)
    return found


def form(text: str) -> str:
    """A variant but for its types and sizes: what the tree of clang depends on."""
    signature = text[text.index("[[kernel]] void") :].split("{")[0]
    return " ".join(re.findall(r"constant|device|\w+ \[\[", signature))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(p.stem for p in (ROOT / "metal").glob("*.metal")))
def test_clang_takes_every_variant(texts: dict[str, list[str]], kernel: str) -> None:
    forms = set()
    for text in texts[kernel]:
        is_new = form(text) not in forms
        forms.add(form(text))
        for standard in front_end.STANDARDS:
            assert not front_end.refusals(text, standard=standard, tree=is_new)


@pytest.mark.parametrize(
    ("kernel", "right", "wrong", "says"),
    [
        ("gdn_round", "thread float* to", "float* to", "without an address space: to"),
        ("gdn_round", "const device T* from", "const constant T* from", "no matching function"),
        ("kv_attend", "constant constexpr float LEAST", "constexpr float LEAST", "a global outside constant memory: LEAST"),
        ("gdn_prefill", "const threadgroup float* from", "const device float* from", "no matching function"),
        ("qmv_rows", "simd_sum(", "simd_total(", "simd_total"),
    ],
)  # fmt: skip
def test_a_fault_of_a_kernel_is_found(
    texts: dict[str, list[str]], kernel: str, right: str, wrong: str, says: str
) -> None:
    text = texts[kernel][0]
    assert right in text
    assert any(says in said for said in front_end.refusals(text.replace(right, wrong)))


REFUSED = {
    "a constant pointer where a device pointer belongs": (
        "inline int at(const device int* p, int i) { return p[i]; }",
        "at(few, 1)",
    ),
    "a pointer parameter without an address space": (
        "inline float one(const float* p) { return p[0]; }",
        "float a[2] = {1.0f, 2.0f}; |int(one(a))",
    ),
    "a reference without an address space": (
        "inline void bump(float& f) { f += 1.0f; }",
        "float a = 1.0f; bump(a); |int(a)",
    ),
    "a local pointer without an address space": ("", "float a[2] = {1.0f, 2.0f}; float* p = a; |int(p[1])"),
    "a returned pointer without an address space": (
        "inline const int* same(const thread int* p) { return p; }",
        "int a = 1; |same(&a)[0]",
    ),
    "a member without an address space": (
        "struct Pair { float* first; };",
        "float a = 1.0f; Pair p; p.first = &a; |int(*p.first)",
    ),
    "a pointer in a template without an address space": (
        "template <class T> inline T one(const T* p) { return p[0]; }",
        "int a = 1; |one(&a)",
    ),
    "a threadgroup pointer kept in a thread pointer": (
        "",
        "threadgroup float s[32]; s[thread_position_in_grid.x % 32] = 1.0f; "
        "thread float* p = (thread float*)&s[0]; |int(*p)",
    ),
    "a device pointer cast without an address space": ("", "int v = *(const int*)x; |v"),
    "recursion": ("inline int fac(int n) { return n < 2 ? 1 : n * fac(n - 1); }", "fac(x[0])"),
    "recursion of two": (
        "int odd(int n); inline int even(int n) { return n ? odd(n - 1) : 1; } "
        "inline int odd(int n) { return n ? even(n - 1) : 0; }",
        "even(x[0])",
    ),
    "recursion of a template": (
        "template <class T> inline T down(T n) { return n < T(1) ? n : down(n - T(1)); }",
        "down(x[0])",
    ),
    "a static local": ("", "static int n = 3; |n"),
    "a global outside constant memory": ("int GLOBAL = 3;", "GLOBAL"),
    "a constant expression outside constant memory": ("constexpr int GLOBAL = 3;", "GLOBAL"),
    "a lambda": ("", "auto twice = [](int n) { return 2 * n; }; |twice(1)"),
    "assembler": ("", 'asm("nop"); |1'),
    "an undefined function": ("", "int(lgamma(1.0f))"),
    "types that fit two overloads": ("", "int(min(x[0], 3u))"),
    "an initialiser that loses digits": ("", "ushort n[1] = {x[0]}; |int(n[0])"),
    "a store into constant memory": ("", "few[0] = 1; |1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_emulator_refuses_what_apples_compiler_refuses(case: str) -> None:
    if reason := emulator.missing_compiler():
        pytest.skip(reason)
    header, body = REFUSED[case]
    before, _, value = body.rpartition("|")
    with pytest.raises(emulator.EmulationError, match="Metal does not take"):
        run(f"{before}{OUT}{value} + x[0] + few[0];", header)


def test_what_metal_takes_is_taken() -> None:
    if reason := emulator.missing_compiler():
        pytest.skip(reason)
    header = """
constant constexpr int TABLE[2] = {1, 2};
template <typename T> inline T at(const device T* p, int i) { return p[i]; }
template <typename T> inline T of_few(const constant T* p, int i) { return p[i]; }
inline void add(thread int& to, int what) { to += what; }
struct Pair { int a, b; };
"""
    body = """
threadgroup int shared_numbers[32];
const uint i = thread_position_in_grid.x;
shared_numbers[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
int sum = of_few(few, 0) + at(x, int(i)) + TABLE[1];
add(sum, shared_numbers[31 - i]);
thread int* here = &sum;
Pair pair = {1, 2};
const device int* from = x + 1;
const float4 four = float4(1.0f, 2.0f, 3.0f, 4.0f);
o[i] = *here + pair.b + from[0] + int(four.w) - 4;
"""
    expected = [1 + i + 2 + 31 - i + 2 + 1 for i in range(32)]
    assert run(body, header) == expected


def run(body: str, header: str) -> list[int]:
    kernel = emulator.metal_kernel("trial", ["x", "few"], ["o"], body, header=header)
    with launch.using(emulator.metal_kernel):
        (out,) = kernel(
            inputs=[mx.arange(32), mx.array([1, 2, 3])],
            output_shapes=[(32,)],
            output_dtypes=[mx.int32],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
        )
    return [int(n) for n in out.tolist()]
