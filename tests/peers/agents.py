"""Run coding agents against Proa, by hand: `make agents` (`--only codex`).

Installs pinned versions into `AGENTS_CACHE` (build/agents, 1.2 GB; needs npm and uv), then runs each with its default
settings where only loopback can be reached:

- two turns of a conversation with the built-in model and the strictest chat template: status, tokens, how many of the
  second turn's are cached, what the response headers name, and fields that tests/data/agents does not have;
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

from peers.coding_agents.clients import AGENTS, CONTEXT, PYTHON_PACKAGES, Agent
from peers.coding_agents.recording_proxy import GIVEN_UP, Exchange, recording_proxy

from support.gateway import running_gateway
from support.scripted_turns import num_common, scripted_engine, turns_with_tools
from support.strict_templates import STRICTEST

SHAPES = Path(__file__).parents[1] / "data" / "agents"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
BLOCK = 16  # tokens; an incomplete block of a prompt is not cached
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
        serve += ["--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT})]
        serve += ["--served-model-name", *dict.fromkeys(agent.model for agent in AGENTS)]
        serve += ["--chat-template", str(template), "--tool-call-parser", "hermes"]
        serve += ["--", sys.executable, __file__, "--url", url]
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
    packages = dict.fromkeys(agent.package for agent in AGENTS if agent.package)
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
    """Two turns of a conversation. The answers are random words, so only requests, usages and headers count."""
    with tempfile.TemporaryDirectory() as folder, recording_proxy(url) as (proxy, exchanges):
        await run(agent, cache, Path(folder), proxy, "Say hello.")
        num_before = len(exchanges)
        await run(agent, cache, Path(folder), proxy, "Say it again.", agent.to_continue)
    refused = [each for each in exchanges if each.status not in (200, GIVEN_UP) and each.method == "POST"]
    assert not refused, f"{refused[0].path}: status {refused[0].status}: {refused[0].answer[:300]}"
    turns, later = ([each for each in part if each.is_turn] for part in (exchanges, exchanges[num_before:]))
    assert len(turns) > len(later) > 0, f"no request with tools; {[(each.path, each.status) for each in exchanges]}"
    first, second = turns[0], later[0]
    lines = [
        f"passed {agent.name} {agent.version}: {first.path}, {first.num_tokens} tokens; second turn: "
        f"{second.num_tokens} tokens, {second.num_cached_tokens} of them cached; ignored: {first.ignored or '-'}; "
        f"warnings: {first.warnings or '-'}"
    ]
    lines += [f"  given up by the client: {each.path}" for each in exchanges if each.status == GIVEN_UP]
    lines += [f"  not in tests/data/agents: {path}" for path in unknown_fields(agent, turns)]
    if second.num_cached_tokens < first.num_tokens - BLOCK:
        lines += changed(first.body, second.body)
    assert second.num_cached_tokens >= 0.99 * first.num_tokens - BLOCK, "\n".join(lines)
    return "\n".join(lines)


async def check_scripted(agent: Agent, cache: Path, url: str) -> str:
    """A turn with a tool that the client really runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        (work / "note.txt").write_text("The secret is marmalade.\n")
        engine = scripted_engine(agent.call(work), "Done.", model=agent.model)
        async with engine, running_gateway(engine, tool_call_parser="hermes") as gateway:
            output = await run(agent, cache, folder, f"http://127.0.0.1:{gateway.port}", "Do it.")
        prompts = turns_with_tools(engine.requests)
        assert any("<tool>" in prompt for prompt in prompts[1:]), f"the call was not run: {output[-500:]}"
        agent.check(work, prompts[-1])
    first, second = prompts[-2].removesuffix("<assistant>"), prompts[-1]
    share = num_common(first, second) / len(first)
    assert share >= 0.99, f"only {share:.1%} of the first prompt is the start of the second"
    return f"passed {agent.name} {agent.version}: a tool was run; {share:.1%} of its prompt begins the next one"


async def run(agent: Agent, cache: Path, folder: Path, url: str, question: str, arguments: Sequence[str] = ()) -> str:
    """Run the client in `folder`/work, with its own files in `folder`/home. Returns its output. `arguments`: before the
    question."""
    home, work = folder / "home", folder / "work"
    for each in (home, work):
        each.mkdir(exist_ok=True)
    for path, text in agent.files(url, agent.model).items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    command = [*agent.command(cache, agent.model), *arguments, question]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env={**environment(home), **agent.environment(url, agent.model, home)},
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


def changed(first: Any, second: Any, path: str = "") -> list[str]:
    """Where the second request is not the first one with more at the end."""
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = [(f"{path}.{name}", first.get(name), second.get(name)) for name in sorted({*first, *second})]
    elif isinstance(first, list) and isinstance(second, list) and len(first) <= len(second):
        pairs = [(f"{path}[{index}]", a, b) for index, (a, b) in enumerate(zip(first, second, strict=False))]
    elif first == second:
        return []
    else:
        start = num_common(str(first), str(second))
        places = (str(each)[max(0, start - 40) : start + 80] for each in (first, second))
        return [f"  changed: {path}, from character {start}: " + " -> ".join(map(repr, places))]
    return [line for name, a, b in pairs for line in changed(a, b, name)]


def unknown_fields(agent: Agent, turns: Sequence[Exchange]) -> list[str]:
    """Paths and types in the client's requests that are in none of its recorded shapes."""
    shapes = [json.loads(file.read_text()) for file in SHAPES.glob(f"{agent.name}-[0-9]-*.json")]
    known = {path for shape in shapes for path in paths(shape["body"])}
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
