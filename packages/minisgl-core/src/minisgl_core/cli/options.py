"""Click options from dataclass fields: one declaration makes a flag, an environment variable and a config-file key.

The options of a command are fields of dataclasses, made with `minisgl_core.config.options.option`::

    @dataclass(frozen=True, kw_only=True)
    class ServerOptions:
        host: str = option("127.0.0.1", "Address to listen on.")
        port: int = option(1919, "Port to listen on.", low=1, high=65535)

    @click.command()
    @with_options(EngineConfig, ServerOptions)
    @click.pass_obj
    def launch(registry: Registry, values: dict[str, Any], sources: dict[str, str]) -> None:
        config = EngineConfig.from_flat(**pick(values, EngineConfig))
        server = ServerOptions(**pick(values, ServerOptions))

``values`` has all options by field name, checked and converted. ``sources`` describes where each value came from. The order of
precedence is flag, environment variable, config file, default. `with_options` adds ``--config`` and ``--print-config``. The
latter prints the options and exits before the function runs; it fails if a selected provider is not installed. The command group
passes its `Registry` as the context's object.
"""

import dataclasses
import difflib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from minisgl_core.cli.config_file import load_config_file
from minisgl_core.config.options import AUTO, LIST, Option, check_value, type_names
from minisgl_core.config.provider_picker import check_providers
from minisgl_core.plugins.plugin_filter import ALLOW_VARIABLE, BLOCK_VARIABLE
from minisgl_core.plugins.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

_PREFIX = "MINISGL_"

_CONFIG_PATH = "minisgl.config_path"
"""Key of the path of the ``--config`` file in a click context's ``meta``."""


