"""Metal source, as MLX generates it, made into a C++ translation unit. Text in, text out; knows no compiler and no arrays."""

from __future__ import annotations

import re
from typing import NamedTuple

from .compiler import EmulationError

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.S)
_INSTANCE = re.compile(r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((.*?)\) .*?;\n", re.S)
_PARAMETER = re.compile(r"\s*(.*?)\s*(\w+) \[\[(\w+)(?:\((\d+)\))?\]\]")
_SHARED = re.compile(r"\bthreadgroup\s+([A-Za-z_]\w*(?:<[^;>]*>)?)\s+(\w+)\s*((?:\[[^\]]*\]\s*)*);")
# Words of C++ that Metal does not have, or that would let the host's library in.
_FOREIGN = re.compile(
    r"\b(double|goto|new|delete|throw|try|virtual|dynamic_cast|typeid|thread_local|std::\w+|constexpr\s+static|printf)\b"
)


class Parameter(NamedTuple):
    """One kernel parameter: its type as text, name, attribute ("buffer" or a thread attribute) and buffer number."""

    type: str
    name: str
    attribute: str
    buffer: int


def parse(text: str) -> list[Parameter]:
    """The buffers of the generated kernel, in order."""
    return [p for p in _parameters(text) if p.attribute == "buffer"]


def _parameters(text: str) -> list[Parameter]:
    signature = _SIGNATURE.search(text)
    if not signature:
        raise EmulationError(
            "MLX generated a kernel signature of a form the emulator does not know:\n" + text
        )
    found = []
    for line in signature.group(2).split(",\n"):
        part = _PARAMETER.fullmatch(line)
        if not part:
            raise EmulationError(f"cannot read the kernel parameter {line!r}")
        found.append(Parameter(part[1], part[2], part[3], int(part[4] or -1)))
    return found


def translate(text: str, body: str, parameters: list[Parameter]) -> str:
    """A C++ unit with `emu_entry(buffers, ids)`. Raises EmulationError for what Metal would not take."""
    _check(text, body, parameters)
    instance, signature = _INSTANCE.search(text), _SIGNATURE.search(text)
    assert signature is not None
    target = instance.group(1) if instance else signature.group(1)
    if instance:
        text = text[: instance.start()]
    arguments = ", ".join(_argument(p) for p in _parameters(text))
    text = re.sub(r"\[\[(buffer\(\d+\)|\w+)\]\]", "", text)
    start = text.rfind(body)
    header, body = _shared_variables(text[:start]), _shared_variables(text[start:])
    return (
        f'#include <metal_stdlib>\n#line 1 "generated"\n{header}\n#line 1 "body"\n{body}\n#line 1 "entry"\n'
        f'extern "C" EMU_PLAIN void emu_entry(void** buffers, const EmuIds* ids) {{\n  {target}({arguments});\n}}\n'
    )


def _argument(p: Parameter) -> str:
    if p.attribute == "buffer":
        return (
            f"*({p.type[:-1]}*)buffers[{p.buffer}]"
            if p.type.endswith("&")
            else f"({p.type})buffers[{p.buffer}]"
        )
    if p.type == "uint3":
        return f"uint3(ids->{p.attribute}.x, ids->{p.attribute}.y, ids->{p.attribute}.z)"
    return f"ids->{p.attribute}"


def without_comments(text: str) -> str:
    """Comments blanked out; lines stay where they are."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)


def _shared_variables(text: str) -> str:
    """`threadgroup T a[N];` becomes static storage that the runtime knows; `threadgroup T*` becomes a plain pointer."""
    text = _SHARED.sub(
        r"alignas(16) static unsigned char \2_bytes[sizeof(\1\3)]; auto& \2 = *reinterpret_cast<\1(*)\3>(\2_bytes); "
        r'emu_threadgroup_variable(\2_bytes, sizeof(\2), "\2");',
        without_comments(text),
    )
    text = re.sub(r"\bthreadgroup\b(?=[\s\w:<>]*[*&])", "", text)
    left = re.search(r"[^\n]*\bthreadgroup\b[^\n]*", text)
    if left:
        raise EmulationError(f"cannot translate this use of threadgroup memory: {left[0].strip()}")
    return text


def _check(text: str, body: str, parameters: list[Parameter]) -> None:
    code = without_comments(text)
    if foreign := _FOREIGN.search(code):
        raise EmulationError(f"{foreign[0]!r} is not available in Metal")
    small = [p.name for p in parameters if "constant" in p.type]
    for statement in re.split(
        r"[;{}]", without_comments(body)
    ):  # MLX binds inputs of fewer than 8 elements as `constant`
        named = [n for n in small if re.search(rf"\b{n}\b", statement)]
        if named and re.search(r"\bdevice\b[^;]*\*", statement):
            raise EmulationError(
                f"a device pointer to {named[0]}, which MLX passes in constant memory here: {statement.strip()}"
            )
