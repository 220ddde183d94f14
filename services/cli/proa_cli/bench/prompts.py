"""The prompts that the flags of a benchmark ask for."""

from typing import Any

import numpy as np

from proa_cli.bench import datasets
from proa_cli.bench.datasets import Prompt
from proa_cli.bench.options import DatasetOptions
from proa_cli.bench.tokens import Tokenizer


def make_prompts(options: DatasetOptions, tokenizer: Tokenizer | None) -> list[Prompt]:
    """The prompts of the dataset. Without a tokenizer those of `custom` are sent as they are; the other datasets need
    one."""
    draw, count = np.random.default_rng(options.seed), options.num_prompts

    def shuffle(items: list[Any]) -> None:
        if not options.disable_shuffle:
            draw.shuffle(items)

    if options.dataset_name == "custom":
        assert options.dataset_path is not None
        outputs, render = options.output_len or options.custom_output_len, tokenizer.render_chat if tokenizer else None
        prompts = datasets.custom_prompts(options.dataset_path, count, outputs, shuffle, render)
    else:
        assert tokenizer is not None
        match options.dataset_name:
            case "random":
                prompts = datasets.random_prompts(tokenizer, count, options.lengths, draw)
            case "prefix_repetition":
                prompts = datasets.repeated_prefix_prompts(
                    tokenizer,
                    count,
                    options.prefix_repetition_num_prefixes,
                    options.prefix_repetition_prefix_len,
                    options.prefix_repetition_suffix_len,
                    options.output_len or options.prefix_repetition_output_len,
                    draw,
                )
                shuffle(prompts)
                return prompts
            case "sharegpt":
                assert options.dataset_path is not None
                wanted = options.output_len or options.sharegpt_output_len
                prompts = datasets.sharegpt_prompts(tokenizer, options.dataset_path, count, wanted, shuffle)
            case "sessions":
                raise ValueError("--dataset-name sessions needs a running server: `proa bench serve` measures it")
    return datasets.oversample(prompts, count if options.oversample else len(prompts), draw)
