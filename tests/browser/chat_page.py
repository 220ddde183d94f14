"""Check the chat page in headless Chromium: `make browser`.

Needs Debian's Chromium or another one at --chromium, the package playwright, which `make browser` brings, and a gateway
that serves the built-in model. Prints a line for each check, writes screenshots into build/browser, and exits with 1 if
a check fails.
"""

import argparse
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

SCREENSHOTS = Path("build/browser")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
DESK, PHONE = {"width": 1000, "height": 700}, {"width": 390, "height": 760}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
DOT = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)  # a PNG of one pixel
SCRIPT = (
    {"reasoning_content": "Let me "},
    {"reasoning_content": "think."},
    {"content": "<b>One</b> moment."},
    {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": 1}'}}]},
)
MARKDOWN = """## A title
Some **bold**, *slanted* and `inline` text with <b>HTML</b> and a [link](https://example.com/).

1. first
   - nested
2. second

```python
print("<b>")
```

```nothing
if "<b>"
```

| name | bytes | what it is for, in a column that is too wide for a phone |
|------|------:|:-:|
| `UDP` | 8 | datagrams |
| `TCP` | 20 | streams |

> A quotation.
"""
# Drops or pastes a file.
TRANSFER = """
([event, type]) => {
  const data = new DataTransfer();
  data.items.add(new File(["a"], "a", { type }));
  const Event = event === "drop" ? DragEvent : ClipboardEvent;
  const transfer = { dataTransfer: data, clipboardData: data, bubbles: true, cancelable: true };
  document.getElementById("prompt").dispatchEvent(new Event(event, transfer));
}
"""
# Replaces the page's fetch: each of `reads` comes after its milliseconds, as one read of all its events.
SCRIPTED_FETCH = """
reads => {
  window.fetch = async (url, { body, signal }) => {
    window.sent = JSON.parse(body);
    const encoder = new TextEncoder();
    return new Response(new ReadableStream({
      async start(stream) {
        signal.addEventListener("abort", () => stream.error(signal.reason));
        for (const [wait, events] of reads) {
          await new Promise(resume => setTimeout(resume, wait));
          if (signal.aborted) return;
          stream.enqueue(encoder.encode(events.join("")));
        }
        stream.close();
      },
    }));
  };
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the chat page in headless Chromium.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="path of the browser")
    arguments = parser.parse_args()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=FLAGS)
        for check in CHECKS:
            try:
                check(browser, arguments.url)
                print(f"passed {check.__name__}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED {check.__name__}: {error}", flush=True)
    return 1 if failed else 0


def check_chat(browser: Browser, url: str) -> None:
    """An answer streams; below it are its figures and the request's id."""
    with opened(browser, url, DESK, "chat") as page:
        ask(page, "What is the capital of France?")
        answer = page.locator("article.assistant")
        expect(answer.locator(".content")).to_contain_text("Paris")
        expect(answer.locator("footer")).to_contain_text("tokens/s")
        expect(answer.locator("footer")).to_contain_text("request ")
        page.click("#new-chat")
        expect(answer).to_have_count(0)


def check_tool_call(browser: Browser, url: str) -> None:
    """A call shows its name and arguments; its result goes to the model, which answers. A message has to wait."""
    with opened(browser, url, DESK, "tool-call") as page:
        page.click("summary")
        page.fill("[name=tools]", json.dumps(TOOLS))
        page.fill("[name=temperature]", "0")
        ask(page, "What is the weather in Rome?")
        call = page.locator(".call")
        expect(call.locator(".name")).to_have_text("get_weather")
        expect(call.locator(".arguments")).to_contain_text("Rome")
        expect(call.locator(".result")).to_be_visible()
        ask(page, "And in Paris?")
        expect(page.locator("#notice")).to_contain_text("waits for the result of its call")
        expect(page.locator("#prompt")).to_have_value("And in Paris?")
        call.locator(".result").fill('{"weather": "rain"}')
        call.locator(".result").press("Enter")
        expect(page.locator("article.assistant .content").nth(1)).not_to_be_empty()
        expect(page.locator("#notice")).to_be_empty()


def check_parts_of_an_answer(browser: Browser, url: str) -> None:
    """Reasoning, text and calls of a scripted answer are shown as text, never as HTML."""

    def script(route: Route) -> None:
        deltas = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in SCRIPT]
        events = [*deltas, {"choices": [], "usage": {"completion_tokens": 9}}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        headers = {"x-request-id": "r1", "x-trace-id": "t1"}
        route.fulfill(content_type="text/event-stream", headers=headers, body=f"{body}data: [DONE]\n\n")

    with opened(browser, url, DESK, "parts") as page:
        page.route("**/v1/chat/completions", script)
        ask(page, "Hi")
        page.click(".assistant .reasoning summary")
        expect(page.locator(".assistant .reasoning .text")).to_have_text("Let me think.")
        expect(page.locator("article.assistant .content")).to_have_text("<b>One</b> moment.")
        expect(page.locator(".call .name")).to_have_text("look")
        expect(page.locator("article.assistant footer")).to_contain_text("trace t1")


def check_images(browser: Browser, url: str) -> None:
    """Images are attached if the model reads them, shown as thumbnails, and sent before the text."""
    sent: list[Any] = []

    def answer(route: Route) -> None:
        sent.append(route.request.post_data_json["messages"][-1]["content"])
        event = json.dumps({"choices": [{"delta": {"content": "A dot."}, "finish_reason": "stop"}]})
        route.fulfill(content_type="text/event-stream", body=f"data: {event}\n\ndata: [DONE]\n\n")

    with opened(browser, url, DESK, "images") as page:
        expect(page.locator("#attach")).to_be_hidden()  # the built-in model reads no images
        page.route("**/v1/chat/completions", answer)
        page.route(
            "**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "m", "input_modalities": ["image"]}]})
        )
        page.reload()
        expect(page.locator("#attach")).to_be_visible()
        files = [{"name": name, "mimeType": "image/png", "buffer": DOT} for name in ("a.png", "b.png")]
        page.set_input_files("#files", files)
        page.locator("#images button").first.press("Enter")
        expect(page.locator("#images img")).to_have_count(1)
        ask(page, "What?")
        expect(page.locator("article.assistant .content")).to_have_text("A dot.")
        expect(page.locator("article.user .images img")).to_have_count(1)
        expect(page.locator("#images img")).to_have_count(0)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(DOT).decode()}"}}
    assert sent == [[image, {"type": "text", "text": "What?"}]], sent


