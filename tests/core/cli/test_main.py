from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import click
import packaging
import pluggy
import pytest

import minisgl_core

HEAVY = {"torch", "transformers", "numpy", "huggingface_hub", "tokenizers", "rich", "yaml", "minisgl_server"}

COMMAND = """
import click
from minisgl_core.errors import InvalidValueError, WorkerDiedError

@click.command()
@click.option("--fail")
def run(fail):
    if fail == "user":
        raise InvalidValueError("--port", 0, "at least 1")
    if fail == "worker":
        raise WorkerDiedError("the scheduler died: killed")
    if fail == "name":
        raise WorkerDiedError("the checkpoint has \\n\\x1b[31m\\ud800 \u00e9")
    if fail == "long":
        raise WorkerDiedError("x" * 10**6)
    print("ran")

not_a_command = 3
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["plugins", "list", "--json"], ["--version"]])
def test_listing_commands_imports_no_torch_and_no_plugin(site, arguments):
    site.install("broken", {"commands": {"breaks": "broken:run"}, "hooks": {"h": "broken"}}, broken="import no_such")
    result = site.run(*arguments)
    assert result.status == 0, result.error
    assert not HEAVY & result.modules
    assert "click" in result.modules
    assert "breaks" in result.output or arguments == ["--version"]


def test_help_shows_summaries_and_the_packages_of_commands(site):
    site.install("stranger", {"commands": {"dance": "stranger:run"}}, version="3.1")
    output = site.run("--help").output
    assert "Serve a model over an OpenAI-compatible API." in output
    assert "From stranger 3.1." in output


def test_a_plugin_command_runs(site):
    site.install("stranger", {"commands": {"dance": "stranger_cli:run"}}, stranger_cli=COMMAND)
    result = site.run("dance")
    assert (result.status, result.output) == (0, "ran\n")


@pytest.mark.parametrize(
    ("failure", "status", "line"),
    [
        ("user", 2, "minisgl: --port=0 is not valid: must be at least 1.\n"),
        ("worker", 1, "minisgl: the scheduler died: killed\n"),
        ("long", 1, f"minisgl: {'x' * 3997}...\n"),
        ("name", 1, "minisgl: the checkpoint has \\n\\x1b[31m\\ud800 é\n"),
    ],
)
def test_errors_print_one_line_and_set_the_exit_status(site, failure, status, line):
    site.install("stranger", {"commands": {"dance": "stranger_cli:run"}}, stranger_cli=COMMAND)
    result = site.run("dance", "--fail", failure)
    assert (result.status, result.error) == (status, line)
    traced = site.run("dance", "--fail", failure, MINISGL_DEBUG="1")
    assert traced.status == status
    assert "Traceback" in traced.error


@pytest.mark.parametrize(
    ("value", "reason"),
    [("broken:run", "No module named 'no_such'"), ("stranger_cli:not_a_command", "is not a click command")],
)
def test_a_command_that_does_not_load_is_named(site, value, reason):
    modules = {"broken": "import no_such", "stranger_cli": COMMAND}
    site.install("stranger", {"commands": {"dance": value}}, **modules)
    result = site.run("dance")
    assert result.status == 2
    assert "'dance' of stranger 1.0" in result.error
    assert reason in result.error
    assert "Traceback" not in result.error


@pytest.mark.parametrize("name", ["lanch", "serve"])
def test_an_unknown_command_is_refused_with_a_similar_one(site, name):
    result = site.run(name)
    assert result.status == 2
    assert "Did you mean 'launch'?" in result.error


def test_a_missing_package_of_a_command_is_named(tmp_path: Path):
    """Run an interpreter that sees minisgl-core and the command line's dependencies, and no other package."""
    info = Path(str(distribution("minisgl-core")._path))  # type: ignore[attr-defined]
    packages = [Path(module.__file__ or "").parent for module in (click, packaging, pluggy, minisgl_core)]
    for path in [info, *packages]:
        (tmp_path / path.name).symlink_to(path)
    code = "from minisgl_core.cli.main import main; main(prog_name='minisgl')"
    env = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", code, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    launch = run("launch", "--model", "x")
    assert launch.returncode == 2
    assert (
        launch.stderr
        == "minisgl: no command is called 'launch' (installed: plugins). Try: pip install minisgl-server\n"
    )
    assert "pip install minisgl-server" in run("--help").stdout
    listed = json.loads(run("plugins", "list", "--json").stdout)
    assert {entry["distribution"] for entry in listed} == {"minisgl-core"}


@pytest.mark.parametrize("arguments", ["--help", "plugins list"])
def test_output_to_a_full_disk_fails_with_one_line(arguments):
    command = [sys.executable, "-c", "from minisgl_core.cli.main import main; main()", *arguments.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "minisgl: the output cannot be written: the disk is full.\n")


