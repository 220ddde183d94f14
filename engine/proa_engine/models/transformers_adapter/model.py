"""A causal language model of `transformers` as a `CausalLM`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import tensors_of
from proa_engine.models.transformers_adapter import fields as adapter_fields
from proa_engine.models.transformers_adapter.attention import AttentionCalls, PagedAttend
from proa_engine.models.transformers_adapter.load_weights import TypedSource, load_weights
from proa_engine.models.transformers_adapter.probe import probe, replace
from proa_engine.models.transformers_adapter.products import CalledLayers, OwnLinear, use_products
from proa_engine.models.transformers_adapter.tensor_parallel import connect, divide, localize, read_plan


class TransformersForCausalLM:
    """A `CausalLM`. The constructor loads all weights and tries the model: it raises ValueError with the reason if the
    model cannot be served."""

    defaults: Mapping[str, Any] = {}
    names: tuple[tuple[str, str], ...] = ()
    read_options = staticmethod(adapter_fields.read_options)

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        options = config.decoder
        assert isinstance(options, adapter_fields.AdaptedOptions)
        name = config.architecture
        if not isinstance(config.linear_method, Unquantized):
            raise ValueError(f"{name} is run by transformers, where quantization and LoRA are not supported")
        if config.batch_invariant:
            raise ValueError(f"{name} is run by transformers, where batch_invariant on a GPU is not supported")
        source = weights.source
        assert isinstance(source, TypedSource)
        model = adapter_fields.build_on_meta(options.fields, source.dtype)
        try:
            plan = read_plan(model, parallel)
            divide(model, plan, parallel, source.device)
        except ValueError as error:
            raise ValueError(f"{name} cannot be run through transformers: {error}") from error
        load_weights(model, source)
        localize(model)
        connect(model, plan, parallel)
        try:
            self._adapt(model, config)
        except ValueError as error:
            raise ValueError(f"{name} cannot be run through transformers: {error}") from error

    @torch.inference_mode()
    def _adapt(self, model: Any, config: ModelConfig) -> None:
        self.decoder = _decoder(model)
        self.calls = AttentionCalls(model)
        called = CalledLayers(self.decoder)
        output_layer = model.get_output_embeddings()
        output_name = next(name for name, module in model.named_modules() if module is output_layer)

        def prepare() -> None:
            use_products(model, called.end() | set(output_layer.modules()))

        self.layers = probe(
            model,
            self.decoder,
            self.calls,
            self._hidden,
            prepare,
            config.vocab_size,
            config.max_position_embeddings,
        )
        # The rest of the model computes logits of hidden states that it gets from here.
        self.given = GivenStates(None, self.decoder)
        replace(model, self.decoder, self.given)
        self.head = model
        self.logits: Callable[[Tensor], Tensor] = self._whole_head
        if self._is_head(model.get_submodule(output_name), config.hidden_size):
            self.logits = model.get_submodule(output_name)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        step = AttentionStep(metadata, positions, batch_invariant=False)
        attend = PagedAttend(self.layers, caches, step)
        hidden: Tensor = self.calls.run(attend, lambda: self._hidden(input_ids, positions), attend.mix)
        return hidden

    def _hidden(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        output = self.decoder(input_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output[0][0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)

    def _is_head(self, layer: nn.Module, hidden_size: int) -> bool:
        """Whether the head computes no more than its output layer."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, hidden_size, generator=generator).to(next(self.decoder.parameters()))
        hidden *= 100 / layer(hidden).abs().max()  # a soft cap would show
        whole, alone = self._whole_head(hidden), layer(hidden)
        return whole.dtype == alone.dtype and torch.equal(whole, alone)

    def _whole_head(self, hidden: Tensor) -> Tensor:
        self.given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.head(ids, use_cache=False).logits[0]
        return logits

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return self.layers

    def parameters(self) -> Iterator[Tensor]:
        return unique_tensors(self.decoder, self.head)


class GivenStates(nn.Module):
    """Stands for a model's decoder or encoder: returns hidden states that were computed before."""

    hidden: Tensor

    def __init__(self, pooler: nn.Module | None, stands_for: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler
        # Plain numbers, which the rest of the model may read.
        self.__dict__ |= {name: value for name, value in vars(stands_for).items() if isinstance(value, int | float)}

    def forward(self, *_: Any, **__: Any) -> "_Output":
        return _Output(self.hidden, None if self.pooler is None else self.pooler(self.hidden))


class _Output:
    """A model output with hidden states, pooled ones too if the model pools them; all its other fields are None."""

    def __init__(self, hidden: Tensor, pooled: Tensor | None) -> None:
        self.last_hidden_state = hidden
        self.pooler_output = pooled

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state, self.pooler_output)[index]

    def __getattr__(self, name: str) -> None:
        return None


def unique_tensors(*models: nn.Module) -> Iterator[Tensor]:
    """The parameters, buffers and products' weights of `models`, each once."""
    seen: set[int] = set()
    for model in models:
        products = [part.product for part in model.modules() if isinstance(part, OwnLinear)]
        for tensor in (*model.parameters(), *model.buffers(), *tensors_of(products)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _decoder(model: Any) -> Any:
    """The part of a model that computes hidden states of tokens."""
    for part in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(part, PreTrainedModel) and part is not model:
            return part
    raise ValueError("it has no decoder")
