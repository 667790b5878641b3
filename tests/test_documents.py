"""The documents are true: commands, options, metrics, files, links and examples, compared with the
code."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin

import httpx
import pytest
import yaml
from async_timeout import timeout
from pydantic.fields import FieldInfo

from docs import reference
from kvevents.field_docs import field_docs
from router.cli import main as command_line
from router.config.replica import ReplicaOptions
from router.config.schema import RouterConfig
from router.feed.feed import Feed
from router.fleet.types import EventSource
from router.index.base import Hit, SourceId
from router.index.index import PrefixIndex
from router.serve.server import RouterApp
from router.serve.service import RouterService
from tests.support.following import QUICK
from tests.support.waiting import DEADLINE_S, eventually

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvevents", "offload", "router", "engine/kvroute_engine")
IMPORTED_FROM = {Path(package).name: package for package in PACKAGES}
"""The directory of each package by the name under which it is imported."""
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/benchmarks.md",
    "docs/comparison.md",
    "docs/concepts.md",
    "docs/configuration.md",
    "docs/deployment.md",
    "docs/engine.md",
    "docs/engines.md",
    "docs/gateways.md",
    "docs/index.md",
    "docs/offloading.md",
    "docs/operations.md",
    "docs/ray.md",
    "docs/routing-quality.md",
    "docs/security.md",
)
WITH_COMMANDS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/deployment.md",
    "docs/engine.md",
    "docs/engines.md",
    "docs/index.md",
    "docs/offloading.md",
    "docs/operations.md",
    "docs/configuration.md",
    "docs/security.md",
)
KEYS = {
    "KVROUTE_CLIENT_KEY": "a",
    "KVROUTE_BOARD_SECRET": "s",
    "KVROUTE_OPERATOR_KEY": "b",
    "GEMMA_KEY": "c",
    "KVROUTE_CLIENT_KEY_A": "f",
    "KVROUTE_SALT_A": "g",
    "KVROUTE_OPERATOR_KEY_B": "h",
    "CLIENT_KEY": "d",
    "OPERATOR_KEY": "e",
}
"""Environment variables that documents use in place of keys."""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(name: str, language: str) -> list[str]:
    """The code blocks of a document that are marked as *language*."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(name), re.MULTILINE | re.DOTALL)


# --- commands -------------------------------------------------------------------------------------


def shell_commands(name: str) -> Iterator[list[str]]:
    """Every command in a document, as the shell splits it."""
    for block in fences(name, "sh"):
        for words in map(shell_words, complete_lines(block)):
            if words:
                yield words


def complete_lines(block: str) -> Iterator[str]:
    """Lines, joined where a backslash or an open quote continues one."""
    pending = ""
    for line in block.splitlines():
        pending += line.removesuffix("\\") + ("" if line.endswith("\\") else "\n")
        if not line.endswith("\\") and pending.count("'") % 2 == 0:
            yield pending
            pending = ""
    assert not pending, f"a command has no end: {pending}"


def shell_words(line: str) -> list[str]:
    """The words of a command, without the `&` that sends it to the background."""
    words = shlex.split(line, comments=True)
    return words[:-1] if words[-1:] == ["&"] else words


def test_a_command_over_several_lines_is_read_as_one() -> None:
    """The other tests here see only what this reads."""
    block = "a --x \\\n  '{\"k\":\n 1}' # why\nb &\n"
    assert [shell_words(line) for line in complete_lines(block)] == [
        ["a", "--x", '{"k":\n 1}'],
        ["b"],
    ]


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_kvroute_command_and_option_exists(name: str) -> None:
    """A reader who types what is written must not get a usage message."""
    in_text = re.findall(r"`(kvroute [a-z]+ [^`]*)`", read(name))
    in_blocks = [words for words in shell_commands(name) if words[0] == "kvroute"]
    for words in [*in_blocks, *map(shell_words, in_text)]:
        command_line._parser(words[1:]).parse_args(words[1:])


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_make_target_and_file_of_a_command_exists(name: str) -> None:
    """`make demo` and the examples are the first things that a reader tries."""
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for words in shell_commands(name):
        if words[0] == "make":
            assert words[1] in targets
        if words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("name", ["README.md", "docs/deployment.md", "docs/engines.md"])
