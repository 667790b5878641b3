"""The dashboard as Grafana gets it by provisioning."""

from __future__ import annotations

import re
from itertools import pairwise

from tests.deploy.files import DEPLOY, dashboard, load, panels, without_variables

GRAFANA = DEPLOY / "grafana"


def test_every_panel_asks_the_data_source_that_was_chosen() -> None:
    """Where the dashboard is imported, the data source has another id."""
    for panel in panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}, (
            panel["title"]
        )


def test_the_provisioned_data_source_is_the_one_that_is_chosen_first() -> None:
    """Otherwise the dashboard shows nothing at first."""
    (source,) = load(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    chosen = next(
        found for found in dashboard()["templating"]["list"] if found["name"] == "datasource"
    )
    assert chosen["current"]["value"] == source["uid"]
    assert chosen["query"] == source["type"]


def test_every_variable_of_an_expression_is_defined() -> None:
    """Grafana leaves an unknown variable as it is, and Prometheus refuses it."""
    defined = {variable["name"] for variable in dashboard()["templating"]["list"]}
    for panel in panels():
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= defined, panel["title"]
            assert "$" not in without_variables(target["expr"]), panel["title"]


def test_panels_have_ids_of_their_own_and_do_not_cover_each_other() -> None:
    """Grafana drops one of two panels with the same id, and moves panels that overlap."""
    whole = dashboard()["panels"]
    assert len({panel["id"] for panel in whole}) == len(whole)
    taken: set[tuple[int, int]] = set()
    for panel in whole:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_rows_are_in_the_order_of_their_places() -> None:
    """Grafana shows them by their places; who edits the file reads them in its order."""
    rows = [panel for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert len(rows) > 1
    assert all(before["gridPos"]["y"] < after["gridPos"]["y"] for before, after in pairwise(rows))


def test_a_state_has_a_name_and_a_colour_for_every_number() -> None:
    """The two timelines turn states into numbers and back."""
    timelines = [panel for panel in panels() if panel["type"] == "state-timeline"]
    assert len(timelines) == 2
    for panel in timelines:
        (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
        shown = {number: entry["text"] for number, entry in mapping["options"].items()}
        asked = re.findall(
            r'(\d) \* \(max by [^{]*\{[^}]*state="(\w+)"', panel["targets"][0]["expr"]
        )
        assert dict(asked) == shown


def test_a_panel_of_what_seldom_happens_shows_zero_meanwhile() -> None:
    """`No data` reads as a broken dashboard, exactly where all is well."""
    seldom = {"Failed", "Retries", "Share that is not exact, by replica"}
    found = {panel["title"]: panel["targets"] for panel in panels() if panel["title"] in seldom}
    assert set(found) == seldom
    for title, targets in found.items():
        for target in targets:
            zero = r"\bor (on\(\) )?(0 \*|vector\(0\)|label_replace\(vector\(0\))"
            assert re.search(zero, target["expr"]), title
