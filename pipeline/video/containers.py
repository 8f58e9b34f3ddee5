"""Video containers: recognised by their first bytes, opened with one named demuxer.

FFmpeg guesses a format from content and name, and some formats are lists of other files (ffconcat,
HLS, DASH, numbered images): a hostile file could make it open any other. Here the first bytes
choose the demuxer, and it may open no further file.

The decoding processes import this module, so it imports neither torch nor a storage library.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import av

HEAD = 1024  # bytes that `sniff` needs
BLOCK = 256 << 10  # bytes per range request

_MP4_BOXES = frozenset(
    (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"moof", b"sidx")
)
_IMAGE_BRANDS = frozenset((b"avif", b"heic", b"heix", b"heim", b"heis", b"mif1", b"crx ", b"jp2 "))
REORDERING = frozenset(("h264", "hevc"))  # codecs whose frames may be stored out of order
INDEXED = frozenset(("mov", "matroska", "avi", "gif"))  # demuxers that seek to key frames reliably


class Container(NamedTuple):
    """A container format: FFmpeg's demuxer and the name that rows and messages use."""

    demuxer: str
    name: str


_MAGIC = {  # by the first bytes
    b"\x1aE\xdf\xa3": Container("matroska", "mkv"),
    b"GIF87a": Container("gif", "gif"),
    b"GIF89a": Container("gif", "gif"),
    b"FLV\x01": Container("flv", "flv"),
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": Container("asf", "asf"),
    b"OggS": Container("ogg", "ogg"),
    b"\x00\x00\x01\xba": Container("mpeg", "mpg"),
    b"DKIF": Container("ivf", "ivf"),
}


class Readable(Protocol):
    """A seekable binary file, local or remote."""

    def read(self, size: int = -1, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...


def sniff(head: bytes) -> Container | None:
    """The container format by the first `HEAD` bytes of a file; None for any other file."""
    if head[4:8] in _MP4_BOXES:
        return _mp4_container(head)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return Container("avi", "avi")
    for magic, container in _MAGIC.items():
        if head.startswith(magic):
            if container.name == "mkv" and b"webm" in head[:64]:
                return Container("matroska", "webm")
            return container
    if _is_transport_stream(head):
        return Container("mpegts", "ts")
    return None


def _mp4_container(head: bytes) -> Container | None:
    """MP4 or MOV by the brand; None for still images in the same box format."""
    brand = head[8:12] if head[4:8] == b"ftyp" else b"qt  "
    if brand in _IMAGE_BRANDS:
        return None
    return Container("mov", "mov" if brand == b"qt  " else "mp4")


def _is_transport_stream(head: bytes) -> bool:
    """Packets of 188 bytes start with 0x47; cameras write 192 bytes with a time code first."""
    for first, packet in ((0, 188), (4, 192)):
        starts = range(first, first + 4 * packet, packet)
        if len(head) > starts[-1] and all(head[start] == 0x47 for start in starts):
            return True
    return False


def open_container(source: str | Readable, demuxer: str) -> Any:
    """Opens the container at an absolute local path or in a seekable file, with `demuxer` only.

    Returns:
        A PyAV container, to be used as a context manager.

    Raises:
        av.error.FFmpegError: it cannot be read.
    """
    limits = {"format_whitelist": demuxer, "protocol_whitelist": "file"}
    if isinstance(source, str):
        source = f"file:{source}"  # else FFmpeg parses protocols and options in file names
    return av.open(source, "r", format=demuxer, options=limits)


def video_stream(container: Any) -> Any | None:
    """The video stream that players show; None for sound only, or sound with a cover picture."""
    stream = container.streams.best("video")
    if stream is None or stream.codec_context is None:
        return None
    if stream.disposition & av.stream.Disposition.attached_pic:
        return None
    return stream


def must_count_frames(demuxer: str, stream: Any) -> bool:
    """Whether frames are timed by counting them, because their time stamps are wrong.

    AVI stores no presentation times. The times that FFmpeg derives are wrong where frames are
    reordered, and one frame late where H.264 or HEVC could reorder but does not.
    """
    codec = stream.codec_context
    return demuxer == "avi" and (bool(codec.has_b_frames) or codec.name in REORDERING)


def hidden_frames(stream: Any) -> int:
    """The number of frames that an edit list hides: in the index, decoded, but never shown.

    Edit lists cut at the start and at the end, so the whole index is read only if the number of
    entries or an entry near an end says that there is one.
    """
    entries = stream.index_entries
    if len(entries) == stream.frames:
        near_ends = (*entries[:64], *entries[-64:])
        if not any(entry.is_discard for entry in near_ends):
            return 0
    return sum(entry.is_discard for entry in entries)


def quarter_turns(degrees: float) -> int:
    """The display matrix's rotation, rounded to 0, 90, 180 or 270 degrees counter-clockwise."""
    return round(degrees / 90) % 4 * 90


def index_end(stream: Any) -> int:
    """The offset behind the last byte that the container's index refers to; 0 without an index."""
    entries = stream.index_entries
    if not len(entries):
        return 0
    return max((entry.pos + entry.size for entry in entries[-32:]), default=0)


def mp4_is_truncated(reader: Readable, size: int) -> bool:
    """Whether an MP4 or MOV of `size` bytes ends inside one of its top-level boxes."""
    offset = 0
    while offset + 8 <= size:
        reader.seek(offset)
        header = reader.read(16)
        length = int.from_bytes(header[:4], "big")
        if length == 1:  # a 64-bit length follows the box's name
            length = int.from_bytes(header[8:16], "big")
        if length < 8:  # 0: the box ends with the file, whatever its size; 2 to 7: no valid length
            return False
        offset += length
    return offset != size
