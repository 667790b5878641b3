"""Which version a request gets: by header, by session, by weight; and only one that is served where
nobody has chosen."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from router.config.models import VersionConfig, VersionedModelConfig
from router.routing.versions import Versions

CHAT = VersionedModelConfig(
    name="chat",
    versions=(
        VersionConfig(model="v1", weight=9),
        VersionConfig(model="v2", weight=1, label="canary"),
        VersionConfig(model="v3", weight=0),
    ),
)


def versions(config: VersionedModelConfig = CHAT) -> Versions:
    return Versions([config], Random(5))


def everywhere(_model: str) -> bool:
    return True


def test_a_name_that_stands_for_itself_is_left_alone() -> None:
    """Most are."""
    assert versions().choose("v1", {}, None, everywhere) is None
    assert versions().choose(None, {}, None, everywhere) is None
    assert not Versions()


def test_a_header_chooses_whatever_the_weights_say() -> None:
    """Also what gets no other request, and what nobody serves: an error tells the client so."""
    chosen = versions()
    for label, model in (("canary", "v2"), (" v3 ", "v3"), ("v1", "v1")):
        headers = {b"x-model-version": label.encode()}
        assert chosen.choose("chat", headers, "s", lambda _: False) == model


def test_a_header_that_names_no_version_is_no_choice() -> None:
    """A version that was retired must not fail the clients that still ask for it."""
    headers = {b"x-model-version": b"v0"}
    assert versions().choose("chat", headers, None, everywhere) in ("v1", "v2")


def test_requests_are_shared_out_by_weight_with_and_without_a_session() -> None:
    """What has weight 0 gets none."""
    chosen = versions()
    for sessions in ([None] * 2000, [str(number) for number in range(2000)]):
        counts = Counter(chosen.choose("chat", {}, session, everywhere) for session in sessions)
        assert set(counts) == {"v1", "v2"}
        assert 140 < counts["v2"] < 260


@given(st.text(max_size=20))
def test_a_session_keeps_its_version(session: str) -> None:
    """In every router, and after a restart: what is cached for it is there."""
    first = Versions([CHAT], Random(1)).choose("chat", {}, session, everywhere)
    assert versions().choose("chat", {}, session, everywhere) == first


def test_only_as_many_sessions_move_as_the_weights_ask_for() -> None:
    """From a tenth to a fifth: a tenth of them, and only to the one that grew."""
    grown = CHAT.model_copy(
        update={"versions": (CHAT.versions[0], VersionConfig(model="v2", weight=2.25))}
    )
    moves: Counter[tuple[str | None, str | None]] = Counter()
    for number in range(2000):
        before = versions().choose("chat", {}, str(number), everywhere)
        moves[before, versions(grown).choose("chat", {}, str(number), everywhere)] += 1
    assert moves["v2", "v1"] == 0
    assert 120 < moves["v1", "v2"] < 280


def test_a_version_that_nobody_serves_is_passed_over() -> None:
    """A canary that is not up yet must not cost a tenth of the requests."""
    chosen = versions()
    for session in (None, *map(str, range(50))):
        assert chosen.choose("chat", {}, session, "v1".__eq__) == "v1"
    assert chosen.choose("chat", {}, None, lambda _: False) in ("v1", "v2")