def check_errors(browser: Browser, url: str) -> None:
    """An error is shown with the gateway's sentence; the question is not part of the next request."""
    with opened(browser, url, DESK, "error") as page:
        ask(page, "word " * 5000)  # in the conversation, it would make every later request fail
        expect(page.locator(".error:not(:empty)")).to_contain_text("maximum context length")
        expect(page.locator("article.left-out")).to_have_count(2)
        with page.expect_request("**/v1/chat/completions") as request:
            ask(page, "What is the capital of France?")
        expect(page.locator("article.assistant .content").last).to_contain_text("Paris")
        expect(page.locator("article.assistant footer").last).to_contain_text("tokens/s")
    sent = request.value.post_data_json["messages"]
    assert sent == [{"role": "user", "content": "What is the capital of France?"}], sent


def check_speed(browser: Browser, url: str) -> None:
    """Tokens a second are those of the generation, also if the model waits first or its text comes at once."""
    streamed = [(1000, [1]), *((20, [number]) for number in range(2, 51))]  # a second in the queue, then 50 a second
    held_back = [(1000, range(1, 51))]  # 50 tokens in a second, all read at the end
    for name, reads, slowest, fastest in (("streamed", streamed, 25, 52), ("held-back", held_back, 25, 51)):
        with opened(browser, url, DESK, f"speed-{name}") as page:
            page.evaluate(SCRIPTED_FETCH, [[wait, [counted(number) for number in read]] for wait, read in reads])
            ask(page, "Hi")
            footer = page.locator("article.assistant footer")
            expect(footer).to_contain_text("tokens/s", timeout=20_000)
            facts = footer.text_content() or ""
            per_second = float(facts.split(" tokens/s")[0].split()[-1])
            assert slowest <= per_second <= fastest, facts


