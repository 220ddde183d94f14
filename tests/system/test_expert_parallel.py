"""An engine whose ranks hold whole experts gives the tokens of one rank, with and without adapters."""

from dataclasses import replace
from pathlib import Path

from proa_engine.config import EngineConfig
from proa_engine.executor import make_executor
from support import adapters
from support.adapters import Adapter, lora_modules
from support.engine import Engine, Result, build_core, engine_over, request, run
from support.parallel_equality import CONFIG, GREEDY, PROMPTS, assert_equal_where_sure
from support.tiny_models import make_tiny_model

ATTENTION = Adapter("attention", modules=("q_proj", "k_proj", "v_proj", "o_proj"))
NAMES = ("", ATTENTION.name)


def generate(engine: Engine) -> list[Result]:
    """Of every prompt, in turn without an adapter and with one."""
    wanted = [
        replace(request(str(number), prompt, GREEDY), lora_name=NAMES[number % 2])
        for number, prompt in enumerate(PROMPTS)
    ]
    return list(run(engine, wanted).values())


def test_ranks_with_whole_experts_give_the_tokens_of_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3_moe", seed=3, num_experts=9)
    adapters.write_adapter(model, tmp_path / ATTENTION.name, ATTENTION)
    settings = CONFIG | {"enable_lora": True, "lora_modules": lora_modules(tmp_path, ATTENTION)}
    with build_core(model, **settings) as alone:
        expected = generate(alone)
        [whole] = alone.executor.started.rank_sizes
    lines: list[str] = []
    config = EngineConfig.from_options(
        model=str(model),
        device="cpu",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        num_gpu_blocks_override=60,
        **settings,
    )
    executor = make_executor(config, lines.append)
    try:
        assert_equal_where_sure(generate(engine_over(executor, config)), expected)
        first, second = executor.started.rank_sizes
    finally:
        executor.shutdown()
    assert first.weight_bytes > second.weight_bytes  # 5 and 4 experts
    assert whole.weight_bytes < first.weight_bytes + second.weight_bytes < 1.1 * whole.weight_bytes
    said = [line for line in lines if "experts: " in line]
    assert len(said) == 1
    assert "2 ranks divide 9 experts of width" in said[0]
    assert said[0].endswith("by expert: enable_expert_parallel is set")
