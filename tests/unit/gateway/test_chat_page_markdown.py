"""The chat page's Markdown, as the tree that becomes elements. Runs the page's own file in node."""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
SCRIPT = """
const {{ parse }} = await import("data:text/javascript," + encodeURIComponent({source}));
let input = "";
for await (const chunk of process.stdin) input += chunk;
console.log(JSON.stringify(JSON.parse(input).map(parse)));
"""


def tag(name: str, *children: Any, **properties: Any) -> dict[str, Any]:
    return {"tag": name, **properties, **({"children": list(children)} if children else {})}


def link(url: str, *children: Any) -> dict[str, Any]:
    return tag("a", *children, href=url, target="_blank", rel="noopener noreferrer")


def cell(name: str, *children: Any, align: str = "") -> dict[str, Any]:
    return {"tag": name, "className": align, "children": list(children)}


CASES: dict[str, tuple[str, list[Any]]] = {
    "emphasis": (
        "**a *b*** and `c ** d`, ~~e~~",
        [
            tag(
                "p",
                tag("strong", "a ", tag("em", "b")),
                " and ",
                tag("code", "c ** d"),
                ", ",
                tag("del", "e"),
            )
        ],
    ),
    "no emphasis": ("2 * 3 * 4, snake_case_name, \\*a\\*", [tag("p", "2 * 3 * 4, snake_case_name, *a*")]),
    "HTML stays text": ("<b>a</b><script>x</script>", [tag("p", "<b>a</b><script>x</script>")]),
    "lines": ("# Title #\none\ntwo\n---", [tag("h1", "Title"), tag("p", "one", tag("br"), "two"), tag("hr")]),
    "fence": (
        "a\n```py x\n  **b**\n\nc\n```\nd",
        [tag("p", "a"), tag("pre", language="py", text="  **b**\n\nc"), tag("p", "d")],
    ),
    "open fence": ("~~~\na\n```", [tag("pre", language="", text="a\n```")]),
    "links": (
        '[a](https://x.org/y_(z) "t") https://x.org/q?b=1.',
        [tag("p", link("https://x.org/y_(z)", "a"), " ", link("https://x.org/q?b=1", "https://x.org/q?b=1"), ".")],
    ),
    "other schemes": (
        "[a](javascript:alert(1)) [b](data:text/html,x)",
        [tag("p", "[a](javascript:alert(1)) [b](data:text/html,x)")],
    ),
    "lists": (
        "- a\n  - b\n\n  c\n- d\n3. e\n   ```\n   f\n   ```",
        [
            tag("ul", tag("li", "a", tag("ul", tag("li", "b")), tag("p", "c")), tag("li", "d")),
            tag("ol", tag("li", "e", tag("pre", language="", text="f")), start=3),
        ],
    ),
    "table": (
        "So:\n| a | `b` |\n|---|--:|\n| 1 \\| 2 |\nend",
        [
            tag("p", "So:"),
            tag(
                "table",
                tag("thead", tag("tr", cell("th", "a"), cell("th", tag("code", "b"), align="right"))),
                tag("tbody", tag("tr", cell("td", "1 | 2"), cell("td", align="right"))),
            ),
            tag("p", "end"),
        ],
    ),
    "quote": ("> a\n> - b\n\nc", [tag("blockquote", tag("p", "a"), tag("ul", tag("li", "b"))), tag("p", "c")]),
}
LONG = ("*a " * 30_000, "`" * 100_000, "> " * 2_000, "- " * 2_000, "\n" * 100_000, "[a](" * 30_000, "|" * 50_000)


def parsed(texts: list[str]) -> list[Any]:
    source = (files("proa_gateway.page") / "markdown.js").read_text()
    script = SCRIPT.format(source=json.dumps(source))
    command = ["node", "--input-type=module", "--eval", script]
    result = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=60, check=True)
    found: list[Any] = json.loads(result.stdout)
    return found


def test_markdown_becomes_a_tree_without_html_and_with_links_to_http_only() -> None:
    trees = parsed([text for text, _ in CASES.values()])
    assert dict(zip(CASES, trees, strict=True)) == {name: tree for name, (_, tree) in CASES.items()}


def test_long_texts_without_ends_are_parsed() -> None:
    assert len(parsed(list(LONG))) == len(LONG)  # within the time limit of the process
