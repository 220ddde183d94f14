"""The tokenizer, the chat template, and conversations as token ids with a mask of the tokens to learn.

The template has one special token per role, instead of ChatML's four tokens per message, so that short conversations
have fewer tokens to train on.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.conversations import conversation
from training.stories import story_text
from training.tools import CALL, CALL_END, RESPONSE, RESPONSE_END, calls_text, results_text, tools_text
from training.turns import Conversation
from training.world import ANIMALS

BEGIN, SYSTEM, USER, ASSISTANT, END, PAD = "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
# Tools as in Hermes' format. Their tokens are not special to the tokenizer, so that they stay in the text.
TOOL_TOKENS = (CALL, CALL_END, RESPONSE, RESPONSE_END)
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% if tools %}{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\n\n' }}{% endif %}"
    "{{ '<tools>' }}{% for tool in tools %}{{ '\n' + tool['function'] | tojson }}{% endfor %}"
    "{{ '\n</tools><|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '\n' if loop.previtem is defined and loop.previtem['role'] == 'tool' else '<|user|>' }}"
    "{{ '<tool_response>\n' + message['content'] | trim + '\n</tool_response>' }}"
    "{% if loop.nextitem is undefined or loop.nextitem['role'] != 'tool' %}{{ '<|end|>' }}{% endif %}"
    "{% elif message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user, assistant and tool') }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}"
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
    parts = [text for text in (talk.system, tools_text(talk.tools)) if text]
    if parts:
        pieces.append((SYSTEM + "\n\n".join(parts) + END, False))
    for exchange in talk.exchanges:
        pieces.append((f"{USER}{exchange.question.strip()}{END}{ASSISTANT}", False))
        if exchange.calls:
            pieces.append((f"{calls_text(exchange.calls)}{END}", True))
            pieces.append((f"{USER}{results_text(exchange.results)}{END}{ASSISTANT}", False))
        pieces.append((f"{exchange.answer}{END}", True))
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
        vocab_size=VOCAB_SIZE - len(TOOL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(_plain_texts(seed), conversations), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    return tokenizer


def _plain_texts(seed: int) -> Iterator[str]:
    rng = Random(seed)
    while True:
        talk = conversation(rng)
        lines = [tool.json for tool in talk.tools]
        for exchange in talk.exchanges:
            calls = (call.json for call in exchange.calls)
            lines += [exchange.question, *calls, *exchange.results, exchange.answer]
        yield "\n".join(lines)


def documents(tokenizer: Tokenizer, rng: Random) -> Iterator[Document]:
    """Generate training documents without end."""
    while True:
        yield token_ids_of(tokenizer, pieces_of(rng))


def token_ids_of(tokenizer: Tokenizer, pieces: Sequence[tuple[str, bool]]) -> Document:
    """The document of a conversation's pieces."""
    token_ids: list[int] = []
    learn: list[bool] = []
    for text, wanted in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        token_ids += ids
        learn += [wanted] * len(ids)
    return token_ids, learn


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
