"""vLLM's flags that are not flags here: which have no effect, which are found elsewhere, and which are refused.

`vllm_flags.tsv` has a row for each flag of vLLM's `serve`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files

SHORT_FLAGS = {
    "-O": "--optimization-level",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}


class Kind(Enum):
    """What becomes of a flag of vLLM. The value is the word in docs/from-vllm.md."""

    SAME = "the same"  # a flag of `proa serve`
    ACCEPTED = "accepted"  # holds without it
    ELSEWHERE = "elsewhere"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one flag. `--no-flag` of a flag that is elsewhere or refused always holds."""

    kind: Kind
    text: str
    """What differs (SAME), why the flag has no effect, what takes its place, or why it is refused; one sentence without
    a full stop."""
    values: tuple[str, ...] | None = ()
    """Those which hold here anyway, lower case, "true" and "false" for flags without a value; None: any. Others are
    refused with `text`."""


@cache
def flag_table() -> Mapping[str, Row]:
    """The rows of `vllm_flags.tsv` by the flags' long names."""
    return dict(_read((files("proa_cli") / "vllm_flags.tsv").read_text("utf-8")))


def expand(word: str) -> tuple[str, str | None]:
    """The long name of the flag that `word` begins with, and its value if `word` has that too. Hyphens may be
    underscores, and `-O3` is `-O 3`, as in vLLM."""
    name, equals, value = word.partition("=")
    if name.startswith("-O") and len(name) > 2:
        name, equals, value = "-O", "=", name[2:]
    name, dot, field = name.partition(".")  # a field of JSON keeps its underscores
    return SHORT_FLAGS.get(name, name.replace("_", "-")) + dot + field, value if equals else None


def note(row: Row, words: Sequence[str]) -> str:
    """Return why a flag, given by `words` with its long name, has no effect. Raises `ValueError` if its value is not
    what holds here, and for a flag that is found elsewhere or refused."""
    name, equals, inner = words[0].partition("=")
    values = [inner, *words[1:]] if equals else words[1:]
    value = " ".join(values).lower() or ("true" if name == positive(name) else "false")
    shown = f"{name} {value}" if values and row.values else name  # values of other flags may be secrets
    is_absent = name != positive(name) and row.kind in (Kind.ELSEWHERE, Kind.REFUSED)
    if is_absent or row.values is None or any(_equal(value, each) for each in row.values):
        return f"{shown} has no effect: {row.text}"
    if row.kind is Kind.ELSEWHERE:
        raise ValueError(f"{shown} is not a flag of `proa serve`: {row.text}")
    raise ValueError(f"{shown} is not supported: {row.text}")


def positive(name: str) -> str:
    """`--flag` of `--no-flag`, other names as they are."""
    return f"--{name[5:]}" if name.startswith("--no-") else name


def _read(table: str) -> Iterator[tuple[str, Row]]:
    """Yield each flag of a table in TSV with its row. Lines that begin with # are comments."""
    for line in table.splitlines():
        if not line.startswith("#"):
            kind, names, values, text = line.split("\t")
            row = Row(Kind(kind), text, {"*": None, "-": ()}.get(values, tuple(values.split())))
            yield from ((name, row) for name in names.split())


def _equal(value: str, other: str) -> bool:
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other
