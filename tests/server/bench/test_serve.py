"""``minisgl bench serve`` against a live server on the trained model."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minisgl_core.cli.main import main
from minisgl_server.bench.serve.report import as_json
from minisgl_server.bench.trace.format import TraceRequest, write_trace

EVENT = b'data: {"choices":[{"index":0,"text":"x","finish_reason":%s}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM = HEAD + chunk(EVENT % b"null") + chunk(EVENT % b'"length"' + USAGE) + b"0\r\n\r\n"


def bench(url: str, *arguments: object, **environ: str) -> Result:
    flags = ["bench", "serve", "--url", url, *map(str, arguments)]
    return CliRunner().invoke(main, flags, env=environ, catch_exceptions=False)


def bench_json(path: Path, url: str, *arguments: object, **environ: str) -> dict[str, Any]:
    done = bench(url, *arguments, "--json", path, "--details", **environ)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_responses_match_the_requested_lengths(server: Any, tmp_path: Path) -> None:
    shape = ("--num-requests", 6, "--input-len", "9:12", "--output-len", "3:5", "--seed", 7)
    sweep = ("--max-concurrency", 1, "--max-concurrency", 3, "--plot", tmp_path / "p.svg", "--goodput", "ttft:60000")
    found = bench_json(tmp_path / "b.json", f"{server.url}/v1", *shape, *sweep)
    assert [run["label"] for run in found["runs"]] == ["1 at once", "3 at once"]
    for run, limit in zip(found["runs"], (1, 3), strict=True):
        assert (run["num_sent"], run["num_completed"], run["num_failed"]) == (6, 6, 0)
        assert (run["num_other_lengths"], run["num_other_prompts"], run["has_usage"]) == (0, 0, True)
        assert run["peak_concurrency"] == limit
        assert run["num_cached_tokens"] == 0, "prompts share nothing, with each other or with another run's"
        assert run["goodput_per_s"] == pytest.approx(run["requests_per_s"])
        assert run["output_tokens_per_s"] == pytest.approx(run["num_output_tokens"] / run["seconds"])
        for metric in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms"):
            spread = run[metric]
            assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]
        requests = run["requests"]
        assert sum(each["num_output_tokens"] for each in requests) == run["num_output_tokens"]
        assert all(each["num_prompt_tokens"] == each["asked_prompt_tokens"] for each in requests)
        assert all(0 < each["ttft_s"] <= each["latency_s"] for each in requests)
    lengths = [[each["num_prompt_tokens"] for each in run["requests"]] for run in found["runs"]]
    assert sorted(lengths[0]) == sorted(lengths[1]), "all runs have the same lengths"
    assert {9, 10, 11, 12} >= set(lengths[0])
    assert found["options"]["seed"] == 7
    assert found["options"]["model"] == found["model"]
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_cpu_time_of_a_local_server(server: Any, tmp_path: Path) -> None:
    shape = ("--num-requests", 12, "--input-len", 4, "--output-len", 16, "--max-concurrency", 12)
    [run] = bench_json(tmp_path / "b.json", server.url, *shape)["runs"]
    by_process = run["server_cpu_us_per_token"]
    assert {"api", "tokenizer 0", "tokenizer 1", "engine rank 0"} <= by_process.keys()
    assert by_process["engine rank 0"] > 0
    parts = (each for name, each in by_process.items() if name == "api" or name.startswith("tokenizer"))
    assert run["frontend_cpu_us_per_token"] == pytest.approx(sum(parts))
    [same] = bench_json(tmp_path / "c.json", server.url, *shape, "--server-pid", server.process.pid)["runs"]
    assert same["server_cpu_us_per_token"].keys() == by_process.keys()


def test_hit_rate_of_shared_prefixes(server: Any, tmp_path: Path) -> None:
    shape = ("--num-requests", 6, "--input-len", 8, "--output-len", 1, "--max-concurrency", 1)
    prefixes = ("--shared-prefix-tokens", 32, "--num-prefixes", 2)
    done = bench(server.url, *shape, *prefixes, "--json", tmp_path / "b.json")
    [run] = json.loads((tmp_path / "b.json").read_text())["runs"]
    assert (run["num_prompt_tokens"], run["num_cached_tokens"]) == (6 * 40, 4 * 32)
    assert run["hit_rate"] == pytest.approx(128 / 240)
    assert "53.3%" in done.stdout
    assert done.stderr == "", "no progress bar in a pipe"


def test_turns_of_token_ids(server: Any, tmp_path: Path) -> None:
    shape = ("--num-turns", 3, "--num-requests", 5, "--input-len", 16, "--output-len", 4, "--max-concurrency", 1)
    [run] = bench_json(tmp_path / "b.json", server.url, *shape)["runs"]
    found = [(each["conversation"], each["turn"], each["num_prompt_tokens"]) for each in run["requests"]]
    assert found == [(0, 0, 16), (0, 1, 36), (0, 2, 56), (1, 0, 16), (1, 1, 36)]
    cached = [each["num_cached_tokens"] for each in run["requests"]]
    assert cached == [0, 16, 32, 0, 16], "the whole pages of the prompt before"


@pytest.fixture(scope="module", params=["GGUF file", "folder without weights"])
def tokenizer_path(
    request: pytest.FixtureRequest, smollm2_path: Path, engine_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param == "GGUF file":
        return smollm2_path
    folder = tmp_path_factory.mktemp("tokenizer")
    engine_tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_chats_of_exact_length(server: Any, tokenizer_path: Path, tmp_path: Path) -> None:
    shape = ("--num-turns", 2, "--num-requests", 4, "--input-len", 20, "--output-len", 6, "--max-concurrency", 2)
    chat = ("--endpoint", "chat", "--tokenizer", tokenizer_path, "--shared-prefix-tokens", 12)
    [run] = bench_json(tmp_path / "b.json", server.url, *shape, *chat)["runs"]
    assert (run["num_completed"], run["num_other_prompts"], run["num_other_lengths"]) == (4, 0, 0)
    firsts = [each for each in run["requests"] if each["turn"] == 0]
    assert all(each["asked_prompt_tokens"] == each["num_prompt_tokens"] > 32 for each in firsts)
    for each in run["requests"]:
        before = [one for one in firsts if one["conversation"] == each["conversation"]]
        if each["turn"] == 1:
            assert each["num_cached_tokens"] >= before[0]["num_prompt_tokens"] - 1


def test_replay_of_a_trace(server: Any, tmp_path: Path) -> None:
    prompts = [(40, [1, 2, 3]), (40, [1, 2, 4]), (33, [5, 6, 7]), (56, [1, 2, 4, 8]), (9, []), (400, list(range(25)))]
    trace = [
        TraceRequest(chat_id=at, timestamp=100 + at / 100, input_length=n, output_length=1 + at, hash_ids=ids)
        for at, (n, ids) in enumerate(prompts)
    ]
    write_trace(tmp_path / "t.jsonl", trace)
    flags = ("--trace", tmp_path / "t.jsonl", "--max-input-len", 100, "--max-concurrency", 1)
    found = bench_json(tmp_path / "b.json", server.url, *flags, "--time-scale", 0.5, "--time-scale", 2)
    assert [run["label"] for run in found["runs"]] == ["trace x 0.5, 1 at once", "trace x 2, 1 at once"]
    assert "1 of more than 100 tokens were skipped" in found["workload"]
    for run in found["runs"]:
        sent = [(each["num_prompt_tokens"], each["num_output_tokens"]) for each in run["requests"]]
        assert sent == [(40, 1), (40, 2), (33, 3), (56, 4), (9, 5)]
        assert [each["num_cached_tokens"] for each in run["requests"]] == [0, 32, 0, 32, 0]
    fast, slow = ([each["sent_s"] for each in run["requests"]] for run in found["runs"])
    assert all(each >= 0.005 * at for at, each in enumerate(fast))
    assert all(each >= 0.02 * at for at, each in enumerate(slow))


def test_duration_ends_a_run(server: Any, tmp_path: Path) -> None:
    flags = ("--duration", 0.3, "--max-concurrency", 2, "--input-len", 4, "--output-len", 2)
    [run] = bench_json(tmp_path / "b.json", server.url, *flags)["runs"]
    assert 2 <= run["num_sent"] == run["num_completed"]
    assert all(each["sent_s"] < 0.3 for each in run["requests"])


def test_failed_requests_are_counted_and_shown(server: Any, tmp_path: Path) -> None:
    flags = ("--num-requests", 3, "--num-turns", 3, "--input-len", "3000", "--output-len", 6000, "--num-warmups", 0)
    done = bench(server.url, *flags, "--json", tmp_path / "b.json")
    assert done.exit_code == 1, "nothing was answered"
    [run] = json.loads((tmp_path / "b.json").read_text())["runs"]
    assert (run["num_sent"], run["num_completed"], run["num_failed"], run["num_unsent"]) == (1, 0, 1, 2)
    [(error, count)] = run["errors"].items()
    assert (error[:9], count) == ("HTTP 400:", 1)
    assert "max_tokens" in error
    assert error in done.stdout
    assert "2 later turns were not sent" in done.stdout
    assert run["ttft_ms"] is run["hit_rate"] is None
    assert "n/a" in done.stdout


def test_a_server_without_usage_is_measured_by_events(scripted: Any, tmp_path: Path) -> None:
    """The server sends no usage. One stream breaks off, one has an error, and one request gets 404."""
    answers = [
        HEAD + chunk(EVENT % b"null") + chunk(EVENT % b'"length"' + b"data: [DONE]\n\n") + b"0\r\n\r\n",
        HEAD + chunk(EVENT % b"null") + b"0\r\n\r\n",
        HEAD + chunk(b'data: {"error":{"message":"out of luck","code":500}}\n\n') + b"0\r\n\r\n",
        b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 24\r\n\r\n{"error": "slow\\n down"}',
        STREAM,
    ]

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(answers.pop(0))

    made = scripted(answer)
    flags = ("--model", "m", "--num-requests", 5, "--num-warmups", 0, "--max-concurrency", 1, "--output-len", 2)
    extra = ("--extra-body", '{"top_k": 3, "temperature": 0.5}', "--no-ignore-eos")
    [run] = bench_json(tmp_path / "b.json", made.url, *flags, *extra, MINISGL_API_KEY="secret-key")["runs"]
    assert (run["num_completed"], run["num_failed"], run["has_usage"], run["hit_rate"]) == (2, 3, False, None)
    assert run["errors"] == {
        "the stream ended without a finish reason": 1,
        "out of luck": 1,
        "HTTP 429: slow down": 1,
    }
    assert run["num_output_tokens"] == 4
    assert "secret-key" not in (tmp_path / "b.json").read_text()
    for request in made.requests:
        assert b"\r\nAuthorization: Bearer secret-key\r\n" in request
        body = json.loads(request.partition(b"\r\n\r\n")[2])
        assert (body["top_k"], body["temperature"], body["max_tokens"], body["model"]) == (3, 0.5, 2, "m")
        assert "ignore_eos" not in body


def test_an_interrupted_run_is_reported(scripted: Any, tmp_path: Path) -> None:
    stuck = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        if made.requests.index(request) == 0:
            connection.sendall(STREAM)
        else:
            connection.sendall(HEAD + chunk(EVENT % b"null"))
            stuck.set()

    made = scripted(answer)
    program = Path(sys.executable).with_name("minisgl")
    flags = ["--model", "m", "--num-warmups", "0", "--max-concurrency", "1", "--max-concurrency", "2"]
    command = [program, "bench", "serve", "--url", made.url, *flags, "--json", str(tmp_path / "b.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert stuck.wait(60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "1 at once: 1 requests were interrupted" in stdout
    assert "Traceback" not in stderr
    [run] = json.loads((tmp_path / "b.json").read_text())["runs"]
    assert (run["num_sent"], run["num_completed"], run["num_interrupted"]) == (2, 1, 1)
    assert run["is_interrupted"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "nowhere.jsonl"], ["--trace", "No such file"]),
        (["--trace", "t", "--input-len", "5"], ["--input-len", "without --trace"]),
        (["--time-scale", "2"], ["--time-scale", "with --trace"]),
        (["--burstiness", "2"], ["--burstiness", "--request-rate"]),
        (["--turn-delay", "2"], ["--turn-delay", "--num-turns"]),
        (["--num-prefixes", "2"], ["--num-prefixes", "--shared-prefix-tokens"]),
        (["--endpoint", "chat", "--vocab-size", "99"], ["--vocab-size", "--endpoint completions"]),
        (["--details"], ["--details", "--json"]),
        (["--duration", "3"], ["--duration", "--max-concurrency"]),
        (["--goodput", "speed:3"], ["--goodput", "ttft:200"]),
        (["--goodput", "ttft:nan"], ["--goodput", "ttft:200"]),
        (["--input-len", "9:3"], ["--input-len", "LOW:HIGH"]),
        (["--extra-body", "[1]"], ["--extra-body", "JSON object"]),
        (["--plot", "x.pdf"], ["--plot", ".svg"]),
        (["--tokenizer", "/"], ["no weights provider can read", "no config.json"]),
        (["--url", "localhost:3"], ["--url", "http://"]),
        (["--url", "http://127.0.0.1:9"], ["/v1/models", "--model"]),
        (["--request-rate", "nan"], ["--request-rate"]),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], words: list[str]) -> None:
    done = CliRunner().invoke(main, ["bench", "serve", *arguments])
    assert done.exit_code in (1, 2)
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.output


def test_plot_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = CliRunner().invoke(main, ["bench", "serve", "--plot", "x.png"])
    assert done.exit_code == 2
    assert "pip install 'minisgl-server[plot]'" in done.stderr


def test_infinities_and_nan_are_strings_in_json() -> None:
    options = SimpleNamespace(
        request_rates=(float("inf"), float("-inf"), float("nan"), 1.5), api_key="key", details=False
    )
    written = as_json(options, "m", "random", [])
    assert written["options"]["request_rates"] == ["inf", "-inf", "nan", 1.5]
    assert json.loads(json.dumps(written, allow_nan=False)) == written


@pytest.mark.parametrize(
    ("endpoint", "error", "advice"),
    [
        ("completions", "HTTP/1.1 404 Not Found|{'detail':'Not Found'}", "--endpoint chat"),
        ("completions", "HTTP/1.1 405 Method Not Allowed|{'detail':'Method Not Allowed'}", "--endpoint chat"),
        (
            "completions",
            "HTTP/1.1 404 Not Found|{'error':{'message':'This is a chat model, not one for v1/completions.'}}",
            "--endpoint chat",
        ),
        (
            "chat",
            "HTTP/1.1 400 Bad Request|{'error':{'message':'It needs a chat template.'}}",
            "--endpoint completions",
        ),
        ("completions", "HTTP/1.1 404 Not Found|{'error':{'message':'The model x does not exist.'}}", None),
        ("completions", "HTTP/1.1 500 Internal Server Error|{'error':{'message':'Broken.'}}", None),
    ],
)
def test_failures_are_grouped_and_suggest_the_other_endpoint(
    scripted: Any, endpoint: str, error: str, advice: str | None
) -> None:
    head, body = error.replace("'", '"').split("|")
    num_asked = 0

    def answer(connection: socket.socket, request: bytes) -> None:
        nonlocal num_asked
        num_asked += 1
        sent = body.replace("}", f"}}{' ' * num_asked}", 1).encode()
        if '."' in body:
            sent = body.replace('."', f' (request cmpl-{num_asked}a)."').encode()
        connection.sendall(f"{head}\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)

    flags = ("--model", "m", "--num-requests", 12, "--num-warmups", 0, "--max-concurrency", 1, "--endpoint", endpoint)
    done = bench(scripted(answer).url, *flags)
    assert done.exit_code == 1
    [line] = [line for line in done.stdout.splitlines() if "failed:" in line]
    assert f"failed: 12 x HTTP {head.split()[1]}: " in line
    assert ("try --endpoint" in done.stdout) == (advice is not None)
    if advice is not None:
        assert f"; try {advice}." in done.stdout
