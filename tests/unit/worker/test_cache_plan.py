"""Tables of layers, bytes of a block and distances of checkpoints, for layers of real models."""

import torch

from proa_engine.layers.cache_layers import CacheLayer, CrossLayer, KeyValueLayer, LatentLayer, SharedLayer, StateLayer
from proa_engine.memory.cache_plan import CachePlan, Place, allocate_caches, plan_caches
from proa_engine.memory.kv_cache import share_of_cached_states

BFLOAT16 = torch.bfloat16
KIB, MIB = 2**10, 2**20


def plan(layers: list[CacheLayer], max_model_len: int = 131_072) -> CachePlan:
    return plan_caches(layers, 16, BFLOAT16, max_model_len)


def alternating(full: KeyValueLayer, window: KeyValueLayer, num_windows: int, periods: int) -> list[CacheLayer]:
    return [layer for _ in range(periods) for layer in (*[window] * num_windows, full)]


def test_layers_of_one_kind_have_one_table() -> None:
    llama = plan([KeyValueLayer(8, 128)] * 3)
    assert (llama.block_bytes, llama.windows) == (3 * 64 * KIB, ())
    assert llama.places == (Place(0, 0), Place(0, 64 * KIB), Place(0, 128 * KIB))


def test_gpt_oss_has_a_table_of_full_layers_and_one_of_windows() -> None:
    result = plan(alternating(KeyValueLayer(8, 64), KeyValueLayer(8, 64, 128), 1, 12))
    assert (result.block_bytes, result.windows, result.checkpoint_interval) == (384 * KIB, (128,), 512)
    assert [place.table for place in result.places if place] == [1, 0] * 12


def test_window_layers_are_packed_into_as_many_tables_as_they_need() -> None:
    result = plan(alternating(KeyValueLayer(8, 256), KeyValueLayer(8, 256, 1024), 5, 8))  # Gemma 3 12B
    assert (result.block_bytes, result.windows) == (MIB, (1024,) * 5)
    assert result.checkpoint_interval == 32_768
    uneven = plan(alternating(KeyValueLayer(16, 128), KeyValueLayer(16, 128, 1024), 26, 2))
    assert uneven.windows == (1024,) * 13  # more would not fit: a block grows by a window layer
    assert uneven.block_bytes == 4 * 128 * KIB


def test_a_window_layer_larger_than_all_full_layers_sets_the_bytes_of_a_block() -> None:
    result = plan([KeyValueLayer(1, 64), KeyValueLayer(4, 64, 512), KeyValueLayer(4, 64, 32)])
    assert (result.block_bytes, result.windows) == (16 * KIB, (32, 512))
    assert result.places == (Place(0, 0), Place(2, 0), Place(1, 0))


def test_blocks_are_whole_rows_of_every_head_size() -> None:
    result = plan([KeyValueLayer(1, 48), KeyValueLayer(1, 32), KeyValueLayer(1, 16, 32)])
    assert result.block_bytes == 6 * 1024  # of 5 KiB; rows take 1.5, 1 and 0.5 KiB


def test_windows_of_the_whole_context_and_of_all_layers_are_masks_only() -> None:
    assert plan([KeyValueLayer(1, 64), KeyValueLayer(1, 64, 4096)], max_model_len=4096).windows == ()
    assert plan([KeyValueLayer(1, 64, 4096)] * 2).windows == ()
    assert plan([KeyValueLayer(1, 64), KeyValueLayer(1, 64, 1)]).windows == (2,)


def test_states_take_no_blocks_and_shared_layers_nothing() -> None:
    state = StateLayer((((32, 128, 128), torch.float32), ((8192, 3), BFLOAT16)))
    result = plan([state, state, state, KeyValueLayer(2, 256)] * 10)  # Qwen3.5 35B-A3B
    assert result.block_bytes == 320 * KIB
    assert result.state_bytes == 30 * (2 * MIB + 48 * KIB)
    assert result.checkpoint_interval == 16_384
    shared = plan([KeyValueLayer(1, 64), KeyValueLayer(1, 64, 32), SharedLayer(1), SharedLayer(0), SharedLayer(2)])
    assert shared.places == (Place(0, 0), Place(1, 0), Place(1, 0), Place(0, 0), Place(1, 0))
    assert shared.block_bytes == 4 * KIB


def test_cross_attention_has_a_table_of_its_own_behind_all_others() -> None:
    own, audio = KeyValueLayer(6, 64), CrossLayer(6, 64, 1500)
    result = plan([own, audio] * 4)  # Whisper tiny
    assert (result.block_bytes, result.windows, result.cross_tokens) == (96 * KIB, (), 1500)
    assert result.places == tuple(Place(table, layer * 24 * KIB) for layer in range(4) for table in (0, 1))
    memory = allocate_caches([own, audio] * 4, result, 5, BFLOAT16, torch.device("cpu"))
    assert {cache.tensors[0].shape for cache in memory.layers} == {(5, 6, 16, 64)}
    pairs = zip(memory.layers[::2], memory.layers[1::2], strict=True)
    assert all(one.tensors[0].data_ptr() == other.tensors[0].data_ptr() for one, other in pairs)
    assert plan([KeyValueLayer(6, 64, 128), own, CrossLayer(12, 64, 1500)]).block_bytes == 48 * KIB


def test_a_model_of_states_alone_has_the_shortest_interval() -> None:
    state = StateLayer((((4, 8), torch.float32),))
    assert plan([state, state]).checkpoint_interval == 64