def counted(number: int, text: str = "a ", **usage: Any) -> str:
    """The event of one token, with the usage so far."""
    choice = {"delta": {"content": text}, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice], 'usage': {'completion_tokens': number, **usage}})}\n\n"


def check_recovery(browser: Browser, url: str) -> None:
    """A page that is opened before an engine is ready says so, and can be used when one is."""
    models = [503, []]  # what the gateway answers at first

    def answer(route: Route) -> None:
        if not models:
            return route.continue_()
        first = models.pop(0)
        return route.fulfill(status=503, body="") if first == 503 else route.fulfill(json={"data": first})

    page = browser.new_page(viewport=DESK)
    page.clock.install()
    page.route("**/v1/models", answer)
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("503")
    page.clock.run_for(2000)
    expect(page.locator("#model")).to_contain_text("waiting for a model")
    ask(page, "What is the capital of France?")
    expect(page.locator("#notice")).to_contain_text("waiting for a model")
    page.clock.run_for(2000)
    expect(page.locator("#model")).to_contain_text("proa-builtin")
    expect(page.locator("#notice")).to_be_empty()
    page.press("#prompt", "Enter")  # the question is still there
    expect(page.locator("article.assistant .content")).to_contain_text("Paris")
    page.close()


def check_stop(browser: Browser, url: str) -> None:
    """An answer that is stopped says so. Its question stays only if there is text, which the next request then has."""
    with opened(browser, url, DESK, "stop") as page:
        for reads, kept in (([[0, [counted(1)]], [60_000, []]], True), ([[60_000, []]], False)):
            page.evaluate(SCRIPTED_FETCH, reads)
            ask(page, "Hi")
            if kept:
                expect(page.locator("article.assistant .content").last).to_have_text("a ")
            page.click("#stop")
            expect(page.locator("article.assistant footer").last).to_contain_text("stopped")
            expect(page.locator("article.assistant footer").last).not_to_contain_text("…")
            expect(page.locator("#send")).to_be_visible()
        expect(page.locator("article.left-out")).to_have_count(2)
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1)]]])
        ask(page, "Go on")
        sent = page.evaluate("() => window.sent")["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"], sent


def check_composer(browser: Browser, url: str) -> None:
    """Send keeps its size when the prompt grows, and Stop has the same. Escape stops too."""
    with opened(browser, url, DESK, "composer") as page:
        page.evaluate(SCRIPTED_FETCH, [[60_000, []]])
        ask(page, "Hi")
        stop = page.locator("#stop").bounding_box()
        page.keyboard.press("Escape")
        expect(page.locator("article.assistant footer")).to_contain_text("stopped")
        assert page.locator("#send").bounding_box() == stop
        page.fill("#prompt", "line\n" * 8)
        send = page.locator("#send").bounding_box()
        assert page.locator("#prompt").bounding_box()["height"] > 2 * send["height"]
        assert (send["width"], send["height"]) == (stop["width"], stop["height"])


def check_markdown(browser: Browser, url: str) -> None:
    """An answer's Markdown is elements; its code and its text can be copied. The figures are the response's."""
    details = {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}
    events = [counted(number, text, **details) for number, text in enumerate(MARKDOWN.splitlines(keepends=True), 1)]
    for scheme in ("light", "dark"):
        for size, viewport in (("desk", DESK), ("phone", PHONE)):
            with opened(browser, url, viewport, f"markdown-{size}-{scheme}", color_scheme=scheme) as page:
                page.context.grant_permissions(["clipboard-read", "clipboard-write"])
                page.evaluate(SCRIPTED_FETCH, [[1, [event]] for event in events])
                ask(page, "Show me.")
                answer = page.locator("article.assistant")
                expect(answer.locator("footer")).to_contain_text("12 prompt tokens (8 cached)")
                expect(page.locator("#context")).to_have_text(f"{12 + len(events)} of 2,048 tokens of context")
                expect(answer.locator("table td.right")).to_have_text(["8", "20"])
                expect(answer.locator("li li")).to_have_text("nested")
                expect(answer.locator("a")).to_have_attribute("href", "https://example.com/")
                expect(answer.locator("b, script, img")).to_have_count(0)
                expect(answer.locator(".fence .hljs-built_in")).to_have_text("print")
                expect(answer.locator(".fence .hljs-string")).to_have_text('"<b>"')
                expect(answer.locator(".fence").nth(1).locator("code span")).to_have_count(0)
                for button, copied in ((".copy-code", 'print("<b>")'), (".copy", MARKDOWN)):
                    answer.locator(button).first.click()
                    expect(answer.locator(button).first).to_have_text("Copied")
                    assert page.evaluate("() => navigator.clipboard.readText()") == copied
                assert page.evaluate("() => document.documentElement.scrollWidth") <= viewport["width"]


