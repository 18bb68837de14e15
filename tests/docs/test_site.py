"""The docs site builds, and its statements on commands, fields, extension points and messages match the code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name

import click
import pytest
from anthropic.types import message_create_params
from click.testing import CliRunner
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel, ValidationError
from starlette.routing import Route

import api_reference
import cli_reference
import public_api
from minisgl_backends.attention import (
    flash_backend,
    flash_versions,
    flashinfer_backend,
    triton_backend,
    trtllm_backend,
)
from minisgl_backends.cuda import decode
from minisgl_core.cli.main import main
from minisgl_core.cli.new_plugin import SCAFFOLDS
from minisgl_core.config.provider_picker import PREFERENCES
from minisgl_core.plugins import hookspecs
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.plugin_filter import ALLOW_VARIABLE
from minisgl_core.plugins.registry import Registry
from minisgl_core.runtime.ipc import IpcAddresses
from minisgl_server.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from minisgl_server.api.app import create_app
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.errors import _REJECTIONS
from minisgl_server.api.generate import GenerateRequest, GenerateSamplingParams
from minisgl_server.api.openai.schemas import ChatRequest, CompletionRequest
from minisgl_server.api.openai_responses.schemas import InputTokensRequest, ResponsesRequest
from minisgl_server.api.tokenize import DetokenizeRequest, TokenizeRequest
from minisgl_server.options import ServerOptions
from serve_once import program

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CORE = "../packages/minisgl-core/README.md"
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))


def block(page: str, mark: str) -> str:
    """Return the code of the block with this mark."""
    [code] = re.findall(
        rf"^<!-- test: {re.escape(mark)} -->\n```\w+\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S
    )
    return str(code)


def commands(page: str, mark: str) -> list[list[str]]:
    return [shlex.split(line.removeprefix("$ ")) for line in block(page, mark).splitlines()]


def marked(page: str, mark: str) -> str:
    """Return the paragraph or table with this mark."""
    return (DOCS / page).read_text().partition(f"<!-- test: {mark} -->\n")[2].partition("\n\n")[0]


def rows(page: str, mark: str) -> list[list[str]]:
    """Return the cells of a table without its header."""
    lines = marked(page, mark).splitlines()[2:]
    assert lines, f"{page} has no table marked {mark!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# The site.


def test_the_site_builds_strictly_and_loads_no_external_files(tmp_path: Path) -> None:
    """Every page is listed, and all links and anchors have targets."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--max-prefill-length" in (tmp_path / "site/cli/index.html").read_text()
    for page, name in (
        ("contracts", "AttentionBackend.forward"),
        ("layers", "RowParallelLinear"),
        ("hooks", "request_finished"),
        ("kits", "PolicyTests"),
    ):
        assert re.search(rf'id="[\w.]*{name}"', (tmp_path / f"site/reference/{page}/index.html").read_text()), name
    layers = re.sub("<[^>]*>", "", (tmp_path / "site/reference/layers/index.html").read_text())
    assert "num_sinks: int = 0" in layers, "the arguments of a constructor"
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.?(?:https?:)?//[^>]*>", page.read_text()), page