def test_a_full_disk_names_the_file_that_cannot_be_written(site):
    command = """
import click, errno, os

@click.command()
def run():
    print("ran")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/batch")
"""
    site.install("stranger", {"commands": {"dance": "stranger_cli:run"}}, stranger_cli=command)
    result = site.run("dance")
    assert (result.status, result.output) == (1, "ran\n")
    assert result.error == "minisgl: /dev/shm/batch cannot be written: the disk is full.\n"


@pytest.mark.parametrize("kind", ["OSError", "zmq.ZMQError"])
def test_too_many_open_files_name_the_limit(site, kind):
    command = f"""
import click, errno, zmq

@click.command()
def run():
    raise {kind}(errno.EMFILE, "Too many open files")
"""
    site.install("stranger", {"commands": {"dance": "stranger_cli:run"}}, stranger_cli=command)
    result = site.run("dance")
    assert (result.status, result.error) == (1, "minisgl: too many files are open. Raise the limit with ulimit -n.\n")


def test_an_interrupted_import_prints_one_line(site):
    (site.path / "click.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    code = f"import sys; sys.path.insert(0, {str(site.path)!r}); from minisgl_core.cli import run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "\nAborted!\n")


def test_hooks_add_options_to_commands_but_not_groups(site):
    hooks = """
import click
from minisgl_core import hookimpl

@hookimpl
def cli_options(command):
    return [click.Option(["--metrics-port"], type=int, callback=lambda ctx, param, value: print(command, value))]
"""
    points = {"commands": {"dance": "stranger_cli:run"}, "hooks": {"metrics": "stranger_hooks"}}
    site.install("stranger", points, stranger_cli=COMMAND, stranger_hooks=hooks)
    result = site.run("dance", "--metrics-port", "9")
    assert (result.status, result.output) == (0, "dance 9\nran\n")
    assert "stranger_hooks" not in site.run("plugins", "list").modules


def test_a_config_file_sets_options_of_hooks(site):
    command = """
import click
from minisgl_core.cli.options import with_options
from minisgl_core.config.options import ParallelOptions

@click.command()
@with_options(ParallelOptions)
def run(values, sources):
    print(values)
"""
    hooks = """
import click
from minisgl_core import hookimpl

@hookimpl
def cli_options():
    return [click.Option(["--metrics-port"], type=int, callback=lambda ctx, param, value: print(value))]
"""
    points = {"commands": {"dance": "stranger_cli:run"}, "hooks": {"metrics": "stranger_hooks"}}
    site.install("stranger", points, stranger_cli=command, stranger_hooks=hooks)
    path = site.path / "config.toml"
    path.write_text("metrics-port = 9\ntp = 2\n")
    result = site.run("dance", "--config", str(path))
    assert (result.status, result.output) == (0, "9\n{'tp': 2, 'pp': 1, 'executor': 'local', 'placement': 'pack'}\n"), (
        result.error
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("[click.Option(['--fail'])]", "--fail, which dance has."),
        ("[click.Option(['--mine/--fail'])]", "--fail, which dance has."),
        ("[click.Option(['--mine']), click.Option(['--mine'])]", "--mine, which dance has."),
        ("['--mine']", "must return a list of click options, but it contains '--mine'"),
    ],
)
def test_a_hook_cannot_redefine_a_flag_of_a_command(site, options, reason):
    hooks = f"""
import click
from minisgl_core import hookimpl

@hookimpl
def cli_options():
    return {options}
"""
    points = {"commands": {"dance": "stranger_cli:run"}, "hooks": {"metrics": "stranger_hooks"}}
    site.install("stranger", points, stranger_cli=COMMAND, stranger_hooks=hooks)
    result = site.run("dance")
    assert result.status == 2
    assert reason in result.error
    assert "the hook cli_options of stranger:metrics" in result.error


def test_completion_imports_no_command(site):
    site.install("broken", {"commands": {"breaks": "broken:run"}}, broken="import no_such")
    result = site.run(_MINISGL_COMPLETE="bash_complete", COMP_WORDS="minisgl b", COMP_CWORD="1")
    assert result.status == 0, result.error
    assert {"plain,bench", "plain,breaks"} <= set(result.output.split())


def test_importing_the_package_imports_no_torch():
    code = """
import sys, minisgl_core
assert not {"torch", "numpy", "pluggy", "click"} & set(sys.modules)
assert set(minisgl_core.__all__) <= set(dir(minisgl_core))
from minisgl_core import EngineConfig, MinisglError, SamplingParams, __version__, hookimpl
EngineConfig.from_flat(page_size=16)
assert not {"torch", "transformers"} & set(sys.modules)
assert __version__[0].isdigit()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        minisgl_core.nothing  # noqa: B018


def test_progress_bars_of_libraries_are_not_written_to_pipes():
    code = """
from minisgl_core.cli.main import main
main(["--version"], standalone_mode=False)
from tqdm.auto import tqdm
assert list(tqdm(range(3), desc="a bar")) == [0, 1, 2]
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_commands_run_with_a_closed_stderr():
    code = "from minisgl_core.cli.main import main; main(['--version'])"
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{code}" 2>&-'], capture_output=True, text=True)
    assert done.returncode == 0
    assert "minisgl" in done.stdout
