"""Test the dashboard in a real browser.

By pointer, by keyboard alone, on a phone, in dark mode.
Screenshots are written to test-artefacts/dashboard, which git ignores.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from nearkin.lab.generated_data import mutate, records_like
from nearkin_gateway.dashboard import charts, rendering
from nearkin_gateway.dashboard.rendering import Visitor
from tests.support.serve import fill
from tests.support.servers.servers import MissingTool

ARTEFACTS = Path(__file__).parents[2] / "test-artefacts/dashboard"
PAGES = {
    "overview": "/",
    "blobs": "/ui/blobs",
    "blob": "/ui/blob?key=releases%2Fnearkin.tar",
    "deleted": "/ui/deleted",
    "pipeline": "/ui/pipeline",
    "upkeep": "/ui/upkeep",
    "settings": "/ui/settings",
}
DUMP = records_like(2_000_000, 7)
SLOW_MS = 20_000
"""How long a page may take on a machine that does much else."""


@dataclass(frozen=True)
class ServedStore:
    """`nearkin serve` in a process of its own."""

    url: str
    token: str


def chromium() -> str:
    """Return the browser. Raises MissingTool."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise MissingTool("chromium is not installed: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def served_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    folder = tmp_path_factory.mktemp("browser")
    fill(folder / "store")
    command = [sys.executable, "-m", "nearkin.cli", "serve", str(folder / "store"), "--port", "0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert child.stdout is not None
            url, token = child.stdout.readline().strip(), child.stdout.readline().strip()
            assert token.startswith("token nk_"), (folder / "log").read_text()
            yield ServedStore(url.rstrip("/"), token.removeprefix("token "))
        finally:
            child.terminate()
            assert child.wait(60) == 0, (folder / "log").read_text()
            child.stdout.close() if child.stdout is not None else None
    assert token.split("_", 2)[2] not in (folder / "log").read_text()  # a secret may hold "_" itself


@pytest.fixture(scope="module")
def browser(need: Callable[[Callable[[], Any]], Any]) -> Iterator[Browser]:
    program = need(chromium)
    expect.set_options(timeout=SLOW_MS)
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Browser, served_store: ServedStore) -> Iterator[Callable[..., Page]]:
    """Return a page in a profile of its own; whatever the browser complains of fails the test."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def make(*, logged_in: bool = True, breaks: bool = False, **more: Any) -> Page:
        context = browser.new_context(base_url=served_store.url, accept_downloads=True, **more)
        context.set_default_timeout(SLOW_MS)
        contexts.append(context)
        page = context.new_page()
        if not breaks:
            page.on(
                "console",
                lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
            )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        if logged_in:
            page.goto("/login")
            page.get_by_label("Token").fill(served_store.token)
            page.get_by_role("button", name="Log in").click()
            expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


def shot(page: Page, name: str) -> None:
    page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)


def versions(page: Page) -> int:
    return int(page.locator("#card-versions").inner_text())


def test_operator_walk_by_pointer(open_page: Callable[..., Page], tmp_path: Path) -> None:
    """Walk through the dashboard as an operator does."""
    page = open_page()
    before, logical = versions(page), page.locator("#card-logical").inner_text()
    shot(page, "walk-1-overview")

    page.get_by_role("link", name="Blobs", exact=True).click()
    page.get_by_label("Key starts with").fill("walk/")
    source = tmp_path / "shop ümläut.dump"
    source.write_bytes(DUMP)
    page.locator("#upload-files").set_input_files(source)
    expect(page.locator("#uploads")).to_contain_text("version 1 is committed", timeout=SLOW_MS)
    expect(page.locator("#uploads progress")).to_have_js_property("value", len(DUMP))
    expect(page.locator("#blobs")).to_contain_text("walk/shop ümläut.dump")
    shot(page, "walk-2-uploaded")

    page.get_by_role("link", name="Overview").click()
    expect(page.locator("#card-versions")).to_have_text(str(before + 1), timeout=SLOW_MS)  # by itself: the page is live
    expect(page.locator("#card-logical")).not_to_have_text(logical)
    expect(page.locator("#prefixes")).to_contain_text("walk/")

    page.get_by_role("link", name="Settings").click()
    algorithm = page.locator('form[data-section="features"][data-field="algorithm"]')
    assert algorithm.get_by_label("algorithm").input_value() == "finesse"
    algorithm.get_by_label("algorithm").select_option("ntransform")
    algorithm.get_by_role("button", name="Set").click()
    expect(page.locator("#status-message")).to_have_text("features.algorithm is ntransform now.")
    expect(page.locator("#audit")).to_contain_text('{"features": {"algorithm": "ntransform"}}')
    expect(algorithm.get_by_label("algorithm")).to_have_value("ntransform")
    shot(page, "walk-3-settings")

    second = mutate(DUMP, 9, edits=40)
    source.write_bytes(second)
    page.goto("/ui/blobs?prefix=walk%2F")
    dropped = page.evaluate_handle(
        "bytes => { const data = new DataTransfer();"
        " data.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt(0))], 'shop ümläut.dump'));"
        " return data; }",
        base64.b64encode(second).decode(),
    )
    page.locator("#upload").dispatch_event("drop", {"dataTransfer": dropped})
    expect(page.locator("#uploads")).to_contain_text("version 2 is committed", timeout=SLOW_MS)

    page.get_by_role("link", name="walk/shop ümläut.dump", exact=True).click()
    expect(page.get_by_role("heading", name="Version 2")).to_be_visible()
    assert page.locator(".strip .kind-duplicate").count() > 20
    assert page.locator(".strip .kind-delta").count() > 5
    shot(page, "walk-4-blob")
    for number, data in ((2, second), (1, DUMP)):
        with page.expect_download() as download:
            page.get_by_role("link", name=f"Download version {number}").last.click()
        assert Path(download.value.path()).read_bytes() == data
        assert download.value.suggested_filename == "shop ümläut.dump"

    page.get_by_role("button", name="Delete version 1").click()
    page.get_by_label("Reason").fill("by mistake")
    shot(page, "walk-5-sure")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#gone")).to_contain_text("by mistake")
    expect(page.locator("#versions tbody tr")).to_have_count(1)
    page.wait_for_load_state()  # a click before the page's script has run does nothing
    page.get_by_role("button", name="Undelete version 1").click()
    expect(page.locator("#versions tbody tr")).to_have_count(2)

    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    page.goto("/")
    expect(page).to_have_url(re.compile("/login$"))


def test_upload_broken_off_resumes(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(breaks=True)
    page.goto("/ui/blobs")
    source = tmp_path / "broken.bin"
    source.write_bytes(DUMP)
    requests: list[tuple[str, str | None]] = []

    def patches(route: Any) -> None:
        requests.append((route.request.method, route.request.headers.get("upload-offset")))
        if route.request.method == "PATCH" and len([one for one in requests if one[0] == "PATCH"]) == 1:
            route.abort("connectionreset")
        else:
            route.continue_()

    page.route("**/v1/uploads/*", patches)
    page.locator("#upload-files").set_input_files(source)
    expect(page.locator("#uploads")).to_contain_text("version 1 is committed", timeout=SLOW_MS)
    methods = [method for method, _ in requests]
    assert methods[:3] == ["PATCH", "HEAD", "PATCH"]
    page.unroute_all()


def test_upload_resumes_after_leaving_the_page(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(breaks=True)
    page.goto("/ui/blobs")
    source = tmp_path / "left.bin"
    source.write_bytes(DUMP)
    page.route("**/v1/uploads/*", lambda route: route.abort("connectionreset"))
    page.locator("#upload-files").set_input_files(source)
    expect(page.locator("#uploads")).to_contain_text("interrupted; going on")
    page.goto("/")  # left while nothing gets through
    page.unroute_all()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.method) if "/v1/uploads" in request.url else None)
    page.goto("/ui/blobs")
    page.locator("#upload-files").set_input_files(source)
    expect(page.locator("#uploads")).to_contain_text("version 1 is committed")
    assert requests[:2] == ["HEAD", "PATCH"]
    assert "POST" not in requests


def test_keyboard_alone_suffices(open_page: Callable[..., Page], served_store: ServedStore) -> None:
    page = open_page(logged_in=False)
    page.goto("/")
    expect(page.get_by_label("Token")).to_be_focused()
    page.keyboard.insert_text(served_store.token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "() => { const e = document.activeElement; const s = getComputedStyle(e);"
                " return [e.labels?.[0]?.innerText || e.innerText || '', s.outlineStyle]; }"
            )
            if focused[0].replace("\n", " ").startswith(name):
                assert focused[1] == "solid", f"{name}: its focus cannot be seen"
                return
        raise AssertionError(f"{name} was not reached")

    page.goto("/ui/settings")
    tab_to("policy")
    tab_to("Set")
    page.goto("/ui/settings")
    tab_to("algorithm")
    page.keyboard.press("o")  # odess
    tab_to("Set")
    page.keyboard.press("Enter")
    expect(page.locator("#status-message")).to_have_text("features.algorithm is odess now.")
    tab_to("Reset")
    page.keyboard.press("Space")
    expect(page.locator("#status-message")).to_have_text(
        "features.algorithm has the value of the configuration file again."
    )

    page.goto("/ui/blob?key=db%2Fshop.dump")
    tab_to("Delete the key")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("#versions tbody tr")).to_have_count(4)


def test_pages_are_accessible_in_both_schemes(open_page: Callable[..., Page]) -> None:
    """Check accessibility of every page in both colour schemes and on a phone."""
    page = open_page(reduced_motion="reduce")
    axe = Axe()
    for name, path in PAGES.items():
        page.set_viewport_size({"width": 1280, "height": 800})
        page.emulate_media(color_scheme="light")
        page.goto(path)
        shot(page, f"desk-{name}")
        looked = {"light": axe.run(page).response}
        page.emulate_media(color_scheme="dark")
        shot(page, f"dark-{name}")
        looked["dark"] = axe.run(page, options={"runOnly": ["color-contrast"]}).response
        for look, found in looked.items():
            assert [(entry["id"], entry["nodes"][0]["target"]) for entry in found["violations"]] == [], f"{look} {name}"
            assert found["passes"], "axe has looked at nothing"
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 320, "height": 640})
        shot(page, f"phone-{name}")
        assert page.evaluate("document.documentElement.scrollWidth") == 320, f"{name} is wider than a phone"
        wide = "[...document.querySelectorAll('.card')].filter(card => card.scrollWidth > card.clientWidth).length"
        assert page.evaluate(wide) == 0, f"{name}: something leaves its card"
        assert looked["light"]["testEngine"]["name"] == "axe-core"


def test_pages_are_readable_without_javascript(open_page: Callable[..., Page]) -> None:
    page = open_page(java_script_enabled=False)
    assert versions(page) >= 12
    page.goto("/ui/blob?key=images%2Fweb.img")
    expect(page.get_by_role("heading", name="How it is kept")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()


# --- layout at the widths of a phone, a tablet and a desk ------------------------------------------------------------

WIDTHS = (375, 768, 1440)
LONG_KEY = "layout/" + "a-folder/" * 9 + "and-a-file.tar.zst"
INVISIBLE_KEY = "layout/zero\u200bwidth \u202egnp.exe "
OUTSIDE = """() => [...document.querySelectorAll('table > * > tr > *, time, .actions > *')].filter(cell => {
  const box = cell.getBoundingClientRect();
  const hidden = cell.closest('.hidden') || box.width <= 1 || cell.closest('thead')?.getBoundingClientRect().width <= 1;
  return !hidden && (box.left < 0 || box.right > innerWidth + 1);
}).map(cell => `${cell.closest('table')?.id}: ${cell.textContent.trim().slice(0, 40)}`)"""
CHARTS = """() => [...document.querySelectorAll('.chart, .strip')].map(chart => {
  const card = chart.closest('.card'), style = getComputedStyle(card);
  const room = card.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return Math.abs(room - chart.getBoundingClientRect().width) <= 1;
})"""


def upload(page: Page, key: str) -> None:
    status = page.evaluate(
        "key => fetch(`/v1/blobs/${encodeURIComponent(key)}?wait=20`, {method: 'PUT', body: 'a',"
        " headers: {'X-Nearkin-CSRF': document.querySelector('meta[name=nearkin-csrf]').content}}).then(r => r.status)",
        key,
    )
    assert status == 201


def pipeline_page() -> str:
    """Return the page of a gateway with Kafka: a failure, a paused worker and a dead letter."""
    minute = {"committed": 3, "logical_bytes": 9_000_000, "stored_bytes": 700_000, "failed": 1}
    pipeline = {
        "embedded": False,
        "minutes": [minute],
        "stages": [{"group": "nearkin-chunker", "records_per_second": 12.5, "lag_records": 40, "old_records": 2}],
        "failures": [
            {"time": "2026-11-20T10:00:00Z", "tenant": "shop", "key": LONG_KEY, "failure": "too large: " + "x" * 200}
        ],
    }
    worker = {
        "worker": "chunker-0", "state": "paused", "revision": "0123456789ab", "started": "2026-11-20T10:00:00Z",
        "silent_seconds": 3,
    }  # fmt: skip
    letter = {
        "letter": "3-1042", "time": "2026-11-20T10:00:00Z", "topic": "nearkin.segments", "partition": 3,
        "offset": 1042,
        "stage": "dedup", "error": "nearkin_shared.errors.Corrupt", "message": "containers/1a2b: checksum " * 6,
        "replayed": False,
    }  # fmt: skip
    drawn, grid = charts.bars([("10:00", 5_000_000), ("10:01", 9_000_000)])
    visitor = Visitor("default", "tester", frozenset(("read", "write", "delete", "admin")), "csrf")
    shown: dict[str, Any] = {
        "activity": pipeline,
        "letters": [letter],
        "bars": drawn,
        "grid": grid,
        "workers": [worker],
    }
    return bytes(rendering.page("pipeline.html", visitor, title="Pipeline", **shown).body).decode()


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_screen(open_page: Callable[..., Page], width: int) -> None:
    """Every cell and button is on the screen, charts fill their card, dates stay on one line."""
    page = open_page()
    upload(page, LONG_KEY)
    upload(page, "layout/gone")
    page.evaluate(
        "fetch('/v1/blobs/layout%2Fgone?reason=' + 'typed+too+fast+'.repeat(9), {method: 'DELETE',"
        " headers: {'X-Nearkin-CSRF': document.querySelector('meta[name=nearkin-csrf]').content}})"
    )
    page.route("**/ui/pipeline?kafka", lambda route: route.fulfill(body=pipeline_page(), content_type="text/html"))
    page.set_viewport_size({"width": width, "height": 900})
    drawn = 0
    for name, path in {**PAGES, "gone": "/ui/blob?key=layout%2Fgone", "kafka": "/ui/pipeline?kafka"}.items():
        page.goto(path)
        shot(page, f"layout-{name}-{width}")
        assert page.evaluate("document.documentElement.scrollWidth") == width, name
        assert page.evaluate(OUTSIDE) == [], name
        scrolled = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert page.evaluate(scrolled) == 0, name
        filled = page.evaluate(CHARTS)
        assert all(filled), f"{name}: a chart does not fill its card"
        drawn += len(filled)
        broken = "[...document.querySelectorAll('time')].filter(e => e.getClientRects().length > 1).length"
        assert page.evaluate(broken) == 0, f"{name}: a date is broken over two lines"
    assert drawn >= 3
    for label in ("Reduction", "Error"):  # the columns that were out of sight on a phone
        page.goto("/" if label == "Reduction" else "/ui/pipeline?kafka")
        assert page.locator(f"td[data-label={label}]").first.bounding_box()["x"] < width  # type: ignore[index]
    for name in ("Replay letter 3-1042", "Drop letter 3-1042"):
        button = page.get_by_role("button", name=name)
        button.scroll_into_view_if_needed()
        expect(button).to_be_in_viewport(ratio=1)
    page.unroute_all()


def test_dead_letter_is_dropped_after_a_question(open_page: Callable[..., Page]) -> None:
    """Ask before a drop, without a reason; send nothing if cancelled, else the letter alone."""
    page = open_page()
    sent: list[tuple[str, str | None]] = []

    def answer(route: Any) -> None:
        sent.append((route.request.url.rpartition("/v1")[2], route.request.post_data))
        route.fulfill(json={"dropped": ["3-1042"]})

    page.route("**/ui/pipeline?kafka", lambda route: route.fulfill(body=pipeline_page(), content_type="text/html"))
    page.route("**/v1/dead/*", answer)
    page.goto("/ui/pipeline?kafka")
    page.wait_for_load_state()
    drop, dialog = page.get_by_role("button", name="Drop letter 3-1042"), page.get_by_role("dialog")
    drop.click()
    expect(page.locator("#sure-title")).to_have_text("Drop letter 3-1042?")
    expect(page.get_by_label("Reason")).to_be_hidden()
    shot(page, "drop-sure")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert sent == []
    drop.click()
    dialog.get_by_role("button", name="Drop").click()
    expect(page.locator("#status-message")).to_have_text("Letter 3-1042 was dropped.")
    assert sent == [("/dead/drop", '{"letters":["3-1042"]}')]
    page.goto("/ui/blob?key=db%2Fshop.dump")  # a deletion still asks for its reason
    page.wait_for_load_state()
    page.get_by_role("button", name="Delete the key").click()
    expect(page.get_by_label("Reason")).to_be_visible()
    expect(dialog.get_by_role("button", name="Delete")).to_be_visible()
    page.keyboard.press("Escape")
    page.unroute_all()


def test_keys_are_short_and_their_invisible_characters_shown(open_page: Callable[..., Page]) -> None:
    """Shorten a long key in its middle, with a tooltip.

    Escape invisible characters, in dialogs too.
    """
    page = open_page()
    upload(page, LONG_KEY)
    upload(page, INVISIBLE_KEY)
    page.goto("/ui/blobs?prefix=layout%2F")
    long = page.locator("#blobs a span[title]").first
    assert long.get_attribute("title") == LONG_KEY
    assert len(long.inner_text()) <= 56
    assert long.inner_text().endswith("and-a-file.tar.zst")
    shown = r"layout/zero\u200bwidth \u202egnp.exe\x20"
    page.get_by_role("link", name=shown, exact=True).click()
    expect(page.get_by_role("heading", name=shown)).to_be_visible()
    page.get_by_role("button", name="Delete the key").click()
    expect(page.locator("#sure-title")).to_have_text(f"Delete {shown} with all its versions?")
    page.keyboard.press("Escape")


def test_settings_show_pause_apart(open_page: Callable[..., Page]) -> None:
    """Show `paused` and its state on a card of its own."""
    page = open_page()
    page.goto("/ui/settings")
    switch = page.locator(".switch")
    expect(switch.get_by_role("heading")).to_have_text("Pause the services")
    assert page.locator(".flow").get_by_label("paused").count() == 0
    switch.get_by_label("paused").select_option("on")
    switch.get_by_role("button", name="Set").click()
    expect(page.locator("#status-message")).to_have_text("service.paused is true now.")
    expect(page.locator(".switch.on").get_by_role("heading")).to_have_text("The services are paused")
    shot(page, "settings-paused")
    page.locator(".switch").get_by_label("paused").select_option("off")
    page.locator(".switch").get_by_role("button", name="Set service.paused", exact=True).click()
    expect(page.locator("#status-message")).to_have_text("service.paused is false now.")