def test_command_line_options_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has every option that `--help` shows without plugins, under its command."""
    monkeypatch.setenv(ALLOW_VARIABLE, "minisgl-core")
    reference = cli_reference.cli_reference()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", reference, re.M))
    assert {words.split()[1] for words in sections if words != "minisgl"} == {"launch", "shell", "bench", "plugins"}
    for words, command in cli_reference.commands():
        shown = CliRunner().invoke(main, [*words.split()[1:], "--help"], catch_exceptions=False).output
        flags = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown.partition("\nOptions:\n")[2], re.M)) - {"--help"}
        assert flags or isinstance(command, click.Group), words
        assert flags <= set(names(sections[words])), words
    assert "| `--page-size` `INTEGER|auto` | `auto` |" in sections["minisgl launch"]


# The pages with commands.


def test_every_block_is_tested_or_has_a_reason() -> None:
    for page, known in (
        ("index.md", ["run", "launch", "request", "inspect"]),
        ("plugins/index.md", ["new"]),
        (CORE, ["list"]),
    ):
        assert re.findall(r"^<!-- test: (.*) -->\n```", (DOCS / page).read_text(), re.M) == known


def test_the_quick_start_in_a_program(run_python: Callable[[str], str]) -> None:
    assert "Paris" in run_python(block("index.md", "run"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_quick_start_of_a_server(url: str) -> None:
    [launch], [curl] = commands("index.md", "launch"), commands("index.md", "request")
    assert launch[:3] == ["minisgl", "launch", "--port"]
    assert curl[1].startswith(f"http://127.0.0.1:{launch[3]}/")
    curl[1] = curl[1].replace(f"http://127.0.0.1:{launch[3]}", url)
    done = subprocess.run([*curl, "-s"], capture_output=True, text=True, timeout=120)
    assert "Berlin" in done.stdout


@pytest.mark.parametrize("command", commands("index.md", "inspect") + commands(CORE, "list"), ids=" ".join)
def test_documented_commands_run(command: list[str]) -> None:
    assert command[0] == "minisgl"
    done = CliRunner().invoke(main, command[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "radix" in done.output or "page_size" in done.output


def test_a_new_plugin(tmp_path: Path) -> None:
    new, enter, install, test, check = commands("plugins/index.md", "new")
    assert (new[0], check[0], install[:2], test) == ("minisgl", "minisgl", ["pip", "install"], ["pytest"])
    folder, site = tmp_path / enter[1], tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    for command, where in (
        ([program(), *new[1:]], tmp_path),
        ([*pip, "--target", str(site), "."], folder),
        ([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], folder),
        ([program(), *check[1:]], folder),
    ):
        done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "minisgl-mine" in done.stdout


def test_the_kinds_of_new_plugins() -> None:
    assert [name for cell, *_ in rows("plugins/index.md", "kinds") for name in names(cell)] == list(SCAFFOLDS)


# The API.


def fields(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def openai_fields(module: object) -> set[str]:
    return {*module.CompletionCreateParamsBase.__annotations__, "stream"}  # type: ignore[attr-defined]


OPENAI_CHAT, OPENAI_COMPLETION = openai_fields(chat_create_params), openai_fields(completion_create_params)
OPENAI_RESPONSE = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
ANTHROPIC_MESSAGE = {*message_create_params.MessageCreateParamsBase.__annotations__, "stream"}


def test_request_fields_are_documented() -> None:
    """The table has all fields of both requests, and those of OpenAI's client."""
    table = rows("api.md", "fields")
    found = [names(row[0])[0] for row in table]
    assert len(set(found)) == len(found)
    columns = (fields(ChatRequest), fields(CompletionRequest), OPENAI_CHAT | OPENAI_COMPLETION)
    for column, real in enumerate(columns, 1):
        assert {row[column] for row in table} == {"yes", ""}
        shown = {name for name, row in zip(found, table, strict=True) if row[column]}
        assert shown == real & {*fields(ChatRequest), *fields(CompletionRequest)}


@pytest.mark.parametrize(
    ("mark", "model", "official"),
    [
        ("chats", ChatRequest, OPENAI_CHAT),
        ("responses", ResponsesRequest, OPENAI_RESPONSE),
        ("messages", MessagesRequest, ANTHROPIC_MESSAGE),
    ],
)
def test_refused_fields(mark: str, model: type[BaseModel], official: set[str]) -> None:
    assert fields(CompletionRequest) >= OPENAI_COMPLETION
    shown = names(marked("api.md", f"refused by {mark}"))
    assert shown == sorted(official - fields(model))
    for name in shown:
        with pytest.raises(ValidationError) as caught:
            model.model_validate({name: "x"})
        assert ("extra_forbidden", (name,)) in [(error["type"], error["loc"]) for error in caught.value.errors()]


