"""Traces: what every drafter would have said at every place of real answers, and how much of it the text bears out.

A trace is enough to replay any way of choosing drafts without a model, because drafts are made from the text alone: whoever stands at a
place would have been offered the same. Kept in one compressed file, a workload's answers one behind the other, with the name of the model
that answered: how often its drafts stand says nothing of another model's. Knows files and arrays; knows no engine and no costs.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxspec.errors import ConfigError

_MODEL = "model"  # no workload's array: those have a slash in their names


@dataclass(frozen=True, kw_only=True)
class Said:
    """One drafter over N places. length, stood (N,): how many tokens it offers there and how many of them came. confidences (N, K) in
    255ths, zero behind `length`; None for drafters that know no probabilities. backing (N,): tokens before the draft that its place would
    have said right, at most 255; None for drafters that do not know.
    """

    length: np.ndarray
    stood: np.ndarray
    confidences: np.ndarray | None = None
    backing: np.ndarray | None = None

    def __post_init__(self) -> None:
        fits = self.length.shape == self.stood.shape and self.length.ndim == 1
        if self.confidences is not None:
            fits &= self.confidences.ndim == 2 and len(self.confidences) == len(self.length)
        fits &= self.backing is None or self.backing.shape == self.length.shape
        if not fits or np.any(self.stood > self.length):
            raise ConfigError(
                "A trace holds one length and one count for every place, the count no larger than the length."
            )

    def __len__(self) -> int:
        return len(self.length)

    def part(self, start: int, end: int) -> Said:
        sure = None if self.confidences is None else self.confidences[start:end]
        backing = None if self.backing is None else self.backing[start:end]
        return Said(
            length=self.length[start:end], stood=self.stood[start:end], confidences=sure, backing=backing
        )


Answer = Mapping[str, Said]  # by drafter, all of one length


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Answers of one kind. distinct: share of distinct 4-grams in each answer's text: loops flatter every drafter."""

    name: str
    answers: Sequence[Answer]
    distinct: Sequence[float]


def join(answers: Sequence[Answer]) -> dict[str, Said]:
    """Answers as one long one. Where a drafter has confidences or backing in some, it has nothing but zeros in those in which it never
    drafted."""
    out = {}
    for name in answers[0]:
        parts = [a[name] for a in answers]
        out[name] = Said(
            length=np.concatenate([p.length for p in parts]),
            stood=np.concatenate([p.stood for p in parts]),
            confidences=_joined([(p.confidences, len(p)) for p in parts]),
            backing=_joined([(p.backing, len(p)) for p in parts]),
        )
    return out


def _joined(parts: Sequence[tuple[np.ndarray | None, int]]) -> np.ndarray | None:
    """Parts, each so many long, one behind the other; zeros where one is missing, None where all are."""
    known = next((p for p, _ in parts if p is not None), None)
    if known is None:
        return None
    return np.concatenate([np.zeros((n, *known.shape[1:]), np.uint8) if p is None else p for p, n in parts])


def write_traces(path: Path, workloads: Sequence[Workload], *, model: str) -> None:
    """Write all workloads into one file. model: that answered, and whose drafters drafted."""
    arrays: dict[str, np.ndarray] = {_MODEL: np.array(model)}
    for workload in workloads:
        sizes = [len(next(iter(a.values()))) for a in workload.answers]
        arrays[f"{workload.name}/ends"] = np.cumsum(sizes).astype(np.uint32)
        arrays[f"{workload.name}/distinct"] = np.asarray(workload.distinct, np.float32)
        for name, said in join(workload.answers).items():
            arrays[f"{workload.name}/{name}/length"] = said.length
            arrays[f"{workload.name}/{name}/stood"] = said.stood
            if said.confidences is not None:
                arrays[f"{workload.name}/{name}/confidences"] = said.confidences
            if said.backing is not None:
                arrays[f"{workload.name}/{name}/backing"] = said.backing
    # numpy's own writer stamps the time; equal traces should make equal files
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for key, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            file.writestr(
                zipfile.ZipInfo(f"{key}.npy", (1980, 1, 1, 0, 0, 0)), content.getvalue(), zipfile.ZIP_DEFLATED
            )


def read_traces(path: Path, *, of: str) -> dict[str, Workload]:
    """Return workloads by name. Raises ConfigError where the file is none of ours, or holds the drafts of another model than `of`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        model = str(arrays.pop(_MODEL))
        names = [key.removesuffix("/ends") for key in arrays if key.endswith("/ends")]
        found = {name: _workload(name, arrays) for name in names}
    except (OSError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path.name} is no file of traces.") from error
    if model != of:
        raise ConfigError(f"{path.name} holds the drafts of {model}, which say nothing of {of}.")
    return found


def _workload(name: str, arrays: Mapping[str, np.ndarray]) -> Workload:
    ends = [int(e) for e in arrays[f"{name}/ends"]]
    whole = {}
    for key in arrays:
        if key.startswith(f"{name}/") and key.endswith("/length"):
            base = key.removesuffix("/length")
            sure, backing = arrays.get(f"{base}/confidences"), arrays.get(f"{base}/backing")
            whole[base.removeprefix(f"{name}/")] = Said(
                length=arrays[key].astype(np.uint8),
                stood=arrays[f"{base}/stood"].astype(np.uint8),
                confidences=None if sure is None else sure.astype(np.uint8),
                backing=None if backing is None else backing.astype(np.uint8),
            )
    answers = [
        {d: said.part(start, end) for d, said in whole.items()}
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return Workload(name=name, answers=answers, distinct=[float(x) for x in arrays[f"{name}/distinct"]])


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams over all n-grams of a text; 1 for texts shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def matched(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens at the beginning of `draft` are those of `text`."""
    for i, (drafted, came) in enumerate(zip(draft, text, strict=False)):
        if drafted != came:
            return i
    return min(len(draft), len(text))
