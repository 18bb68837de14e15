from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.cli.main import MinisglGroup
from minisgl_core.cli.options import format_config, pick, with_options
from minisgl_core.config.options import EngineConfig, engine_options, option
from minisgl_core.plugins.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(1919, "Port to listen on.", low=1, high=65535)
    cors: bool = option(True, "Allow other origins.")
    key: tuple[str, ...] = option((), "Passwords.", secret=True)
    name: tuple[str, ...] = option((), "Names.")


class Run:
    """Runs a command with the engine's options and `ServerOptions`, and records its arguments."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        kinds = {"attention": "quick", "policy": "fcfs", "executor": "local"}
        self.registry = Registry(Entry(kind, name, "no_such:Quick", "stranger", "1") for kind, name in kinds.items())

    def __call__(self, *arguments: str, file: str = "", suffix: str = ".toml", **environ: str) -> Any:
        self.values, self.sources = {}, {}

        @click.command()
        @with_options(EngineConfig, ServerOptions)
        @click.option("--other", type=int, default=1)
        @click.pass_obj
        def launch(registry: Registry, values: dict[str, Any], sources: dict[str, str], other: int) -> None:
            assert registry is self.registry
            self.values, self.sources = {**values, "other": other}, sources

        class Group(MinisglGroup):
            def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
                return launch

        if file:
            path = self.tmp_path / f"config{suffix}"
            path.write_text(file)
            arguments = (*arguments, "--config", str(path))
        runner = CliRunner(env=environ)
        return runner.invoke(Group("minisgl"), ["launch", *arguments], obj=self.registry, terminal_width=200)


@pytest.fixture
def run(site, tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_defaults_are_those_of_the_dataclasses(run: Run):
    result = run()
    assert result.exit_code == 0, result.output
    assert {name: run.values[name] for name in engine_options()} == EngineConfig().flat()
    assert ServerOptions(**pick(run.values, ServerOptions)) == ServerOptions()
    assert EngineConfig.from_flat(**pick(run.values, EngineConfig)) == EngineConfig()
    assert set(run.sources.values()) == {"default"}
    assert set(run.sources) == set(run.values) - {"other"}


def test_mistyped_variables_are_named(run: Run):
    read = {"MINISGL_PAGE_SIZE": "4", "MINISGL_DISABLE_OVERLAP_SCHEDULING": "1", "MINISGL_PLUGINS_BLOCK": ""}
    of_others = {"MINISGL_DEBUG": "1", "MINISGL_EXAMPLE_LOG": "x", "MINISGL_METRICS": "1", "MY_MINISGL_TPP": "2"}
    of_others["MINISGL_HOME"] = "x"  # beside the prefix, it shares two letters with MINISGL_MOE
    assert run(**read, **of_others).stderr == ""
    result = run(MINISGL_MEMORY_RATO="0.5", MINISGL_PLUGIN_BLOCK="x", **read)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"minisgl: the environment variable MINISGL_{name} is ignored: no option has it. Did you mean 'MINISGL_{meant}'?"
        for name, meant in (("MEMORY_RATO", "MEMORY_RATIO"), ("PLUGIN_BLOCK", "PLUGINS_BLOCK"))
    ]


def test_flags_override_environment_override_file(run: Run):
    file = "page_size = 2\nnum_pages = 20\ntp = 3\nport = 30\nother = 300\n"
    environ = {"MINISGL_PAGE_SIZE": "4", "MINISGL_NUM_PAGES": "40", "MINISGL_HOST": "::"}
    result = run("--page-size", "8", file=file, **environ)
    assert result.exit_code == 0, result.output
    chosen = {name: run.values[name] for name in ("page_size", "num_pages", "host", "tp", "port", "dtype", "other")}
    expected = {"page_size": 8, "num_pages": 40, "host": "::", "tp": 3, "port": 30, "dtype": "auto", "other": 300}
    assert chosen == expected
    assert run.sources["page_size"] == "flag --page-size"
    assert run.sources["num_pages"] == "environment variable MINISGL_NUM_PAGES"
    assert run.sources["tp"] == f"file {run.tmp_path / 'config.toml'}"
    assert run.sources["dtype"] == "default"


def test_an_environment_variable_selects_a_yaml_config_file(run: Run):
    path = run.tmp_path / "serve.yaml"
    path.write_text("page-size: 16\ndummy-weight: true\nmodel: null\ndisable_overlap: auto\n")
    assert run(MINISGL_CONFIG=str(path)).exit_code == 0
    assert (run.values["page_size"], run.values["dummy_weight"], run.values["model"]) == (16, True, None)


def test_empty_environment_variables_count_as_unset(run: Run):
    assert run(MINISGL_PAGE_SIZE="").exit_code == 0
    assert run.values["page_size"] == "auto"


@pytest.mark.parametrize(
    ("arguments", "environ", "value"),
    [
        ([], {}, "auto"),
        (["--disable-overlap"], {}, True),
        (["--no-disable-overlap"], {}, False),
        ([], {"MINISGL_DISABLE_OVERLAP": "1"}, True),
        ([], {"MINISGL_DISABLE_OVERLAP": "false"}, False),
        ([], {"MINISGL_DISABLE_OVERLAP": "auto"}, "auto"),
        ([], {"MINISGL_DISABLE_OVERLAP_SCHEDULING": "1"}, True),
        ([], {"MINISGL_DISABLE_OVERLAP_SCHEDULING": "1", "MINISGL_DISABLE_OVERLAP": "0"}, False),
        (["--no-disable-overlap"], {"MINISGL_DISABLE_OVERLAP": "1"}, False),
    ],
)
def test_disable_overlap(run: Run, arguments, environ, value):
    result = run(*arguments, **environ)
    assert result.exit_code == 0, result.output
    assert run.values["disable_overlap"] is value or run.values["disable_overlap"] == value == "auto"


@pytest.mark.parametrize(
    ("arguments", "environ", "value", "source"),
    [
        (["--no-cors"], {}, False, "flag --no-cors"),
        (["--cors"], {"MINISGL_CORS": "0"}, True, "flag --cors"),
        ([], {"MINISGL_CORS": "off"}, False, "environment variable MINISGL_CORS"),
        ([], {}, True, "default"),
    ],
)
def test_boolean_flags(run: Run, arguments, environ, value, source):
    result = run(*arguments, **environ)
    assert result.exit_code == 0, result.output
    assert run.values["cors"] is value
    assert run.sources["cors"] == source


@pytest.mark.parametrize(
    ("arguments", "environ", "file", "message"),
    [
        (["--page-size", "0"], {}, "", "--page-size=0 is not valid: must be at least 1."),
        (["--page-size", "ten"], {}, "", "--page-size='ten' is not valid: must be a whole number or auto."),
        (["--tp", "1.5"], {}, "", "--tp='1.5' is not valid: must be a whole number."),
        (["--dtype", "int3"], {}, "", "--dtype='int3' is not valid: must be one of auto, bfloat16"),
        (["--memory-ratio", "nan"], {}, "", "--memory-ratio=nan is not valid: must be at least 0.05, at most 1."),
        (["--port", "65536"], {}, "", "--port=65536 is not valid: must be at least 1, at most 65535."),
        ([], {"MINISGL_TP": "0"}, "", "MINISGL_TP=0 is not valid"),
        ([], {"MINISGL_DISABLE_OVERLAP_SCHEDULING": "so"}, "", "MINISGL_DISABLE_OVERLAP_SCHEDULING='so' is not"),
        ([], {}, "tp = 1.5", "config.toml=1.5 is not valid: must be a whole number."),
        (["--tp", "2"], {}, "tp = 0", "config.toml=0 is not valid"),
        ([], {}, "page_sise = 1", "='page_sise' is not valid: must be the name of an option of this command. Did you"),
        ([], {}, "page-size = 1\npage_size = 2", "given once"),
        ([], {}, "print_config = true", "must be the name of an option"),
        ([], {}, "tp = ", "must be a readable TOML file"),
        (["--config", "missing.toml"], {}, "", "must be a readable TOML file. [Errno 2]"),
        (["--config", "x.ini"], {}, "", "a file that ends in .toml, .yaml or .yml"),
    ],
)
def test_invalid_options_are_refused_in_one_line(run: Run, arguments, environ, file, message):
    result = run(*arguments, file=file, **environ)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert run.values == {}


@pytest.mark.parametrize("file", ["- a\n- b\n", "a: [1\n", "page_size: [1, 2]\n"])
def test_bad_yaml_is_refused(run: Run, file: str):
    result = run(file=file, suffix=".yaml")
    assert result.exit_code == 2
    assert "is not valid: must be" in result.stderr


def test_help_lists_installed_providers_without_importing_them(run: Run):
    text = " ".join(run("--help").stdout.split())
    assert "Attention backend; 'a,b' uses a for prefill and b for decode. [default: auto] Installed: quick." in text
    assert "--dtype [auto|bfloat16|float16|float32]" in text
    assert "--page-size INTEGER|auto" in text
    assert "Installed: none." in text


def test_print_config_writes_an_equivalent_config_file(run: Run):
    arguments = ["--page-size", "4", "--model", 'C:\\odd "name"\n', "--memory-ratio", "0.5", "--no-cors"]
    assert run(*arguments).exit_code == 0
    direct = run.values
    printed = run(*arguments, "--print-config")
    assert printed.exit_code == 0
    assert run.values == {}, "the command ran"
    assert run(file=printed.stdout).exit_code == 0
    assert run.values == direct
    assert "page_size = 4" in printed.stdout
    assert "# flag --page-size\n" in printed.stdout
    assert "# num_pages is not set" in printed.stdout


def test_print_config_checks_that_providers_are_installed(run: Run):
    printed = run("--attn", "quick,nosuch", "--print-config")
    assert printed.exit_code == 2
    assert "--attn: no attention provider is called 'nosuch'" in printed.stderr
    assert printed.stdout == ""


def test_an_option_may_be_given_several_times(run: Run):
    for arguments, environ, file in (
        (["--name", "a", "--name", "b"], {}, ""),
        ([], {"MINISGL_NAME": "a b"}, ""),
        ([], {}, 'name = ["a", "b"]'),
    ):
        result = run(*arguments, file=file, **environ)
        assert result.exit_code == 0, result.output
        assert run.values["name"] == ("a", "b")
    assert run(file='name = "a"').exit_code == 0
    assert run.values["name"] == ("a",)
    assert "a string or a list of strings" in run(file="name = [1]").output
    printed = run("--name", "a", "--name", 'b"', "--print-config").output
    assert tomllib.loads(printed)["name"] == ["a", 'b"']


def test_print_config_hides_secrets(run: Run):
    printed = run("--key", "abcdef", "--key", "ghijkl", "--print-config").output
    assert "# key is set, and not shown" in printed
    assert "key" not in tomllib.loads(printed)
    refused = run(file="key = [5, 'abcdef']")
    assert "key in" in refused.output
    for output in (printed, refused.output, run("--help").output):
        assert "abcdef" not in output
        assert "ghijkl" not in output


scalars = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text())


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), scalars))
def test_printed_config_is_toml(values: dict[str, Any]):
    assert tomllib.loads(format_config(values, dict.fromkeys(values, "default"))) == values


def test_duplicate_options_raise_an_error():
    with pytest.raises(AssertionError, match="twice"):
        with_options(EngineConfig, EngineConfig)