@pytest.mark.parametrize(
    ("mark", "model"),
    [
        ("responses", ResponsesRequest),
        ("messages", MessagesRequest),
        ("generate", GenerateRequest),
        ("sampling_params", GenerateSamplingParams),
        ("tokenize", TokenizeRequest),
        ("detokenize", DetokenizeRequest),
    ],
)
def test_other_fields(mark: str, model: type[BaseModel]) -> None:
    text = marked("api.md", mark)
    shown = [names(row[0])[0] for row in rows("api.md", mark)] if text.startswith("|") else names(text)
    assert sorted(shown) == sorted(model.model_fields)


def test_the_first_fields_are_those_of_token_counting() -> None:
    for page, counted, last in (
        ("responses", InputTokensRequest, "chat_template_kwargs"),
        ("messages", CountTokensRequest, "speed"),
    ):
        shown = [names(row[0])[0] for row in rows("api.md", page)]
        assert shown[: shown.index(last) + 1] == list(counted.model_fields)


def test_endpoints_are_documented() -> None:
    """The table has every route of the server with default options."""
    with IpcAddresses.create() as endpoints:
        client = EngineClient(endpoints)
        app = create_app(client, ServerOptions())
        client.close()
    paths = app.openapi()["paths"].items()
    real = {f"{method.upper()} {path.replace(':path', '')}" for path, methods in paths for method in methods}
    real |= {f"GET {route.path}" for route in app.routes if isinstance(route, Route) and not route.include_in_schema}
    real.remove("GET /docs/oauth2-redirect")  # belongs to /docs
    shown = [names(row[0])[0] for row in rows("api.md", "endpoints")]
    assert sorted(shown) == sorted(real)


def test_errors_are_documented() -> None:
    """The table has status and code of every error response in the source."""
    real = {(status, code) for status, code in _REJECTIONS.values() if code}
    for path in ROOT.glob("packages/minisgl-server/src/minisgl_server/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiError":
                codes = [*node.args[3:4], *(word.value for word in node.keywords if word.arg == "code")]
                literals = [code for code in codes if isinstance(code, ast.Constant)]
                real |= {(ast.literal_eval(node.args[0]), code.value) for code in literals}
    shown = {(int(row[0]), code) for row in rows("api.md", "errors") for code in names(row[1])}
    assert shown == real


# Extension points.


def test_extension_points_are_documented() -> None:
    registry = Registry.from_environment({})
    ours = re.compile(r"minisgl-(core|backends|models|server)")
    table = rows("extension_points.md", "extension points")
    assert [names(row[0]) for row in table] == [[kind.group] for kind in KINDS.values()]
    kits = set()
    for kind, row in zip(KINDS.values(), table, strict=True):
        contract = kind.contract.replace(":", ".").removeprefix("minisgl_core.")
        assert names(row[1]) == [contract] * bool(contract)
        assert row[2].replace("`", "") == kind.summary.replace("`", "")
        shipped = [e.name for e in registry.entries(kind.name) if ours.fullmatch(e.distribution)]
        if kind.name == "models":
            architectures = [names(each[0])[0] for each in rows("models.md", "architectures")]
            assert architectures == [name for name in shipped if name != "transformers"]
            assert row[3] == f"[{len(architectures)} architectures](models.md), `transformers`"
        else:
            assert names(row[3]) == shipped, kind.name
        kits |= set(names(row[4]))
    testing = ROOT / "packages/minisgl-core/src/minisgl_core/testing"
    real = {
        f"{path.stem}.{name}"
        for path in testing.glob("*_kit.py")
        for name in re.findall(r"^class (\w+Tests)\b", path.read_text(), re.M)
    }
    assert kits == real


def test_auto_tries_the_listed_providers() -> None:
    found = {}
    for [kind], cuda, cpu in (
        (names(row[0]), names(row[1]), names(row[2])) for row in rows("extension_points.md", "preferences")
    ):
        found |= {(kind, "cuda"): tuple(cuda), (kind, "cpu"): tuple(cpu)}
    assert found == PREFERENCES


def test_attention_backends() -> None:
    """The page has head dimensions, page sizes and capabilities of the shipped backends."""
    heads = {
        "fa": flash_backend._HEAD_DIMS,
        "fi": flashinfer_backend._HEAD_DIMS,
        "hopper": decode.HEAD_DIMS,
        "triton": triton_backend.TritonAttention.head_dims,
        "trtllm": trtllm_backend._HEAD_DIMS,
    }
    registry = Registry.from_environment({})
    shown = set()
    for row in rows("models.md", "attention backends"):
        [name] = names(row[0])
        shown.add(name)
        dims = heads.get(name)
        assert row[3] == ("any" if dims is None else ", ".join(map(str, dims))), name
        capabilities = registry.load("attention", name).capabilities
        real = capabilities.sliding_windows, capabilities.soft_cap, capabilities.sinks
        assert row[5:] == ["yes" if each else "no" for each in real], name
    assert shown == {"fa", "fi", "hopper", "native", "torch", "triton", "trtllm"}
    for version in flash_versions.VERSIONS:
        [row] = [
            row
            for row in rows("models.md", "attention backends")
            if row[0].endswith(f"FlashAttention {version.number}")
        ]
        assert row[2] == ("any" if version.page_multiple == 1 else f"multiples of {version.page_multiple}")


def test_public_modules() -> None:
    assert tuple(names(marked("extension_points.md", "public modules"))) == public_api.PUBLIC


def test_hooks() -> None:
    tree = ast.parse(Path(hookspecs.__file__).read_text())
    real = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert [names(row[0])[0] for row in rows("extension_points.md", "hooks")] == real


@pytest.mark.parametrize("page", ["reading.md", "overlap.md", "architecture.md"])
def test_files_exist(page: str) -> None:
    for name in re.findall(r"`([\w/]+\.py)`", (DOCS / page).read_text()):
        assert any(path.match(name) for path in SOURCES), name


def test_architecture_lists_the_layers_of_core_in_order() -> None:
    """The layers are `CORE_LAYERS` of tests/test_architecture.py."""
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text())
    [value] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CORE_LAYERS"
    ]
    layers = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
    assert [names(row[0])[0] for row in rows("architecture.md", "core layers")] == layers


