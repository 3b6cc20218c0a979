"""JSON-Schema-Test-Suite against the grammars of answers: an invalid value is written only where the reading says what it leaves out.

The suite is not part of this project. MLXSPEC_JSON_SCHEMA_SUITE names a folder with its `tests/draft2020-12`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from test_call_grammars import maker

from mlxspec.config import SamplingParams
from mlxspec.errors import GrammarError
from mlxspec.parsers.schema import Schema

SUITE = os.environ.get("MLXSPEC_JSON_SCHEMA_SUITE", "")
# (file, schema, value) that is written although it is invalid, each with its reason
SUBTLETIES: dict[str, str] = {}


def outcomes(folder: Path) -> tuple[Counter[str], list[str]]:
    """Counts, and what is silently permitted though it is invalid."""
    constraints, tokenizer, _ = maker()
    counts: Counter[str] = Counter()
    permitted = []
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            try:
                read = Schema(case["schema"])
                if read.left_out:
                    counts["left out, and said"] += len(case["tests"])
                    continue
                params = SamplingParams(json_schema=read.json())
                grammar = constraints.compile(params).grammar
            except GrammarError:
                counts["refused"] += len(case["tests"])
                continue
            assert grammar is not None
            for test in case["tests"]:
                ids = tokenizer.encode_plain(json.dumps(test["data"], ensure_ascii=False))
                copy = grammar.copy(constraints.clock)
                is_written = copy.validate(ids) == len(ids) and all(map(copy.consume, ids))
                if is_written:
                    mask = copy.mask() if not copy.is_finished else None
                    ends = constraints.vocabulary.eos_ids
                    is_written = mask is None or any(mask[i // 32] >> (i % 32) & 1 for i in ends)
                counts[
                    f"{'valid' if test['valid'] else 'invalid'}, {'written' if is_written else 'not written'}"
                ] += 1
                if is_written and not test["valid"]:
                    permitted.append(f"{path.name}: {case['description']}: {test['description']}")
    return counts, permitted


@pytest.mark.slow
@pytest.mark.skipif(not SUITE, reason="MLXSPEC_JSON_SCHEMA_SUITE names no folder")
def test_no_invalid_value_is_written_without_a_word() -> None:
    counts, permitted = outcomes(Path(SUITE) / "tests" / "draft2020-12")
    assert set(permitted) <= set(SUBTLETIES), (counts, permitted)
    assert counts["valid, written"] > 300
