"""The model in a multipart form, wherever it lies and however hostile the form is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.bodies import MAX_FORM_PARTS, form_field

TYPE = b"multipart/form-data; boundary=XyZ"


def part(head: bytes, value: bytes) -> bytes:
    return b"--XyZ\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


FILE = part(b'Content-Disposition: form-data; name="file"; filename="model"', b"\x00" * 3_000_000)
MODEL = part(b'Content-Disposition: form-data; name="model"', b"whisper")
END = b"--XyZ--\r\n"


@pytest.mark.parametrize(
    ("content_type", "body", "value"),
    [
        (TYPE, MODEL + END, "whisper"),
        (TYPE, b"preamble\r\n" + MODEL + END, "whisper"),
        (TYPE, FILE + MODEL + END, "whisper"),
        (TYPE, MODEL + FILE + END, "whisper"),
        (b'multipart/form-data; charset=x; boundary="XyZ"', MODEL + END, "whisper"),
        (TYPE, part(b"content-type: text/plain\r\ncontent-disposition: form-data; name=model",
                    b"w") + END, "w"),
        (TYPE, FILE + END, None),
        (TYPE, MODEL.removesuffix(b"\r\n"), None),
        (TYPE, END, None),
        (TYPE, b"", None),
        (b"multipart/form-data", MODEL + END, None),
        (TYPE, part(b"x: y", b"") * MAX_FORM_PARTS + MODEL + END, None),
        (TYPE, part(b"x: " + b"y" * 10_000, b"") + MODEL + END, None),
    ],
)  # fmt: skip
def test_a_field_is_found_or_it_is_none(
    content_type: bytes, body: bytes, value: str | None
) -> None:
    """Without a model a request is refused; it must not go anywhere by chance."""
    assert form_field(content_type, body, b"model") == value


@given(st.lists(st.sampled_from([b"--XyZ", b"\r\n", b'; name="model"', b"--", MODEL, b"x" * 9])))
def test_no_form_makes_the_reader_fail(pieces: list[bytes]) -> None:
    """Anyone can send anything."""
    found = form_field(TYPE, b"".join(pieces), b"model")
    assert found is None or isinstance(found, str)