def test_event_configurations_on_engines_command_lines_are_json(name: str) -> None:
    """An engine would refuse it, or worse, publish nothing."""
    found = [
        words[words.index("--kv-events-config") + 1]
        for words in shell_commands(name)
        if "--kv-events-config" in words
    ]
    assert found
    for text in found:
        config = json.loads(text)
        assert config["publisher"] == "zmq"
        assert config["endpoint"].startswith("tcp://*:"), (
            "vLLM and SGLang connect to any other address"
        )


def test_kvroute_is_installed_from_its_checkout() -> None:
    """No package index has it yet, and one that has the name some day may have somebody else's."""
    sources = [ROOT / name for name in DOCUMENTS]
    sources += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    told = re.compile(r"pip install (?:--\S+ )*['\"]?kvroute\b")
    assert [str(path) for path in sources if told.search(path.read_text(encoding="utf-8"))] == []


def test_the_imports_of_the_readme_work() -> None:
    """They are what an engine's author copies first."""
    blocks = fences("README.md", "python")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


async def test_the_curl_commands_for_replicas_work() -> None:
    """At 3 a.m. they must work as written."""
    commands = [words for words in shell_commands("docs/operations.md") if words[0] == "curl"]
    assert len(commands) == 4
    service = RouterService(RouterConfig())
    transport = httpx.ASGITransport(RouterApp(service))
    async with (
        service.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        for _, *arguments in commands:
            method, path, headers, body = request_of(arguments)
            answer = await client.request(method, path, headers=headers, content=body)
            assert answer.is_success, (arguments, answer.text)
        assert service.registry.replicas() == ()


def request_of(arguments: list[str]) -> tuple[str, str, dict[str, str], bytes]:
    """Method, path, headers and body of a curl command; the replica is a port that nothing uses."""
    words = [word.replace("10.0.0.9:8000", "127.0.0.1:1") for word in arguments]
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    fields = words[words.index("-H") + 1].split(": ") if "-H" in words else []
    body = words[words.index("-d") + 1].encode() if "-d" in words else b""
    path = next(word.removeprefix("ROUTER") for word in words if word.startswith("ROUTER"))
    return method, path, dict([fields] if fields else []), body


# --- configuration --------------------------------------------------------------------------------


def fields_of(section: Any) -> dict[str, FieldInfo]:
    """A section's fields; the weights are a dataclass, the others are models."""
    fields: dict[str, FieldInfo] = section.__pydantic_fields__
    return fields


def section_in(kind: Any) -> Any:
    """The section that a field holds, by itself or in a list."""
    if hasattr(kind, "__pydantic_fields__"):
        return kind
    return next((found for option in get_args(kind) if (found := section_in(option))), None)


def is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple or any(map(is_list, get_args(kind)))


def sections(kind: Any = RouterConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every section of the configuration by its path: `server.timeouts`, `models[].layout` ..."""
    for name, field in fields_of(kind).items():
        inner = section_in(field.annotation)
        # What can be said of a replica is documented with `replicas`.
        if inner is not None and inner is not ReplicaOptions:
            here = f"{path}.{name}".lstrip(".") + "[]" * is_list(field.annotation)
            yield here, inner
            yield from sections(inner, here)


def test_the_tables_of_options_and_metrics_are_those_of_the_code() -> None:
    """They are generated: a wrong default or a missing metric is worse than none."""
    command = [sys.executable, "docs/reference.py", "--check"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", [path for path, _ in sections()])
def test_every_section_has_its_table(path: str) -> None:
    """What is generated goes where the document asks for it."""
    text = read("docs/configuration.md")
    found = re.search(rf"^##+ `{re.escape(path)}`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/configuration.md has no section `{path}`"
    assert f"<!-- options of {path} -->\n\n| Option |" in found[1]


@pytest.mark.parametrize(
    ("path", "section"), list(sections()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_option_says_what_it_is_for(path: str, section: Any) -> None:
    """An undescribed option might as well not exist; the document takes the words from here."""
    docs = field_docs(section)
    options = {
        name: docs.get(name)
        for name, field in fields_of(section).items()
        if not section_in(field.annotation) or is_list(field.annotation)
    }
    assert [name for name, text in options.items() if not text] == []


def test_the_configuration_document_has_no_other_sections() -> None:
    """A removed section must not stay in the document."""
    headings = re.findall(r"^##+ `(.*?)`", read("docs/configuration.md"), re.MULTILINE)
    assert headings == [
        path for path, _ in sorted(sections(), key=lambda found: headings.index(found[0]))
    ]


def test_the_example_configuration_is_sound_and_shows_every_option() -> None:
    """Operators start from it, and it is the one place with all options."""
    RouterConfig.load(ROOT / "examples/kvroute.yaml", KEYS)
    whole = yaml.safe_load(read("examples/kvroute.yaml"))
    for path, section in sections():
        shown = {key for mapping in mappings_at(whole, path) for key in mapping}
        lacking, unknown = fields_of(section).keys() - shown, shown - fields_of(section).keys()
        assert not lacking, f"{path} of examples/kvroute.yaml lacks {lacking}: a line for each"
        assert not unknown, f"{path} of examples/kvroute.yaml has {unknown}, which are no options"


@pytest.mark.parametrize(
    "line",
    [
        "  max_upstream_connections: 16384\n",
        "    idle_s: 120\n",
        "    key: null\n",  # of several sections
        "  access_log: false\n",
    ],
)
def test_an_option_that_the_example_lacks_gets_a_line(line: str) -> None:
    """So that a new one is written once; at its default, where the others of its section are."""
    whole = read("examples/kvroute.yaml")
    assert reference.completed(whole) == whole
    places = [found.start() for found in re.finditer(f"^{line}", whole, re.MULTILINE)]
    assert places
    for place in places:
        lacking = whole[:place] + whole[place + len(line) :]
        assert reference.completed(lacking) == whole


def mappings_at(data: Any, path: str) -> list[dict[str, Any]]:
    """All mappings at the path of a section."""
    found = [data]
    for name in path.split("."):
        values = [
            mapping[name.removesuffix("[]")]
            for mapping in found
            if name.removesuffix("[]") in mapping
        ]
        found = [item for value in values for item in value] if name.endswith("[]") else values
    return found


@pytest.mark.parametrize("name", ["README.md", "docs/deployment.md", "docs/engines.md"])
def test_configurations_in_the_text_are_sound(name: str) -> None:
    """Users copy them."""
    blocks = fences(name, "yaml")
    assert blocks
    for block in blocks:
        RouterConfig.from_yaml(block, KEYS)


# --- metrics --------------------------------------------------------------------------------------


def documented_metrics() -> list[str]:
    return re.findall(
        r"^\| `(kvroute_\w+)` \|",
        read("docs/operations.md").partition("## All metrics")[2],
        re.MULTILINE,
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_metrics_named_in_the_text_are_those_of_the_list(name: str) -> None:
    """A remedy that names a removed metric costs time during an incident."""
    named = set(re.findall(r"\bkvroute_[a-z_]*[a-z]\b", read(name))) - {"kvroute_ray"}
    assert named <= set(documented_metrics())


# --- words ----------------------------------------------------------------------------------------

ENGINES_WORDS = {
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
    "self_describing_kv_events",
    "include_usage",
    "enable_kv_cache_events",
    "event_buffer_max_size",
    "extra_key",
}
"""Options of engines and clients, which this code does not read."""


def source_code() -> str:
    return "\n".join(path.read_text() for path in modules())


@pytest.mark.parametrize("name", ["docs/configuration.md", "docs/engines.md", "docs/operations.md"])
def test_options_states_and_codes_in_the_text_exist(name: str) -> None:
    """A name that was changed in the code must not remain in a remedy."""
    words = (
        set(re.findall(r"`(?:\w+(?:\[\])?\.)*((?!kvroute_)[a-z]+(?:_[a-z]+)+)`", read(name)))
        - ENGINES_WORDS
    )
    assert words
    code = source_code()
    assert {word for word in words if not re.search(rf"\b{word}\b", code)} == set()


def test_every_reason_for_an_unknown_prompt_is_documented() -> None:
    """They are values of a label, and each has a different remedy."""
    reasons = set(re.findall(r"(?:UntokenizableError|OpaquePrompt)\(\s*\"(\w+)\"", source_code()))
    assert reasons
    assert {
        reason for reason in reasons if f"`{reason}`" not in read("docs/operations.md")
    } == set()


@pytest.mark.parametrize(
    "words",
    [
        "Further problems of this replica are only counted",
        "it is not the subscribed one",
        "the engine's hash function is not known",
        "start from nothing (",
    ],
)
def test_quoted_log_lines_are_in_the_code(words: str) -> None:
    """Operators search the log for them."""
    assert words in read("docs/operations.md")
    assert words in source_code()


# --- files ----------------------------------------------------------------------------------------


def listed_files(package: str) -> list[str]:
    """What a package's docstring lists, from the top down: files, and packages with a slash."""
    found = []
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    for name in re.findall(r"^    (\w+(?:/|\.py)) +\S", docstring, re.MULTILINE):
        path = f"{package}/{name}"
        found.append(path)
        if name.endswith("/") and (ROOT / path / "__init__.py").is_file():
            found += listed_files(path.rstrip("/"))
    return found


def all_listed_files() -> list[str]:
    return [path for package in PACKAGES for path in listed_files(package)]


def modules() -> list[Path]:
    return [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.stem != "__init__"
    ]


def test_every_file_is_listed_once_and_every_listed_one_exists() -> None:
    """The list shows which file to open during an incident."""
    files = [path for path in all_listed_files() if not path.endswith("/")]
    assert sorted(files) == sorted(str(path.relative_to(ROOT)) for path in modules())


def test_every_file_imports_only_what_is_listed_above_it() -> None:
    """So the list can be read from the top, and each file needs only what is above it."""
    places = {path: place for place, path in enumerate(all_listed_files())}
    for path in modules():
        name = str(path.relative_to(ROOT))
        for imported in imported_files(path):
            assert last_place(places, imported) < places[name], f"{name} imports {imported}"


def imported_files(path: Path) -> Iterator[str]:
    """What a module imports of this repository: files, or packages with a slash."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            package, *inner = (node.module or "").split(".")
            if package not in IMPORTED_FROM:
                continue
            base = "/".join([IMPORTED_FROM[package], *inner])
            if (ROOT / f"{base}.pyi").is_file():
                continue  # compiled: it imports nothing
            submodules = [
                f"{base}/{alias.name}.py"
                for alias in node.names
                if (ROOT / f"{base}/{alias.name}.py").is_file()
            ]
            yield from submodules or [
                f"{base}.py" if (ROOT / f"{base}.py").is_file() else f"{base}/"
            ]


def last_place(places: dict[str, int], imported: str) -> int:
    """The place of a package is that of its last file."""
    return max(place for path, place in places.items() if path.startswith(imported))


def test_paths_named_in_architecture_exist() -> None:
    """The numbered steps also name files."""
    text = read("ARCHITECTURE.md")
    named = re.findall(r"`([a-z_/]+\.py)`", text)
    assert named
    for name in named:
        assert any(str(path).endswith(f"/{name}") for path in modules()), name


def room_of(path: str) -> str:
    """The room that a file or package belongs to, as the table in ARCHITECTURE.md names it."""
    package, *inner = path.rstrip("/").removesuffix(".py").split("/")
    if package == "kvevents":
        return package
    if package == "offload":  # its cache is flat, with one package for the kinds of groups
        is_flat = inner[0] == "groups" or not (ROOT / package / inner[0]).is_dir()
        return package if is_flat else f"{package}/{inner[0]}"
    return f"{package}/{inner[1 if package == 'engine' else 0]}"


def rooms_imported() -> dict[str, set[str]]:
    """Every room with the rooms that its files import, but for those that others of them import
    already."""
    direct: dict[str, set[str]] = {}
    for path in modules():
        name = str(path.relative_to(ROOT))
        imported = {room_of(other) for other in imported_files(path)} - ROOMS_LEFT_OUT
        direct.setdefault(room_of(name), set()).update(imported - {room_of(name)})
    return {
        room: {one for one in found if not any(one in below(other, direct) for other in found)}
        for room, found in direct.items()
        if room not in ROOMS_LEFT_OUT
    }


def below(room: str, direct: dict[str, set[str]]) -> set[str]:
    """Every room that is imported from that one, at any distance."""
    return direct[room].union(*(below(other, direct) for other in direct[room]))


ROOMS_LEFT_OUT = {"router/errors", "engine/command"}
"""Single files at the bottom and at the top."""


def table_of_rooms() -> dict[str, set[str]]:
    """What ARCHITECTURE.md says: each room, and on which it stands. These are named as seen from
    there, a neighbour by its last name."""
    rows = re.findall(r"^\| `([a-z/]+)` \| .* \|(.*) \|$", read("ARCHITECTURE.md"), re.MULTILINE)
    rooms = [room for room, _ in rows]
    return {
        room: {
            next(other for other in seen_from(room, name) if other in rooms)
            for name in re.findall(r"`([a-z/]+)`", stands_on)
        }
        for room, stands_on in rows
    }


def seen_from(room: str, name: str) -> Iterator[str]:
    """Where a short name may lie: beside the room, farther out, at the top."""
    while room:
        room = room.rpartition("/")[0]
        yield f"{room}/{name}".lstrip("/")


def test_the_table_of_rooms_is_true() -> None:
    """It is what a newcomer keeps in mind, with its arrows."""
    assert table_of_rooms() == rooms_imported()


def test_kvevents_needs_only_what_the_readme_says() -> None:
    """An engine that embeds it must not need another dependency."""
    allowed = sys.stdlib_module_names | {"kvevents", "msgspec", "zmq", "xxhash"}
    for path in (ROOT / "kvevents").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert {name.split(".")[0] for name in names} <= allowed, path.name


PROJECT_FILES = re.compile(r"https://github\.com/kvroute/kvroute/(?:blob|tree)/main/")
"""How an absolute link to a file of this repository begins."""


def linked_files(name: str) -> Iterator[tuple[Path, str]]:
    """The files of this repository that a document links to, each with an anchor or ""."""
    for link in re.findall(r"\]\(([^)]*)\)", read(name)):
        target, _, anchor = link.partition("#")
        if PROJECT_FILES.match(target):
            yield ROOT / PROJECT_FILES.sub("", target), anchor
        elif not target.startswith(("http:", "https:")):
            yield (ROOT / name).parent / target if target else ROOT / name, anchor


def anchor_of(heading: str) -> str:
    """As GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_between_documents_lead_somewhere(name: str) -> None:
    """Documents refer readers to each other."""
    for path, anchor in linked_files(name):
        assert path.exists(), path
        headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(anchor_of, headings)


def test_links_of_the_readme_work_on_a_package_index() -> None:
    """There it stands without the repository, so a relative link leads nowhere."""
    links = re.findall(r"\]\(([^)]*)\)", read("README.md"))
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    homepage = re.findall(r'^Homepage = "(.*)"', read("pyproject.toml"), re.MULTILINE)
    assert PROJECT_FILES.match(f"{homepage[0]}/blob/main/")


# --- the example engine ---------------------------------------------------------------------------


def test_the_engine_in_the_text_is_the_one_in_the_examples() -> None:
    """Only the file is tested."""
    assert read("examples/engine.py") in fences("docs/engines.md", "python")


async def test_the_example_engine_reuses_what_the_index_predicts(tmp_path: Path) -> None:
    """It shows how to publish, so the predictions for it must be exact to the token, also after
    evictions."""
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    engine = await asyncio.create_subprocess_exec(
        sys.executable,
        "examples/engine.py",
        events,
        replay,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    index, source = PrefixIndex(), SourceId("example")
    feed = Feed(lambda _model: index, QUICK)
    feed.add(source.replica, EventSource(source.dp_rank, events, replay, "kv-events"), "model")
    try:
        hits = [await compared(engine, index, source, prompt) for prompt in prompts(150)]
        assert sum(hit > 0 for hit in hits) > 50
        assert feed.statistics()[source].removed > 0
    finally:
        await feed.close()
        assert engine.stdin is not None
        engine.stdin.close()
        async with timeout(DEADLINE_S):
            assert await engine.wait() == 0


async def test_the_hybrid_example_reuses_what_the_index_predicts_of_every_tier(
    tmp_path: Path,
) -> None:
    """It shows a window, memory and disk together; after a restart it continues with what is on
    disk."""
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    for is_first in (True, False):
        engine = await asyncio.create_subprocess_exec(
            sys.executable,
            *("examples/hybrid_engine.py", events, replay, str(tmp_path / "blocks")),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        index, source = PrefixIndex(), SourceId("example")
        feed = Feed(lambda _model, index=index: index, QUICK)
        feed.add(source.replica, EventSource(source.dp_rank, events, replay, "kv-events"), "model")
        try:
            await eventually(
                lambda index=index, is_first=is_first: knows_the_start(index, is_first),
                "what the engine said first",
            )
            hits = [
                await compared_in_tiers(engine, index, source, prompt) for prompt in prompts(60)
            ]
            assert sum(hit.cached_tokens > hit.gpu_cached_tokens for hit in hits) > 5
            assert is_first or hits[0].cached_tokens + hits[1].cached_tokens > 0, (
                "of the first families nothing is left on disk"
            )
        finally:
            await feed.close()
            assert engine.stdin is not None
            engine.stdin.close()
            async with timeout(DEADLINE_S):
                assert await engine.wait() == 0


def knows_the_start(index: PrefixIndex, is_first: bool) -> bool:
    """The layout, and of a second process the blocks on disk."""
    return any(
        known.layout is not None and (is_first or bool(known.blocks))
        for known in index.statistics().values()
    )


async def compared_in_tiers(
    engine: asyncio.subprocess.Process, index: PrefixIndex, source: SourceId, prompt: list[int]
) -> Hit:
    """As `compared`, including what is loaded from the tiers."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    predicted = index.match(prompt)[source]
    engine.stdin.write(json.dumps(prompt).encode() + b"\n")
    async with timeout(DEADLINE_S):
        hit = Hit(**json.loads(await engine.stdout.readline()))
    assert predicted[:2] == hit[:2]
    # Of the window, a load brings only the blocks that the last token needs.
    await eventually(
        lambda: (
            index.explain(index.prepare(prompt), source)[0].tokens == (len(prompt) - 1) // 16 * 16
        ),
        "the events of this prompt",
    )
    return hit


def prompts(count: int) -> Iterator[list[int]]:
    """Prompts of four families with shared prefixes, which together need more blocks than there
    are."""
    random = Random(1)
    for _ in range(count):
        family = random.randrange(4)
        # A prompt that ends with a block may be loaded but for its last token: the window is then
        # not on the GPU one block earlier, for which `compared_in_tiers` waits.
        shared = random.choice([count for count in range(16, 300) if (count + 100) % 16])
        yield [family * 1000 + place for place in range(shared)] + [
            random.randrange(5000, 9000) for _ in range(100)
        ]


async def compared(
    engine: asyncio.subprocess.Process, index: PrefixIndex, source: SourceId, prompt: list[int]
) -> int:
    """The engine's hit, equal to the index's prediction; returns when the index has what the engine
    then published."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    predicted = index.match(prompt)[source].cached_tokens
    engine.stdin.write(json.dumps(prompt).encode() + b"\n")
    async with timeout(DEADLINE_S):
        hit = int(await engine.stdout.readline())
    assert predicted == hit
    await eventually(
        lambda: index.match(prompt)[source].cached_tokens == (len(prompt) - 1) // 16 * 16,
        "the events of this prompt",
    )
    return hit
