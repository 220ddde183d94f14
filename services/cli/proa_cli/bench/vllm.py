"""Flags of `vllm bench` that are not flags of `proa bench`, each with the reason or what takes its place."""

from collections.abc import Mapping, Sequence

from proa_cli import vllm_flags

_OF_OTHER_DATASETS = "its dataset is not here; write the prompts to a file for `--dataset-name custom`"
_IMAGES = "images are not measured; write the requests' own fields with `--extra-body`"
_PLOTS = "nothing is plotted; `--save-detailed` writes all times"
_ONE_ENGINE = "there is one engine here, Proa's"

REASONS: Mapping[str, str] = {
    "--async-engine": _ONE_ENGINE,
    "--backend": _ONE_ENGINE,
    "--blazedit-max-distance": _OF_OTHER_DATASETS,
    "--blazedit-min-distance": _OF_OTHER_DATASETS,
    "--chat-template-kwargs": "give them as `--extra-body '{\"chat_template_kwargs\": …}'`",
    "--common-prefix-len": "`--random-prefix-len` is the same",
    "--dataset": "use `--dataset-name sharegpt --dataset-path FILE`",
    "--disable-frontend-multiprocessing": _ONE_ENGINE,
    "--enable-multimodal-chat": _IMAGES,
    "--hf-max-batch-size": _ONE_ENGINE,
    "--hf-name": _OF_OTHER_DATASETS,
    "--hf-output-len": _OF_OTHER_DATASETS,
    "--hf-split": _OF_OTHER_DATASETS,
    "--hf-subset": _OF_OTHER_DATASETS,
    "--lora-path": "`proa bench serve --lora-modules` measures adapters",
    "--no-reranker": "rerankers are not measured",
    "--no-stream": "datasets of the hub are not here",
    "--plot-dataset-stats": _PLOTS,
    "--plot-timeline": _PLOTS,
    "--prefix-len": "`--random-prefix-len` is the same",
    "--probe-request-rate": "run a second `proa bench serve` beside this one",
    "--profile": "a profiler would change what is measured",
    "--random-batch-size": "embeddings are not measured",
    "--random-mm-base-items-per-request": _IMAGES,
    "--random-mm-bucket-config": _IMAGES,
    "--random-mm-limit-mm-per-prompt": _IMAGES,
    "--random-mm-num-mm-items-range-ratio": _IMAGES,
    "--self-timed": _OF_OTHER_DATASETS,
    "--skip-tokenizer-init": "a tokenizer is only read for prompts whose length is asked for",
    "--sonnet-input-len": _OF_OTHER_DATASETS,
    "--sonnet-output-len": _OF_OTHER_DATASETS,
    "--sonnet-prefix-len": _OF_OTHER_DATASETS,
    "--spec-bench-category": _OF_OTHER_DATASETS,
    "--spec-bench-output-len": _OF_OTHER_DATASETS,
    "--timeline-itl-thresholds": _PLOTS,
    "--tokenizer-mode": "tokenizers are read from tokenizer.json",
    "--trust-remote-code": "no code of a model is run",
    "--use-beam-search": "beam search is not measured",
}


def expanded(words: Sequence[str], known: set[str]) -> list[str]:
    """`words` with hyphens in place of underscores in the names of flags, as vLLM reads them. `known`: the command's
    flags. Raises `ValueError` with the reason for a flag of vLLM that is not among them."""
    result = []
    for word in words:
        if not word.startswith("--"):
            result.append(word)
            continue
        name, value = vllm_flags.expand(word)
        if name not in known and name in REASONS:
            raise ValueError(f"{name} is not a flag here: {REASONS[name]}")
        result.append(name if value is None else f"{name}={value}")
    return result
