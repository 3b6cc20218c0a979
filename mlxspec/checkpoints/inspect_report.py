"""The data classes of the report that `inspect` gives. Knows no folders and no models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mlxspec.checkpoints.memory import MemoryEstimate
from mlxspec.models.proposal_rows import Proposing


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Numbers of layers. attention: over the whole text; windowed: over a window; recurrent: Gated DeltaNet; shared: attention over
    another layer's keys and values."""

    attention: int
    windowed: int
    recurrent: int
    shared: int

    @property
    def total(self) -> int:
        return self.attention + self.windowed + self.recurrent + self.shared


@dataclass(frozen=True, kw_only=True)
class Head:
    """The MTP head. formats: format -> number of parameters. advice: how to get one where it is absent, else empty."""

    present: bool = False
    parameters: int = 0
    bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The vision tower with its projection. bytes: in the files. max_tokens: of the largest image; square_tokens: of one of 1024 x 1024
    pixels. advice: why the model reads no images where it does not, else empty."""

    present: bool = False
    parameters: int = 0
    bytes: int = 0
    max_tokens: int = 0
    square_tokens: int = 0
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Usable:
    """Whether a drafter can run with this model; why: what it needs. proposing: of one that runs a model, from how many rows of the
    language-model head it proposes unless told otherwise, and the bytes that a drafted token reads."""

    name: str
    usable: bool
    why: str
    proposing: Proposing | None = None


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """The report of `inspect` on a model. Sizes are in elements or bytes.

    revision: the commit, where the folder is in the hub's cache. parameters: of the text model without the MTP head; active: those of them
    that are used for one token, which are fewer with experts. formats: format -> number of parameters. file_bytes: bytes of the text model
    in the files; skipped_bytes: bytes of towers that are not loaded. has_tokenizer: False means that prompts can be given as token ids
    only, from Python. limits: a sentence for each option that cannot be used with this model. computed_in: the dtype in which the model
    would be computed here, and why.
    """

    name: str
    folder: str
    revision: str | None
    model_type: str
    layers: Layers
    hidden_size: int
    vocab_size: int
    max_context: int
    num_experts: int
    parameters: int
    active: int
    formats: dict[str, int]
    file_bytes: int
    skipped_bytes: int
    head: Head
    vision: Tower
    memory: MemoryEstimate
    drafters: tuple[Usable, ...]
    has_tokenizer: bool
    computed_in: str
    limits: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.file_bytes / self.parameters

    def data(self) -> dict[str, Any]:
        """Return the report as plain objects."""
        found = asdict(self) | {"bits_per_weight": round(self.bits_per_weight, 3)}
        found["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        found["layers"] |= {"total": self.layers.total}
        return found
