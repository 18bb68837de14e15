"""The web UI in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_MS = 200_000
LIGHTHOUSE = (
    "You are the keeper of a lighthouse. You know the sea, the wind and the rocks, and you tell every sailor who comes by a"
    " long story about each of them."
)
ESSAY = "Write a long essay about the sea."
ENDLESS = "Count from 1 to 1000, one number a line."
"""Prompt with a long output; SmolLM2 answers most questions in a line."""
TURN = re.compile(r"TTFT \d+ ms · [\d.]+ tok/s · prompt (\d+) \((\d+) cached\) · output (\d+)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium in PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages. At the end, no page may have logged errors or violated the content security policy.

    Chromium also logs unsuccessful responses: one test expects 401, and 503 comes from slow machines.
    """
    complaints: list[str] = []
    contexts: list[Any] = []

    def make(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert [text for text in complaints if not re.search(r"responded with a status of (401|503)", text)] == []


@pytest.fixture
def page(open_page: Callable[..., Any], server: Any) -> Any:
    page = open_page(server.url, viewport={"width": 1400, "height": 1000})
    expect(page.locator("#status")).to_have_text("live", timeout=TIMEOUT_MS)
    return page


def set_options(page: Any, system: str, max_tokens: int, temperature: float = 0) -> None:
    page.click("#settings summary")
    page.fill("#system", system)
    page.fill("#temperature", str(temperature))
    page.fill("#max-tokens", str(max_tokens))


def wait_until_done(page: Any) -> None:
    expect(page.locator("#stop")).to_be_disabled(timeout=TIMEOUT_MS)
    expect(page.locator(".assistant.running")).to_have_count(0)


def legend(page: Any) -> dict[str, int]:
    """Return the number of pages by kind, as the legend shows them."""
    entries = page.locator("#pages-legend li")
    return dict(entries.evaluate_all("nodes => nodes.map((node) => [node.className, Number(node.dataset.count)])"))


def test_reasoning_content_is_shown_and_timed(page: Any) -> None:
    def answer(route: Any) -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
        choices = [
            {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
            {"delta": {"reasoning_content": "Let me think"}, "finish_reason": None},
            {"delta": {"reasoning_content": " more"}, "finish_reason": "length"},
        ]
        chunks = [{"id": "chatcmpl-a", "choices": [each], "usage": usage} for each in choices]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
        route.fulfill(body=body, headers={"Content-Type": "text/event-stream"})
        requests.append(route.request.post_data_json["messages"])

    requests: list[Any] = []
    page.route("**/v1/chat/completions", answer)
    for number in range(2):
        page.fill("#message", "Why?")
        page.press("#message", "Enter")
        expect(page.locator(".reasoning")).to_have_text(["Let me think more"] * (number + 1))
        expect(page.locator(".turn").last).to_contain_text("limit reached")
        wait_until_done(page)
    assert len(requests[1]) == len(requests[0]) + 2, "messages without content stay in the conversation"


def test_a_message_is_streamed_and_not_parsed_as_html(page: Any, client: openai.OpenAI) -> None:
    system, text = "You are terse.", "Say <b>hello</b><img src=x onerror=alert(1)>\nin two lines."
    set_options(page, system, 24)
    page.fill("#message", text)
    page.press("#message", "Enter")
    answer = page.locator(".assistant")
    expect(answer).not_to_be_empty()
    wait_until_done(page)
    assert page.locator(".user").text_content() == text
    assert page.locator(".said b, .said img").count() == 0
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    same = client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=messages, max_tokens=24, temperature=0
    )
    assert answer.text_content() == same.choices[0].message.content
    found = TURN.search(page.locator(".turn").text_content())
    assert found is not None
    assert same.usage is not None
    assert (int(found[1]), int(found[3])) == (same.usage.prompt_tokens, same.usage.completion_tokens)
    # The next turn continues the conversation: all but the end of the first output is cached.
    page.fill("#message", "Again.")
    page.click("#send")
    wait_until_done(page)
    again = TURN.search(page.locator(".turn").last.text_content())
    assert again is not None
    assert int(again[2]) >= int(found[1]) // 16 * 16


def test_a_prefix_of_two_chats_is_one_tree_node(page: Any) -> None:
    set_options(page, LIGHTHOUSE, 80)
    page.click("#more")
    assert page.locator(".lane").count() == 2
    first_step = page.locator("#steps-detail").text_content()
    page.fill("#message", ESSAY)
    page.click("#send")
    # While both run, they are listed and share one tree node.
    expect(page.locator("#requests li")).to_have_count(2, timeout=TIMEOUT_MS)
    shared = page.locator(".node.in-use", has=page.locator("circle:nth-child(2)")).filter(has_text="2 reading").first
    expect(shared).to_be_visible(timeout=TIMEOUT_MS)
    expect(page.locator("#steps-detail")).to_contain_text("2 decodes", timeout=TIMEOUT_MS)
    assert page.locator("#steps-detail").text_content() != first_step
    wait_until_done(page)
    cached = sorted(int(TURN.search(each.text_content())[2]) for each in page.locator(".turn").all())  # type: ignore[index]
    assert cached[1] >= 32, "the second request found the prompt of the first"
    expect(page.locator("#tiles")).to_contain_text("0 waiting")
    expect(page.locator("#requests li")).to_have_count(0, timeout=TIMEOUT_MS)
    assert re.search(r"[1-9]\d* hit", shared.text_content() if shared.count() else page.locator("#tree").text_content())


def test_the_page_map_is_complete_and_drawn(page: Any, http: httpx.Client) -> None:
    set_options(page, LIGHTHOUSE, 60)
    page.fill("#message", ESSAY)
    page.click("#send")
    expect(page.locator("#pages-legend .private")).not_to_have_attribute("data-count", "0", timeout=TIMEOUT_MS)
    counts = legend(page)
    assert sum(counts.values()) == http.get("/engine/state").json()["pages"]["capacity"] == 1199
    assert counts["locked"] + counts["private"] > 0
    wait_until_done(page)
    for canvas in ("steps", "pages"):
        colors = page.evaluate(
            """(id) => {
              const canvas = document.getElementById(id);
              const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
              return new Set(data).size;
            }""",
            canvas,
        )
        assert colors >= 3, canvas


def test_a_step_with_more_prefills_than_are_listed(page: Any) -> None:
    def answer(route: Any) -> None:
        response = route.fetch()
        step = {"step": 7, "time_s": 0, "num_decodes": 2, "num_tokens": 212}
        step |= {"requests": list(range(1, 65)), "num_new": [3] * 64}
        route.fulfill(response=response, json={**response.json(), "steps": [step]})

    page.route("**/engine/state*", answer)
    requests = ", ".join(f"#{number}: 3" for number in range(1, 13))
    expect(page.locator("#steps-detail")).to_have_text(f"Step 7 · 2 decodes · 210 prefill tokens ({requests})")
    page.unroute_all(behavior="ignoreErrors")


def test_stop_and_escape_end_an_answer_at_once(page: Any, http: httpx.Client) -> None:
    set_options(page, "", 4000)
    page.click("#more")
    page.fill("#message", ENDLESS)
    page.click("#send")
    first, second = page.locator(".assistant").all()
    for answer in (first, second):
        expect(answer).not_to_be_empty(timeout=TIMEOUT_MS)
    page.select_option("#target", label="conversation 1")
    page.get_by_role("button", name="Stop conversation 1").click()
    expect(page.locator(".turn").first).to_contain_text("stopped")
    assert "running" in second.get_attribute("class")
    page.keyboard.press("Escape")
    expect(page.locator(".turn").last).to_contain_text("stopped")
    wait_until_done(page)
    length = len(first.text_content())
    stopped_at = http.get("/engine/state").json()["step"]
    while any(http.get("/health/requests").json().values()):  # the scheduler gets the last abort a moment later
        assert http.get("/engine/state").json()["step"] < stopped_at + 100, "aborted before max_tokens"
    expect(page.locator("#requests-summary")).to_have_text("0 running, 0 waiting", timeout=TIMEOUT_MS)
    assert len(first.text_content()) == length


def test_the_tree_is_navigable_by_keyboard(page: Any) -> None:
    page.click("#demo")
    expect(page.locator("#tree .node").nth(2)).to_be_visible(timeout=TIMEOUT_MS)
    page.keyboard.press("Escape")
    wait_until_done(page)
    tree, detail = page.locator("#tree"), page.locator("#tree-detail")
    tree.focus()
    expect(detail).to_contain_text("hit")
    seen = {detail.text_content()}
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
        active = tree.get_attribute("aria-activedescendant")
        assert page.locator(f"#{active}").get_attribute("role") == "treeitem"
        expect(page.locator(f"#{active}.selected")).to_have_count(1)
        seen.add(detail.text_content())
    assert len(seen) > 1


def test_prompts_are_hidden_without_the_flag(page: Any) -> None:
    set_options(page, LIGHTHOUSE, 40)
    page.fill("#message", ESSAY)
    page.click("#send")
    expect(page.locator("#requests li")).to_have_count(1, timeout=TIMEOUT_MS)
    wait_until_done(page)
    expect(page.get_by_text("minisgl launch --web-ui-prompts")).to_be_visible()
    node = page.locator("#tree .node .text").first
    expect(node).to_have_text(re.compile(r"node \d+"))
    assert "lighthouse" not in page.locator("#engine").text_content()


@pytest.mark.nightly
def test_prompts_are_shown_with_the_flag(
    launch: Callable[..., Any], tiny_checkpoint: Path, open_page: Callable[..., Any]
) -> None:
    url = launch("--model", str(tiny_checkpoint), "--num-pages", "1100", "--web-ui-prompts").wait_started().url
    prompt = "You are the keeper of a lighthouse, and you tell long stories."
    body = {"prompt": prompt, "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=100).status_code == 200
    page = open_page(url)
    expect(page.locator("#tree .node .text").first).to_contain_text("You are the", timeout=TIMEOUT_MS)
    expect(page.locator("#prompts-note")).to_be_hidden()


CLIPPED = """() => [...document.querySelectorAll("body *:not(.unseen)")].filter((node) => {
  const isClipping = !["visible", "auto"].includes(getComputedStyle(node).overflowX);
  return isClipping && node.clientWidth > 0 && node.scrollWidth > node.clientWidth + 1;
}).map((node) => `${node.tagName}#${node.id}.${node.className}: ${node.textContent}`)"""
"""Elements whose text is wider than they are, and which do not scroll."""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex], [role=img]")].filter((node) => {
  const by = node.getAttribute("aria-labelledby");
  const label = node.labels?.[0]?.textContent ?? (by && document.getElementById(by).textContent);
  const own = node.tagName === "BUTTON" ? node.textContent : "";
  return !(node.ariaLabel || label || own || "").trim();
}).map((node) => node.outerHTML)"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), pytest.param(390, "light", marks=pytest.mark.nightly)])
def test_figures_are_complete_and_controls_have_names(
    open_page: Callable[..., Any], server: Any, width: int, scheme: str
) -> None:
    page = open_page(server.url, viewport={"width": width, "height": 844}, color_scheme=scheme)
    expect(page.locator("#status")).to_have_text("live", timeout=TIMEOUT_MS)
    set_options(page, LIGHTHOUSE, 60)
    page.click("#demo")
    expect(page.locator("#requests li").first).to_be_visible(timeout=TIMEOUT_MS)
    for _ in range(2):  # during the requests and after them
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert [text for text in page.evaluate(CLIPPED) if not text.startswith("Q#")] == [], "all but the newest text"
        assert page.evaluate(NAMELESS) == []
        assert page.get_by_role("button", name="Stop").count() == 1
        wait_until_done(page)
    expect(page.locator("#tree .node").nth(4)).to_be_visible(timeout=TIMEOUT_MS)
    tree = page.locator("#tree")
    assert tree.evaluate("node => getComputedStyle(node).overflow") == "auto"
    if width == 390:
        tree.hover()
        page.mouse.wheel(200, 0)
        for _ in range(200):
            if tree.evaluate("node => node.scrollLeft"):
                break
            page.wait_for_timeout(50)
        assert tree.evaluate("node => node.scrollLeft") > 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(int(part) for part in re.findall(r"\d+", background)[:3]) < 60) == (scheme == "dark")


