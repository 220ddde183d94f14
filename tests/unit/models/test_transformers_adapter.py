"""Models that `transformers` runs: equal logits, refusals by name, loading, and the published list."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GPT2LMHeadModel

from proa_engine.config import LoadFormat
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.cache_layers import KeyValueLayer, StateLayer
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models import read_config, registry
from proa_engine.models.loader import load_model
from proa_engine.models.transformers_adapter.fields import build_on_meta
from proa_engine.models.transformers_adapter.model import TransformersForCausalLM
from proa_engine.models.transformers_adapter.products import use_products
from proa_engine.models.transformers_adapter.recurrent import FoundMixer, Recurrent, RowStates, try_in_parts
from proa_engine.models.weight_sources import RandomWeights
from support.engine import build_core
from support.paged_model import PagedModel
from support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_model
from support.transformers_sweep import judge, read_page
from support.transformers_types import model_types, tiny_config

# The whole list: tests/system/test_transformers_sweep.py.
SLICE = (
    "bamba",
    "cohere2",
    "deepseek_v2",
    "falcon_h1",
    "gpt2",
    "gpt_neox",
    "jamba",
    "lfm2",
    "mixtral",
    "nemotron_h",
    "olmo_hybrid",
    "opt",
    "phi",
    "stablelm",
    "starcoder2",
)
REFUSED = {
    "bloom": "its attention does not go through the interface of transformers",
    "doge": "DogeAttention changes the attention mask",
    "mamba": "it has no attention",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock keeps a state outside attention",
    "zaya": "ZayaCCAProjection is called with its arguments by position",
}


@pytest.mark.parametrize("model_type", SLICE)
def test_logits_equal_those_of_transformers(model_type: str) -> None:
    assert judge(model_type).outcome == "equal"


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_state_is_refused_by_name(model_type: str) -> None:
    verdict = judge(model_type)
    assert (verdict.outcome, verdict.reason) == ("refused", REFUSED[model_type])


def test_every_type_is_published() -> None:
    published = read_page()
    assert sorted(published) == model_types()
    assert all(published[name] == "equal" for name in SLICE)
    assert all(published[name] == reason for name, reason in REFUSED.items())
    assert list(published.values()).count("equal") >= 95


def load(folder: Path, load_format: LoadFormat = "auto") -> TransformersForCausalLM:
    with mock.patch.object(registry, "MODULES", {}):  # even if the engine has a module for it
        model = load_model(
            folder,
            read_config.from_folder(folder),
            dtype=torch.float32,
            device=torch.device("cpu"),
            parallel=ParallelContext(),
            load_format=load_format,
            report=lambda line: None,
        )
    assert isinstance(model, TransformersForCausalLM)
    return model


def test_checkpoint_with_renamed_and_merged_tensors(tmp_path: Path) -> None:
    """Mixtral's checkpoints have one matrix an expert, the library's modules one tensor for all."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    ids = torch.arange(30) % VOCAB_SIZE
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
        model = load(folder)
        logits = model.compute_logits(PagedModel(model, num_blocks=8).prefill(ids.tolist(), 7))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_configuration_of_other_field_names(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "gpt2")  # calls them n_embd, n_positions and n_layer
    assert "n_positions" in (folder / "config.json").read_text()
    config = read_config.from_folder(folder)
    assert (config.hidden_size, config.max_position_embeddings, len(config.layers)) == (64, 512, 2)
    assert config.eos_token_ids == (EOS_TOKEN_ID,)
    assert config.vocab_size == VOCAB_SIZE


@torch.inference_mode()
def test_dummy_weights_are_the_same_every_time(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "starcoder2")
    hidden = [PagedModel(load(folder, "dummy"), num_blocks=4).prefill([1, 2, 3]) for _ in range(2)]
    assert torch.equal(*hidden)
    assert not hidden[0].isnan().any()


def test_layers_declare_their_windows(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    model = load(make_tiny_model(tmp_path, "cohere2", **kinds))
    assert model.cache_layers() == (KeyValueLayer(2, 16, 20), KeyValueLayer(2, 16, None))


def mixers(model: TransformersForCausalLM) -> list[Recurrent]:
    return [module for module in model.decoder.modules() if isinstance(module, Recurrent)]


def test_a_state_is_found_whatever_its_module_is_called(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "lfm2")
    model = load(folder)
    state = StateLayer((((64, 3), torch.float32),))
    assert model.cache_layers() == (state, KeyValueLayer(2, 16, None), state)
    assert [type(mixer.inner).__name__ for mixer in mixers(model)] == ["Lfm2ShortConv"] * 2
    assert not any(mixer.one_by_one for mixer in mixers(model))


def test_a_module_that_forgets_its_state_goes_on_token_by_token(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path, "jamba"))
    assert [mixer.one_by_one for mixer in mixers(model)] == [True, True]