def check_regenerate_and_edit(browser: Browser, url: str) -> None:
    """The last answer is given anew; an edited message replaces itself and all that follows."""
    with opened(browser, url, DESK, "edit") as page:
        for number, question in enumerate(("One?", "Two?", "Three?"), 1):
            page.evaluate(SCRIPTED_FETCH, [[0, [counted(1, f"answer {number}")]]])
            ask(page, question)
            expect(page.locator("article.assistant .content").last).to_have_text(f"answer {number}")
        expect(page.locator(".regenerate:visible")).to_have_count(1)
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1, "again")]]])
        page.locator(".regenerate").last.click()
        expect(page.locator("article.assistant .content")).to_have_text(["answer 1", "answer 2", "again"])
        page.locator(".edit:visible").nth(1).press("Enter")
        page.locator(".editor textarea").press("Escape")
        expect(page.locator("article.user .content:visible")).to_have_count(3)
        page.locator(".edit:visible").nth(1).press("Enter")
        page.locator(".editor textarea").fill("Other?")
        page.locator(".editor textarea").press("Enter")
        expect(page.locator("article.user .content")).to_have_text(["One?", "Other?"])
        expect(page.locator("article.assistant .content")).to_have_text(["answer 1", "again"])
        sent = page.evaluate("() => window.sent")["messages"]
    assert [message["content"] for message in sent] == ["One?", "answer 1", "Other?"], sent


def check_reload(browser: Browser, url: str) -> None:
    """The chat, an answer that streams, open calls and the settings survive a reload."""
    with opened(browser, url, DESK, "reload") as page:
        page.click("summary")
        page.fill("[name=tools]", json.dumps(TOOLS))
        page.fill("[name=temperature]", "0")
        page.select_option("#model", "sailor")
        ask(page, "What is the capital of France?")
        expect(page.locator("article.assistant footer")).to_contain_text("tokens/s")
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1, "**half**")]], [60_000, []]])
        ask(page, "And more?")
        expect(page.locator("article.assistant strong")).to_have_text("half")
        page.reload()
        expect(page.locator("#model")).to_have_value("sailor")
        expect(page.locator("[name=temperature]")).to_have_value("0")
        expect(page.locator("article")).to_have_count(4)
        expect(page.locator("article.assistant strong")).to_have_text("half")
        expect(page.locator("article.assistant footer").last).to_contain_text("stopped by a reload")
        page.click("#new-chat")
        page.reload()
        expect(page.locator("article")).to_have_count(0)
        expect(page.locator("#welcome")).to_be_visible()
        page.select_option("#model", "proa-builtin")
        ask(page, "What is the weather in Rome?")
        expect(page.locator(".call .result")).to_be_visible()
        page.reload()
        page.locator(".call .result").fill('{"weather": "rain"}')
        page.locator(".call .result").press("Enter")
        expect(page.locator("article.assistant .content").nth(1)).not_to_be_empty()


def check_reload_of_a_stream(browser: Browser, url: str) -> None:
    """The reload that ends an answer's connection is the reason that is shown, not the connection."""
    with opened(browser, url, DESK, "reload-stream") as page:
        for number in range(1, 4):
            ask(page, "Tell me a story.")
            expect(page.locator("article.assistant .content").last).not_to_be_empty()
            page.reload()
            expect(page.locator("article.assistant footer").last).to_contain_text("stopped by a reload")
            expect(page.locator("article.assistant")).to_have_count(number)
        expect(page.locator(".error:not(:empty)")).to_have_count(0)


