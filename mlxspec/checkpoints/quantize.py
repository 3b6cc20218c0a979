"""Quantizes matrices of a model, in MLX's formats and after mlx-lm's rules. Knows no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.errors import ConfigError
from mlxspec.loading.weights import Weights
from mlxspec.models.fill import ROUTERS

# mode: (group sizes, bits), the defaults first, as mlx-lm has them
MODES = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """A quantization format of MLX. group_size: number of weights that share a scale. Raises ConfigError for a combination that MLX does
    not have."""

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64

    @classmethod
    def of(cls, mode: str = "affine", bits: int | None = None, group_size: int | None = None) -> Format:
        """Return a format, with the mode's default for each value that is None. Raises ConfigError for an unknown mode or a value that
        it does not have."""
        if mode not in MODES:
            raise ConfigError(f"--mode must be one of {', '.join(MODES)}, not {mode!r}.")
        groups, widths = MODES[mode]
        return cls(
            mode=mode,
            bits=widths[0] if bits is None else bits,
            group_size=groups[0] if group_size is None else group_size,
        )

    def __post_init__(self) -> None:
        groups, widths = MODES[self.mode]
        for flag, value, allowed in (
            ("--bits", self.bits, widths),
            ("--group-size", self.group_size, groups),
        ):
            if value not in allowed:
                choices = ", ".join(map(str, sorted(allowed)))
                raise ConfigError(
                    f"{flag} must be {'one of ' if len(allowed) > 1 else ''}{choices} for mode {self.mode}, not {value}."
                )

    @property
    def data(self) -> dict[str, Any]:
        """Return the format as config.json writes it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


_ROUTER_FORMAT = Format(bits=8, group_size=64)


def quantize(weights: Weights, module: Any, how: Format) -> tuple[Weights, dict[str, Format]]:
    """Quantize the matrices of a model lazily; return all its tensors, and the format of each matrix that was quantized by module path.

    module: the unquantized module of the weights, which determines what can be quantized. Routers are quantized to 8 bits. Tensors that
    are quantized already, and matrices whose rows cannot be divided into groups, are returned unchanged.
    """
    out, formats = dict(weights), {}
    for path, part in module.named_modules():
        name = f"{path}.weight"
        if not hasattr(part, "to_quantized") or name not in out or f"{path}.scales" in out:
            continue
        form = _ROUTER_FORMAT if path.endswith(ROUTERS) else how
        if out[name].shape[-1] % form.group_size or out[name].shape[-1] % how.group_size:
            continue
        packed = mx.quantize(out[name], group_size=form.group_size, bits=form.bits, mode=form.mode)
        out |= dict(zip((name, f"{path}.scales", f"{path}.biases"), packed, strict=False))
        formats[path] = form
    return out, formats


def described(formats: Mapping[str, Format], main: Format) -> dict[str, Any]:
    """Return the `quantization` entry of config.json: the main format, and the format of each module that differs from it."""
    return main.data | {path: form.data for path, form in formats.items() if form != main}
