"""SessionOptions: the flags of `--dataset-name sessions`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proa.options import check_options, option
from proa_cli.bench.session_plans import (
    Agents,
    Distribution,
    Evenly,
    LogNormal,
    OneShots,
    Subagents,
    Workload,
    parse_distribution,
    parse_one_shots,
    parse_subagents,
)

_METAVAR: Final = "DISTRIBUTION"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What the sessions are like. A distribution is `N`, `LOW:HIGH` or `lognormal:MEDIAN:SIGMA`. The defaults are those
    of coding agents."""

    sessions: int = option(8, "sessions at once; another begins when one has ended", minimum=1)
    session_turns: Distribution = option(
        LogNormal(35, 0.6),
        "turns of a session: N, LOW:HIGH or lognormal:MEDIAN:SIGMA, as for what follows",
        metavar=_METAVAR,
        parse=parse_distribution,
    )
    session_shared_len: int = option(12000, "tokens with which all sessions begin", minimum=0)
    session_first_len: Distribution = option(
        Evenly(2000, 10000), "tokens behind them in a first turn", metavar=_METAVAR, parse=parse_distribution
    )
    session_growth: Distribution = option(
        LogNormal(1340, 0.9),
        "tokens that a later turn adds, the answer to the turn before among them",
        metavar=_METAVAR,
        parse=parse_distribution,
    )
    session_output_len: Distribution = option(
        Evenly(150, 900), "output tokens of a turn", metavar=_METAVAR, parse=parse_distribution
    )
    session_gap: Distribution = option(
        Agents(),
        "seconds between a turn's end and the next turn; `agents`: while tools run, at times a user",
        metavar=_METAVAR,
        parse=parse_distribution,
    )
    session_one_shots: OneShots | None = option(
        None,
        "prompts of no session beside them: how many a second, of how many tokens",
        metavar="RATE:TOKENS",
        parse=parse_one_shots,
    )

    session_subagents: Subagents | None = option(
        None,
        "share of turns that call a sub-agent, a conversation of its own of so many turns, and wait for its end",
        metavar="SHARE:TURNS",
        parse=parse_subagents,
    )
    session_trace: Path | None = option(
        None,
        "JSON lines with `session`, `turn`, `hash_ids`, `output_tokens` and `gap`: sessions to send in place of drawn "
        "ones",
        metavar="FILE",
        parse=Path,
    )
    session_header: str | None = option(
        None, "header with which each turn sends its session's id; a sub-agent has its caller's", metavar="NAME"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def workload(self) -> Workload:
        return Workload(
            turns=self.session_turns,
            shared_tokens=self.session_shared_len,
            first=self.session_first_len,
            growth=self.session_growth,
            outputs=self.session_output_len,
            gaps=self.session_gap,
            subagents=self.session_subagents,
        )
