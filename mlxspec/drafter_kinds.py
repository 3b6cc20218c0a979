"""The kinds of drafters that come with mlxspec, one row each: options, the lists of `inspect`, and the choice of drafters in `load` read
this table. How a kind's weights are built is in engine/load_drafters.py, and for `inspect` and `convert` in models/assemble_drafter.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A kind of drafter.

    name: its name in the option `draft`. needs: in words, what it requires to draft. folders: pairs of a kind of folder whose weights are
    loaded as this drafter, and that folder's title with its article; empty for a drafter without weights. reads_layers: it reads the
    target's residual streams. has_own_rows: its language-model head covers a draft vocabulary of its own, so `draft_vocab` does not apply.
    beside_head: where it is paired with a model, and not named by the caller, it drafts in addition to the model's own MTP head; a drafter
    that the caller names replaces the head. drafts_blocks: it drafts a whole block in one forward, unless n_max is lower. default: `auto`
    includes it wherever it can be made. by_request: its drafts come from the request itself, so it is part of every list of drafters.
    """

    name: str
    needs: str = "no weights"
    folders: tuple[tuple[str, str], ...] = ()
    reads_layers: bool = False
    has_own_rows: bool = False
    beside_head: bool = False
    drafts_blocks: bool = False
    default: bool = False
    by_request: bool = False


KINDS = (
    DrafterKind(name="forced", needs="what a grammar forces", by_request=True),
    DrafterKind(name="predicted", needs="what a request predicts", by_request=True),
    DrafterKind(name="suffix", default=True),
    DrafterKind(
        name="mtp",
        needs="a head that was trained with the model",
        folders=(("head", "an MTP head"), ("assistant", "a Gemma assistant")),
        default=True,
    ),
    DrafterKind(
        name="eagle3",
        needs="an EAGLE-3 drafter made for this model",
        folders=(("eagle3", "an EAGLE-3 drafter"),),
        reads_layers=True,
        has_own_rows=True,
        beside_head=True,
        default=True,
    ),
    DrafterKind(
        name="dflash",
        needs="a block drafter that was trained for this model",
        folders=(("dflash", "a block drafter"),),
        reads_layers=True,
        beside_head=True,
        drafts_blocks=True,
        default=True,
    ),
    DrafterKind(
        name="draft-model",
        needs="a smaller model of the same vocabulary",
        folders=(("model", "a model"),),
        default=True,
    ),
    DrafterKind(name="ngram-simple", default=True),
    DrafterKind(name="ngram-map-k"),
    DrafterKind(name="ngram-map-k4v"),
)
BY_NAME = {kind.name: kind for kind in KINDS}
DRAFTS_AS = {
    folder: kind.name for kind in KINDS for folder, _ in kind.folders
}  # the drafter that a folder of each kind is
TITLES = {
    folder: title for kind in KINDS for folder, title in kind.folders
}  # the same folders, with their article
