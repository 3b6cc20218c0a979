"""The data classes of the report that `inspect` gives. Knows no folders and no models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mlxspec.checkpoints.memory import MemoryEstimate
from mlxspec.models.proposal_rows import Proposing


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The numbers of a model's layers by kind. attention: attention over the whole text; windowed: attention over a window; recurrent:
    Gated DeltaNet; shared: attention over the keys and values of another layer."""

    attention: int
    windowed: int
    recurrent: int
    shared: int

    @property
    def total(self) -> int:
        return self.attention + self.windowed + self.recurrent + self.shared


@dataclass(frozen=True, kw_only=True)
class Head:
    """The MTP head of a model. formats: number of parameters by format. advice: how to get a head where there is none, else empty."""

    present: bool = False
    parameters: int = 0
    bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The vision tower of a model with its projection. bytes: of its tensors in the files. max_tokens: tokens of the largest image;
    square_tokens: tokens of an image of 1024 x 1024 pixels. advice: why the model reads no images, empty where it reads them."""

    present: bool = False
    parameters: int = 0
    bytes: int = 0
    max_tokens: int = 0
    square_tokens: int = 0
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Usable:
    """The report on one kind of drafter for a model. name: of the drafter; usable: whether it can run with this model; why: a phrase on
    what it uses or needs. proposing: for a drafter that runs a model, the rows of the language-model head that it drafts from by
    default, and the bytes that a drafted token reads; else None."""

    name: str
    usable: bool
    why: str
    proposing: Proposing | None = None


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """The report of `inspect` on a model. Sizes are in elements or bytes.

    revision: the commit, None outside the hub's cache. parameters: of the text model without the MTP head; active: those of them that
    one token uses, fewer in a mixture of experts. formats: number of parameters by format. file_bytes: bytes of the text model in the
    files; skipped_bytes: bytes of towers that are not loaded. has_tokenizer: False where prompts can be given as token ids only, from
    Python. limits: a sentence for each option that cannot be used with this model. computed_in: the dtype in which this machine would
    compute the model, and why.
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
        """Return the report as plain objects, for JSON."""
        found = asdict(self) | {"bits_per_weight": round(self.bits_per_weight, 3)}
        found["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        found["layers"] |= {"total": self.layers.total}
        return found
