"""The files of the goldens and their manifest: hashes, tolerances, versions, and the history of every change."""

import datetime
import hashlib
import json
import platform
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from pi05.errors import DataError

from .. import tolerances
from .derive import DERIVATIONS, Tensors, derive, input_hashes

FOLDER = Path(__file__).parent
MANIFEST = "manifest.json"
# Derived again, on another machine or with another NumPy, float64 differs by the order of its sums: 1e-15 was seen.
# A projection is a sum of up to 1e5 numbers. A value that was changed by hand by one part in 1e9 stands 100 above.
LIMIT = 1e-11


def read_manifest(folder: Path = FOLDER) -> dict:
    """The manifest of a folder of goldens."""
    return json.loads((folder / MANIFEST).read_text())


def read_goldens(level: str, folder: Path = FOLDER) -> Tensors:
    """The tensors of one level, checked against the manifest.

    Raises:
        DataError: the file is missing, or is not the one that the manifest knows.
    """
    path, known = folder / f"{level}.safetensors", read_manifest(folder)["files"]
    if not path.is_file() or path.name not in known:
        raise DataError(f"{path}: no such golden in the {'manifest' if path.is_file() else 'folder'}. Derive it: python -m parity.goldens --write REASON")
    if (found := sha256(path)) != known[path.name]:
        raise DataError(
            f"{path}: sha256 {found[:12]}, but the manifest says {known[path.name][:12]}: the file was changed by something else than "
            "`python -m parity.goldens --write REASON`. Restore it; `python -m parity.goldens` shows which tensors differ from the reference."
        )
    return load_file(path)


def write_goldens(reason: str, folder: Path = FOLDER) -> dict[str, Tensors]:
    """Derives all goldens, writes files and manifest, and appends `reason` with the replaced hashes to its history. Returns the tensors."""
    made, files = {}, {}
    folder.mkdir(parents=True, exist_ok=True)
    for level in DERIVATIONS:
        made[level] = derive(level)
        (folder / f"{level}.safetensors").write_bytes(save(made[level]))
        files[f"{level}.safetensors"] = sha256(folder / f"{level}.safetensors")
    old = read_manifest(folder) if (folder / MANIFEST).is_file() else {"files": {}, "history": []}
    history = [*old["history"], {"date": datetime.date.today().isoformat(), "reason": reason, "replaced": old["files"]}]
    manifest = {
        "files": files,
        "inputs": input_hashes(),
        "tolerances": limits(),
        "made_with": {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(), "system": platform.system()},
        "history": history,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return made


def sha256(path: Path) -> str:
    """Hash of a file's content, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def limits() -> dict[str, object]:
    """Every limit of tolerances.py, as the manifest records it: a limit that was widened is seen in two files or in none."""
    return {name: value for name, value in vars(tolerances).items() if name.isupper() and isinstance(value, int | float | dict)}


def differences(stored: Tensors, derived: Tensors, limit: float = LIMIT) -> dict[str, float]:
    """Tensors that differ by more than `limit` of their largest element: name to relative error, inf where one is missing or of another shape."""
    out = {name: np.inf for name in stored.keys() ^ derived.keys()}
    for name in stored.keys() & derived.keys():
        first, second = stored[name], derived[name]
        if first.shape != second.shape or not (np.isfinite(first).all() and np.isfinite(second).all()):
            out[name] = np.inf
            continue
        error = float(np.abs(first.astype(np.float64) - second.astype(np.float64)).max(initial=0.0))
        largest = float(np.abs(first.astype(np.float64)).max(initial=0.0))
        relative = error / largest if largest else (np.inf if error else 0.0)
        if relative > limit:
            out[name] = relative
    return dict(sorted(out.items(), key=lambda item: -item[1]))
