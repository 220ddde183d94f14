"""The table of docs/variables.md. `make pages` writes it into the page."""

from proa.environment import variable_of
from proa.options import flags
from proa_engine.server.options import ServeOptions
from proa_gateway.config import GatewayConfig
from support.documentation import ROOT

PAGE = ROOT / "docs/variables.md"
_START = "<!-- From here on written by `make pages` -->\n"


def page() -> str:
    """The page as it should be: its text as it is, and the table."""
    head, mark, _ = PAGE.read_text().partition(_START)
    assert mark, f"{PAGE} has no line {_START}"
    of_engine, of_gateway = set(flags(ServeOptions)), set(flags(GatewayConfig))
    lines = ["| variable | flag | of |", "|---|---|---|"]
    for flag in sorted(of_engine | of_gateway):
        owners = [name for name, known in (("engine", of_engine), ("gateway", of_gateway)) if flag in known]
        lines.append(f"| `{variable_of(flag)}` | `{flag}` | {', '.join(owners)} |")
    return head + mark + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
