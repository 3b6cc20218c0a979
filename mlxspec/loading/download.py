"""Downloads a repository of the hub into the local cache: data files only, with known sizes.

Names, tokens, offline mode, the layout of the cache and the fetching are those of Hugging Face's own library, which fetches weights by Xet:
in parallel, and no chunk twice. Weights come last and one file after another, so a folder with all its weights is complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlxspec.errors import MlxspecError, ModelError, StorageError
from mlxspec.loading import progress, repositories
from mlxspec.loading.folder import check_links
from mlxspec.loading.short_names import repository

_SPARE = 1 << 30  # bytes of the disk to be left alone
_PLACE = re.compile(
    r"(?:mtp/)?[\w.-]+|1_Pooling/config\.json|\d_Dense/(?:config\.json|model\.safetensors)", re.ASCII
)  # of what is read; no other folder is


class File(NamedTuple):
    """A file of a planned download. size: in bytes; is_here: whether the hub's cache already holds its content."""

    name: str
    size: int
    is_here: bool


class Plan(NamedTuple):
    """A planned download of a repository. revision: as requested; commit: the commit that it is. folder: the folder of the hub's cache
    in which the files will be. base_models: the `base_model` entries of the repository's card."""

    repo: str
    revision: str | None
    commit: str
    folder: Path
    files: tuple[File, ...]
    base_models: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def missing(self) -> int:
        """Return the bytes that are still to be fetched."""
        return sum(f.size for f in self.files if not f.is_here)

    @property
    def weights(self) -> int:
        """Return the bytes of the safetensors files."""
        return sum(f.size for f in self.files if _is_weights(f))


def plan(repo: str, revision: str | None = None) -> Plan:
    """Return the plan of a download: the data files that a repository holds on the hub, with their sizes. Fetches config.json, which
    determines the commit.

    repo: owner/name, an address or a short name. Raises ConfigError for an impossible revision, ModelError where the hub has no such
    model or cannot be reached.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    repo = repository(repo)
    repositories.check_repo(repo)
    repositories.check_revision(revision)
    with explained(repo, revision):
        # asked first: it is tried once, within a time, where a download would be tried again and again
        info = HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        names = {entry.rfilename for entry in info.siblings or []}
        if "adapter_config.json" in names and "config.json" not in names:
            raise ModelError(
                f"{repo} is an adapter, no model: name its model with --model, and a folder that holds it with --adapter."
            )
        config = Path(hf_hub_download(repo, "config.json", revision=revision))
    commit = config.parent.name
    if commit != info.sha:
        raise ModelError(f"{repo} has just been changed on the hub; try again.")
    blobs = config.parent.parent.parent / "blobs"
    files = []
    for entry in info.siblings or []:
        name, size = entry.rfilename, entry.size
        if not _PLACE.fullmatch(name) or not any(fnmatch.fnmatchcase(name, p) for p in repositories.PATTERNS):
            continue
        etag = entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
        if (
            size is None
            or not isinstance(etag, str)
            or not re.fullmatch(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", etag)
        ):
            raise ModelError(f"The hub does not say how large {repo} is; try again later.")
        files.append(File(name, size, (blobs / etag).is_file()))
    if not any(f.name.endswith(".safetensors") for f in files):
        raise ModelError(f"{repo} holds no *.safetensors files; mlxspec runs no other format.")
    return Plan(repo, revision, commit, config.parent, tuple(sorted(files, key=_order)), base_models(info))


def base_models(info: Any) -> tuple[str, ...]:
    """Return the `base_model` entries of a model's card. info: the hub's description of the model (ModelInfo)."""
    named = getattr(info.card_data, "base_model", None)
    found = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return tuple(name for name in found if isinstance(name, str) and name.strip())


def fetch(wanted: Plan) -> Path:
    """Fetch the missing files of a plan, the weights last; return the folder. Raises StorageError where the disk has too little room,
    before anything is fetched; ModelError where the download fails, and complete files are kept."""
    check_disk(wanted)
    _fetch(
        wanted, [f for f in wanted.files if not _is_weights(f)], [f for f in wanted.files if _is_weights(f)]
    )
    missing = [f.name for f in wanted.files if not (wanted.folder / f.name).is_file()]
    if missing:
        raise ModelError(f"{wanted.repo} came without {missing[0]}; pull it again.")
    check_links(wanted.folder)
    return wanted.folder


def fetch_small(wanted: Plan) -> Path:
    """Fetch the missing files of a plan except the weights; return the folder. Raises ModelError and StorageError as `fetch` does."""
    _fetch(wanted, [f for f in wanted.files if not _is_weights(f)])
    check_links(wanted.folder)
    return wanted.folder


def _fetch(wanted: Plan, *groups: Sequence[File]) -> None:
    """Fetch groups of files, one group after the other, and report how much of the whole plan is here."""
    from huggingface_hub import snapshot_download

    here = sum(f.size for f in wanted.files if f.is_here or (wanted.folder / f.name).is_file())
    with (
        explained(wanted.repo, wanted.revision),
        progress.steps(f"pulling {wanted.repo}", sum(f.size for f in wanted.files)) as step,
    ):
        step(here)
        bar = _counted(step)
        for group in groups:
            names = [f.name for f in group]
            snapshot_download(
                wanted.repo, revision=wanted.commit, allow_patterns=names, tqdm_class=bar, max_workers=1
            )


def _is_weights(file: File) -> bool:
    return file.name.endswith(".safetensors")


def _counted(step: progress.Step) -> type:
    """Return a class of progress bars for the hub's library that shows nothing and calls `step` with the number of bytes that have been
    received."""
    from huggingface_hub.utils import tqdm

    class Counted(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str = "", **options: Any) -> None:
            self._counts = name == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                step(int(n or 0))

    return Counted


def check_disk(wanted: Plan, more: int = 0) -> None:
    """Raise StorageError unless the missing files of a plan fit on the disk of the hub's cache. more: bytes to be fetched in addition."""
    free = shutil.disk_usage(wanted.folder).free
    needed = wanted.missing + more
    if needed and needed + _SPARE > free:
        raise StorageError(
            f"{wanted.repo} needs {progress.amount(needed)} and {progress.amount(_SPARE)} to spare, but the disk of "
            f"{repositories.cache_folder()} has {progress.amount(free)} left; free some (`mlxspec rm`) or set HF_HOME to another disk."
        )


