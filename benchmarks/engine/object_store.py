"""Download the files under a prefix of an object store, one after another in one stream each, and as the engine does.

    python -m benchmarks.engine.object_store s3://BUCKET/PREFIX --folder /models --upload-gb 2

Each way downloads into a folder of its own, which is deleted. Prints a line of JSON for each: seconds, GB a second, and
seconds of CPU time. With --upload-gb, dummy shards are uploaded to the prefix first. Credentials: AWS_*, ….
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import obstore
from obstore.store import from_url

from proa_engine.sources import object_download
from proa_engine.sources.object_store import ObjectFile, ObjectFolder

SHARD_BYTES = 1 << 29


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--folder", type=Path, required=True, help="folder to download into")
    parser.add_argument("--upload-gb", type=float, default=0, help="GB of dummy shards to upload to the prefix first")
    parser.add_argument("--threads", type=int, nargs="+", default=[object_download.NUM_THREADS])
    parser.add_argument("--range-mib", type=int, nargs="+", default=[object_download.RANGE_BYTES >> 20])
    arguments = parser.parse_args()
    if arguments.upload_gb:
        upload(arguments.url, int(arguments.upload_gb * 1e9 / SHARD_BYTES + 0.5))
    source = ObjectFolder.open(arguments.url)
    files = source.files()
    measure(
        "one stream, one file after another", arguments.folder, files, lambda folder: in_turn(source, files, folder)
    )
    for threads in arguments.threads:
        for size in arguments.range_mib:
            object_download.NUM_THREADS, object_download.RANGE_BYTES = threads, size << 20
            name = f"{threads} streams of ranges of {size} MiB, MD5 compared"
            measure(name, arguments.folder, files, lambda folder: at_once(source, files, folder))


def upload(url: str, count: int) -> None:
    store = from_url(url, client_options={"allow_http": True})
    for number in range(count):
        obstore.put(
            store, f"model-{number + 1:05}-of-{count:05}.safetensors", os.urandom(1 << 20) * (SHARD_BYTES >> 20)
        )


def in_turn(source: ObjectFolder, files: Sequence[ObjectFile], folder: Path) -> None:
    for file in files:
        with (folder / file.name).open("wb") as written:
            for piece in source.read(file, 0, file.size):
                written.write(piece)
            os.fsync(written.fileno())


def at_once(source: ObjectFolder, files: Sequence[ObjectFile], folder: Path) -> None:
    object_download.download(source, files, folder, lambda _: None, etags_are_md5s=False)


def measure(name: str, parent: Path, files: Sequence[ObjectFile], job: Callable[[Path], None]) -> None:
    folder = parent / "object-store-benchmark"
    folder.mkdir(parents=True)
    started, cpu = time.monotonic(), time.process_time()
    try:
        job(folder)
        seconds, num_bytes = time.monotonic() - started, sum(each.size for each in files)
    finally:
        shutil.rmtree(folder)
    line = {"way": name, "seconds": round(seconds, 2), "GB/s": round(num_bytes / 1e9 / seconds, 2)}
    print(json.dumps(line | {"CPU seconds": round(time.process_time() - cpu, 1)}), flush=True)


if __name__ == "__main__":
    main()
