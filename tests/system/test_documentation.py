"""The documentation's commands and snippets run as typed: requests against a server like `make run`'s, and scripts,
with `--help` if they take minutes, hours or a card.

There are four gateways, each with an engine, and another engine beside them. One gateway has the built-in model, with
its adapters under the names of docs/adapters.md, the others tiny models that read images, take prompt embeddings and
transcribe audio, under the names of their pages. Snippets run in a folder that has the files which they name.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from support.adapters import Adapter, write_adapter
from support.audio_files import encode
from support.documentation import ROOT, Command, commands, snippets
from support.image_models import make_image_model
from support.processes import engine_process, gateway_process, wait_for_models
from support.tiny_models import make_tiny_model
from support.whisper_models import RATE, make_whisper, tone

# The models that the pages name.
IMAGES, TEXT, SPEECH = "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-0.6B", "openai/whisper-large-v3-turbo"
# The pages show the likeliest answer, which is not always the sampled one.
GREEDY = '--override-generation-config={"temperature": 0}'
BUILTIN = ("--model=builtin", "--enable-lora", "--lora-modules", "sql=builtin:sailor", "law=builtin:butler", GREEDY)
TRANSFER = ("--kv-offloading-size=0.1", "--kv-transfer-address=127.0.0.1:0")
SMALL = ("--max-model-len=512", "--kv-cache-memory-bytes=67108864")
OPTIONAL = ("--enable-runtime-lora-updating", "--enable-dev-endpoints", "--enable-tokenizer-info-endpoint")
ENDING = ("chat", "complete", "transcribe", "run-batch", "collect-env")  # commands of `proa` and `proa-gateway`
NAMED = {(each,) for each in ENDING}
CONTRIBUTORS = "docs/extending.md"  # the page about code, not about use
ASKING = [
    each
    for each in commands()
    if each.program == "curl"
    or (each.words[1:2] in NAMED and (each.words[2:] or each.output))  # not only the name
    or (each.words[1:2] == ("bench",) and each.words[3:] and "--help" not in each.words)
]
SCRIPTS = [
    each for each in commands() if each.words[0].startswith("python") and each.words[1:3] not in ((), ("-m", "pip"))
]

QUICK = ("core_step", "embeddings_http", "hit_rate", "host_step", "preflight", "response_writer", "routing_decision")


@dataclass(frozen=True)
class Site:
    """A folder to run in, and the addresses to use in place of those that the pages name. `gateways`: by page, of those
    with another model than `gateway`; `peer`: of an engine with which `engine` exchanges blocks."""

    folder: Path
    engine: str
    peer: str
    gateway: str
    gateways: Mapping[str, str]

    def run(self, page: str, *command: str) -> str:
        """Run a command of a page to its end; returns its output. It gets this site's addresses and absolute paths."""
        gateway = self.gateways.get(page, self.gateway)
        engines = {"127.0.0.1:50051": self.engine, "127.0.0.1:50052": self.peer}
        places = {"localhost:8000": gateway, "/adapters/": f"{self.folder}/adapters/"}
        for old, new in (places | engines).items():
            command = tuple(word.replace(old, new) for word in command)
        return run(command, self.folder, {"PYTHONPATH": str(ROOT / "tests")} if page == CONTRIBUTORS else {})


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command of the environment of this Python; returns its output. Raises AssertionError if it fails."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    for owner in ("Qwen", "openai"):
        (folder / owner).mkdir()
    images = make_image_model(folder / IMAGES, "qwen3_vl")
    Image.new("RGB", (64, 48), "navy").save(folder / "boat.jpg")
    speech = make_whisper(folder / SPEECH)
    (folder / "speech.mp3").write_bytes(encode(tone(0), RATE, "mp3"))
    (folder / "adapters").mkdir()
    text = make_tiny_model(folder / TEXT, "qwen3")
    write_adapter(text, folder / "adapters/sql", Adapter("sql"))
    torch.save(torch.randn(5, json.loads((text / "config.json").read_text())["hidden_size"]), folder / "prompt.pt")
    body = {"model": "proa-builtin", "messages": [{"role": "user", "content": "Hello!"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "Tell me about the moon."}\n')
    with ExitStack() as stack:
        _, builtin = stack.enter_context(engine_process(*BUILTIN, *TRANSFER))
        _, peer = stack.enter_context(engine_process(*BUILTIN, *TRANSFER))
        _, reader = stack.enter_context(engine_process(f"--model={images}", f"--served-model-name={IMAGES}", *SMALL))
        embeds = (f"--model={text}", f"--served-model-name={TEXT}", "--enable-prompt-embeds")
        _, embedded = stack.enter_context(engine_process(*embeds, *SMALL))
        hearing = (f"--model={speech}", f"--served-model-name={SPEECH}", "--kv-cache-memory-bytes=67108864")
        _, listener = stack.enter_context(engine_process(*hearing))
        _, port = stack.enter_context(gateway_process(builtin, *OPTIONAL))
        _, images_port = stack.enter_context(gateway_process(reader))
        _, speech_port = stack.enter_context(gateway_process(listener))
        _, embeds_port = stack.enter_context(gateway_process(embedded))
        wait_for_models(port, {"proa-builtin", "sql", "law"})
        wait_for_models(embeds_port, {TEXT})
        wait_for_models(speech_port, {SPEECH})
        gateways = {
            "docs/audio.md": f"127.0.0.1:{speech_port}",
            "docs/images.md": f"127.0.0.1:{images_port}",
            "docs/prompt-embeds.md": f"127.0.0.1:{embeds_port}",
        }
        yield Site(folder, builtin, peer, f"127.0.0.1:{port}", gateways)


@pytest.mark.parametrize("page", dict.fromkeys(each.page for each in ASKING))
def test_requests_get_the_answers_that_the_page_shows(page: str, site: Site) -> None:
    """In the page's order: some requests undo what those before them did."""
    for command in (each for each in ASKING if each.page == page):
        shell = """curl() { command curl --silent --show-error --fail-with-body "$@"; }
            proa() { command proa "$@" $(case "$1 $2" in
                chat* | complete* | transcribe*) echo --url=http://localhost:8000/v1;;
                "bench serve") echo --base-url=http://localhost:8000 --disable-tqdm;;
            esac); }"""
        output = site.run(page, "bash", "-c", f"{shell}\n{command.text}")
        assert '"error":{' not in output.replace('"error":null', ""), output
        assert matches(output, command.output), f"{command} answers:\n{output}"


def matches(output: str, shown: str) -> bool:
    """Whether an output is the one that a page shows. Line breaks do not count; `…` stands for any text."""
    pattern = ".*".join(re.escape(part) for part in "".join(shown.split()).split("…"))
    return not shown or re.match(pattern, "".join(output.split())) is not None


@pytest.mark.parametrize("page", dict.fromkeys(each.page for each in snippets() if each.language == "python"))
def test_python_of_a_page_runs_from_top_to_bottom(page: str, site: Site) -> None:
    parts = [each.text for each in snippets() if (each.page, each.language) == (page, "python")]
    site.run(page, sys.executable, "-c", "\n".join(parts))


DIFFERENT = {(each.words, *each.environment.items()): each for each in SCRIPTS}.values()


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each script prints for `--help`, by `str(command)`. Those with the same environment run in one process."""
    printed: dict[str, str] = {}
    file = tmp_path_factory.mktemp("helps") / "commands.json"
    slow = [each for each in DIFFERENT if Path(each.words[1]).stem not in QUICK]
    for environment in {tuple(each.environment.items()) for each in slow}:
        commands = [each for each in slow if tuple(each.environment.items()) == environment]
        file.write_text(json.dumps([each.words[1:] for each in commands]))
        run([sys.executable, "tests/support/script_help.py", str(file)], ROOT, dict(environment))
        printed |= dict(zip(map(str, commands), json.loads(file.read_text()), strict=True))
    return printed


@pytest.mark.parametrize("command", DIFFERENT, ids=str)
def test_each_script_runs_or_has_the_flags_that_are_shown(command: Command, helps: Mapping[str, str]) -> None:
    if Path(command.words[1]).stem in QUICK:  # takes seconds
        assert run(command.words, ROOT, command.environment)
        return
    printed = helps[str(command)]
    assert printed.startswith("usage: "), printed
    assert set(command.flags) <= set(re.findall(r"--[\w-]+", printed))
