"""Two ranks of every published type give the logits of `transformers`; types without a plan are refused."""

import json
import multiprocessing
from pathlib import Path

import pytest

from support.transformers_ranks import RANKS, run_rank
from support.transformers_sweep import read_page, read_single_rank_types

SECONDS = 600


@pytest.mark.timeout(SECONDS + 60)
def test_two_ranks_give_the_logits_of_transformers(tmp_path: Path) -> None:
    single = read_single_rank_types()
    types = [name for name, outcome in read_page().items() if outcome == "equal"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.transformers_ranks"])
    ranks = [context.Process(target=run_rank, args=(rank, types, tmp_path)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    refused = "transformers has no tensor parallel plan for it, so tensor_parallel_size must be 1"
    expected = {name: refused if name in single else "equal" for name in types}
    for rank in range(RANKS):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
