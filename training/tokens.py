"""The tokenizer, the chat template, and conversations as token ids with a mask of the tokens to learn.

The template has one special token per role, instead of ChatML's four tokens per message, so that short conversations
have fewer tokens to train on.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.conversations import Conversation, conversation
from training.stories import story_text
from training.world import ANIMALS

BEGIN, SYSTEM, USER, ASSISTANT, END, PAD = "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB_SIZE = 2048
# Single digits, words with the space before them, runs of other characters, line breaks and spaces.
_PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


# Token ids, and for each whether the loss includes it: the assistant's messages.
Document = tuple[list[int], list[bool]]


def render(talk: Conversation) -> list[tuple[str, bool]]:
    """The conversation as pieces of text, each with whether the loss includes it. Joined, the chat template's text."""
    pieces = [(BEGIN, False)]
    if talk.system is not None:
        pieces.append((f"{SYSTEM}{talk.system}{END}", False))
    for question, answer in talk.messages:
        pieces.append((f"{USER}{question.strip()}{END}{ASSISTANT}", False))
        pieces.append((f"{answer}{END}", True))
    return pieces


def pieces_of(rng: Random) -> list[tuple[str, bool]]:
    """A conversation, or sometimes a plain story, for completions without a chat template."""
    if rng.random() < 0.01:
        return [(BEGIN, False), (f"{story_text(rng, rng.choice(ANIMALS).name)}{END}", True)]
    return render(conversation(rng))


def train_tokenizer(seed: int, conversations: int = 60_000) -> Tokenizer:
    """Train a byte-level BPE tokenizer on generated conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(_plain_texts(seed), conversations), trainer)
    return tokenizer


def _plain_texts(seed: int) -> Iterator[str]:
    rng = Random(seed)
    while True:
        talk = conversation(rng)
        yield "\n".join(text for message in talk.messages for text in message)


def documents(tokenizer: Tokenizer, rng: Random) -> Iterator[Document]:
    """Generate training documents without end."""
    while True:
        token_ids: list[int] = []
        learn: list[bool] = []
        for text, wanted in pieces_of(rng):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            token_ids += ids
            learn += [wanted] * len(ids)
        yield token_ids, learn


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