def test_two_caches_of_one_layer(tmp_path: Path) -> None:
    kinds = [type(layer) for layer in load(make_tiny_model(tmp_path, "falcon_h1")).cache_layers()]
    assert kinds == [StateLayer, KeyValueLayer] * 2


def test_a_state_that_the_library_does_not_see_is_refused() -> None:
    class Forgetful(torch.nn.Module):
        """Keeps the last token's sum, which no cache has."""

        before = torch.zeros(1)

        def forward(self, hidden_states: torch.Tensor, cache: RowStates) -> torch.Tensor:
            cache.update_recurrent_state(hidden_states[:, -1], 0)
            result = hidden_states + self.before
            self.before = hidden_states.sum() + 1
            return result

    hidden = torch.randn(1, 13, 4, generator=torch.Generator().manual_seed(0))
    mixer = Recurrent(FoundMixer(Forgetful(), hidden, "cache", {}, {("recurrent", 0): hidden[:, -1]}))
    with pytest.raises(ValueError, match="Forgetful does not continue a sequence from its states"):
        try_in_parts(mixer, hidden)


def test_drafts_are_refused_where_the_library_computes_states(tmp_path: Path) -> None:
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    folder = make_tiny_model(tmp_path, "jamba")
    with (
        pytest.raises(ValueError, match="speculative_config is not supported for JambaForCausalLM"),
        build_core(folder, speculative_config=drafts, max_model_len=64),
    ):
        pass


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path, "starcoder2")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.extra.weight"] = tensors.pop("model.norm.bias")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing model\.norm\.bias; unexpected model\.extra\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("gpt2", {}, "transformers has no tensor parallel plan for it"),
        ("cohere2", {}, r"num_attention_heads \(4\) cannot be divided by tensor_parallel_size \(3\)"),
        ("cohere2", {"num_attention_heads": 6}, r"num_key_value_heads \(2\) cannot be divided by .* \(3\)"),
    ],
)
def test_ranks_are_refused_before_weights_are_read(
    model_type: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, model_type, **overrides)
    config = read_config.from_folder(folder)
    weights = Weights(RandomWeights(0, torch.float32, torch.device("cpu")), Unquantized())
    with mock.patch.object(RandomWeights, "take", side_effect=AssertionError), pytest.raises(ValueError, match=message):
        TransformersForCausalLM(config, weights, ParallelContext(0, 3))


def fields(**others: Any) -> dict[str, Any]:
    return {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", **others}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (fields(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type dynamic"),
        (fields(text_config={}), "it has other inputs than text"),
        (fields(add_cross_attention=True), "add_cross_attention"),
        (fields(use_bidirectional_attention="all"), "bidirectional attention is not supported"),
        (fields(model_type="unknown"), "model_type unknown is not one of transformers"),
        ({"architectures": ["NoSuchForCausalLM"]}, "architecture NoSuchForCausalLM is not supported"),
    ],
)
def test_configurations_are_refused_by_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config.from_dicts(config, {})


def test_bidirectional_attention_of_images_is_that_of_no_text() -> None:
    assert read_config.from_dicts(fields(use_bidirectional_attention="vision"), {}).hidden_size


def test_missing_library_names_the_extra() -> None:
    with (
        mock.patch.object(registry, "has_transformers", return_value=False),
        pytest.raises(ValueError, match=r"pip install 'proa-engine\[transformers\]'"),
    ):
        read_config.from_dicts(fields(), {})


@pytest.mark.parametrize("bias", [False, True])
def test_called_layers_are_replaced_by_products(bias: bool) -> None:
    with torch.inference_mode():
        layers: Any = torch.nn.Sequential(torch.nn.Linear(8, 12, bias=bias), torch.nn.Linear(12, 5))
        x = torch.randn(2, 7, 8)
        expected = layers(x)
        use_products(layers, {layers[0]})
        assert [isinstance(layer, torch.nn.Linear) for layer in layers] == [False, True]
        torch.testing.assert_close(layers(x), expected)


def test_models_are_built_one_at_a_time() -> None:
    building: list[object] = []
    most = 0

    @contextmanager
    def recorded() -> Iterator[None]:
        nonlocal most
        building.append(None)
        most = max(most, len(building))
        time.sleep(0.01)  # long enough for the other threads to come here
        yield
        building.pop()

    fields = tiny_config("gpt2").to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    with (
        mock.patch.object(
            GPT2LMHeadModel, "get_init_context", side_effect=lambda *_: [torch.device("meta"), recorded()]
        ),
        ThreadPoolExecutor(4) as threads,
    ):
        for built in [threads.submit(build_on_meta, fields, torch.float32) for _ in range(4)]:
            assert isinstance(built.result(), GPT2LMHeadModel)
    assert most == 1
