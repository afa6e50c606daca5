"""From what a person writes (a path, a Hub id, a URL) to a folder on this machine."""

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from pi05.errors import CheckpointError

SKIPPED = ("train_state", "train_state.safetensors", "optimizer.pt", "optimizer.safetensors")  # large, and no part of what acts
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.yaml", "*.model"]


def locate(source: str | Path) -> Path:
    """The local folder of a checkpoint; fetched into the cache first if it is elsewhere, once.

    source: a folder, or a file in it; owner/name of the Hub, with @revision where it matters; a URL that fsspec reads (gs:// with gcsfs installed).

    Raises:
        CheckpointError: there is no such thing, or it cannot be fetched.
    """
    source = str(source)
    if "://" in source:
        return _fetch(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if source.startswith((".", "/", "~")) or not HUB_ID.fullmatch(source):
        raise CheckpointError(f"There is no checkpoint {source!r} (from {Path.cwd()}). Give a folder, an owner/name of the Hub, or a gs:// URL.")
    return _download(source)


def _download(source: str) -> Path:
    """The snapshot of a Hub repository."""
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    name, _, revision = source.partition("@")
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES, ignore_patterns=list(SKIPPED)))
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{source!r} is neither a folder (from {Path.cwd()}) nor a repository that the Hub gives out now ({type(error).__name__}: {reason})."
        ) from error


def _fetch(url: str) -> Path:
    """The folder of `url`, from the cache if it was ever fetched whole: a run must not need the network for it."""
    import fsspec

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pi05" / "checkpoints"
    url = url.rstrip("/").removesuffix("/params")  # openpi's statistics lie beside its params
    folder = cache / hashlib.sha256(url.encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    try:
        files, root = fsspec.url_to_fs(url)
        names = [name for name in files.find(root) if not set(name.removeprefix(root).split("/")) & set(SKIPPED)]
    except (ImportError, OSError, ValueError) as error:
        cure = "Install gcsfs (the gcs extra of pi05)" if isinstance(error, ImportError) else "Check the address, or copy it here by other means"
        raise CheckpointError(f"{url} cannot be read ({error}), and {folder} does not exist. {cure}.") from error
    if not names:
        raise CheckpointError(f"There is nothing at {url}.")
    cache.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=cache, prefix=".part-"))
    try:
        for name in names:
            target = part / name.removeprefix(root).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(name, str(target))
        part.replace(folder)
    except OSError as error:
        raise CheckpointError(f"{url} could not be fetched whole ({error}). Check the disk and the connection, and try again.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