def test_intervals_and_shares_of_real_sizes() -> None:
    """Small states get the shortest interval; half of the memory is for states that are larger than 4,096 tokens."""

    def sizes(states: int, layers: int, state: StateLayer, full: KeyValueLayer) -> tuple[int, int, float]:
        result = plan([*[state] * states, *[full] * layers])
        tokens = result.state_bytes * result.block_size // result.block_bytes
        return tokens, result.checkpoint_interval, share_of_cached_states(result)

    def mamba2(heads: int, head_dim: int, state_size: int, groups: int) -> StateLayer:
        channels = heads * head_dim + 2 * groups * state_size
        return StateLayer((((heads, head_dim, state_size), torch.float32), ((channels, 3), BFLOAT16)))

    lfm2_8b = StateLayer((((2048, 2), BFLOAT16),))
    assert sizes(18, 6, lfm2_8b, KeyValueLayer(8, 64)) == (12, 64, 0.25)
    assert sizes(23, 6, mamba2(64, 64, 128, 8), KeyValueLayer(2, 128)) == (7988, 32_768, 0.5)  # Nemotron 3 Nano
    assert sizes(36, 4, mamba2(48, 64, 128, 1), KeyValueLayer(8, 64)) == (6999, 32_768, 0.5)  # Granite 4 Tiny
    assert sizes(36, 4, mamba2(128, 64, 128, 1), KeyValueLayer(8, 128)) == (9327, 65_536, 0.5)  # Granite 4 Small
    qwen = StateLayer((((32, 128, 128), torch.float32), ((8192, 3), BFLOAT16)))
    assert sizes(30, 10, qwen, KeyValueLayer(2, 256)) == (3144, 16_384, 0.25)  # Qwen3.5 35B-A3B


def test_latent_rows_are_one_for_all_heads() -> None:
    assert plan([LatentLayer(512, 64)] * 47).block_bytes == 47 * 16 * 1152


def test_layers_of_one_shape_use_the_same_memory_in_every_table() -> None:
    layers = alternating(KeyValueLayer(2, 8), KeyValueLayer(2, 8, 32), 2, 1)
    caches = allocate_caches(layers, plan(layers), 5, BFLOAT16, torch.device("cpu")).layers
    assert [cache.table for cache in caches] == [1, 2, 0]
    assert len({cache.tensors[0].data_ptr() for cache in caches}) == 1
    keys, values = caches[0].tensors
    assert keys.shape == values.shape == (5, 2, 16, 8)
    assert keys.is_contiguous()
    assert values.is_contiguous()


def test_layers_of_several_shapes_are_views_of_the_same_bytes() -> None:
    layers: list[CacheLayer] = [KeyValueLayer(1, 8), KeyValueLayer(2, 16, 32), KeyValueLayer(1, 8), SharedLayer(1)]
    result = plan(layers)
    caches = allocate_caches(layers, result, 5, BFLOAT16, torch.device("cpu")).layers
    for number, cache in enumerate(caches[:3]):
        for tensor in cache.tensors:
            tensor[3 if cache.table else 1] = number
    assert caches[3] is caches[1]
    for number, cache in enumerate(caches[:3]):
        assert cache.tensors[0].stride(0) * 2 == result.block_bytes
        for tensor in cache.tensors:
            assert (tensor[3 if cache.table else 1] == number).all()


def plan_stages(layers: list[CacheLayer], num_stages: int, max_model_len: int = 131_072) -> list[CachePlan]:
    size = len(layers) // num_stages
    stages = [range(start, start + size) for start in range(0, len(layers), size)]
    return [plan_caches(layers, 16, BFLOAT16, max_model_len, own) for own in stages]


def test_stages_have_the_tables_of_the_whole_model_and_store_their_own_layers() -> None:
    layers = alternating(KeyValueLayer(8, 256), KeyValueLayer(8, 256, 1024), 5, 8)  # Gemma 3 12B
    whole = plan(layers)
    for stage in plan_stages(layers, 2):
        assert (stage.windows, stage.block_size) == (whole.windows, whole.block_size)
        assert len(stage.places) == len(layers) // 2
        assert stage.block_bytes == whole.block_bytes // 2, "each table has as many layers of either stage"
        assert len(set(stage.places)) == len(stage.places)
        assert all(place is not None and place.offset < stage.block_bytes for place in stage.places)
    uneven = plan_stages(layers, 3)  # 16 layers each, of which 2 or 3 have full attention
    assert {stage.windows for stage in uneven} == {whole.windows}
    assert [stage.block_bytes for stage in uneven] == [3 * 128 * KIB] * 3


def test_stages_have_the_checkpoint_interval_of_the_whole_model() -> None:
    state = StateLayer((((16, 128, 128), torch.float32),))
    layers: list[CacheLayer] = [state, state, state, KeyValueLayer(2, 256)] * 2
    assert {stage.checkpoint_interval for stage in plan_stages(layers, 8)} == {plan(layers).checkpoint_interval}


def test_what_a_stage_does_not_keep_counts_as_a_byte() -> None:
    state = StateLayer((((2, 16, 16), torch.float32),))
    first, second = plan_stages([state, state, KeyValueLayer(1, 64), KeyValueLayer(1, 64)], 2)
    assert (first.state_bytes, first.block_bytes, first.places) == (4 * KIB, 1, (None, None))
    assert (second.state_bytes, second.block_bytes) == (1, 8 * KIB)
    assert plan_stages([KeyValueLayer(1, 64)] * 2, 2)[0].state_bytes == 0
    memory = allocate_caches([state, state], first, 5, BFLOAT16, torch.device("cpu"), 3, whole_blocks=True)
    assert memory.blocks.shape == (5, 1)
    assert len(memory.states) == 2
