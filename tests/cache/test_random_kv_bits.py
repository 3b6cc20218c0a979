"""Random requests have the same text drafted and plain with keys and values in 8 and 4 bits."""

from __future__ import annotations

import pytest
from planting import catches

from tests.engine import random_slices
from tests.engine.random_requests import Case


@catches(
    "keys of a verify are kept otherwise than those of a step",
    "mlxspec.cache.quantized:QuantizedLayerCache._stored",
    lambda right: lambda self, keys, values: right(self, keys * (1 + 2 * (1 < keys.shape[1] < 17)), values),
    case="[4-float32]",
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("kv_bits"))
def test_keys_and_values_in_few_bits(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)
