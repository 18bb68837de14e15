"""Reader of ``--config`` files."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_core.config.options import check_value
from minisgl_core.errors import InvalidValueError
from minisgl_core.utils.exceptions import one_line
from minisgl_core.utils.suggestions import option_hint


def load_config_file(path: str, options: Mapping[str, dataclasses.Field[Any] | None]) -> dict[str, Any]:
    """Return the checked values in a TOML or YAML file, by name. Keys may be written with dashes or underscores.

    `options` has the field of each allowed option, which checks the value; None leaves the check to click.
    """
    values: dict[str, Any] = {}
    for key, value in _parse(path).items():
        name = str(key).replace("-", "_")
        if name not in options:
            remedy = option_hint(name, options)
            raise InvalidValueError(f"key in {path}", key, "the name of an option of this command", remedy)
        if name in values:
            raise InvalidValueError(f"key in {path}", key, "given once, either with dashes or with underscores")
        item = options[name]
        values[name] = value if item is None else check_value(f"{name} in {path}", value, item)
    return values


def _parse(path: str) -> Mapping[Any, Any]:
    import yaml

    suffix = Path(path).suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise InvalidValueError("--config", path, "a file that ends in .toml, .yaml or .yml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        what = f"a readable {'TOML' if suffix == '.toml' else 'YAML'} file"
        raise InvalidValueError("--config", path, what, one_line(error)) from error
    if not isinstance(data, dict):
        raise InvalidValueError("--config", path, "a mapping of option names to values")
    return data
