"""Audio files to windows: formats by their first bytes, channels, rates, limits, damaged and hostile files."""

import struct
from contextlib import suppress
from io import BytesIO

import av
import numpy as np
import pytest

from proa_gateway.audio.decode import AudioError, Samples, choose_format, decode, decode_windows
from support.audio_files import FORMATS, encode, tone

RATE = 16_000


def read(data: bytes, sampling_rate: int = RATE) -> Samples:
    return np.concatenate(list(decode(data, sampling_rate)))


def windows_of(data: bytes, *, max_window: int = 30 * RATE, max_seconds: float = 60) -> list[Samples]:
    max_samples = round(max_seconds * RATE)
    windows = decode_windows(data, sampling_rate=RATE, max_window=max_window, max_samples=max_samples)
    return [samples for samples, _ in windows]


def refusal(data: bytes) -> str:
    with pytest.raises(AudioError) as caught:
        windows_of(data)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tone_sounds_alike_in_all_formats(name: str) -> None:
    samples = read(encode(np.stack([tone(1.0, 48_000)] * 2), 48_000, name))
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(RATE, abs=800)  # codecs pad
    middle = samples[len(samples) // 2 - 2000 : len(samples) // 2 + 2000]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.06)  # LAME takes off 5 %
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(4000)))
    assert spectrum.argmax() * RATE / 4000 == pytest.approx(440, abs=4)


@pytest.mark.parametrize("name", ["wav", "wav of 24 bits", "wav of floats", "flac", "m4a lossless", "mov", "mkv"])
def test_lossless_files_at_the_models_rate_keep_their_samples(name: str) -> None:
    original = np.random.default_rng(0).uniform(-0.9, 0.9, 3 * RATE // 2).astype(np.float32)
    assert np.abs(read(encode(original, RATE, name)) - original).max() <= 2**-15


@pytest.mark.parametrize("name", ["wav of floats", "wav", "flac", "mkv"])
@pytest.mark.parametrize("num_channels", [1, 2, 4, 6, 8])
def test_the_mean_of_all_channels_is_taken(num_channels: int, name: str) -> None:
    by_channel = np.stack([tone(0.5, RATE, level=level / 10) for level in range(1, num_channels + 1)])
    samples = read(encode(by_channel, RATE, name))
    assert samples == pytest.approx(by_channel.mean(axis=0), abs=2**-15)


def test_eight_channels_in_planes_are_read() -> None:
    samples = read(encode(np.stack([tone(0.5, 48_000)] * 8), 48_000, "ogg opus"))
    assert np.abs(samples[1000:7000]).max() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("rate", [4000, 8000, 11_025, 22_050, 44_100, 96_000, 192_000])
def test_all_usual_rates_are_resampled(rate: int) -> None:
    samples = read(encode(tone(1.0, rate), rate, "wav of floats"))
    assert len(samples) == pytest.approx(RATE, abs=1)
    assert np.abs(samples[1000:-1000] - tone(1.0, RATE)[1000 : len(samples) - 1000]).max() < 0.01


def test_files_that_were_joined_may_change_their_rate_and_channels() -> None:
    first, second = encode(tone(1.0, 44_100), 44_100, "mp3"), encode(np.stack([tone(1.0, 32_000)] * 2), 32_000, "mp3")
    assert len(read(first + second[second.index(b"\xff\xfb") :])) == pytest.approx(2 * RATE, abs=2400)


def test_samples_out_of_range_are_cut_off_and_others_refused() -> None:
    file = encode(np.array([0.5, 3.0, -1e30, 1.0] * 100, np.float32), RATE, "wav of floats")
    assert read(file)[:4].tolist() == [0.5, 1.0, -1.0, 1.0]
    for value in (np.nan, np.inf):
        broken = np.array([[0.5, value] * 100, [0.5, -value] * 100], np.float32)
        assert refusal(encode(broken, RATE, "wav of floats")) == "it has samples that are no numbers"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"RIFF", "its first bytes are those of no such file"),
        (b"hello", "its first bytes are those of no such file"),
        (b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=audio 5004 RTP/AVP 0\r\n", "its first bytes are those of no such"),
        (b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1/a.ts\n", "its first bytes are those of no such file"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "its first bytes are those of no such file"),
        (b"<?xml version='1.0'?><MPD/>", "its first bytes are those of no such file"),
        (b"\xff\xf1L\x80'\x7f\xfc\xde\x02\x00", "its first bytes are those of no such file"),  # AAC without a container
        (b"FORM\0\0\0\0AIFF", "it is AIFF"),
        (b"#!AMR\n", "it is AMR"),
    ],
)
def test_other_files_are_refused_by_their_first_bytes(data: bytes, message: str) -> None:
    assert message in refusal(data)


