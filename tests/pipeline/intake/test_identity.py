from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.intake import identity
from pipeline.records import FrameOptions
from std_core.types import Sampling

BASE: dict[str, Any] = {
    "video_uri": "s3://bucket/a.mp4",
    "size": 10,
    "version": "etag",
    "prompt": "What happens?",
    "model_revision": "r1",
    "frames": FrameOptions(),
    "sampling": Sampling(),
    "dtype": "float32",
}
CHANGES = [
    {"video_uri": "s3://bucket/b.mp4"},
    {"size": 11},
    {"size": None, "version": None},
    {"version": "other"},
    {"prompt": "What happens ?"},
    {"model_revision": "r2"},
    {"frames": FrameOptions(fps=1)},
    {"frames": FrameOptions(nframes=8)},
    {"frames": FrameOptions(video_start=0.5)},
    {"sampling": Sampling(max_tokens=3)},
    {"sampling": Sampling(temperature=0)},
    {"sampling": Sampling(temperature=1, seed=0)},
    {"sampling": Sampling(stop=("a", "b"))},
    {"sampling": Sampling(stop=("ab",))},
    {"sampling": Sampling(min_tokens=1)},
    {"dtype": "bfloat16"},
    {"max_model_len": 512},
    {"given_id": "0"},
    {"given_id": "0", "occurrence": 1},
    {"occurrence": 1},
    {"sparse": {}},
    {"sparse": {"keep": 0.5}},
]


def test_every_setting_that_changes_the_text_changes_the_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [identity.request_id(**BASE | change) for change in [{}, *CHANGES]]
    monkeypatch.setattr(identity, "PREPROCESSING_VERSION", identity.PREPROCESSING_VERSION + 1)
    ids.append(identity.request_id(**BASE))
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_equal_numbers_url_aliases_and_signatures_give_the_same_id() -> None:
    def id_with(**change: Any) -> str:
        return identity.request_id(**BASE | change)

    assert id_with(frames=FrameOptions(fps=2)) == id_with(frames=FrameOptions(fps=2.0))
    assert id_with(video_uri="s3a://bucket/a.mp4") == id_with()
    assert id_with(video_uri="file:///a/b.mp4") == id_with(video_uri="/a/b.mp4")
    assert id_with(video_uri="https://h/a?x=1&sv=1&sig=1") == id_with(
        video_uri="https://u:p@h/a?x=1&sv=1&sig=2"
    )
    for name in ("x", "author", "design", "token", "se"):
        assert id_with(video_uri=f"https://h/a?{name}=1") != id_with(
            video_uri=f"https://h/a?{name}=2"
        )


def test_the_id_is_the_same_in_every_release() -> None:
    """A changed hash without a new PREPROCESSING_VERSION would rerun all existing outputs."""
    assert identity.request_id(**BASE) == "301df70fb9c2cb2332e56489262bba4f"


@given(st.text(), st.text(), st.one_of(st.none(), st.text()))
def test_any_text_has_an_id_and_field_boundaries_count(
    name: str, prompt: str, own: str | None
) -> None:
    video = "s3://bucket/" + name + "\udcff"  # names on a disk need not be Unicode
    one = identity.request_id(**BASE | {"video_uri": video, "prompt": prompt, "given_id": own})
    other = identity.request_id(
        **BASE | {"video_uri": video + "x", "prompt": prompt[1:], "given_id": own}
    )
    assert one != other
    assert one == identity.request_id(
        **BASE | {"video_uri": video, "prompt": prompt, "given_id": own}
    )
