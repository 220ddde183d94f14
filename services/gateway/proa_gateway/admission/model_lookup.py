"""ModelLookup: which models requests may name, and the one of those that name none."""

from dataclasses import replace

from proa_gateway.config import GatewayConfig
from proa_gateway.engines.lora_registry import KnownLora
from proa_gateway.engines.model_registry import ModelRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import EngineUnavailable, InvalidRequest, ModelNotFound


class ModelLookup:
    """A model is known if an engine has served it or `--model` names it, whether or not an engine serves it now. An
    adapter is a model beside that of its engines."""

    def __init__(self, config: GatewayConfig, *, pool: EnginePool, models: ModelRegistry) -> None:
        self._config = config
        self._pool = pool
        self._models = models

    def names(self) -> list[str]:
        """Names of models that requests may use, those of adapters last."""
        models = self._engine_models()
        loras = [each.lora.name for each in self._models.loras if self._base_of(each) in models]
        return models + sorted(name for name in loras if name not in models)

    def base_name(self, name: str) -> str:
        """The name of the engines' model: of an adapter's, or the name itself. Raises `InvalidRequest`."""
        lora, known = self._models.loras.get(name), self.known
        if lora is None or name in known or not known:
            return name
        base = self._base_of(lora)
        if base is None:
            message = f"The adapter {name!r} needs a base_model_name, one of {', '.join(sorted(known))}."
            raise InvalidRequest(message, param="model")
        return base

    def get(self, name: str) -> ServedModel:
        """A model or an adapter with its model. Raises `EngineUnavailable` if no engine has served it yet."""
        base = self.base_name(name)
        model = self._models.get(base)
        lora = self._models.loras.get(name)
        return model if lora is None or base == name else replace(model, lora=lora.lora)

    def name(self, requested: str | None) -> str:
        """The requested name, or the only model's. Raises `InvalidRequest` and `EngineUnavailable`."""
        if requested is not None:
            return requested
        names = self._pool.model_names() or self._engine_models()
        if len(names) > 1:
            raise InvalidRequest(f"model must be one of {', '.join(names)}.", param="model")
        if not names:
            raise EngineUnavailable("No engine is ready.")
        return names[0]

    @property
    def known(self) -> set[str]:
        return {*self._config.models, *self._models.names()}

    def check(self, name: str) -> None:
        """Raises `ModelNotFound` if the model is not known and no engine may turn out to serve it."""
        # While no model is known, or an engine may turn out to serve this one, its absence is not permanent.
        if (known := self.known) and name not in known and not self._pool.may_serve(name):
            raise ModelNotFound(f"The model {name!r} does not exist.", param="model")

    def tokenizer_model(self, requested: str | None) -> ServedModel:
        """The model of a request that needs its tokenizer but no engine. Raises `InvalidRequest`, `ModelNotFound`,
        and `EngineUnavailable` if no engine has served it yet."""
        name = self.name(requested)
        self.check(self.base_name(name))
        return self.get(name)

    def _base_of(self, lora: KnownLora) -> str | None:
        known = self.known
        return lora.base_model or (next(iter(known)) if len(known) == 1 else None)

    def _engine_models(self) -> list[str]:
        names = {*self._pool.model_names(), *self._config.models}
        if self._config.deadlines.scale_from_zero > 0:
            names.update(self._models.names())
        return sorted(names)
