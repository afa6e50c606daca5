"""The upgrade matrix: `pytest parity` under other versions of what pi05 stands on, one environment a column, one table out.

    uvx nox -l                                   the environments
    uvx nox -s parity                            all of them (each a virtual environment made by uv; the first takes minutes to download)
    uvx nox -s "parity(torch-newest)"            one of them
    uvx nox -s upgrade -- torch==2.12.0          a single candidate against the pinned versions; options of pytest may follow: -- jax==0.12.0 -m l3
    uvx nox -s table                             the table of what has run, also as .cache/parity/matrix.md

Each environment changes one thing, so that a red one names the culprit. Reports lie in .cache/parity/NAME/report.html, compared with the pinned one.
The ranges that pi05 accepts are pyproject.toml's; those that were tested on GPUs are its [tool.pi05.tested].
"""

import json
import tomllib
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["parity"]
nox.options.stop_on_first_error = False

ROOT = Path(__file__).parent
OUT = ROOT / ".cache" / "parity"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = {Requirement(pin).name: pin for pin in PROJECT["tool"]["uv"]["constraint-dependencies"]}
# What moves together: a torch has its own torchvision and torchcodec, a jax its own jaxlib.
FAMILIES = {
    "torch": ("torch", "torchvision", "torchcodec"),
    "jax": ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ml-dtypes", "tensorstore"),
    "transformers": ("transformers", "tokenizers", "huggingface-hub"),
    "numpy": ("numpy", "pandas"),
    "lerobot": ("lerobot", "datasets", "av", "pyarrow"),
    "safetensors": ("safetensors",),
}
# Packages whose pins are dropped, and what is asked for besides. With "override" that holds against every bound of other packages (LeRobot 0.6.1
# wants torch < 2.12), which is what a candidate is about; "all-newest" is the newest that allow each other.
# "oldest" is uv's lowest-direct: the lower bounds of pyproject.toml.
ENVIRONMENTS: dict[str, dict] = {
    "pinned": {},
    **{f"{name}-newest": {"free": family, "ask": (name,), "override": True} for name, family in FAMILIES.items()},
    "all-newest": {"free": tuple(PINS)},
    "oldest": {"free": tuple(PINS), "options": ("--resolution", "lowest-direct")},
    "torch-2.11": {"free": FAMILIES["torch"], "ask": ("torch==2.11.*",)},
    "torch-next": {"free": FAMILIES["torch"], "ask": ("torch>=2.12",), "override": True},
    "jax-0.11": {"free": FAMILIES["jax"], "ask": ("jax==0.11.*",)},
    "jax-0.12": {"free": FAMILIES["jax"], "ask": ("jax==0.12.*",), "override": True},
    "transformers-5.5": {"free": FAMILIES["transformers"], "ask": ("transformers==5.5.*",)},
    "transformers-next": {"free": FAMILIES["transformers"], "ask": ("transformers>=5.6",), "override": True},
}


@nox.session(python="3.12")
@nox.parametrize("environment", [nox.param(name, id=name) for name in ENVIRONMENTS])
def parity(session: nox.Session, environment: str) -> None:
    """pytest parity in one environment of the matrix."""
    run_parity(session, environment, **ENVIRONMENTS[environment], pytest_options=tuple(session.posargs))


@nox.session(python="3.12")
def upgrade(session: nox.Session) -> None:
    """A single candidate: nox -s upgrade -- torch==2.12.0 [options of pytest]."""
    wanted = [text for text in session.posargs if not text.startswith("-") and any(mark in text for mark in "=<>")]
    if not wanted:
        session.error("Say which version: nox -s upgrade -- torch==2.12.0")
    free = tuple(package for text in wanted for package in FAMILIES.get(Requirement(text).name, (Requirement(text).name,)))
    name = "upgrade-" + "-".join(text.replace("==", "-") for text in wanted)
    run_parity(session, name, free=free, ask=tuple(wanted), override=True, pytest_options=tuple(text for text in session.posargs if text not in wanted))
    show_table(session)


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """The table of every environment that has run."""
    show_table(session)


def run_parity(
    session: nox.Session,
    name: str,
    *,
    free: tuple[str, ...] = (),
    ask: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    override: bool = False,
    pytest_options: tuple[str, ...] = (),
) -> None:
    """Installs pi05 with all pins but those of `free`, and `ask`; runs the suite; leaves its report in OUT/name.

    override: `ask` holds even where pyproject.toml, or a package that it names, forbids it.
    """
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "constraints.txt").write_text("\n".join(pin for package, pin in PINS.items() if package not in free) + "\n")
    (folder / "overrides.txt").write_text("\n".join(ask if override else ()) + "\n")
    dev = PROJECT["dependency-groups"]["dev"]
    session.install(
        "--no-config",  # else uv reads the pins of pyproject.toml besides
        *("--constraint", str(folder / "constraints.txt"), "--override", str(folder / "overrides.txt")),
        *options,
        "-e",
        ".",
        *ask,
        *(dev if not free else _names(dev)),
    )
    baseline = OUT / "pinned" / "report.json"
    against = ("--baseline", str(baseline)) if baseline.is_file() and name != "pinned" else ()
    command = ("pytest", "parity", "--report", str(folder), *against, "--junitxml", str(folder / "junit.xml"), *pytest_options)
    session.run("python", "-m", *command, env={"JAX_COMPILATION_CACHE_DIR": str(folder / "jax")})


def _names(requirements: list[str]) -> list[str]:
    return [Requirement(text).name for text in requirements]


def show_table(session: nox.Session) -> None:
    """Prints, and writes as Markdown, one line an environment."""
    reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(OUT.glob("*/report.json"))}
    if not reports:
        session.error("Nothing has run yet: nox -s parity")
    text = matrix(reports)
    (OUT / "matrix.md").write_text(text)
    session.log("the matrix, also in %s:\n\n%s", OUT / "matrix.md", text)


def matrix(reports: dict[str, dict]) -> str:
    """Markdown: environment, verdict, what differs from the pinned versions, worst error of each level in units of its limit, first divergence."""
    pinned = reports.get("pinned", {}).get("environment", {})
    levels = sorted({row["level"] for report in reports.values() for row in report["rows"]}, key=lambda level: int(level[1:]))
    lines = ["| " + " | ".join(["environment", "verdict", "versions", *levels, "first divergence"]) + " |", "|" + "---|" * (len(levels) + 4)]
    for name in sorted(reports, key=lambda name: (name != "pinned", name)):
        report = reports[name]
        packages = [package for package in PINS if report["environment"].get(package, pinned.get(package)) != pinned.get(package)]
        versions = ", ".join(f"{package} {report['environment'].get(package)}" for package in packages) or "as pinned"
        worst = [_worst(report, level) for level in levels]
        where = report["first_divergence"]
        found = f"{where['level']} {where['subject']}: {where['name']}" if where else ""
        lines.append("| " + " | ".join([name, report["verdict"], versions, *worst, found]) + " |")
    return "\n".join(lines) + "\n"


def _worst(report: dict, level: str) -> str:
    """Of limits that are above zero; what must be exact passes or fails."""
    checks = [check for row in report["rows"] if row["level"] == level for check in row["checks"]]
    if any(check["error"] is None or (not check["limit"] and check["error"]) for check in checks):
        return "FAIL"
    return f"{max((check['error'] / check['limit'] for check in checks if check['limit']), default=0.0):.0%}" if checks else "-"
