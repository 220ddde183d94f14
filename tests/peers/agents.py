"""Run coding agents against Proa, by hand: `make agents` (`--only codex`).

Installs pinned versions into `AGENTS_CACHE` (build/agents, 1.2 GB; needs npm and uv), then runs each with its default
settings where only loopback can be reached:

- twice against the built-in model with the strictest chat template: status, tokens, cached share of the second prompt,
  what the response headers name, and fields that tests/data/agents does not have;
- once against a scripted model that calls a tool: a patch that Codex applies, a file that the others read.

Prints a line for each, and exits with 1 if one fails. About 5 minutes on 2 free cores.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.coding_agents.clients import AGENTS, PYTHON_PACKAGES, Agent
from peers.coding_agents.recording_proxy import Exchange, recording_proxy

from support.gateway import running_gateway
from support.scripted_turns import scripted_engine, turns_with_tools
from support.strict_templates import STRICTEST

SHAPES = Path(__file__).parents[1] / "data" / "agents"
CONTEXT = {"max_position_embeddings": 131_072}
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
PORT = 8123
SECONDS = 600  # for a client's run


def main() -> int:
    arguments = parse_arguments()
    if arguments.url:
        return asyncio.run(run_all(arguments))
    cache = arguments.cache.resolve()
    install(cache)
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "strictest.jinja"
        template.write_text(TOOLS + STRICTEST)
        url = f"http://127.0.0.1:{PORT}"
        serve = ["proa", "serve", "builtin", "--host", "127.0.0.1", "--port", str(PORT)]
        serve += ["--hf-overrides", json.dumps(CONTEXT), "--chat-template", str(template)]
        serve += ["--tool-call-parser", "hermes", "--", sys.executable, __file__, "--url", url]
        serve += ["--cache", str(cache), "--only", arguments.only]
        return subprocess.run([*without_network(), *serve]).returncode


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run coding agents against the built-in model and a scripted one.")
    cache = Path(os.environ.get("AGENTS_CACHE", "build/agents"))
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the installed clients")
    parser.add_argument("--only", default="", help="run only agents whose name contains this text")
    parser.add_argument("--url", default="", help="of a running gateway; otherwise one is started")
    return parser.parse_args()


def install(cache: Path) -> None:
    """Packages that are there in the pinned version are kept."""
    cache.mkdir(parents=True, exist_ok=True)
    packages = [agent.package for agent in AGENTS if agent.package]
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", cache, *packages], check=True)
    for agent in AGENTS:
        if agent.postinstall:  # npm runs no scripts of packages
            subprocess.run(["node", cache / "node_modules" / agent.postinstall], check=True)
    python = cache / "venv/bin/python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--quiet", cache / "venv"], check=True)
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *PYTHON_PACKAGES], check=True)


def without_network() -> list[str]:
    """The beginning of a command that can reach nothing but loopback."""
    unshare = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
        return unshare
    print("no network namespace here: the clients' settings alone keep them from calling home", flush=True)
    return []


async def run_all(arguments: argparse.Namespace) -> int:
    failed = []
    for agent in AGENTS:
        if arguments.only in agent.name:
            for check in (check_builtin, check_scripted):
                try:
                    print(await check(agent, arguments.cache, arguments.url), flush=True)
                except Exception as error:
                    failed.append(agent.name)
                    print(f"FAILED {agent.name} ({check.__name__[6:]}): {type(error).__name__}: {error}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


async def check_builtin(agent: Agent, cache: Path, url: str) -> str:
    """The same question twice. The answers are random words, so only requests and headers count."""
    with tempfile.TemporaryDirectory() as folder, recording_proxy(url) as (proxy, exchanges):
        for _ in range(2):
            await run(agent, cache, Path(folder), proxy, "proa-builtin", "Say hello.")
    turns = [each for each in exchanges if each.is_turn]
    assert turns, f"no request with tools; {[(each.path, each.status) for each in exchanges]}"
    refused = [each for each in exchanges if each.status != 200 and each.method == "POST"]
    assert not refused, f"{refused[0].path}: status {refused[0].status}: {refused[0].answer[:300]}"
    first, last = turns[0], turns[-1]
    share = last.num_cached_tokens / max(1, last.num_tokens)
    lines = [
        f"passed {agent.name} {agent.version}: {first.path}, {last.num_tokens} tokens, {share:.1%} of them cached the "
        f"second time; ignored: {last.ignored or '-'}; warnings: {last.warnings or '-'}"
    ]
    lines += [f"  not in tests/data/agents: {path}" for path in unknown_fields(agent, turns)]
    assert share >= 0.99 or not agent.is_deterministic, "\n".join(lines)
    return "\n".join(lines)


async def check_scripted(agent: Agent, cache: Path, url: str) -> str:
    """A turn with a tool that the client really runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        (work / "note.txt").write_text("The secret is marmalade.\n")
        engine = scripted_engine(agent.call(work), "Done.")
        async with engine, running_gateway(engine, tool_call_parser="hermes") as gateway:
            output = await run(agent, cache, folder, f"http://127.0.0.1:{gateway.port}", "fake", "Do it.")
        prompts = turns_with_tools(engine.requests)
        assert len(prompts) >= 2, f"the call was not run: {output[-500:]}"
        agent.check(work, prompts[-1])
    first, second = prompts[-2].removesuffix("<assistant>"), prompts[-1]
    num_common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    share = num_common / len(first)
    assert share >= 0.99, f"only {share:.1%} of the first prompt is the start of the second"
    return f"passed {agent.name} {agent.version}: a tool was run; {share:.1%} of its prompt begins the next one"


async def run(agent: Agent, cache: Path, folder: Path, url: str, model: str, question: str) -> str:
    """Run the client in `folder`/work, with its own files in `folder`/home. Returns its output."""
    home, work = folder / "home", folder / "work"
    for each in (home, work):
        each.mkdir(exist_ok=True)
    for path, text in agent.files(url, model).items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    command = agent.command(cache, model, question)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env={**environment(home), **agent.environment(url, model, home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    except TimeoutError:
        process.kill()
        raise
    text = output.decode(errors="replace")
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}: {text[-800:]}"
    return text


def environment(home: Path) -> dict[str, str]:
    """Without the keys and settings of whoever runs this."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
    return {**kept, **folders, "HOME": str(home)}


def unknown_fields(agent: Agent, turns: Sequence[Exchange]) -> list[str]:
    """Paths and types in the client's requests that are in none of its recorded shapes."""
    known = {
        path for file in SHAPES.glob(f"{agent.name}-*.json") for path in paths(json.loads(file.read_text())["body"])
    }
    return sorted({path for turn in turns for path in paths(turn.body)} - known)


def paths(value: Any, path: str = "") -> set[str]:
    """The paths and types of a body's values, without the schemas of tools."""
    if isinstance(value, Mapping):
        named = {f"{path}.{name}": entry for name, entry in value.items() if name not in ("parameters", "input_schema")}
        return {found for name, entry in named.items() for found in paths(entry, name)}
    if isinstance(value, list):
        return {found for entry in value for found in paths(entry, f"{path}[]")}
    kind = f" {value}" if path.endswith((".type", ".role")) else ""
    return {f"{path}: {type(value).__name__}{kind}"}


if __name__ == "__main__":
    sys.exit(main())
