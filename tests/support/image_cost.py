"""Prepares each of the image files in the arguments, and prints seconds of processor time and the peak of bytes above
those before it."""

import sys
import time
from contextlib import suppress
from pathlib import Path

from proa.image.limits import ImageError, ImageLimits
from proa.image.prepare import prepare_image
from support.image_files import KEEPS_SHAPE, encoded, random_image


def num_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):  # loads the code
        prepare_image(encoded(random_image("RGB", 64, 64), format), KEEPS_SHAPE, ImageLimits())
    for path in sys.argv[1:]:
        data = Path(path).read_bytes()
        before, started = num_bytes("VmRSS"), time.process_time()
        with suppress(ImageError):
            prepare_image(data, KEEPS_SHAPE, ImageLimits(max_bytes=2**30))
        print(time.process_time() - started, num_bytes("VmHWM") - before)


if __name__ == "__main__":
    main()
