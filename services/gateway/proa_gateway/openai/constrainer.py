"""Constrainer: a request's constraint as the grammar of its sampling parameters."""

from collections.abc import Sequence

from proa.contract import Grammar, SamplingParams
from proa.grammar import GrammarError
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.grammars import Grammars
from proa_gateway.openai.message_constraint import BUDGET, NO_BUDGET, MessageConstraint, MessageGrammarKey
from proa_gateway.openai.structured_outputs import Constraint
from proa_gateway.parsing.grammar import Reasoning, reasoning_grammar


class Constrainer:
    def __init__(self, grammars: Grammars, pool: EnginePool) -> None:
        self._grammars = grammars
        self._pool = pool

    async def constrain(
        self,
        params: Sequence[SamplingParams],
        constraint: Constraint | None,
        message: MessageConstraint | None,
        model: ServedModel,
    ) -> tuple[str, ...]:
        """Set the grammar of `params`. Return warnings about what it does not enforce.

        `constraint`: of the content. `message`: of the calls; None: all output is content. Raises `UnsupportedField` if
        the model's engines support no grammars, `InvalidRequest` for a constraint that cannot be enforced.
        """
        if constraint is None and (message is None or not message.constrains):
            return ()
        param = constraint.param if constraint is not None else message.param if message is not None else None
        if self._pool.refuses_grammars(model.base_name):
            text = f"{param} is not supported by the engines of the model {model.base_name!r}."
            raise UnsupportedField(text, param=param)
        if message is not None and message.thinking_token_budget is not None:
            if constraint is not None or message.constrains_calls:
                raise InvalidRequest(f"{BUDGET} and {param} exclude each other.", param=BUDGET)
            self._bound_reasoning(params, message, model, message.thinking_token_budget)
            return ()
        grammar: Grammar | None = None
        warnings: tuple[str, ...] = ()
        try:
            if constraint is not None:
                lowered = await self._grammars.lower(constraint.params, model.tokenizer, strict=constraint.strict)
                grammar, warnings = lowered.grammar, lowered.warnings
            if message is not None:
                key = MessageGrammarKey.of(message, grammar, model.tokenizer)
                grammar = (await self._grammars.get(key)).grammar
        except GrammarError as error:
            raise InvalidRequest(f"{param}: {error}.", param=param) from None
        for each in params:
            each.grammar = grammar
        return tuple(f"{param}: {warning}" for warning in warnings)

    def _bound_reasoning(
        self, params: Sequence[SamplingParams], message: MessageConstraint, model: ServedModel, max_tokens: int
    ) -> None:
        if message.reasoning is Reasoning.CLOSED and message.tool_format.reasoning is not None:
            return
        added_tokens = model.tokenizer.added_tokens
        grammar = reasoning_grammar(message.tool_format, max_tokens, message.reasoning, added_tokens)
        if grammar is None:
            raise UnsupportedField(NO_BUDGET, param=BUDGET)
        for each in params:
            each.grammar = grammar
