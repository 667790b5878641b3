"""Implementations by name: what is found, what wins, what is said of a broken plug-in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvevents.errors import KVEventsError, PlugInError
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.plugins import PlugIns
from kvevents.publisher import create_publisher
from kvevents.publisher_config import PublisherConfig

MODULE = '''
class Loud:
    def __init__(self, word):
        self.word = word

    def speak(self):
        return self.word.upper()


class Refusing:
    def __init__(self, word):
        raise RuntimeError(f"not {word}")


class Mute:
    def __init__(self, word):
        pass


class Recorder:
    """An event publisher, as another package would write it."""

    def __init__(self, config, layout, chain, data_parallel_rank):
        self.made_from = (config, layout, chain, data_parallel_rank)

    def publish(self, events):
        return True

    def shutdown(self, timeout_s=5.0):
        pass

    def statistics(self):
        return None


number = 5
'''

ENTRY_POINTS = """
[kvroute.test_speakers]
loud = kvroute_speakers:Loud
quiet = kvroute_speakers:Loud
refusing = kvroute_speakers:Refusing
mute = kvroute_speakers:Mute
number = kvroute_speakers:number
absent = kvroute_speakers:Absent
missing = kvroute_no_such_module:Loud
broken = kvroute_speakers_broken:Loud

[kvroute.publishers]
recorder = kvroute_speakers:Recorder
"""


class Quiet:
    """The built-in one."""

    def __init__(self, word: str) -> None:
        self.word = word

    def speak(self) -> str:
        return self.word.lower()


@pytest.fixture
def speakers() -> PlugIns[[str], Quiet]:
    return PlugIns("kvroute.test_speakers", "speaker", {"quiet": Quiet}, ("speak",))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed package of plug-ins, as pip would leave it."""
    (tmp_path / "kvroute_speakers.py").write_text(MODULE)
    (tmp_path / "kvroute_speakers_broken.py").write_text("raise OSError('no microphone')\n")
    install(tmp_path, "kvroute-speakers", ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in ("kvroute_speakers", "kvroute_speakers_broken"):
        sys.modules.pop(module, None)


def install(site: Path, distribution: str, entry_points: str) -> None:
    info = site / f"{distribution.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_plug_in_is_found_by_its_entry_point(site: Path, speakers: PlugIns[[str], Quiet]) -> None:
    """Installing a package is all it takes; arguments reach it as they are."""
    assert speakers.make("loud", "Word").speak() == "WORD"
    assert speakers.make("loud", word="Word").speak() == "WORD"


def test_a_built_in_name_wins_over_a_plug_in(site: Path, speakers: PlugIns[[str], Quiet]) -> None:
    """A package must not change what a configuration means by merely being installed."""
    assert isinstance(speakers.make("quiet", "Word"), Quiet)
    assert speakers.names().count("quiet") == 1


def test_built_in_names_come_first_and_plug_ins_are_sorted(
    site: Path, speakers: PlugIns[[str], Quiet]
) -> None:
    """The list is shown to people."""
    speakers.register("zither", Quiet)
    assert speakers.names()[:4] == ["quiet", "zither", "absent", "broken"]


def test_a_registered_factory_needs_no_package(speakers: PlugIns[[str], Quiet]) -> None:
    """An application adds its own kind in a line, once."""
    speakers.register("whisper", lambda word: Quiet(word[:1]))
    assert speakers.make("whisper", "Word").speak() == "w"
    for taken in ("whisper", "quiet"):
        with pytest.raises(ValueError, match=f"speaker: '{taken}' is registered already"):
            speakers.register(taken, Quiet)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "loudd",
            r"speaker: 'loudd' is unknown; did you mean loud\? known: quiet, absent, broken,",
        ),
        ("QUIET", r"speaker: 'QUIET' is unknown; did you mean quiet\? known: quiet"),
        ("xyz", r"speaker: 'xyz' is unknown; known: quiet"),
        ("x" * 100, r"speaker: 'x{40}' is unknown"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    site: Path, speakers: PlugIns[[str], Quiet], name: str, message: str
) -> None:
    """Most unknown names are misspelt."""
    with pytest.raises(PlugInError, match=message):
        speakers.make(name, "word")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "cannot be imported: No module named 'kvroute_no_such_module'"),
        ("absent", "cannot be imported: .*Absent"),
        ("broken", "cannot be imported: no microphone"),
        ("number", "is int; it must be callable"),
        ("mute", "made Mute, which lacks speak"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named_with_its_package(
    site: Path, speakers: PlugIns[[str], Quiet], name: str, message: str
) -> None:
    """It is met at start-up, by somebody who did not write it and has to know whom to ask."""
    place = rf"speaker: the plug-in '{name}', kvroute_.* of kvroute-speakers 1\.5, "
    with pytest.raises(PlugInError, match=place + message):
        speakers.make(name, "word")


def test_what_a_plug_in_raises_itself_goes_through(
    site: Path, speakers: PlugIns[[str], Quiet]
) -> None:
    """It knows best what is wrong with its arguments."""
    with pytest.raises(RuntimeError, match="not word"):
        speakers.make("refusing", "word")


def test_a_name_that_two_packages_offer_is_refused(
    site: Path, speakers: PlugIns[[str], Quiet]
) -> None:
    """Which of them would be taken is chance otherwise."""
    install(site, "another", "[kvroute.test_speakers]\nloud = kvroute_another:Loud\n")
    with pytest.raises(
        PlugInError,
        match=r"'loud' is offered by kvroute_another:Loud of another 1\.5 and "
        r"kvroute_speakers:Loud of kvroute-speakers 1\.5; uninstall all but one",
    ):
        speakers.make("loud", "word")


def test_errors_are_of_the_class_their_user_chose(site: Path) -> None:
    """Each package raises its own; without a choice it is ours, and a ValueError."""
    make: Callable[[str, str], Quiet] = PlugIns(
        "kvroute.test_speakers", "speaker", {"quiet": Quiet}, ("speak",), LookupError
    ).make
    for name in ("xyz", "missing", "number", "mute"):
        with pytest.raises(LookupError):
            make(name, "word")
    assert issubclass(PlugInError, KVEventsError)
    assert issubclass(PlugInError, ValueError)


def test_an_event_publisher_can_be_a_plug_in(site: Path) -> None:
    """`PublisherConfig(kind=...)` names it; it gets what the built-in ones get."""
    layout = KVCacheLayout.build([KVCacheGroup(GroupKind.FULL, 16)])
    config = PublisherConfig(kind="recorder")
    publisher = create_publisher(config, layout, None, 2)
    assert publisher.made_from == (config, layout, None, 2)  # type: ignore[attr-defined]
    with pytest.raises(PlugInError, match="kind: 'recorded' is unknown; did you mean recorder"):
        create_publisher(PublisherConfig(kind="recorded"), layout)
