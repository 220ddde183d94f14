"""Training of the built-in model: held-out combinations are not in its text, and runs resume and export."""

import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from proa.chat_template import ChatTemplate
from proa_engine.builtin import builtin_model_folder
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.drafters.base import BlockDrafter, Entries, NoDrafter
from proa_engine.models.drafters.load import FoundDrafter, load_drafter, read_drafter
from proa_engine.models.loader import load_model
from support.paged_model import attention_metadata, nan_caches
from training import sums
from training.conversations import conversation
from training.drafter import (
    Drafter,
    Passes,
    answers_batches,
    common_tokens,
    generated_batches,
    layer_states,
    make_batch,
)
from training.drafter import save as save_drafter
from training.drafter import train as train_drafter
from training.evaluate import held_out_questions, tool_questions
from training.export import export
from training.network import Network, NetworkConfig
from training.tokens import CHAT_TEMPLATE, TOOL_TOKENS, load_tokenizer, render
from training.train import Run, train
from training.turns import Conversation, Exchange, is_held_out
from training.weights import load_network


def conversations(*, seed: int, count: int) -> list[Conversation]:
    rng = Random(seed)
    return [conversation(rng) for _ in range(count)]


def messages_of(exchange: Exchange) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = [{"role": "user", "content": exchange.question}]
    if exchange.calls:
        calls = [{"id": "0", "type": "function", "function": call.function} for call in exchange.calls]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": "0", "content": result} for result in exchange.results]
    return [*messages, {"role": "assistant", "content": exchange.answer}]


def test_training_text_has_no_held_out_combination() -> None:
    for talk in conversations(seed=1, count=20_000):
        assert not any(is_held_out(combination) for combination in talk.combinations)


def test_no_message_has_a_held_out_sum_or_difference() -> None:
    """Independent of the turns' keys: checks the numbers on both sides of each sign."""
    seen = 0
    for talk in conversations(seed=2, count=10_000):
        for left, sign, right in re.findall(r"(\d+) ([+-]) (\d+)", str(talk.exchanges)):
            key = sums.sum_key if sign == "+" else sums.difference_key
            assert not is_held_out(key(int(left), int(right))), talk
            seen += 1
    assert seen > 5_000


def test_no_question_of_the_evaluation_is_in_the_training_text() -> None:
    asked = {exchange.question for talk in conversations(seed=3, count=20_000) for exchange in talk.exchanges}
    for questions in (held_out_questions(200, seed=2024), tool_questions(200, seed=2024)):
        assert len(questions) == 200
        assert not asked & {question.text for question in questions}


def test_training_text_equals_the_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_folder())
    assert tokenizer.chat_template == CHAT_TEMPLATE
    template = ChatTemplate(CHAT_TEMPLATE)
    for talk in conversations(seed=4, count=400):
        messages: list[Any] = [{"role": "system", "content": talk.system}] if talk.system else []
        messages += [message for exchange in talk.exchanges for message in messages_of(exchange)]
        tools: list[Any] | None = [tool.definition for tool in talk.tools] or None
        text = "".join(piece for piece, _ in render(talk))
        assert template.render(messages, {"tools": tools}, add_generation_prompt=False) == text
        assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == text


def test_template_keeps_arguments_that_are_text_and_content_beside_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [{"role": "assistant", "content": "I add.", "tool_calls": [call, call]}]
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    text = ChatTemplate(CHAT_TEMPLATE).render(messages, add_generation_prompt=False)
    assert text == f"<|begin|><|assistant|>I add.\n{one}\n{one}<|end|>"


