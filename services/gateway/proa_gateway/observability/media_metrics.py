"""Metrics of images and audio."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

IMAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
AUDIO_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class MediaMetrics:
    """Times are in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._images = counter(
            "proa_gateway_images",
            "Images of requests, by outcome: prepared, cached, refused, overloaded, cancelled.",
            ("outcome",),
        )
        self._image_time = histogram(
            "proa_gateway_image_seconds",
            "Time to fetch, decode and resize an image, for images that are used.",
            buckets=IMAGE_BUCKETS,
        )
        self._audios = counter(
            "proa_gateway_audios",
            "Audio files of requests, by outcome: prepared, cached, refused, overloaded, cancelled.",
            ("outcome",),
        )
        self._audio_time = histogram(
            "proa_gateway_audio_seconds",
            "Time to decode an audio file, for files that are used.",
            buckets=AUDIO_BUCKETS,
        )
        self._audio_duration = counter(
            "proa_gateway_audio_duration_seconds", "Duration of the audio that was decoded, in seconds."
        )
        self._audio_failures = counter(
            "proa_gateway_audio_process_failures", "Processes that decode audio files and died or were late."
        )
        self._windows = counter(
            "proa_gateway_transcription_windows",
            "Windows of audio by outcome: accepted, silent (not sent to an engine), retried (an attempt whose text was "
            "unlikely).",
            ("outcome",),
        )

    def observe_image(self, outcome: str, seconds: float) -> None:
        """`outcome`: `prepared`, `cached` (known by its file), `refused`, `overloaded` or `cancelled` (client gone, or
        another image of the request was refused)."""
        self._images.labels(outcome).inc()
        if outcome in ("prepared", "cached"):
            self._image_time.observe(seconds)

    def observe_audio(self, outcome: str, decode_seconds: float, audio_seconds: float) -> None:
        """`outcome`: `prepared`, `cached`, `refused`, `overloaded` or `cancelled` (client gone, or its request
        failed)."""
        self._audios.labels(outcome).inc()
        self._audio_duration.inc(audio_seconds)
        if outcome == "prepared":
            self._audio_time.observe(decode_seconds)

    def observe_audio_process_failure(self) -> None:
        self._audio_failures.inc()

    def observe_window(self, outcome: str) -> None:
        """Count a window of an audio: `accepted`; `silent` if no engine was sent it; `retried` for each attempt whose
        text was not likely."""
        self._windows.labels(outcome).inc()
