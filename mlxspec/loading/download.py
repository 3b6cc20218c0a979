"""Downloads a repository of the hub into the local cache: data files only, with known sizes, resumed after an interruption.

Names, tokens, offline mode and the layout of the cache are those of Hugging Face's own library. Only large files are fetched here, because
that library starts them again after an interruption. Weights come last, so a folder with all its weights is complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mlxspec.errors import MlxspecError, ModelError, StorageError
from mlxspec.loading import progress, repositories
from mlxspec.loading.folder import check_links
from mlxspec.loading.reach import check_reachable

LARGE = 8 << 20  # bytes; smaller files are quickly fetched again
_SPARE = 1 << 30  # bytes of the disk to be left alone
_PLACE = re.compile(
    r"(?:mtp/)?[\w.-]+|1_Pooling/config\.json|\d_Dense/(?:config\.json|model\.safetensors)", re.ASCII
)  # of what is read; no other folder is
_SHA256 = re.compile(r"[0-9a-f]{64}")


class File(NamedTuple):
    """A file of a plan. size in bytes; have: how many of them are here; blob: where the cache keeps its content."""

    name: str
    size: int
    have: int
    blob: Path


class Plan(NamedTuple):
    """What a download is made of. folder: where its files will be found; commit: the revision they are of; base_models: what the card of
    the repository names as `base_model`."""

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
        """Bytes that are still to be fetched."""
        return sum(f.size - f.have for f in self.files)

    @property
    def weights(self) -> int:
        """Bytes of tensors."""
        return sum(f.size for f in self.files if f.name.endswith(".safetensors"))


def plan(repo: str, revision: str | None = None) -> Plan:
    """Ask the hub what data files there are. Fetches config.json, by which the revision is found.

    Raises ConfigError for a revision that can be none, ModelError where the hub has no such model or cannot be reached.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    repositories.check_repo(repo)
    repositories.check_revision(revision)
    with explained(repo, revision):
        config = Path(hf_hub_download(repo, "config.json", revision=revision))
        commit = config.parent.name
        info = HfApi().model_info(
            repo, revision=commit, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
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
        blob = blobs / etag
        files.append(File(name, size, _have(blob, size), blob))
    if not any(f.name.endswith(".safetensors") for f in files):
        raise ModelError(f"{repo} holds no *.safetensors files; mlxspec runs no other format.")
    return Plan(repo, revision, commit, config.parent, tuple(sorted(files, key=_order)), base_models(info))


def base_models(info: Any) -> tuple[str, ...]:
    """What the card of a model names as `base_model`, of what the hub says about it."""
    named = getattr(info.card_data, "base_model", None)
    found = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return tuple(name for name in found if isinstance(name, str) and name.strip())


def fetch(wanted: Plan) -> Path:
    """Fetch what is missing; returns the folder. Raises StorageError before anything is fetched when the disk is too small, ModelError when
    the way breaks off: what has come by then stays, and the next call goes on from there."""
    check_disk(wanted)
    names = [f.name for f in wanted.files]
    with (
        explained(wanted.repo, wanted.revision),
        progress.steps(f"pulling {wanted.repo}", wanted.size) as step,
    ):
        step(wanted.size - wanted.missing)
        _fetch_small(wanted, [f for f in wanted.files if f.size < LARGE])
        step(sum(f.size - f.have for f in wanted.files if f.size < LARGE))
        for file in wanted.files:
            if file.size >= LARGE and file.have < file.size:
                _fetch_large(wanted, file, step)
        _fetch_small(wanted, [f for f in wanted.files if f.size >= LARGE])  # links to what has been fetched
    missing = [name for name in names if not (wanted.folder / name).is_file()]
    if missing:
        raise ModelError(f"{wanted.repo} came without {missing[0]}; pull it again.")
    check_links(wanted.folder)
    return wanted.folder


def check_disk(wanted: Plan) -> None:
    """Raise StorageError unless what is missing fits on the disk of the cache."""
    free = shutil.disk_usage(wanted.folder).free
    if wanted.missing and wanted.missing + _SPARE > free:
        raise StorageError(
            f"{wanted.repo} needs {progress.amount(wanted.missing)} and {progress.amount(_SPARE)} to spare, but the disk of "
            f"{repositories.cache_folder()} has {progress.amount(free)} left; free some (`mlxspec rm`) or set HF_HOME to another disk."
        )


def _order(file: File) -> tuple[bool, str]:
    return file.name.endswith(".safetensors"), file.name


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.mlxspec-part")


def _have(blob: Path, size: int) -> int:
    if blob.is_file():
        return size
    try:
        return min(_part(blob).stat().st_size, size)
    except OSError:
        return 0


def _fetch_small(wanted: Plan, files: list[File]) -> None:
    if files:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm

        class Silent(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})

        snapshot_download(
            wanted.repo, revision=wanted.commit, allow_patterns=[f.name for f in files], tqdm_class=Silent
        )


