"""Training of the built-in model: held-out combinations are not in its text, and runs resume and export."""

import re
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from proa_engine.builtin import builtin_model_folder
from training import sums
from training.conversations import Conversation, conversation
from training.evaluate import held_out_questions
from training.export import export
from training.network import Network, NetworkConfig
from training.tokens import render
from training.train import train
from training.turns import is_held_out


def conversations(*, seed: int, count: int) -> list[Conversation]:
    rng = Random(seed)
    return [conversation(rng) for _ in range(count)]


def test_training_text_has_no_held_out_combination() -> None:
    for talk in conversations(seed=1, count=20_000):
        assert not any(is_held_out(combination) for combination in talk.combinations)


def test_no_message_has_a_held_out_sum_or_difference() -> None:
    """Independent of the turns' keys: checks the numbers on both sides of each sign."""
    seen = 0
    for talk in conversations(seed=2, count=10_000):
        for left, sign, right in re.findall(r"(\d+) ([+-]) (\d+)", str(talk.messages)):
            key = sums.sum_key if sign == "+" else sums.difference_key
            assert not is_held_out(key(int(left), int(right))), talk
            seen += 1
    assert seen > 5_000


def test_no_question_of_the_evaluation_is_in_the_training_text() -> None:
    asked = {question for talk in conversations(seed=3, count=20_000) for question, _ in talk.messages}
    questions = held_out_questions(200, seed=2024)
    assert len(questions) == 200
    assert not asked & {question.text for question in questions}


def test_training_text_equals_the_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_folder())
    for talk in conversations(seed=4, count=200):
        messages = [{"role": "system", "content": talk.system}] if talk.system else []
        for question, answer in talk.messages:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "".join(text for text, _ in render(talk))


def test_interrupted_training_resumes_and_exports_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(builtin_model_folder() / "tokenizer.json", tmp_path)
    train(tmp_path, steps=1, seed=1)
    train(tmp_path, steps=2, seed=1)
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
