"""The model in a multipart form, wherever it lies and however hostile the form is."""

from __future__ import annotations

from email import message_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.doors.http.bodies import MAX_FORM_PARTS, check_form, form_field
from router.errors import BadRequest

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
        (TYPE, FILE + END + MODEL + END, None),
        (TYPE, b"", None),
        (b"multipart/form-data", MODEL + END, None),
        (TYPE, part(b'content-disposition: form-data; filename="; name=model"; name="x"', b"w")
            + MODEL + END, "whisper"),
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


@pytest.mark.parametrize(
    "body",
    [
        MODEL + END,
        FILE + MODEL + END,
        FILE + END,
        part(b'Content-Disposition: form-data; name="file"; filename="a;b name=\\".wav"', b"x")
        + END,
        MODEL + part(b"x: y\r\ncontent-disposition: form-data; name=y", b"a --Xy\r\n") + END,
        MODEL + END + b"epilogue",
    ],
)
def test_a_plain_form_passes_the_check(body: bytes) -> None:
    """What clients send."""
    check_form(TYPE, body, b"model")


def disguised(disposition: bytes) -> bytes:
    return part(b"content-disposition: form-data; " + disposition, b"other") + MODEL + END


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (TYPE, MODEL + MODEL + END),
        (TYPE, disguised(b"name*=utf-8''model")),
        (TYPE, disguised(b"name*0=mo; name*1=del")),
        (TYPE, disguised(b"name=x; name=model")),
        (TYPE, disguised(b'name="mod\\el"')),
        (TYPE, disguised(b'filename="a\nname=model"; name=x')),
        (TYPE, disguised(b"name=x\r\n ; name=model")),
        (TYPE, disguised(b"name=x\r\ncontent-disposition: form-data; name=model")),
        (TYPE, disguised(b"filename=a")),
        (TYPE, b"preamble\r\n" + MODEL + END),
        (TYPE, MODEL.replace(b"\r\n", b"\n") + END),
        (TYPE, MODEL.replace(b"XyZ", b"XyZ ") + END),
        (TYPE, MODEL),
        (TYPE, part(b"content-disposition: form-data; name=x", b"a\n" + MODEL) + END),
        (TYPE, part(b"--XyZ\r\ncontent-disposition: form-data; name=x", b"") + END),
        (TYPE, MODEL + b"--XyZ--" + MODEL + END),
        (TYPE, b'{"model": "other"}'),
        (TYPE + b"; boundary=abc", MODEL + END),
        (TYPE + b"; boundary*=utf-8''abc", MODEL + END),
        (b"multipart/form-data", MODEL + END),
        (TYPE, part(b"content-disposition: form-data; name=x", b"") * MAX_FORM_PARTS + END),
    ],
)
def test_a_form_that_can_be_read_in_two_ways_does_not_pass(
    content_type: bytes, body: bytes
) -> None:
    """The router would check one model, and the engine serve another."""
    with pytest.raises(BadRequest):
        check_form(content_type, body, b"model")


@given(st.lists(st.sampled_from([b"--XyZ", b"\r\n", b'; name="model"', b"--", MODEL, b"x" * 9])))
def test_what_passes_the_check_is_read_as_python_reads_it(pieces: list[bytes]) -> None:
    """Engines are written in it."""
    body = b"".join(pieces)
    try:
        check_form(TYPE, body, b"model")
    except BadRequest:
        return
    form = message_from_bytes(b"content-type: " + TYPE + b"\r\n\r\n" + body)
    parts = [part for part in form.walk() if part is not form]
    names = [part.get_param("name", header="content-disposition") for part in parts]
    models = [
        str(part.get_payload()).strip()
        for part, name in zip(parts, names, strict=True)
        if name == "model"
    ]
    found = form_field(TYPE, body, b"model")
    assert models == ([] if found is None else [found])
