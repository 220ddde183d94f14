"""ModelLookup: which models requests may name, and the one of those that name none."""

from proa_gateway.config import GatewayConfig
from proa_gateway.engines.model_registry import ModelRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import EngineUnavailable, InvalidRequest, ModelNotFound


class ModelLookup:
    """A model is known if an engine has served it or `--model` names it, whether or not an engine serves it now."""

    def __init__(self, config: GatewayConfig, *, pool: EnginePool, models: ModelRegistry) -> None:
        self._config = config
        self._pool = pool
        self._models = models

    def names(self) -> list[str]:
        """Names of models that requests may use, sorted."""
        names = {*self._pool.model_names(), *self._config.models}
        if self._config.deadlines.scale_from_zero > 0:
            names.update(self._models.names())
        return sorted(names)

    def name(self, requested: str | None) -> str:
        """The requested name, or the only model's. Raises `InvalidRequest` and `EngineUnavailable`."""
        if requested is not None:
            return requested
        names = self._pool.model_names() or self.names()
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
        self.check(name)
        return self._models.get(name)
