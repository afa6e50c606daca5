"""The report of a parity session as data: report.json, its environment, and what it is compared with."""

import datetime
import importlib.metadata
import json
import math
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pi05.compare import Check
from pi05.stack import find_gpu, versions_of

from .record import Record, Row

# What computes, reads or writes numbers here; CUDA, cuDNN and NVRTC are asked of each framework, since each may load its own.
PACKAGES = (
    *("numpy", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ml-dtypes", "torch", "torchvision", "transformers", "tokenizers", "lerobot"),
    *("safetensors", "einops", "sentencepiece", "datasets", "av", "torchcodec", "pillow", "pyarrow", "pydantic", "pytest"),
)
HISTORY = "history"


def environment(device: str) -> dict[str, str]:
    """Every version that matters, by component. "cudnn (torch)" and the like are what that framework itself has loaded."""
    found: dict[str, str] = {"pi05": _version("pi05"), "commit": _commit(), "python": platform.python_version()}
    found |= {name: _version(name) for name in PACKAGES}
    for framework in ("torch", "jax"):
        versions, _ = versions_of(framework)
        extra = {f"{name} ({framework})": version for name, version in versions.items() if name not in PACKAGES}
        found |= {name: version or "not loaded" for name, version in extra.items()}
    gpu = find_gpu()
    found["device"] = device
    found["gpu"] = f"{gpu.count} x {gpu.name}, driver {gpu.driver}" if gpu else "none"
    found["machine"] = f"{_cpu()} ({platform.machine()}, {platform.system()} {platform.release()})"
    return found


def make_report(record: Record, found: Mapping[str, str], tests: Mapping[str, int], problems: Mapping[str, str], seconds: float, command: str) -> dict:
    """The session as JSON-able data. tests: number of tests by outcome; problems: node id of a test that did not pass -> its reason.

    "verdict" is PASS only if something was compared, nothing failed and nothing was skipped. An error that is not finite is null.
    """
    failed = any(tests.get(outcome, 0) for outcome in ("failed", "error"))
    incomplete = tests.get("skipped", 0) or tests.get("xfailed", 0) or not record.rows
    where = first_divergence(record)
    return {
        "verdict": "FAIL" if failed or where else "INCOMPLETE" if incomplete else "PASS",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "command": command,
        "environment": dict(found),
        "tests": dict(tests),
        "problems": dict(problems),
        "first_divergence": where and {"level": where[0].level, "subject": where[0].subject, **_as_json(where[1])},
        "rows": [{"level": row.level, "subject": row.subject, "checks": [_as_json(check) for check in row.checks]} for row in record.rows],
        "mutants": [{"name": name, "caught_by": killer, **_as_json(check, "where")} for name, killer, check in record.mutants],
    }


def first_divergence(record: Record) -> tuple[Row, Check] | None:
    """The first check that failed, level by level and within a test in execution order: where to look first."""
    for row in sorted(record.rows, key=lambda row: int(row.level[1:])):
        for check in row.checks:
            if not check.passed:
                return row, check
    return None


def read_history(folder: Path) -> list[dict]:
    """The reports kept in a folder, oldest first."""
    return [json.loads(path.read_text()) for path in sorted((folder / HISTORY).glob("*.json"))]


def save_report(report: Mapping, folder: Path) -> Path:
    """Writes report.json and a copy into the folder's history; returns the former's path."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    (folder / HISTORY).mkdir(parents=True, exist_ok=True)
    stamp = re.sub(r"\D", "", report["time"])[:14]
    (folder / HISTORY / f"{stamp}.json").write_text(text)
    (folder / "report.json").write_text(text)
    return folder / "report.json"


def margin(check: Mapping) -> float:
    """Error of a check of report.json in units of its limit; infinite if it was not finite."""
    error = math.inf if check["error"] is None else check["error"]
    return error / check["limit"] if check["limit"] else (math.inf if error else 0.0)


def worst(row: Mapping) -> dict:
    """The check of a row of report.json that is nearest to its limit, or farthest beyond."""
    return max(row["checks"], key=margin)


def changes(report: Mapping, previous: Mapping) -> dict[str, tuple[str, str]]:
    """Component -> (before, now) of what differs between two environments."""
    before, now = previous["environment"], report["environment"]
    return {name: (before.get(name, "-"), now.get(name, "-")) for name in now | before if before.get(name) != now.get(name)}


def find_check(report: Mapping | None, level: str, subject: str, name: str) -> dict | None:
    """The check of that name in another report; None where it has none."""
    for row in report["rows"] if report else ():
        if (row["level"], row["subject"]) == (level, subject):
            return next((check for check in row["checks"] if check["name"] == name), None)
    return None


def _as_json(check: Check, name: str = "name") -> dict:
    return {name: check.name, "error": float(check.error) if math.isfinite(check.error) else None, "limit": float(check.limit)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Of the repository that this file is in; "-" in an installed package."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return "-"
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "-"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.is_file() else []
    return f"{len(names)} x {names[0]}" if names else platform.processor() or "unknown processor"
