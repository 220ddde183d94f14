"""The core's images and their limits, from the engine's configuration and how its model reads images."""

from proa_engine.config import EngineConfig
from proa_engine.core.encoder_cache import EncoderCache
from proa_engine.core.image_store import ImageStore
from proa_engine.core.images import Images
from proa_engine.models.image_config import ImageConfig


def make_images(config: EngineConfig, images: ImageConfig | None) -> Images | None:
    """None if the engine reads no images."""
    if images is None:
        return None
    return Images(
        ImageStore(int(config.mm_processor_cache_gb * 2**30)),
        EncoderCache(config.num_encoder_cache_tokens(images.input), config.max_num_batched_tokens),
        attends_within=images.attends_within,
    )


def max_image_tokens(config: EngineConfig, images: ImageConfig | None, *, max_num_seqs: int) -> int:
    """Of one image. A step that must compute all of an image also has a token, with its drafts, of each other running
    request, of which there are up to `max_num_seqs` - 1."""
    if images is None:
        return 0
    size, budget = config.num_encoder_cache_tokens(images.input), config.max_num_batched_tokens
    if not images.attends_within:
        return size
    num_others = min(max_num_seqs, budget) - 1
    return min(size, budget - num_others * (1 + config.num_speculative_tokens))
