"""The tables of docs/from-vllm.md. `make pages` writes them into the page."""

from collections.abc import Mapping

from proa_cli.vllm_flags import SHORT_FLAGS, Kind, Row, flag_table
from support.documentation import ROOT

PAGE = ROOT / "docs/from-vllm.md"
_START = "<!-- From here on written by `make pages` -->\n"


def page() -> str:
    """The page as it should be: its text as it is, and the tables."""
    head, mark, _ = PAGE.read_text().partition(_START)
    assert mark, f"{PAGE} has no line {_START}"
    return head + mark + "\n" + flags(flag_table())


def flags(table: Mapping[str, Row]) -> str:
    """The section of flags, in Markdown."""
    numbers = ", ".join(f"{sum(row.kind is kind for row in table.values())} {kind.value}" for kind in Kind)
    lines = ["## Flags", "", f"{len(table)} flags: {numbers}.", ""]
    lines += ["| vLLM's flag | in Proa | what differs, why, or where |", "|---|---|---|"]
    lines += [_line(name, row) for name, row in sorted(table.items())]
    return "\n".join(lines) + "\n"


def _line(name: str, row: Row) -> str:
    shorts = [short for short, long in SHORT_FLAGS.items() if long == name]
    names = ", ".join(f"`{each}`" for each in [name, *shorts])
    return f"| {names} | {row.kind.value} | {row.text.replace('|', chr(92) + '|')}{_values(row)} |"


def _values(row: Row) -> str:
    """Of a flag that is accepted, the values that are, if it has values; of another one, those that hold here too."""
    if not row.values or (row.kind is Kind.ACCEPTED and row.values == ("true",)):
        return ""
    values = ", ".join(f"`{each}`" for each in row.values)
    return f" (only {values})" if row.kind is Kind.ACCEPTED else f" ({values}: accepted)"


if __name__ == "__main__":
    PAGE.write_text(page())