def test_the_page_asks_for_an_api_key_and_keeps_it_per_tab(
    launch: Callable[..., Any], tiny_checkpoint: Path, open_page: Callable[..., Any]
) -> None:
    flags = ("--model", str(tiny_checkpoint), "--num-pages", "1100", "--api-key", "open-sesame")
    url = launch(*flags).wait_started().url
    for path in ("", "web_ui/main.js"):
        assert httpx.get(f"{url}/{path}").status_code == 200
    assert httpx.get(f"{url}/engine/state").status_code == 401
    assert httpx.get(f"{url}/web_ui/%2e%2e/v1/models").status_code == 404
    page = open_page(url)
    key, status = page.get_by_label("This server requires an API key."), page.locator("#status")
    expect(key).to_be_focused(timeout=TIMEOUT_MS)
    key.fill("open-barley")
    key.press("Enter")
    refused = page.get_by_label("The API key was rejected. Enter another one.")
    refused.fill("open-sesame")
    refused.press("Enter")
    expect(status).to_have_text("live", timeout=TIMEOUT_MS)
    expect(refused).to_be_hidden()
    set_options(page, "", 4)
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    wait_until_done(page)
    expect(page.locator(".turn")).to_contain_text("output 4")
    page.reload()
    expect(status).to_have_text("live", timeout=TIMEOUT_MS)
    expect(key).to_be_hidden()
    stranger = open_page(url)
    expect(stranger.get_by_label("This server requires an API key.")).to_be_focused(timeout=TIMEOUT_MS)
    expect(stranger.locator("#status")).to_have_text("API key needed")