def _fetch_large(wanted: Plan, file: File, step: progress.Step) -> None:
    """Append to what a former try left. The whole is checked against its hash before it gets its name."""
    from huggingface_hub.file_download import http_get

    where, headers = location(wanted.repo, wanted.commit, file.name)
    part = _part(file.blob)
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as out, alone(out, wanted.repo):
        have = min(out.tell(), file.size)
        if have < file.size:
            http_get(
                where,
                out,
                resume_size=have,
                headers=headers,
                expected_size=file.size,
                tqdm_class=counter(step),
            )
        out.flush()
        os.fsync(out.fileno())
        if part.stat().st_size != file.size or (
            _SHA256.fullmatch(file.blob.name) and _sha256(part) != file.blob.name
        ):
            part.unlink()
            raise ModelError(
                f"{file.name} of {wanted.repo} arrived damaged and was thrown away; pull it again."
            )
        part.chmod(0o644)
        part.replace(file.blob)


def location(repo: str, commit: str, name: str) -> tuple[str, dict[str, str]]:
    """Where the content of a file lies, behind the hub's redirection, and the headers of a request for it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url, headers = hf_hub_url(repo, name, revision=commit), build_hf_headers()
    where = get_hf_file_metadata(url, headers=headers).location
    if urlsplit(where).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for its stores
    return where, headers


def counter(step: progress.Step) -> type:
    """A class that the hub's library takes for a progress bar."""

    class Counter:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.total = 0

        def __enter__(self) -> Counter:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            step(int(count or 0))

        def close(self) -> None:
            pass

    return Counter


@contextlib.contextmanager
def alone(file: Any, repo: str) -> Iterator[None]:
    """Two processes must not append to the same file. Raises ModelError when another one does."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ModelError(f"{repo} is being pulled by another process; wait for that one.") from error
    yield  # closing the file lets go of it


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """What goes wrong between here and the hub, as one sentence. Raises ModelError at once where the hub cannot be reached."""
    from huggingface_hub import errors as hf
    from huggingface_hub.utils import logging

    bases = hf.HfHubHTTPError.__mro__  # among them what its HTTP client raises, whichever client that is
    transport = next((c for c in bases if c.__name__ == "HTTPError"), hf.HfHubHTTPError)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what matters is said below, in one sentence
    try:
        if not _is_offline():
            check_reachable(repo)
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
                f"HF_HUB_OFFLINE is set, so {repo} cannot be fetched; unset it, or take what `mlxspec list` shows."
            ) from error
        raise ModelError(f"{repo} is not in the local cache and Hugging Face cannot be reached.") from error
    except hf.EntryNotFoundError as error:
        raise ModelError(f"{repo} has no config.json, so it is no model that mlxspec can run.") from error
    except (hf.HfHubHTTPError, transport, OSError, ValueError) as error:
        if getattr(error, "errno", None) in (28, 122):  # no space, quota
            raise StorageError(
                f"The disk is full: {repo} came in part, and the next try goes on from there."
            ) from error
        raise ModelError(
            f"{repo} could not be downloaded ({_reason(error)}); what has come is kept, so pull it again."
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