def test_reading_lists_twelve_files_and_describes_each() -> None:
    text = (DOCS / "reading.md").read_text()
    listed = [names(row[1])[0] for row in rows("reading.md", "files")]
    assert len(listed) == 12
    assert re.findall(r"^\*\*(\d+)\. `([^`]+)`", text, re.M) == [(str(n), name) for n, name in enumerate(listed, 1)]


def test_the_reference_has_every_contract() -> None:
    found = {resolve_name(kind.contract).__module__ for kind in KINDS.values() if kind.contract}
    assert found <= {*api_reference.modules("minisgl_core.contracts.*")}
    assert "::: minisgl_core.contracts.policy\n" in api_reference.on_page_markdown(
        (DOCS / "reference/contracts.md").read_text()
    )


# Messages.


def templates(path: Path) -> Iterator[str]:
    """Return the texts in a file, with … in place of values."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[-.\d]*[sdfr]", "…", node.value)


def unknown(quoted: list[str]) -> list[str]:
    """Return the messages that no text in the source contains."""
    known = [template for path in SOURCES for template in templates(path)]
    return [line for line in quoted if not any(line in template for template in known)]


def test_quoted_messages_exist() -> None:
    """Every message that the troubleshooting page quotes is in the source."""
    text = (DOCS / "troubleshooting.md").read_text()
    quoted = [line for code in re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S) for line in code.splitlines()]
    assert len(quoted) > 15
    assert unknown(quoted) == []


def test_messages_of_grammar_limits_exist() -> None:
    """Those of the last two rows are llguidance's."""
    quoted = [message for row in rows("structured_output.md", "limits")[:-2] for message in names(row[2])]
    assert unknown([re.sub(r"[\d.]+", "…", message).removeprefix("must be ") for message in quoted]) == []
