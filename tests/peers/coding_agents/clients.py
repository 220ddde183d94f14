"""The coding agents of `agents.py`: their packages, and how each is pointed at a gateway. docs/agents.md has the same
settings."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from support.scripted_turns import call

PYTHON_PACKAGES = ("openai-agents==0.24.0",)
CONTEXT = 65_536  # tokens, as in docs/agents.md
_KNOWN_MODEL = "gpt-5.6-luna"  # Codex and the Agents SDK know this name, and send it other requests
_PATCH = """*** Begin Patch
*** Add File: hello.txt
+hello from proa
*** End Patch
"""


def read_note(tool: str, field: str) -> Callable[[Path], str]:
    return lambda work: call(tool, **{field: str(work / "note.txt")})


def saw_the_note(work: Path, prompt: str) -> None:
    assert "The secret is marmalade." in prompt.rpartition("<tool>")[2], prompt[-1000:]


def patched(work: Path, prompt: str) -> None:
    assert (work / "hello.txt").read_text() == "hello from proa\n", prompt[-1000:]


def _nothing(url: str, model: str) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Agent:
    """`model`: the name under which the model is served. `command`: from the folder of the packages and the model,
    without the question, which comes last. `to_continue`: arguments before the question that continue the last
    conversation. `files`: of its home, by path. `environment`: from the URL, the model and its home. `call`: what the
    scripted model writes, for a work folder; `check` raises `AssertionError` unless the call was run, from the work
    folder and the prompt after it."""

    name: str
    version: str
    package: str = ""  # npm
    postinstall: str = ""
    model: str = "a-model"
    command: Callable[[Path, str], Sequence[str]]
    to_continue: Sequence[str] = ("--continue",)
    environment: Callable[[str, str, Path], Mapping[str, str]] = lambda url, model, home: {}
    files: Callable[[str, str], Mapping[str, str]] = _nothing
    call: Callable[[Path], str]
    check: Callable[[Path, str], None] = saw_the_note


def codex_files(url: str, model: str) -> Mapping[str, str]:
    config = f"""model = "{model}"
model_provider = "proa"
model_context_window = {CONTEXT}
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.proa]
name = "Proa"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    return {"codex/config.toml": config}


def claude_environment(url: str, model: str, home: Path) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": model,
        "CLAUDE_CONFIG_DIR": str(home / "claude"),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def opencode_files(url: str, model: str) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Proa",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {model: {"limit": {"context": CONTEXT, "output": 8192}}},
    }
    config = {"autoupdate": False, "share": "disabled", "provider": {"proa": provider}}
    return {"config/opencode/opencode.json": json.dumps(config)}


def qwen_files(url: str, model: str) -> Mapping[str, str]:
    settings = {
        "model": {"generationConfig": {"contextWindowSize": CONTEXT}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    return {".qwen/settings.json": json.dumps(settings)}


_CODEX = Agent(
    name="codex",
    version="0.171.0",
    package="@openai/codex@0.171.0",
    command=lambda cache, model: [
        *(str(cache / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check"),
        *("--sandbox", "danger-full-access"),
    ],
    to_continue=("resume", "--last"),
    environment=lambda url, model, home: {"CODEX_HOME": str(home / "codex")},
    files=codex_files,
    call=lambda work: call("exec_command", cmd=f"apply_patch <<'EOF'\n{_PATCH}EOF\n"),
    check=patched,
)
AGENTS = (
    _CODEX,
    replace(
        _CODEX,
        name="codex-own-model",
        model=_KNOWN_MODEL,
        call=lambda work: call("functions__exec", input=f"text(await tools.apply_patch({json.dumps(_PATCH)}))"),
    ),
    Agent(
        name="claude-code",
        version="2.1.332",
        package="@anthropic-ai/claude-code@2.1.332",
        postinstall="@anthropic-ai/claude-code/install.cjs",
        command=lambda cache, model: [str(cache / "node_modules/.bin/claude"), "--print"],
        environment=claude_environment,
        call=read_note("Read", "file_path"),
    ),
    Agent(
        name="opencode",
        version="1.18.33",
        package="opencode-ai@1.18.33",
        postinstall="opencode-ai/postinstall.mjs",
        command=lambda cache, model: [str(cache / "node_modules/.bin/opencode"), "run", "-m", f"proa/{model}"],
        files=opencode_files,
        call=read_note("read", "filePath"),
    ),
    Agent(
        name="qwen-code",
        version="0.24.4",
        package="@qwen-code/qwen-code@0.24.4",
        command=lambda cache, model: [str(cache / "node_modules/.bin/qwen"), "--auth-type", "openai"],
        environment=lambda url, model, home: {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": model,
        },
        files=qwen_files,
        call=read_note("read_file", "file_path"),
    ),
    Agent(
        name="openai-agents",
        version="0.24.0",
        model=_KNOWN_MODEL,
        command=lambda cache, model: [
            *(str(cache / "venv/bin/python"), str(Path(__file__).parent / "openai_agent.py"))
        ],
        to_continue=(),
        environment=lambda url, model, home: {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_DEFAULT_MODEL": model,
        },
        call=read_note("read_file", "path"),
    ),
)