def _order(file: File) -> tuple[bool, str]:
    return _is_weights(file), file.name


@contextlib.contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn an error of the hub's library that is raised in the block into a ModelError or StorageError of one sentence. repo, revision:
    what the sentence names."""
    from huggingface_hub import errors as hf
    from huggingface_hub.utils import logging

    bases = hf.HfHubHTTPError.__mro__  # among them what its HTTP client raises, whichever client that is
    transport = next((c for c in bases if c.__name__ == "HTTPError"), hf.HfHubHTTPError)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what matters is said below, in one sentence
    try:
        yield
    except MlxspecError:
        raise
    except hf.GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated: accept its terms at huggingface.co/{repo}, then set HF_TOKEN to a token of that account."
        ) from error
    except hf.RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder {repo} here and no model {repo} on Hugging Face (or it is private: set HF_TOKEN)."
        ) from error
    except hf.RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision or 'main'} on Hugging Face.") from error
    except (hf.LocalEntryNotFoundError, hf.OfflineModeIsEnabled) as error:
        if _is_offline():
            raise ModelError(
                f"HF_HUB_OFFLINE is set, so {repo} cannot be fetched; unset it, or take what `mlxspec models` shows."
            ) from error
        raise ModelError(f"{repo} is not in the local cache and Hugging Face cannot be reached.") from error
    except hf.EntryNotFoundError as error:
        raise ModelError(f"{repo} has no config.json, so it is no model that mlxspec can run.") from error
    except (hf.HfHubHTTPError, transport, OSError, ValueError) as error:
        if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
            raise ModelError(
                f"{repo} is not in the local cache and Hugging Face cannot be reached."
            ) from error
        if getattr(error, "errno", None) in (28, 122):  # no space, quota
            raise StorageError(
                f"The disk is full: {repo} came in part; files that are whole are kept."
            ) from error
        raise ModelError(
            f"{repo} could not be downloaded ({_reason(error)}); files that are whole are kept, so pull it again."
        ) from error
    finally:
        logging.set_verbosity(level)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the hub answered {status}: set HF_TOKEN to a token that may read it"
    if status is not None:
        return f"the hub answered {status}"
    return getattr(error, "strerror", None) or type(error).__name__
