"""The chat page's dictation, with a microphone that is scripted. Runs the page's own file in node."""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
SCRIPT = """
const {{ Dictation }} = await import("data:text/javascript," + encodeURIComponent({source}));
const log = [];
const track = {{ stop: () => log.push("off") }};
class Recorder extends EventTarget {{
  mimeType = "audio/webm";
  start() {{ log.push("start"); }}
  stop() {{
    this.dispatchEvent(Object.assign(new Event("dataavailable"), {{ data: "ab" }}));
    this.dispatchEvent(Object.assign(new Event("dataavailable"), {{ data: "c" }}));
    this.dispatchEvent(new Event("stop"));
  }}
}}
const button = Object.assign(new EventTarget(), {{ setAttribute: (name, value) => log.push(`${{name}} ${{value}}`) }});
const media = {media};
const heard = {{
  onRecorded: async (blob) => log.push(`${{blob.type}} ${{await blob.text()}}`),
  onFailed: (text) => log.push(text),
}};
const dictation = new Dictation(button, heard, media, Recorder);
for (let click = 0; click < {clicks}; click++) {{
  button.dispatchEvent(new Event("click"));
  await new Promise((done) => setTimeout(done));
}}
console.log(JSON.stringify([dictation.isPossible, log]));
"""
WORKING = "{ getUserMedia: async () => ({ getTracks: () => [track] }) }"
DENIED = '{ getUserMedia: async () => { throw new Error("denied"); } }'


def run(media: str, clicks: int) -> list[Any]:
    source = json.dumps((files("proa_gateway.page") / "dictation.js").read_text())
    script = SCRIPT.format(source=source, media=media, clicks=clicks)
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_two_clicks_make_a_recording_and_turn_the_microphone_off() -> None:
    one = ["start", "aria-pressed true", "off", "aria-pressed false", "audio/webm abc"]
    assert run(WORKING, 2) == [True, one]
    assert run(WORKING, 4) == [True, one * 2]


def test_a_microphone_that_may_not_be_used_is_reported_at_each_click() -> None:
    assert run(DENIED, 2) == [True, ["The microphone cannot be used: denied"] * 2]


def test_a_browser_without_a_microphone_offers_no_dictation() -> None:
    assert run("null", 0) == [False, []]
