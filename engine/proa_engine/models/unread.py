"""Tensors of checkpoints that no layer takes, with the reasons.

Any other tensor that no layer takes is an error, because a model without it computes something else. `transformers`
warns of such tensors, except those that a model's class lists (`_keys_to_ignore_on_load_unexpected`).
"""

from proa_engine.layers.lora import AUDIO_ENCODERS, ENCODERS
from proa_engine.models.config import ModelConfig


def why_unread(name: str, config: ModelConfig, decoder: str, head: str) -> str | None:
    """Return why the model has no use for a checkpoint's tensor; None: it has one.

    `decoder` and `head` are how the names of the text model's tensors and of its LM head's begin, with the dot.
    """
    first = len(config.layers)
    predictors = tuple(f"{decoder}layers.{number}." for number in range(first, first + config.num_nextn_layers))
    if name.endswith((".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")):
        return "frequencies, which config.json gives"
    if name.rpartition(".")[2] == "position_ids":
        return "the numbers from 0 on"
    if name.startswith(("mtp.", f"{decoder}mtp_layers.", *predictors)):
        return "predicts further tokens: a drafter's (models/drafters/mtp.py)"
    if "vision_tower." in name and ".head." in name:
        return "pools an image, of which text models read every part"
    if name == f"{head}weight" and not config.has_lm_head:
        return "logits, where no tokens are generated"
    if name.startswith("score.") and config.pooling.labels:
        return "taken by load_pooling_heads, which refuses what it does not take"
    encoders = ENCODERS if config.is_text_part else AUDIO_ENCODERS
    if not config.audios and not encoders.isdisjoint(name.split(".")[:2]):
        return "of an encoder of images or sound, which are not read"
    return None
