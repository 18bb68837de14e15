"""Generator of plugin packages from the files in ``templates``."""

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from packaging.utils import canonicalize_name
from packaging.version import Version

from minisgl_core.errors import InvalidValueError
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.registry import Registry

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
"""Valid names of distributions (PEP 508)."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Properties of one kind's package.

    ``{name}`` is the plugin's name, ``{Name}`` the same in camel case, and ``{name_}`` with underscores.

    Attributes:
        module: name of the provider's module and of its template.
        provider: name of the provider in the module; empty if the module itself is registered.
        summary: description of the package, without a full stop.
        dependencies: dependencies besides minisgl-core.
        options: options of ``minisgl launch`` that use the plugin; by default, the kind's flag with the plugin's name.
        entry: name of the entry point.
    """

    module: str
    provider: str
    summary: str
    dependencies: tuple[str, ...] = ()
    options: str = ""
    entry: str = "{name}"


SCAFFOLDS = {
    "attention": Scaffold("attention", "{Name}Attention", "An attention backend", ("torch",)),
    "models": Scaffold(
        "model", "{Name}ForCausalLM", "A model architecture", ("torch",), "--model FOLDER", "{Name}ForCausalLM"
    ),
    "prefix_cache": Scaffold("prefix_cache", "{Name}Cache", "A prefix cache", ("numpy",)),
    "moe": Scaffold("moe", "{Name}Moe", "A mixture-of-experts kernel", ("torch",)),
    "ops": Scaffold("ops", "{Name}Ops", "Kernels", ("torch",), "--ops {name},auto"),
    "quantization": Scaffold("quantization", "{Name}Quantization", "A quantization method", ("torch",)),
    "communicator": Scaffold(
        "communicator",
        "{Name}Communicator",
        "Collectives between ranks",
        ("numpy", "torch"),
        "--tp 3 --communicator {name}",
    ),
    "executor": Scaffold("executor", "{Name}Executor", "An executor of ranks", (), "--tp 3 --executor {name}"),
    "router": Scaffold("router", "{Name}Router", "A router of requests", (), "--replicas 2 --router {name}"),
    "platform": Scaffold("platform", "{Name}Platform", "A device", ("psutil", "torch")),
    "weights": Scaffold("weights", "{Name}Weights", "A checkpoint format", ("torch", "transformers"), "--model FOLDER"),
    "policy": Scaffold("policy", "{Name}Policy", "A scheduling policy"),
    "commands": Scaffold("command", "{name_}", "A command", ("click",)),
    "grammar": Scaffold(
        "grammar", "{Name}Grammar", "A grammar backend for structured outputs", ("minisgl-backends[grammar]", "numpy")
    ),
    "hooks": Scaffold("hooks", "", "A hook module"),
}
"""Scaffolds by kind."""


def write_plugin(name: str, kind: str, parent: Path) -> list[Path]:
    """Write a package into a new folder.

    Args:
        name: name of the distribution and the folder. The provider's name is `name` without a leading ``minisgl-``.
        kind: a key of `SCAFFOLDS`.
        parent: parent of the new folder.

    Returns:
        The files, relative to `parent`.

    Raises:
        InvalidValueError: `name` is not valid for a distribution or a package, or is taken; or the folder exists.
    """
    distribution = canonicalize_name(name)
    package = distribution.replace("-", "_")
    short = distribution.removeprefix("minisgl-")
    scaffold = SCAFFOLDS[kind]
    # The class of the attention backend my-attention is MyAttention, not MyAttentionAttention.
    camel = "".join(map(str.capitalize, short.split("-"))).removesuffix(scaffold.provider.partition("}")[2])
    words = {"name": short, "name_": short.replace("-", "_"), "Name": camel}
    entry = scaffold.entry.format(**words)
    _check_names(name, package, short, kind, entry)
    folder = parent / distribution
    if folder.exists():
        raise InvalidValueError("NAME", name, "the name of a new folder", f"The folder {folder} exists already.")

    provider = scaffold.provider.format(**words)
    core = Version(version("minisgl-core"))
    requires = (f"minisgl-core>={core.major}.{core.minor},<{core.major}.{core.minor + 1}", *scaffold.dependencies)
    module = f"{package}.{scaffold.module}"
    options = scaffold.options or (f"{KINDS[kind].flag} {{name}}" if KINDS[kind].flag else "")
    use = f"minisgl {short}" if kind == "commands" else f"minisgl launch {options.format(**words)}".rstrip()
    values = {
        "distribution": distribution,
        "package": package,
        "module": scaffold.module,
        "provider": provider,
        "summary": scaffold.summary,
        "group": KINDS[kind].group,
        "entry": entry,
        "value": f"{module}:{provider}" if provider else module,
        "use": use,
        "dependencies": ", ".join(f'"{each}"' for each in requires),
    }
    source = f"src/{package}"
    texts = {
        "pyproject.toml": _fill("pyproject.toml", values),
        "README.md": _fill("README.md", values),
        f"{source}/__init__.py": f'"""{scaffold.summary} for minisgl."""\n',
        f"{source}/py.typed": "",
        f"{source}/{scaffold.module}.py": _fill(f"{scaffold.module}.py", values),
        f"tests/test_{scaffold.module}.py": _fill(f"test_{scaffold.module}.py", values),
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return [Path(distribution, path) for path in texts]


def _check_names(name: str, package: str, short: str, kind: str, entry: str) -> None:
    """Check that the names of distribution, package and provider are valid and not in use; see `write_plugin`."""
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, dots, dashes and underscores, with a letter or digit at both ends"
        raise InvalidValueError("NAME", name, allowed)
    parts = [package, short.replace("-", "_")]
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise InvalidValueError("NAME", name, "a name that Python can import", "Use a letter first, and no keyword.")
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        remedy = f"A module called {package} can be imported already."
        raise InvalidValueError("NAME", name, "a new name", remedy)
    for other in Registry.from_environment().entries(kind):
        if other.name == entry and kind != "hooks":
            raise InvalidValueError("NAME", name, "a new name", f"{other} registers the {KINDS[kind].label} {entry}.")


def _fill(file: str, values: dict[str, str]) -> str:
    text = files("minisgl_core.cli").joinpath("templates", f"{file}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(values)