def check_chats(browser: Browser, url: str) -> None:
    """Chats are kept in a list, from which they are opened and deleted; another tab has it too."""
    with opened(browser, url, DESK, "chats") as page:
        for question in ("First?", "Second?"):
            page.click("#new-chat")
            page.evaluate(SCRIPTED_FETCH, [[0, [counted(1, f"to {question}")]]])
            ask(page, question)
            expect(page.locator("article.assistant .content")).to_have_text(f"to {question}")
        expect(page.locator("#chats .open")).to_have_text(["Second?", "First?"])
        expect(page.locator("#chats [aria-current]")).to_have_text("Second?")
        page.click("#chats .open >> text=First?")
        expect(page.locator("article .content")).to_have_text(["First?", "to First?"])
        page.reload()
        expect(page.locator("article .content")).to_have_text(["First?", "to First?"])
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1, "half")]], [60_000, []]])
        ask(page, "More?")
        expect(page.locator("article.assistant .content").last).to_have_text("half")
        page.click("#chats .open >> text=Second?")  # which stops the answer
        expect(page.locator("article .content")).to_have_text(["Second?", "to Second?"])
        other = page.context.new_page()
        other.goto(url)
        expect(other.locator("#welcome")).to_be_visible()
        other.click("#chats .open >> text=First?")
        expect(other.locator("article .content")).to_have_text(["First?", "to First?", "More?", "half"])
        expect(other.locator("article.assistant footer").last).to_contain_text("stopped")
        other.once("dialog", lambda dialog: dialog.accept())
        other.hover("#chats li >> text=Second?")
        other.click("#chats li:has-text('Second?') .remove")
        expect(other.locator("#chats .open")).to_have_text(["First?"])
        expect(page.locator("#chats .open")).to_have_text(["First?"])
    with opened(browser, url, PHONE, "chats-phone") as page:
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1, "a")]]])
        ask(page, "A question that is longer than the list of chats is wide, on every screen that there is?")
        expect(page.locator("#chats")).to_be_hidden()
        page.click("#new-chat")
        page.click("#show-chats")
        expect(page.locator("#chats .remove")).to_be_in_viewport()
        page.click("#chats .open")
        expect(page.locator("#chats")).to_be_hidden()
        expect(page.locator("article.assistant .content")).to_have_text("a")


def check_defaults(browser: Browser, url: str) -> None:
    """The settings show what applies without them; what is set is sent."""
    with opened(browser, url, DESK, "defaults") as page:
        page.click("summary")
        expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "1 by default")
        expect(page.locator("[name=top_p]")).to_have_attribute("placeholder", "1 by default")
        expect(page.locator("[name=max_completion_tokens]")).to_have_attribute("placeholder", "up to 2,048")
        expect(page.locator("#defaults")).to_be_empty()
        defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
        card = {"id": "m", "default_sampling_params": defaults}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
        page.reload()
        page.click("summary")
        expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0.7 by default")
        expect(page.locator("#defaults")).to_contain_text("top_k 20, repetition_penalty 1.05")
        for name, value in (("top_p", "0.5"), ("seed", "7"), ("stop", "END\nUser:\n")):
            page.fill(f"[name={name}]", value)
        page.click("summary")
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1)]]])
        ask(page, "Hi")
        expect(page.locator("article.assistant footer")).to_contain_text("1 tokens")
        sent = page.evaluate("() => window.sent")
    assert (sent["top_p"], sent["seed"], sent["stop"]) == (0.5, 7, ["END", "User:"]), sent
    assert "temperature" not in sent, sent


def check_large_images(browser: Browser, url: str) -> None:
    """A chat that is too large for the browser's store is kept without its images, and the page says so."""
    card = {"id": "m", "input_modalities": ["image"]}
    with opened(browser, url, DESK, "large-images") as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
        page.reload()
        expect(page.locator("#attach")).to_be_visible()
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1)]]])
        page.set_input_files("#files", [{"name": "a.png", "mimeType": "image/png", "buffer": DOT + bytes(1_600_000)}])
        expect(page.locator("#images img")).to_have_count(1)
        ask(page, "What?")
        expect(page.locator("#notice")).to_contain_text("will not survive a reload")
        page.reload()
        expect(page.locator("article.user .content")).to_have_text("(image: not kept)\nWhat?")
        expect(page.locator("article.user img")).to_have_count(0)