def with_options(*sections: type, hidden: Sequence[str] = ()) -> Callable[[F], F]:
    """Decorate a command's function with the options of `sections`; see the module's docstring.

    Args:
        sections: dataclasses whose fields are options, or whose defaults are such dataclasses (`EngineConfig`).
        hidden: names of options that ``--help`` leaves out.

    Returns:
        A decorator. The function is called with keywords ``values: dict[str, Any]`` and ``sources: dict[str, str]``, by option,
        and with the arguments of its other click decorators.
    """
    declared = [item for section in sections for item in _option_fields(section)]
    names = [item.name for item in declared]
    assert len(set(names)) == len(names), f"an option is declared twice: {names}"

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **params: Any) -> Any:
            ctx = click.get_current_context()
            _warn_of_mistyped_variables(ctx.command.params)
            values = {name: params.pop(name) for name in names}
            sources = {param.name: param.source(ctx) for param in ctx.command.params if isinstance(param, ConfigOption)}
            if params.pop("print_config"):
                check_providers(values, ctx.find_object(Registry) or Registry.from_environment())
                secret = {item.name for item in declared if item.metadata["option"].secret}
                return click.echo(format_config(values, sources, secret), nl=False)
            return function(*args, values=values, sources=sources, **params)

        help = "Print the options and where each comes from, as a config file, and exit."
        decorated: Any = _config_option(click.option("--print-config", is_flag=True, help=help)(run))
        for item in reversed(declared):
            hide = item.name in hidden
            decorated = click.option(*_declarations(item), cls=ConfigOption, item=item, hidden=hide)(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def _warn_of_mistyped_variables(params: Sequence[click.Parameter]) -> None:
    """Name variables of the environment that nothing reads and that resemble one of an option. Plugins may have others."""
    variables = [[each.envvar] if isinstance(each.envvar, str) else each.envvar or () for each in params]
    known = {ALLOW_VARIABLE, BLOCK_VARIABLE, *itertools.chain(*variables)}
    # All have the same prefix. With it, short names that have nothing in common would be similar.
    names = [each.removeprefix(_PREFIX) for each in known]
    for name in sorted(each for each in os.environ.keys() - known if each.startswith(_PREFIX)):
        for meant in difflib.get_close_matches(name.removeprefix(_PREFIX), names, n=1, cutoff=0.8):
            text = f"the environment variable {name} is ignored: no option has it. Did you mean '{_PREFIX}{meant}'?"
            click.echo(f"minisgl: {text}", err=True)


def pick(values: Mapping[str, Any], *sections: type) -> dict[str, Any]:
    """Return the `values` that are options of `sections`."""
    return {item.name: values[item.name] for section in sections for item in _option_fields(section)}


def format_config(values: Mapping[str, Any], sources: Mapping[str, str], secret: Set[str] = frozenset()) -> str:
    """Return `values` as TOML, each with its source as a comment: a valid ``--config`` file.

    A value of None is a comment, as TOML has no null. So is a `secret` one, which is not shown.
    """
    lines = [_line(name, value, name in secret) for name, value in values.items()]
    width = max(map(len, lines), default=0)
    return "".join(f"{line:<{width}}  # {sources[name]}\n" for name, line in zip(values, lines, strict=True))


class ConfigOption(click.Option):
    """Click option of one dataclass field."""

    def __init__(self, param_decls: list[str], item: dataclasses.Field[Any], **attrs: Any) -> None:
        self.item = item
        meta: Option = item.metadata["option"]
        is_flag = "bool" in type_names(item)
        is_list = type_names(item) == [LIST]
        super().__init__(
            param_decls,
            type=_CheckedFlag() if is_flag else _Checked(),
            is_flag=is_flag,
            multiple=is_list,
            default=item.default,
            show_default=(AUTO if item.default == AUTO else False) if is_flag else item.default not in (None, ()),
            envvar=[f"MINISGL_{item.name.upper()}", *meta.env],
            help=meta.help,
            metavar=None if is_flag else meta.metavar or _metavar(item, meta),
            **attrs,
        )

    def source(self, ctx: click.Context) -> str:
        """Return a phrase that names the source of the value."""
        found = ctx.get_parameter_source(self.name or "")
        if found is ParameterSource.COMMANDLINE:
            negated = self.is_flag and ctx.params.get(self.name or "") is False
            return f"flag {(self.secondary_opts if negated else self.opts)[0]}"
        if found is ParameterSource.ENVIRONMENT:
            return f"environment variable {self._variable()}"
        return f"file {ctx.meta[_CONFIG_PATH]}" if found is ParameterSource.DEFAULT_MAP else "default"

    def spelling(self, ctx: click.Context | None) -> str:
        """Return the flag or environment variable that the user set."""
        found = ctx and ctx.get_parameter_source(self.name or "")
        return self._variable() if found is ParameterSource.ENVIRONMENT else self.opts[0]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Add the installed providers to the help of options that select one."""
        kind = self.item.metadata["option"].kind
        record = super().get_help_record(ctx)
        if not kind or record is None:
            return record
        registry = ctx.find_object(Registry) or Registry.from_environment()
        return record[0], f"{record[1]}  Installed: {', '.join(registry.names(kind)) or 'none'}."

    def _variable(self) -> str:
        assert self.envvar is not None
        return next((name for name in self.envvar if os.environ.get(name)), self.envvar[0])


class _Checked(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Parameter type that converts with the field's check; errors have the name that the user wrote."""

    name = "value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert isinstance(param, ConfigOption)
        checked = check_value(param.spelling(ctx), value, param.item)
        return checked[0] if param.multiple else checked  # click passes the values of a list one by one


class _CheckedFlag(_Checked, click.types.BoolParamType):
    """Boolean `_Checked`, since click requires a boolean type for ``--x/--no-x``."""


def _config_option(function: Any) -> Any:
    def load(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
        if path is not None:
            reserved = ("help", "config", "print_config")
            params = [p for p in ctx.command.get_params(ctx) if p.name not in reserved]
            fields = {p.name: getattr(p, "item", None) for p in params if p.name and p.param_type_name == "option"}
            ctx.default_map = load_config_file(path, fields)
            ctx.meta[_CONFIG_PATH] = path
        return path

    return click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=load,
        envvar="MINISGL_CONFIG",
        help="TOML or YAML file with options by name. Each option is also an environment variable: MINISGL_ and its"
        " name in capitals. Flags take precedence over the environment, and the environment over the file.",
    )(function)


def _option_fields(section: type) -> Iterator[dataclasses.Field[Any]]:
    for item in dataclasses.fields(section):
        if "option" in item.metadata:
            yield item
        elif dataclasses.is_dataclass(item.default):
            yield from _option_fields(type(item.default))


def _declarations(item: dataclasses.Field[Any]) -> tuple[str, str]:
    flag = item.name.replace("_", "-")
    return item.name, f"--{flag}/--no-{flag}" if "bool" in type_names(item) else f"--{flag}"


def _metavar(item: dataclasses.Field[Any], meta: Option) -> str:
    if meta.choices:
        return f"[{'|'.join(meta.choices)}]"
    names = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT", LIST: "TEXT"}
    types = type_names(item)
    if meta.kind:
        return "NAME"
    return names[types[0]] + (f"|{AUTO}" if types[0] != "str" and "str" in types else "")


def _line(name: str, value: Any, is_secret: bool) -> str:
    if value is None:
        return f"# {name} is not set"
    return f"# {name} is set, and not shown" if is_secret and value else f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
