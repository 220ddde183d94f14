"""Constrainer: a request's constraint as the grammar of its sampling parameters."""

from collections.abc import Sequence

from proa.contract import Grammar, SamplingParams
from proa.grammar import GrammarError
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.grammars import Grammars
from proa_gateway.openai.structured_outputs import Constraint


class Constrainer:
    def __init__(self, grammars: Grammars, pool: EnginePool) -> None:
        self._grammars = grammars
        self._pool = pool

    async def constrain(
        self, params: Sequence[SamplingParams], constraint: Constraint, model: ServedModel
    ) -> tuple[str, ...]:
        """Set the grammar of `params`. Return warnings about what it does not enforce.

        Raises `UnsupportedField` if the model's engines support no grammars, `InvalidRequest` for a constraint that
        cannot be enforced.
        """
        param = constraint.param
        if self._pool.refuses_grammars(model.name):
            message = f"{param} is not supported by the engines of the model {model.name!r}."
            raise UnsupportedField(message, param=param)
        try:
            lowered = await self._grammars.lower(constraint.params, model.tokenizer, strict=constraint.strict)
        except GrammarError as error:
            raise InvalidRequest(f"{param}: {error}.", param=param) from None
        grammar = constrained_part(lowered.grammar)
        for each in params:
            each.grammar = grammar
        return tuple(f"{param}: {warning}" for warning in lowered.warnings)


def constrained_part(grammar: Grammar) -> Grammar:
    """The grammar with the part of the output that it constrains: all of it."""
    return grammar