def check_welcome(browser: Browser, url: str) -> None:
    """The first screen says what the page is, and its examples work."""
    for size, viewport in (("desk", DESK), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            with opened(browser, url, viewport, f"welcome-{size}-{scheme}", color_scheme=scheme) as page:
                expect(page.locator("#examples button")).to_have_count(3)
    with opened(browser, url, DESK, "example") as page:
        for number, words in enumerate(("Paris", "", "17 + 25")):
            page.locator("#examples button").nth(number).click()
            expect(page.locator("article.assistant footer")).to_contain_text("tokens/s", timeout=60_000)
            expect(page.locator("article.assistant .content")).to_contain_text(words)
            page.click("#new-chat")


def check_what_the_model_supports(browser: Browser, url: str) -> None:
    """Images can be pasted and dropped, thinking switched, if the model's card says so; else the page says why not."""
    with opened(browser, url, DESK, "drop") as page:
        page.evaluate(TRANSFER, ["drop", "image/png"])
        expect(page.locator("#notice")).to_have_text("proa-builtin reads no images.")
        expect(page.locator("#thinking-label")).to_be_hidden()
        card = {"id": "m", "input_modalities": ["image"], "thinking_switch": "enable_thinking", "max_model_len": 9000}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
        page.reload()
        page.evaluate(TRANSFER, ["drop", "image/png"])
        page.evaluate(TRANSFER, ["paste", "image/png"])
        expect(page.locator("#images img")).to_have_count(2)
        page.evaluate(TRANSFER, ["drop", "text/plain"])
        expect(page.locator("#notice")).to_have_text("a is not attached: it is no image.")
        page.click("#new-chat")
        page.select_option("#thinking", "off")
        page.evaluate(SCRIPTED_FETCH, [[0, [counted(1)]]])
        page.locator("#examples button").last.click()
        expect(page.locator("article.user img")).to_be_visible()
        expect(page.locator("article.assistant footer")).to_contain_text("1 tokens")
        sent = page.evaluate("() => window.sent")
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}, sent


def check_faulty_settings(browser: Browser, url: str) -> None:
    """A wrong setting is named, whether the page finds it or the gateway."""
    tool = json.dumps([{"type": "other"}])
    cases = (("tools", "{", "Tools"), ("temperature", "3", "Temperature"), ("tools", tool, "Tools"))
    for number, (name, value, label) in enumerate(cases):
        with opened(browser, url, PHONE, f"fault-{number}") as page:
            page.click("summary")
            page.fill(f"[name={name}]", value)
            page.click("summary")
            ask(page, "Hi")
            expect(page.locator("#notice, .error:not(:empty)").filter(has_text=f"Settings, {label}")).to_be_visible()
            expect(page.locator(f"[name={name}]")).to_have_attribute("aria-invalid", "true")


def check_phone(browser: Browser, url: str) -> None:
    """Nothing is wider than a phone's screen."""
    with opened(browser, url, PHONE, "phone") as page:
        ask(page, "Tell me a story.")
        expect(page.locator("article.assistant footer")).to_contain_text("tokens/s", timeout=60_000)
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"the page is {width} pixels wide"
        expect(page.locator("#send")).to_be_in_viewport()


@contextmanager
def opened(browser: Browser, url: str, viewport: Any, name: str, **options: Any) -> Iterator[Page]:
    """The page with its models. Fails if it prints an error; a screenshot is taken at the end."""
    page = browser.new_context(viewport=viewport, **options).new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#model option:not([value=''])", state="attached")
    try:
        yield page
    finally:
        page.screenshot(path=SCREENSHOTS / f"{name}.png")
        page.context.close()
    assert not errors, errors


def ask(page: Page, question: str) -> None:
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")


CHECKS = (
    check_chat,
    check_tool_call,
    check_parts_of_an_answer,
    check_images,
    check_errors,
    check_speed,
    check_recovery,
    check_stop,
    check_composer,
    check_markdown,
    check_regenerate_and_edit,
    check_reload,
    check_reload_of_a_stream,
    check_chats,
    check_defaults,
    check_large_images,
    check_welcome,
    check_what_the_model_supports,
    check_faulty_settings,
    check_phone,
)

if __name__ == "__main__":
    sys.exit(main())
