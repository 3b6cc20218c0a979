"""Lists the models in Hugging Face's local cache and in LM Studio's folders that mlxspec can run, and removes those of the cache. Uses the
hub's library and headers of files; loads nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mlxspec.checkpoints.memory import expected
from mlxspec.errors import ModelError, StorageError
from mlxspec.loading import hub, lm_studio, repositories
from mlxspec.loading.folder import VISION_FILE, check_links, tensor_files
from mlxspec.loading.published import MODELOPT_FILE, is_unpacked, of_mlx
from mlxspec.loading.safetensors import check_header
from mlxspec.loading.tokenizer import read_json
from mlxspec.models.drafter_folders import ALONE
from mlxspec.models.folder import kind_by
from mlxspec.models.runnable import judge

LM_STUDIO = "LM Studio"  # in place of a revision


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model or drafter on this disk: one revision of a repository in Hugging Face's cache, or a folder of LM Studio, which has no
    revision but LM_STUDIO.

    refs: branches and tags of the revision. size: bytes on the disk. is_complete: whether all weights are on the disk and can be loaded.
    has_head: whether an MTP head that can draft is among them, None where that is not known. problem: why the model cannot be used, else
    empty. memory: bytes that running the model takes, None for a drafter and for a model that cannot be used.
    """

    name: str
    revision: str
    refs: tuple[str, ...]
    folder: str
    size: int
    model_type: str
    quantization: str
    has_head: bool | None
    is_complete: bool
    problem: str
    memory: int | None = None

    def data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The models and drafters on this disk that mlxspec can run. folder: Hugging Face's cache. entries: sorted by name, those of the
    cache first, including incomplete downloads. num_others: number of repositories that mlxspec does not run."""

    folder: Path
    entries: tuple[Entry, ...]
    num_others: int


def listing(context: int | None = None) -> Listing:
    """Return the models and drafters of Hugging Face's cache, then those of LM Studio. Where there is no cache, its part is empty.
    context: number of tokens of one row for which the memory is estimated, None for the default."""
    info, found, others = _scan(), [], 0
    for repo in sorted(info.repos, key=lambda r: r.repo_id) if info else ():
        runnable = []
        if repo.repo_type == "model":
            runnable = [_entry(repo.repo_id, _Revision.of(r), context) for r in repo.revisions]
        entries = [e for e in runnable if e is not None]
        found += sorted(entries, key=lambda e: (not e.refs, e.revision))
        others += not entries
    for name, folder in lm_studio.models().items():
        entry = _entry(name, _Revision(folder, LM_STUDIO, (), _size(folder)), context)
        found += [entry] if entry is not None else []
        others += entry is None
    return Listing(folder=repositories.cache_folder(), entries=tuple(found), num_others=others)


class _Revision(NamedTuple):
    """The files of one revision of a model. refs: its branches and tags. size: bytes on the disk."""

    folder: Path
    commit: str
    refs: tuple[str, ...]
    size: int

    @classmethod
    def of(cls, found: Any) -> _Revision:
        """Return the revision that an object of the hub's library (CachedRevisionInfo) describes."""
        return cls(
            Path(found.snapshot_path), found.commit_hash, tuple(sorted(found.refs)), found.size_on_disk
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Removal:
    """A planned deletion of revisions of a model from the cache. freed: bytes of the disk that become free."""

    def __init__(self, name: str, revisions: tuple[str, ...], strategy: Any, parts: tuple[Path, ...]) -> None:
        self.name, self.revisions = name, revisions
        self._strategy, self._parts = strategy, parts
        self.freed = int(strategy.expected_freed_size) + sum(p.stat().st_size for p in parts)

    def execute(self) -> None:
        """Delete the files. Raises StorageError where the file system refuses."""
        try:
            for part in self._parts:
                part.unlink(missing_ok=True)
            self._strategy.execute()
        except OSError as error:
            raise StorageError(f"{self.name} could not be removed: {error.strerror}.") from error


def removal(name: str, revision: str | None = None) -> Removal:
    """Plan the deletion of a model from Hugging Face's cache; return the plan and delete nothing yet. revision: a commit or its first 6
    or more digits, a branch or a tag; None for all revisions. Raises ModelError where the cache does not hold the model or the
    revision."""
    repositories.check_repo(name)
    repositories.check_revision(revision)
    info = _scan()
    repos = [r for r in info.repos if r.repo_type == "model" and r.repo_id == name] if info else []
    if not repos and name in lm_studio.models():
        raise ModelError(f"{name} is LM Studio's; remove it there, or delete {lm_studio.models()[name]}.")
    if not repos:
        raise ModelError(f"{name} is not in the cache; `mlxspec models` shows what is.")
    repo = repos[0]
    chosen = [
        r.commit_hash
        for r in repo.revisions
        if revision is None
        or revision in r.refs
        or (len(revision) >= 6 and r.commit_hash.startswith(revision))
    ]
    if not chosen and repo.revisions:
        raise ModelError(
            f"{name} is here, but not its revision {revision}; `mlxspec models` shows which are."
        )
    # what a broken download left belongs to no revision: it goes with the last one
    parts = (
        list((repo.repo_path / "blobs").glob("*.incomplete")) if len(chosen) == len(repo.revisions) else []
    )
    alone = replace(info, repos=frozenset({repo}))  # a copy of a repository has the same commits
    return Removal(name, tuple(chosen), alone.delete_revisions(*chosen), tuple(parts))


def _scan() -> Any:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(repositories.cache_folder())
    except (CacheNotFound, ValueError):
        return None


def _entry(name: str, revision: _Revision, context: int | None) -> Entry | None:
    """Return the entry of one revision, read from its config.json and the headers of its weights; None for a model of a kind that
    mlxspec does not run."""
    folder, names, problem = revision.folder, None, ""
    shards, beside = list[Path](), list[Path]()
    try:
        config = read_json(folder / "config.json")
    except ModelError:
        return None
    try:
        check_links(folder)
        if hub.is_complete(folder):
            shards, beside = tensor_files(folder)
            names = [n for path in shards or beside for n in check_header(path)]
    except ModelError as error:
        problem = str(error)
    try:
        runs = judge(config, kind=None if names is None else kind_by(names, config))
    except ModelError:
        return None
    has_head, memory, stored = None, None, quantization(config)
    if names is not None:
        lies_beside = any(path.name != VISION_FILE for path in beside)
        has_head = not runs.by_mlx_lm and (lies_beside or any(".mtp." in f".{n}" for n in names))
    try:
        form = runs.unpacked(read_json(folder / MODELOPT_FILE), names=names)
        stored = form or stored
        if names is not None and runs.is_model:
            files = sum(path.stat().st_size for path in (*shards, *beside))
            memory = expected(runs, files, context, unpacked=is_unpacked(form)).total
    except ModelError as error:
        problem = problem or str(error)
    complete = names is not None and not problem
    if not complete and not problem:
        problem = f"incomplete: `mlxspec pull {name}` fetches the rest"
    return Entry(
        name=name,
        revision=revision.commit,
        refs=revision.refs,
        folder=str(folder),
        size=revision.size,
        model_type=runs.kind if runs.kind in ALONE else str(config.get("model_type")),
        quantization=stored,
        has_head=has_head,
        is_complete=complete,
        problem=problem,
        memory=memory,
    )


def quantization(config: dict[str, Any]) -> str:
    """Return how a config.json describes the storage of the weights: "4 bits", the name of a mode other than affine, the dtype of
    unquantized weights, or "?". The tensors themselves are not read."""
    found = of_mlx(config)
    if type(found.get("bits")) is int:
        mode = found.get("mode", "affine")
        return f"{found['bits']} bits" if mode == "affine" else str(mode)[:20]
    text = config.get("text_config")
    sources = (config, text if isinstance(text, dict) else {})
    dtypes = [s.get(k) for s in sources for k in ("dtype", "torch_dtype") if isinstance(s.get(k), str)]
    return str(dtypes[0])[:20] if dtypes else "?"
