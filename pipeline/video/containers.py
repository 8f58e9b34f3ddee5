"""Video containers: told apart by their first bytes, opened with one demuxer and nothing else.

FFmpeg guesses a format from content and name, and some formats are lists of other files (ffconcat,
HLS, DASH, numbered images). Here the first bytes decide, the demuxer is named, and it may open no
further file. The decoding processes import this module, so it needs neither torch nor a storage
library."""

from __future__ import annotations

from typing import Any, Protocol

import av

HEAD = 1024  # bytes that `sniff` wants to see
BLOCK = 256 << 10  # bytes per range request

_MP4_BOXES = frozenset(
    (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"moof", b"sidx")
)
_IMAGE_BRANDS = frozenset((b"avif", b"heic", b"heix", b"heim", b"heis", b"mif1", b"crx ", b"jp2 "))
_MAGIC = {  # first bytes: (demuxer, name of the container)
    b"\x1aE\xdf\xa3": ("matroska", "mkv"),
    b"GIF87a": ("gif", "gif"),
    b"GIF89a": ("gif", "gif"),
    b"FLV\x01": ("flv", "flv"),
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": ("asf", "asf"),
    b"OggS": ("ogg", "ogg"),
    b"\x00\x00\x01\xba": ("mpeg", "mpg"),
    b"DKIF": ("ivf", "ivf"),
}
REORDERING = frozenset(("h264", "hevc"))
EXACT = frozenset(("mov", "avi"))  # demuxers whose index counts the frames


class Readable(Protocol):
    """A file that can be read from any place, local or not."""

    def read(self, size: int = -1, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...


def sniff(head: bytes) -> tuple[str, str] | None:
    """(FFmpeg's demuxer, name of the container) by the first `HEAD` bytes; None where they begin no
    video container."""
    if head[4:8] in _MP4_BOXES:
        brand = head[8:12] if head[4:8] == b"ftyp" else b"qt  "
        return None if brand in _IMAGE_BRANDS else ("mov", "mov" if brand == b"qt  " else "mp4")
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi", "avi"
    for magic, (demuxer, container) in _MAGIC.items():
        if head.startswith(magic):
            return demuxer, "webm" if container == "mkv" and b"webm" in head[:64] else container
    if _transport_stream(head):
        return "mpegts", "ts"
    return None


def _transport_stream(head: bytes) -> bool:
    """Packets of 188 bytes begin with 0x47; of 192 (a time code first, as cameras write), too."""
    return any(
        len(head) > first + 3 * step and all(head[first + k * step] == 0x47 for k in range(4))
        for first, step in ((0, 188), (4, 192))
    )


def open_container(source: str | Readable, demuxer: str) -> Any:
    """The container at an absolute local path or in a seekable file, read by `demuxer` only; a
    context manager.

    Raises:
        av.error.FFmpegError: it cannot be read.
    """
    limits = {"format_whitelist": demuxer, "protocol_whitelist": "file"}
    # "file:" keeps FFmpeg from reading a protocol or an option into a name
    return av.open(
        f"file:{source}" if isinstance(source, str) else source, "r", format=demuxer, options=limits
    )


def video_stream(container: Any) -> Any | None:
    """The stream that players show; None where there is only sound, or a cover picture."""
    stream = container.streams.best("video")
    if (
        stream is None
        or stream.codec_context is None
        or stream.disposition & av.stream.Disposition.attached_pic
    ):
        return None
    return stream


def counts_frames(demuxer: str, stream: Any) -> bool:
    """Whether frames have to be timed by counting them: AVI stores no presentation times, and those
    that FFmpeg makes up are wrong where frames are reordered, and a frame late where H.264 or HEVC
    could reorder but don't."""
    return demuxer == "avi" and (
        bool(stream.codec_context.has_b_frames) or stream.codec_context.name in REORDERING
    )


def hidden_frames(stream: Any) -> int:
    """Frames that an edit list cuts off: indexed and decoded, never shown. They lie at the ends of
    the index."""
    entries = stream.index_entries
    if len(entries) == stream.frames and not any(
        e.is_discard for e in (*entries[:64], *entries[-64:])
    ):
        return 0  # the usual case, without a look at every entry
    return sum(entry.is_discard for entry in entries)


def quarter_turns(degrees: float) -> int:
    """A display matrix's rotation as 0, 90, 180 or 270 degrees counter-clockwise."""
    return round(degrees / 90) % 4 * 90


def index_end(stream: Any) -> int:
    """The byte after the last one that the container's index points at; 0 without an index."""
    entries = stream.index_entries
    return (
        max((entry.pos + entry.size for entry in entries[-32:]), default=0) if len(entries) else 0
    )


def mp4_ends_early(reader: Readable, size: int) -> bool:
    """Whether an MP4 or MOV of `size` bytes breaks off inside one of its top-level boxes."""
    at = 0
    while at + 8 <= size:
        reader.seek(at)
        header = reader.read(16)
        length = int.from_bytes(header[:4], "big")
        if length == 1:  # a 64-bit length follows the name
            length = int.from_bytes(header[8:16], "big")
        if length == 0:  # reaches to the end of the file, wherever that is
            return False
        if length < 8:
            return False
        at += length
    return at != size
