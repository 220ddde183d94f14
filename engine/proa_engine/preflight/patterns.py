"""Whether the patterns of a quantization can be matched with a model's names in time.

Python's `re` can take longer than the universe is old, and nothing in the process can stop it. The package `regex` can,
but takes gigabytes to compile a repetition of repetitions, and Rust's engines lack the lookaheads that GPTQModel's
patterns have. So all patterns are matched with all names once in a process that is ended if it takes too long.
"""

import json
import subprocess
import sys
from collections.abc import Collection

from proa_engine.models.quantization.formats import Quantization

SECONDS = 60.0  # a process starts in 0.02 s, and matches 100,000 names in 0.1 s
_PROGRAM = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    compiled = re.compile(pattern)
    for name in names:
        compiled.match(name)
"""


def check_patterns(quantization: Quantization, modules: Collection[str]) -> None:
    """Raise ValueError for what is not a pattern, or if matching the names of `modules` takes longer than `SECONDS`."""
    patterns = list(dict.fromkeys(pattern.pattern for rule in quantization.rules for pattern in rule.patterns))
    if not patterns:
        return
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    try:
        subprocess.run(
            command, input=json.dumps([patterns, list(modules)]).encode(), timeout=SECONDS, capture_output=True
        )
    except subprocess.TimeoutExpired as error:
        begun = (error.output or b"").split()
        shown = patterns[int(begun[-1])] if begun else patterns[0]
        raise ValueError(
            f"quantization_config in config.json: matching its patterns with the names of {len(modules):,} modules "
            f"takes more than {SECONDS:.0f} s; the pattern that ran: {shown[:200]}"
        ) from error