def test_tool_tokens_are_one_token_each_and_stay_in_the_text() -> None:
    tokenizer = load_tokenizer(builtin_model_folder() / "tokenizer.json")
    ids = tokenizer.encode("".join(TOOL_TOKENS), add_special_tokens=False).ids
    assert len(ids) == len(TOOL_TOKENS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(TOOL_TOKENS)
    assert tokenizer.get_vocab_size() == 2048


def test_interrupted_training_resumes_and_exports_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(builtin_model_folder() / "tokenizer.json", tmp_path)
    train(tmp_path, 1, Run())
    train(tmp_path, 2, Run())
    assert "step 1 of 2" in capsys.readouterr().out
    export(tmp_path, tmp_path / "model")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 2
    network = Network(NetworkConfig(**state["config"]))
    network.load_state_dict({name: weight.bfloat16().float() for name, weight in state["network"].items()})
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    token_ids = torch.arange(200).view(2, 100)
    with torch.no_grad():
        expected = network.logits(network(token_ids))
        torch.testing.assert_close(exported(token_ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_training_starts_from_the_weights_of_an_exported_model(tmp_path: Path) -> None:
    run = Run(model=builtin_model_folder(), rate=0.0)
    train(tmp_path, 1, run)
    export(tmp_path, tmp_path / "model")
    for name in ("model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (builtin_model_folder() / name).read_bytes(), name


@pytest.mark.parametrize("known", [None, torch.arange(3, 2000, 2)])
def test_the_drafter_is_trained_as_the_engine_drafts(known: torch.Tensor | None, tmp_path: Path) -> None:
    """The logits of a draft, and of the one behind it, which reads the drafter's own output."""
    folder, config = builtin_model_folder(), read_config.from_folder(builtin_model_folder())
    network = load_network(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        trained = Drafter(network, (2, 3, 4), known)
        batches = generated_batches(network, trained, folder, Random(1))
        train_drafter(trained, network.embedding, batches, steps=1, passes=2)
    trained.load_state_dict({name: weight.bfloat16().float() for name, weight in trained.state_dict().items()})
    save_drafter(trained, folder, tmp_path, passes=2)
    options = read_drafter(SpeculativeConfig(method="eagle3", model=str(tmp_path)), tmp_path, config)
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "parallel": ParallelContext()}
    model = load_model(folder, config, **cpu, report=lambda text: None)
    found = FoundDrafter(tmp_path, options)
    drafter = load_drafter(found, config, model, **cpu, report=lambda text: None)
    assert not isinstance(drafter, NoDrafter | BlockDrafter)

    token_ids = torch.randint(2048, (1, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        states = torch.cat(layer_states(network, token_ids)[1:], dim=-1)[:, :-1]
        embedded, passes = network.embedding(token_ids[:, 1:]), Passes(network.config, 29)
        first = trained(trained.combine(states), embedded, passes)
        second = trained(first.roll(1, dims=1), embedded, passes)
        ids = torch.arange(2048) if known is None else known
        expected = [
            torch.full((29, 2048), -torch.inf).index_copy_(1, ids, trained.logits(each)[0]) for each in (first, second)
        ]
    caches, blocks = nan_caches(drafter, 3, 16), [[2, 0]]  # type: ignore[arg-type]
    true_tokens = attention_metadata([29], [29], blocks, 16)
    read = drafter(Entries(drafter.combine(states[0]), token_ids[0, 1:], torch.arange(29)), caches, true_tokens)
    torch.testing.assert_close(drafter.compute_logits(read), expected[0], atol=1e-4, rtol=1e-4)
    for place in (28, 17, 5):  # the last one first: a draft's entry replaces that of the true token
        one = attention_metadata([1], [place + 1], blocks, 16)
        draft = Entries(read[place - 1 : place].clone(), token_ids[0, place + 1 : place + 2], torch.tensor([place]))
        drafted = drafter(draft, caches, one)
        torch.testing.assert_close(drafter.compute_logits(drafted)[0], expected[1][place], atol=1e-4, rtol=1e-4)


def test_batches_of_answers_have_what_the_model_computes_of_each_answer_alone() -> None:
    network = load_network(builtin_model_folder())
    rng = Random(1)
    lengths = [rng.randint(8, 200) for _ in range(12)]
    answers = [([rng.randrange(2048) for _ in range(each)], [False] * 4 + [True] * (each - 4)) for each in lengths]
    drafter = Drafter(network, (2, 3, 4), common_tokens(answers, 300))
    batches = answers_batches(network, drafter, answers, rng)
    seen = set[int]()
    while len(seen) < len(answers):
        batch = next(batches)
        for row, next_ids in enumerate(batch.next_ids):
            number = next(number for number, (ids, _) in enumerate(answers) if next_ids[:5].tolist() == ids[1:6])
            ids, learn = answers[number]
            alone = make_batch(network, drafter, torch.tensor([ids]), torch.tensor([learn]))
            length = len(ids) - 2
            torch.testing.assert_close(batch.hidden[row, :length], alone.hidden[0], atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(batch.states[row, :length], alone.states[0], atol=1e-3, rtol=1e-3)
            assert torch.equal(batch.is_known[row, :length], alone.is_known[0])
            assert batch.learn[row].sum() == length - 2
            seen.add(number)
