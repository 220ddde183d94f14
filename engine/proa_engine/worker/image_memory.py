"""How much memory images take beside the KV cache: arithmetic on sizes."""

from math import isqrt

from proa.contract import ImageInput
from proa_engine.config import EngineConfig
from proa_engine.models.image_config import ImageConfig


def most_image_tokens(config: EngineConfig, images: ImageInput, max_model_len: int) -> int:
    """Of the largest image that is encoded: others are rejected."""
    return min(images.max_tokens, config.num_encoder_cache_tokens(images), max_model_len)


def image_of(image_input: ImageInput, num_tokens: int) -> tuple[int, int]:
    """Height and width in pixels of an image of about `num_tokens` tokens, if it may have as many, near a square."""
    if image_input.side:
        return image_input.side, image_input.side
    least = -(-image_input.min_pixels // image_input.unit**2)
    num_tokens = min(max(num_tokens, least), image_input.max_tokens)
    rows = isqrt(num_tokens)
    return rows * image_input.unit, num_tokens // rows * image_input.unit


def encoder_cache_bytes(config: EngineConfig, images: ImageConfig | None, dtype_bytes: int) -> int:
    """Of the encoded images that are kept, on each rank."""
    return 0 if images is None else config.num_encoder_cache_tokens(images.input) * images.embedding_width * dtype_bytes


def cpu_encoder_bytes(config: EngineConfig, images: ImageConfig | None, max_model_len: int, dtype_bytes: int) -> int:
    """Estimated bytes of the encoded images that are kept, and of encoding the largest one."""
    if images is None:
        return 0
    most = most_image_tokens(config, images.input, max_model_len)
    return encoder_cache_bytes(config, images, dtype_bytes) + most * images.token_values * dtype_bytes