def test_texts_are_never_read_as_playlists_whatever_is_before_them() -> None:
    for head in (b"RIFF\0\0\0\0WAVE", b"OggS", b"fLaC", b"ID3", b"\x1aE\xdf\xa3", b"\0\0\0\x20ftyp"):
        for text in (b"v=0\r\nm=audio 5004 RTP/AVP 0\r\n", b"#EXTM3U\nhttp://127.0.0.1/\n"):
            with pytest.raises(AudioError):
                read(head + text)


def test_a_container_without_audio_is_refused() -> None:
    assert refusal(_video()) == "it has no audio"
    empty = bytearray(encode(tone(0.1, RATE), RATE))
    start = empty.index(b"data") + 4
    assert refusal(bytes(empty[:start]) + bytes(4)) == "it has no audio"


@pytest.mark.parametrize(("tag", "bits", "name"), [(2, 4, "adpcm_ms"), (0x31, 0, "gsm_ms"), (0x11, 4, "adpcm_ima_wav")])
def test_other_codecs_are_refused_by_their_name(tag: int, bits: int, name: str) -> None:
    file = bytearray(encode(tone(0.1, 8000), 8000))
    file[20:22], file[34:36] = struct.pack("<H", tag), struct.pack("<H", bits)
    assert refusal(bytes(file)).startswith(f"the codec {name} is not supported")


@pytest.mark.parametrize("rate", [0, 1, 3999, 192_001, 2**31 - 1])
def test_a_forged_rate_is_refused(rate: int) -> None:
    file = bytearray(encode(tone(0.1, RATE), RATE))
    file[24:28] = struct.pack("<I", rate)
    assert "samples a second" in (message := refusal(bytes(file))) or message == "it is damaged"


def test_a_forged_number_of_channels_is_refused() -> None:
    file = bytearray(encode(tone(0.1, RATE), RATE))
    for number in (0, 9, 65_535):
        file[22:24] = struct.pack("<H", number)
        file[32:34] = struct.pack("<H", 2 * number % 65_536)
        assert "channels" in (message := refusal(bytes(file))) or message in ("it is damaged", "it has no audio")


def test_the_length_in_the_header_is_not_believed() -> None:
    file = bytearray(encode(tone(0.5, RATE), RATE))
    start = file.index(b"data") + 4
    for size in (0xFFFFFFFF, 2**31):
        file[start : start + 4] = struct.pack("<I", size)
        assert len(read(bytes(file))) == RATE // 2


def test_a_file_that_is_too_long_is_refused_when_the_limit_is_reached() -> None:
    file = encode(np.zeros(600 * 8000, np.float32), 8000, "flac")
    assert len(file) < 120_000  # ten minutes of silence
    windows = decode_windows(file, sampling_rate=RATE, max_window=30 * RATE, max_samples=70 * RATE)
    assert [len(next(windows)[0]), len(next(windows)[0])] == pytest.approx([28 * RATE] * 2, abs=2 * RATE)
    with pytest.raises(AudioError, match="it is longer than 70 seconds, the limit"):
        next(windows)


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_and_damaged_files_end_or_are_refused(name: str) -> None:
    file, random = encode(np.stack([tone(0.4, 24_000)] * 2), 24_000, name), np.random.default_rng(0)
    for end in range(0, len(file), max(len(file) // 20, 1)):
        _read_or_refuse(file[:end])
    for _ in range(20):
        damaged = bytearray(file)
        for place in random.integers(12, len(file), 10):
            damaged[place] = random.integers(256)
        _read_or_refuse(bytes(damaged))


def test_the_first_bytes_choose_the_format() -> None:
    assert {name: choose_format(encode(np.stack([tone(0.1, 48_000)] * 2), 48_000, name)) for name in FORMATS} == {
        **dict.fromkeys(("wav", "wav of 24 bits", "wav of floats", "wav of bytes"), "wav"),
        "flac": "flac",
        "mp3": "mp3",
        **dict.fromkeys(("ogg opus", "ogg vorbis"), "ogg"),
        **dict.fromkeys(("m4a", "m4a lossless", "mov"), "mov"),
        **dict.fromkeys(("webm", "mkv"), "matroska"),
    }


def _read_or_refuse(data: bytes) -> None:
    with suppress(AudioError):
        assert all(np.isfinite(window).all() for window in windows_of(data))


def _video() -> bytes:
    file = BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        frame = av.VideoFrame.from_ndarray(np.zeros((24, 16), np.uint8), format="yuv420p")
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()
