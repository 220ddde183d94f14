"""Check the chat page in headless Chromium: `make browser`, or `python tests/browser/chat_page.py --url URL`.

Needs Debian's Chromium or another one at --chromium, the package playwright, and a gateway that serves the built-in
model. Prints a line for each check, writes screenshots into build/browser, and exits with 1 if a check fails.
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the chat page in headless Chromium.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="path of the browser")
    arguments = parser.parse_args()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=FLAGS)
        for check in (check_chat, check_tool_call, check_parts_of_an_answer, check_images, check_errors, check_phone):
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
    """A call shows its name and arguments; its result goes to the model, which answers."""
    with opened(browser, url, DESK, "tool-call") as page:
        page.click("summary")
        page.fill("#tools", json.dumps(TOOLS))
        page.fill("#temperature", "0")
        ask(page, "What is the weather in Rome?")
        call = page.locator(".call")
        expect(call.locator(".name")).to_have_text("get_weather")
        expect(call.locator(".arguments")).to_contain_text("Rome")
        call.locator(".result").fill('{"weather": "rain"}')
        call.locator(".result").press("Enter")
        expect(page.locator("article.assistant .content").nth(1)).not_to_be_empty()


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
        page.locator("#images img").first.click()
        expect(page.locator("#images img")).to_have_count(1)
        ask(page, "What?")
        expect(page.locator("article.assistant .content")).to_have_text("A dot.")
        expect(page.locator("article.user .images img")).to_have_count(1)
        expect(page.locator("#images img")).to_have_count(0)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(DOT).decode()}"}}
    assert sent == [[image, {"type": "text", "text": "What?"}]], sent


def check_errors(browser: Browser, url: str) -> None:
    """An error is shown with the gateway's sentence, and the next question works."""
    with opened(browser, url, DESK, "error") as page:
        page.click("summary")
        page.fill("#max-tokens", "100000")
        ask(page, "Hi")
        expect(page.locator(".error")).to_contain_text("maximum context length")
        page.fill("#max-tokens", "")
        ask(page, "What is the capital of France?")
        expect(page.locator("article.assistant .content").last).to_contain_text("Paris")


def check_phone(browser: Browser, url: str) -> None:
    """Nothing is wider than a phone's screen."""
    with opened(browser, url, PHONE, "phone") as page:
        ask(page, "Tell me a story.")
        expect(page.locator("article.assistant footer")).to_contain_text("tokens/s", timeout=60_000)
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"the page is {width} pixels wide"
        expect(page.locator("#send")).to_be_in_viewport()


@contextmanager
def opened(browser: Browser, url: str, viewport: Any, name: str) -> Iterator[Page]:
    """The page with its models. Fails if it prints an error; a screenshot is taken at the end."""
    page = browser.new_page(viewport=viewport)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    try:
        yield page
    finally:
        page.screenshot(path=SCREENSHOTS / f"{name}.png")
        page.close()
    assert not errors, errors


def ask(page: Page, question: str) -> None:
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")


if __name__ == "__main__":
    sys.exit(main())
