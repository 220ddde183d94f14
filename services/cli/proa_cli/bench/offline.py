"""What `proa bench latency` and `proa bench throughput` have in common: flags of the outputs, and the loaded engine."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from proa.contract import SamplingParams
from proa.environment import value_of, variable_of
from proa.options import add_options, check_options, from_arguments, option
from proa_cli.bench import vllm
from proa_engine.config import EngineConfig

if TYPE_CHECKING:
    from proa_engine import LLM

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What the outputs are, and where the results are written."""

    n: int = option(1, "outputs of each prompt", minimum=1)
    disable_detokenize: bool = option(False, "do not make texts of the outputs")
    output_json: Path | None = option(None, "file for the results, as JSON", metavar="FILE", parse=Path)

    def __post_init__(self) -> None:
        check_options(self)
        if self.output_json is not None and not self.output_json.absolute().parent.is_dir():
            raise ValueError(f"--output-json {self.output_json}: there is no folder {self.output_json.parent}")

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            n=self.n, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=not self.disable_detokenize
        )

    def write(self, results: Mapping[str, Any]) -> None:
        if self.output_json is not None:
            self.output_json.write_text(json.dumps(results, indent=4))


def run(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    kind: type[Options],
    measure: Callable[[Options], None],
    **defaults: object,
) -> int:
    """Measure with the flags of `kind` and their variables; returns the exit status. `defaults`: of fields of the
    engine's configuration that have others here."""
    add_options(parser, kind)
    for name, value in defaults.items():
        if value_of(variable_of(name), os.environ) is None:
            parser.set_defaults(**{f"config.{name}": value})
    try:
        words = vllm.expanded(words, set(parser._option_string_actions))
        measure(from_arguments(kind, parser.parse_args(words), os.environ))
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


def load(config: EngineConfig, num_requests: int) -> "LLM":
    """Load the model, with room for this many waiting requests."""
    from proa_engine import LLM  # imports torch, which errors in flags need not wait for

    room = max(config.max_waiting_requests, num_requests)
    return LLM.from_engine_args(replace(config, max_waiting_requests=room))
