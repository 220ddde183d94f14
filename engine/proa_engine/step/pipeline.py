"""What a rank does with a step's hidden states besides computing its layers, by its pipeline stage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from proa_engine.models.base import CausalLM, StageModel
from proa_engine.models.stages import Stage
from proa_engine.ranks.stage_links import StageLinks
from proa_engine.step.step_inputs import DecodeRows, StepInputs


class StageIO(Protocol):
    """The input and the output of a stage's layers. Device work, in the order of the steps."""

    is_whole: bool  # whether it is the model's only stage
    samples: bool  # whether it has the LM head

    def receive(self, inputs: StepInputs) -> Tensor | None:
        """Return the input of the stage's layers, [tokens, hidden_size]; None on the first stage. That of a step that
        is replayed as a graph is at `graph_input`."""
        ...

    def graph_input(self, num_tokens: int) -> Tensor | None:
        """Return the fixed memory of the input of graphs of `num_tokens` tokens, None on the first stage."""
        ...

    def send(self, result: Tensor, inputs: StepInputs, arrays: Sequence[Tensor]) -> None:
        """Pass on the layers' result, [tokens, hidden_size]. `arrays` are the step's staged arrays."""
        ...

    def finish(self, result: Tensor, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        """Return the step's hidden states and the inputs for sampling from them, where `samples`. `result` is that of
        this stage's layers."""
        ...


class FirstStage:
    """Sends what its layers return. Samples from what the last stage sends back, as far as it is needed."""

    is_whole, samples = False, True

    def __init__(self, model: StageModel, links: StageLinks) -> None:
        self._model = model
        self._links = links

    def receive(self, inputs: StepInputs) -> None:
        return None

    def graph_input(self, num_tokens: int) -> None:
        return None

    def send(self, result: Tensor, inputs: StepInputs, arrays: Sequence[Tensor]) -> None:
        self._links.send(_own_memory(result, inputs))

    def finish(self, result: Tensor, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        rows = result.new_empty(_num_returned(inputs), result.shape[1])
        if not len(rows):
            return rows, inputs
        self._links.receive(rows)
        if _returns_samples(inputs) and inputs.sampling is not None:
            inputs = replace(inputs, sampling=replace(inputs.sampling, hidden_rows=None))
        return self._model.finish(rows), inputs


class LaterStage:
    """Computes what the stage before sent. The last stage returns the rows that the first one needs."""

    is_whole = samples = False

    def __init__(self, links: StageLinks, graph_inputs: Tensor, *, is_last: bool) -> None:
        """`graph_inputs`: fixed memory [tokens of the largest graph, hidden_size] in the type of hidden states."""
        self._links = links
        self._graph_inputs = graph_inputs
        self._is_last = is_last

    def receive(self, inputs: StepInputs) -> Tensor:
        if isinstance(inputs.rows, DecodeRows):
            x = self._graph_inputs[: inputs.num_tokens]
        else:
            x = self._graph_inputs.new_empty(inputs.num_tokens, self._graph_inputs.shape[1])
        self._links.receive(x)
        return x

    def graph_input(self, num_tokens: int) -> Tensor:
        return self._graph_inputs[:num_tokens]

    def send(self, result: Tensor, inputs: StepInputs, arrays: Sequence[Tensor]) -> None:
        if not self._is_last:
            self._links.send(_own_memory(result, inputs))
        elif _returns_samples(inputs) and inputs.sampling is not None and inputs.sampling.hidden_rows is not None:
            self._links.send(result.index_select(0, arrays[inputs.sampling.hidden_rows]))
        elif _num_returned(inputs):
            self._links.send(_own_memory(result, inputs))

    def finish(self, result: Tensor, inputs: StepInputs) -> tuple[Tensor, StepInputs]:
        raise AssertionError("only the first stage samples")


def make_stage_io(
    model: CausalLM, stage: Stage, links: StageLinks, *, max_graph_tokens: int, example: Tensor
) -> StageIO:
    """Make that of one of several stages. `max_graph_tokens`: of the largest graph. `example` is [0, hidden_size] like
    hidden states."""
    if stage.is_first:
        assert isinstance(model, StageModel), "only a StageModel is divided"
        return FirstStage(model, links)
    inputs = torch.zeros(max_graph_tokens, example.shape[1], dtype=example.dtype, device=example.device)
    return LaterStage(links, inputs, is_last=stage.index == stage.count - 1)


def _own_memory(result: Tensor, inputs: StepInputs) -> Tensor:
    """Return `result` in memory that no later step writes: a graph's next replay overwrites its result."""
    return result.clone() if isinstance(inputs.rows, DecodeRows) else result


def _returns_samples(inputs: StepInputs) -> bool:
    """Whether the last stage returns the rows that are sampled and no others."""
    return not any(part.reads_hidden for part in inputs.parts)


def _num_returned(inputs: StepInputs) -> int:
    """Return the number of rows that the last stage returns: all, those that are sampled, or none."""
    if not _returns_samples(inputs):
        return inputs.num_tokens
    return 0 if inputs.sampling is None else inputs.sampling.num_rows
