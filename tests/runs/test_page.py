"""The prediction page in a real browser: it shows the server's answers to what a user gives."""

import dataclasses
import io
import json
import re
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
from browser import ANSWER_SECONDS, CHROMIUM, PREFIX, Browser, Page
from PIL import Image
from served import COLOURS, ROOT, Server, colour_run, labelled_run, masked_run, negative_run, picture

from deeplightning.kinds import CLASS_COLOURS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder for the runs that the servers serve."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(place):
    started = Server(colour_run(place / "colours").path, place / "errors", "--max-upload-mb", "1")
    yield started
    started.stop()


@pytest.fixture
def open_page(browser, serving):
    """`open_page(url)` returns a Page, which is closed before the servers of the test are killed."""
    pages = []

    def opened(url, prefix="", path=""):
        pages.append(Page(browser, url, prefix, path))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


@pytest.fixture
def page(open_page, server):
    return open_page(server.url)


def give_keys(page):
    """Enter a wrong key, which is refused with a message, and then the right one."""
    page.call("Input.insertText", text="wrong")
    page.press("Enter", "\r")
    page.evaluate("until(() => document.querySelector('#note').textContent.includes('does not accept this key'))")
    page.call("Input.insertText", text="a-key-to-try")
    page.press("Enter", "\r")


def png(colour, **options):
    """Return name, type and content of a picture for `Page.give`."""
    return f"{colour}.png", "image/png", picture(colour, **options)


def drop(page, *files):
    """Drop files on the page; return the content of the cards."""
    page.give("drop", *files)
    return page.answers()


def expected_rows(server, data):
    """Return the expected table of a card, from the server's answer to another client."""
    status, answer = server.ask("POST", "/predict", data)
    assert status == 200
    shares = [(one["label"], one["probability"]) for one in answer["predictions"] if one["probability"] >= 0.0005]
    return [[label, "> 99.9 %" if 0.9995 < share < 1 else f"{100 * share:.1f} %"] for label, share in shares]


TIMES = "\N{MULTIPLICATION SIGN}"
SEEN = f"As the network sees it: 8 {TIMES} 8, colour"


def test_a_dropped_image_gets_the_servers_answer(page, server, tmp_path):
    """The card has classes, probabilities, bars of their length, the picture and the time; screen readers get the
    result, too. Classes below 0.1 % have no bar and are listed in one line."""
    data = picture("green", size=(640, 480))
    (answer,) = drop(page, ("a green one.png", "image/png", data))
    assert answer["rows"] == expected_rows(server, data)
    assert answer["title"] == answer["rows"][0][0] == "green"
    shares = [one["probability"] for one in server.ask("POST", "/predict", data)[1]["predictions"]]
    assert answer["shares"] == pytest.approx([share for share in shares if share >= 0.0005], abs=0.01)
    assert answer["names"] == ["a green one.png", SEEN]
    assert re.fullmatch(r"\d+(\.\d)? ms", answer["time"])
    assert page.evaluate("document.querySelector('#timing').checkVisibility()")
    assert re.fullmatch(rf"a green one\.png: green, {answer['rows'][0][1]}, \d+(\.\d)? ms", page.note())
    assert page.evaluate("document.querySelector('#note').role") == "status"
    seen = page.shot(tmp_path / "page.png")
    assert np.all(seen == COLOURS["green"], axis=2).sum() > 10_000  # the picture itself
    blue = io.BytesIO()
    Image.new("RGB", (8, 8), (0, 0, 255)).save(blue, "PNG")
    (answer,) = drop(page, ("blue.png", "image/png", blue.getvalue()))
    assert answer["rows"] == expected_rows(server, blue.getvalue())
    assert ([row[0] for row in answer["rows"]], answer["others"]) == (["blue"], "red, green: below 0.1 %")


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (1000, "dark")])
def test_it_can_be_read_everywhere(page, open_page, server, tmp_path, width, scheme):
    """Nothing is wider than the window, also in the docs with open sections; text has WCAG's contrast of 4.5 to 1."""
    docs = open_page(server.url, path="docs")
    docs.look(width, scheme)
    for _ in range(2):
        assert docs.evaluate("document.documentElement.scrollWidth <= innerWidth")
        docs.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    dark = docs.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(21, 20, 18)") == (scheme == "dark")
    page.look(width, scheme)
    long = ("a" * 200 + ".png", "image/png", picture("blue"))
    assert len(drop(page, long, ("b.png", "image/png", b"no picture"))) == 2
    page.shot(tmp_path / "page.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    pairs = page.evaluate(COLOURS_OF)
    assert len(pairs) > 8
    for text, ground in pairs:
        assert contrast(text, ground) >= 4.5, (text, ground)
    assert (np.mean(pairs[0][1]) < 128) == (scheme == "dark")


COLOURS_OF = """
[...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() && one.textContent.trim()).map((one) => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  let ground = one;
  while (numbers(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
  const colours = [getComputedStyle(one).color, getComputedStyle(ground).backgroundColor];
  return colours.map((text) => numbers(text).slice(0, 3));
})
"""


def contrast(one, other):
    """Return the contrast ratio of two colours: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio"""

    def luminance(colour):
        shares = [value / 255 for value in colour]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_several_images_are_answered_in_order(page, server):
    """Each image has its own card, even if others are refused; the next choice replaces the cards."""
    given = [png("blue"), ("text.jpg", "image/jpeg", b"no picture"), png("red"), png("green")]
    answers = drop(page, *given)
    assert [answer["title"] for answer in answers] == ["blue", None, "red", "green"]
    assert [answer["names"][0] for answer in answers] == [name for name, _, _ in given]
    assert page.note() == "4 images: 3 answered, 1 not answered."
    assert page.evaluate("document.body.innerText").count("measured in this browser") == 1
    assert [answer["title"] for answer in drop(page, given[0])] == ["blue"]


def test_the_samples_of_the_run_can_be_tried(page, server):
    """Each sample is a button with a name that works by keyboard; its answer is that of the server."""
    samples = server.ask("GET", "/samples")[1]["samples"]
    page.evaluate("until(() => document.querySelectorAll('#samples img').length === 4)")
    names = page.evaluate("[...document.querySelectorAll('#samples img')].map((image) => image.alt)")
    assert names == [f"Sample {number}" for number in range(1, 5)]
    page.evaluate("document.querySelectorAll('#samples button')[1].focus()")
    page.press("Enter", "\r")
    (answer,) = page.answers()
    assert answer["names"] == ["Sample 2.png", SEEN]
    body, kind = json.dumps({"image": samples[1]}), {"Content-Type": "application/json"}
    expected = server.ask("POST", "/predict", body, kind)[1]
    assert answer["title"] == expected["label"]


def test_the_page_shows_what_the_network_gets_of_a_picture(page, server):
    """The card shows the input of the network, and a hint if the picture is far smaller than it or has other
    proportions."""
    end = ": the answer may be unreliable."
    for (width, height), hint in {
        (8, 8): None,
        (800, 600): None,
        (2, 2): f"Its sides are 4.0 times as short{end}",
        (160, 4): f"Its proportions are changed{end}",
        (16, 8): f"Its proportions are changed{end}",
    }.items():
        (answer,) = drop(page, png("red", size=(width, height)))
        assert answer["names"] == ["red.png", SEEN]
        sizes = f"This picture has {width} {TIMES} {height} pixels; the network was trained on 8 {TIMES} 8."
        assert answer["hint"] == (hint and f"{sizes} {hint}")
    shown = server.ask("POST", "/predict?show=input", picture("red", size=(16, 8)))[1]["input"]
    assert page.evaluate("document.querySelectorAll('#answers img')[1].src") == f"data:image/png;base64,{shown}"


def test_a_phone_offers_its_camera(page):
    """Without a mouse, the page offers to choose a picture, or to take one through a field with `capture`."""
    visible = (
        "[...document.querySelectorAll('#drop, #camera')].filter((one) => one.checkVisibility())"
        ".map((one) => one.innerText.trim().split('\\n')[0])"
    )
    assert page.evaluate(visible) == ["Drop an image here, or choose one"]
    page.look(360)
    assert page.evaluate(visible) == ["Choose an image", "Take a picture"]
    assert page.evaluate("document.querySelector('#camera input').getAttribute('capture')") == "environment"
    assert "Drop" not in page.evaluate("document.body.innerText")


def test_what_the_server_refuses_is_shown_with_its_message(page, server):
    """The card shows the error message of the server; the next picture is answered."""
    (answer,) = drop(page, ("text.jpg", "image/jpeg", b"no picture at all"))
    status, refusal = server.ask("POST", "/predict", b"no picture at all")
    assert (status, answer["fault"], answer["rows"]) == (415, refusal["ERROR"], [])
    assert page.note() == "text.jpg: not answered; the reason is in the list of answers."
    assert "at most 1 MB" in drop(page, ("large.png", "image/png", b"\0" * 3_000_000))[0]["fault"]
    assert drop(page, png("red"))[0]["title"] == "red"


def test_an_image_can_be_chosen_and_pasted(page, tmp_path):
    """Images can be chosen, the same one twice, and pasted. A drop without files gets a message."""
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}.png").write_bytes(picture(colour))
    for chosen in (["red", "blue"], ["red"], ["red"]):
        root = page.call("DOM.getDocument")["root"]["nodeId"]
        chooser = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        files = [str(tmp_path / f"{colour}.png") for colour in chosen]
        page.evaluate("document.querySelector('#answers').replaceChildren()")
        page.call("DOM.setFileInputFiles", files=files, nodeId=chooser)
        assert [answer["title"] for answer in page.answers()] == chosen
    page.give("paste", png("green"))
    assert page.answers()[0]["title"] == "green"
    page.give("drop")
    assert page.note().startswith("That was not a file")


def test_the_keyboard_is_enough(page):
    """The first Tab focuses the file chooser visibly, and Enter opens it; further ones reach samples and links."""
    page.call("Page.setInterceptFileChooserDialog", enabled=True)
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    assert page.evaluate("getComputedStyle(document.querySelector('#drop')).outlineStyle") == "solid"
    page.press("Enter", "\r")
    assert page.wait("Page.fileChooserOpened")["mode"] == "selectMultiple"
    page.evaluate("until(() => document.querySelectorAll('#samples button').length === 4)")
    for stop in (*[""] * 4, "3 classes", "docs", "openapi.j", "info", "metrics"):
        page.press("Tab")
        name = page.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 9).trim()")
        assert name == stop


def test_it_tells_which_model_answers(page, server):
    """The page shows task, input, run and labels as in `/info`."""
    info = server.ask("GET", "/info")[1]
    description = f"Run a run, id abc: image classification on 8 {TIMES} 8 pixels, colour; images up to 1 MB."
    assert page.evaluate("document.querySelector('#model').textContent") == description
    assert info["run"]["folder_name"] == "a run"
    assert page.evaluate("document.querySelector('#classes p').textContent") == ", ".join(info["labels"])


def test_it_may_stand_behind_a_prefix(open_page, server):
    """A proxy may serve the page below a path: every address on the page is relative."""
    page = open_page(server.url, PREFIX)
    assert drop(page, png("red"))[0]["title"] == "red"
    asked = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    fetched = {url.removeprefix(server.url) for url in asked if url.startswith("http")}
    assert fetched == {f"{PREFIX}/{name}" for name in ("", "info", "samples", "predict?show=input")}


def test_a_server_that_does_not_answer_is_reported(open_page, serving, place):
    """The first image reports that the server does not answer; the others are not sent."""
    server = serving(place / "colours")
    page = open_page(server.url)
    server.stop()
    faults = [answer["fault"] for answer in drop(page, png("red"), png("blue"))]
    assert faults == ["The server does not answer; check that it is still running.", "Not sent."]
    assert page.note() == "2 images: 0 answered, 2 not answered."


def test_a_key_is_asked_for_and_kept_nowhere(open_page, serving, place, server):
    """The page asks for a key only if the server needs one; images wait for it; it is in no storage and no address."""
    assert open_page(server.url).evaluate("document.querySelector('#key').hidden")
    secured = serving(place / "colours", "--api-key-env", "THE_KEY", THE_KEY="a-key-to-try")
    page = open_page(secured.url)
    assert not page.evaluate("document.querySelector('#key').hidden")
    page.give("drop", png("red"), png("blue"))
    page.evaluate("until(() => document.querySelector('#note').textContent.startsWith('Enter the API key'))")
    assert page.note() == "Enter the API key; then the 2 images are sent again."
    assert not page.evaluate("document.querySelectorAll('.fault, #samples button').length")
    assert page.evaluate("document.activeElement.id") == "secret"
    give_keys(page)
    page.evaluate("until(() => document.querySelectorAll('h2:not(:empty)').length === 2)")
    assert [answer["title"] for answer in page.answers()] == ["red", "blue"]
    assert page.evaluate("document.querySelector('#key').hidden")
    page.evaluate("until(() => document.querySelectorAll('#samples button').length === 4)")
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    asked = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert not any("a-key-to-try" in url for url in asked)


def test_a_key_that_no_header_can_carry_keeps_its_field(open_page, serving, place):
    """Quotation marks that a chat has put around the key are refused at the field, where the key can be corrected."""
    page = open_page(serving(place / "colours", "--api-key-env", "THE_KEY", THE_KEY="a-key-to-try").url)
    page.evaluate("until(() => !document.querySelector('#key').hidden)")
    page.evaluate("document.querySelector('#secret').focus()")
    page.call("Input.insertText", text="\N{LEFT DOUBLE QUOTATION MARK}a-key-to-try\N{RIGHT DOUBLE QUOTATION MARK}")
    page.press("Enter", "\r")
    page.evaluate("new Promise((done) => setTimeout(done, 500))")
    assert not page.evaluate("document.querySelector('#key').hidden")
    page.evaluate("document.querySelector('#secret').select()")
    page.call("Input.insertText", text="a-key-to-try")
    page.press("Enter", "\r")
    page.evaluate("until(() => document.querySelector('#key').hidden)")


def test_a_picture_is_answered_with_a_picture(open_page, serving, place, tmp_path):
    """A reconstruction is shown beside the input."""
    server = serving(negative_run(place / "negative").path)
    page = open_page(server.url)
    (answer,) = drop(page, png("red"))
    assert (answer["title"], answer["rows"], answer["names"]) == (None, [], ["red.png", SEEN, "The model's picture"])
    assert answer["time"].endswith(" ms")
    image = server.ask("POST", "/predict", picture("red"))[1]["image"]
    shown = page.evaluate("[...document.querySelectorAll('#answers img')].at(-1).src")
    assert shown == f"data:image/png;base64,{image}"
    seen = page.shot(tmp_path / "page.png")
    for colour in (COLOURS["red"], [255 - value for value in COLOURS["red"]]):
        assert np.all(np.abs(seen.astype(int) - colour) <= 1, axis=2).sum() > 10_000


def test_a_picture_gets_several_labels(open_page, serving, place):
    """The labels that apply are the title, and bold in the list of all labels."""
    server = serving(labelled_run(place / "labelled").path)
    page = open_page(server.url)
    (answer,) = drop(page, png("red"))
    assert answer["title"] == "red, green"
    assert answer["rows"] == expected_rows(server, picture("red"))
    weights = page.evaluate("[...document.querySelectorAll('tbody th')].map((one) => getComputedStyle(one).fontWeight)")
    bold = {row[0] for row, weight in zip(answer["rows"], weights, strict=True) if weight == "600"}
    assert bold == {"red", "green"}
    page.evaluate("until(() => document.querySelector('#classes summary').textContent)")
    assert page.evaluate("document.querySelector('#classes summary').textContent") == "3 labels"


def test_a_picture_gets_its_mask(open_page, serving, place, tmp_path):
    """The mask is shown beside the input, and a list shows the share of each class in its colour."""
    server = serving(masked_run(place / "masked").path)
    page = open_page(server.url)
    (answer,) = drop(page, png("green"))
    assert (answer["title"], answer["names"]) == ("green", ["green.png", SEEN, "The model's mask"])
    assert (answer["rows"], answer["others"]) == ([["green", "100.0 %"]], "red, blue: no pixel")
    expected = server.ask("POST", "/predict", picture("green"))[1]
    shown = page.evaluate("[...document.querySelectorAll('#answers img')].at(-1).src")
    assert shown == f"data:image/png;base64,{expected['mask']}"
    shown = page.evaluate("getComputedStyle(document.querySelector('.bar i')).backgroundColor")
    red, green, blue = CLASS_COLOURS[1]
    assert expected["classes"][1]["colour"] == f"#{red:02x}{green:02x}{blue:02x}"
    assert shown == f"rgb({red}, {green}, {blue})"
    seen = page.shot(tmp_path / "page.png")
    assert np.all(np.abs(seen.astype(int) - CLASS_COLOURS[1]) <= 1, axis=2).sum() > 5_000


def test_an_answer_of_another_kind_is_shown_as_json(open_page, server, tmp_path):
    """A kind of answer that the page does not know, such as points in a picture, is shown as the server sends it."""
    page = open_page(server.url)
    page.evaluate('window.fetch = async () => new Response(\'{"points": [[1, 2.5], ["<b>", 0]]}\')')
    (answer,) = drop(page, png("red"))
    assert (answer["title"], answer["rows"]) == (None, [])
    shown = page.evaluate("document.querySelector('#answers blockquote').textContent")
    assert shown == '{"points":[[1,2.5],["<b>",0]]}'
    assert page.note().startswith(f"red.png: {shown}, ")
    page.shot(tmp_path / "page.png")


def test_texts_are_written_into_a_field(open_page, serving, place):
    """A text gets the answer that any client gets; there is no area to drop pictures on."""
    from exported import WORDS, exported  # imported lazily: only this needs torch

    server = serving(exported(place / "written", "text_classification")[1].path)
    page = open_page(server.url)
    page.evaluate("until(() => !document.querySelector('#write').hidden)")
    assert page.evaluate("document.querySelector('#drop').hidden") is True
    text = "a <b>fine</b> film"
    page.evaluate(f"document.querySelector('#text').value = '{text}'")
    page.evaluate("document.querySelector('#write button').click()")
    (answer,) = page.answers()
    status, expected = server.ask("POST", "/predict", json.dumps({"text": text}), {"Content-Type": "application/json"})
    assert (status, answer["title"]) == (200, expected["label"])
    assert [row[0] for row in answer["rows"]] == [one["label"] for one in expected["predictions"]]
    assert page.evaluate("document.querySelector('blockquote').textContent") == text
    model = page.evaluate("document.querySelector('#model').textContent")
    assert f"text classification on a vocabulary of {WORDS.size} tokens" in model


def test_labels_of_markup_are_shown_as_text(open_page, serving, place, tmp_path):
    """Labels and file names that contain markup are shown as text: no script runs, and no other address is fetched."""
    labels = (
        "<img src=x onerror=\"document.title='pwned'\">",
        "</script><script>document.title='pwned'</script>",
        "&lt;b>",
    )
    server = serving(colour_run(place / "markup", labels).path)
    page = open_page(server.url)
    title = page.evaluate("document.title")
    for number, colour in enumerate(COLOURS):
        cards = drop(page, (f"<svg onload=document.title='pwned'>{number}.png", "image/png", picture(colour)))
        answer = next(one for one in cards if f">{number}.png" in one["names"][0])
        assert answer["title"] == labels[number]
        assert {row[0] for row in answer["rows"]} <= set(labels)
    assert page.evaluate("document.querySelectorAll('#answers script, #answers svg, #answers b').length") == 0
    assert page.evaluate("[...document.images].every((image) => /^(blob|data:image\\/png):?/.test(image.src))")
    assert page.evaluate("document.title") == title
    page.shot(tmp_path / "page.png")


# ---- the docs page

COMMANDS = "[...document.querySelectorAll('figure pre')].map((one) => one.textContent)"


@pytest.mark.parametrize(
    "kind",
    [
        "image_classification",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("text_classification", "table_regression", "array_multilabel")
        ),
    ],
)
def test_the_docs_show_each_address_with_a_command_that_works(open_page, serving, place, kind):
    """Routes and statuses are those of `/openapi.json`; each command, run in a shell, is answered."""
    from exported import exported  # imported lazily, since it needs torch

    server = serving(exported(place / kind, kind)[1].path)
    page = open_page(server.url, path="docs")
    described = server.ask("GET", "/openapi.json")[1]["paths"]
    routes = [f"{method.upper()} {path}" for path, methods in described.items() for method in methods]
    assert page.evaluate("[...document.querySelectorAll('nav a')].map((one) => one.textContent)") == routes
    assert page.evaluate("[...document.querySelectorAll('article h2')].map((one) => one.textContent)") == routes
    statuses = page.evaluate(
        "[...document.querySelectorAll('article:first-child summary b')].map((b) => b.textContent)"
    )
    assert statuses == sorted(described["/predict"]["post"]["responses"])
    commands = page.evaluate(COMMANDS)
    assert len(commands) == len(described["/predict"]["post"]["requestBody"]["content"]) + len(routes) - 1
    sent = place / "sent"
    sent.write_bytes(picture("red", size=(5, 6)))
    if kind.startswith("array"):
        np.save(place / "sent.npy", np.zeros((2, 12)))
        sent.write_bytes((place / "sent.npy").read_bytes())
    for command in commands:
        line = re.sub(r"\bFILE\b", str(sent), command).replace("curl -s", "curl -s -w '\n%{http_code}'")
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=ANSWER_SECONDS)
        assert done.stdout.endswith("\n200"), (command, done.stdout)


def test_the_docs_work_by_keyboard_and_are_named(open_page, server):
    """The page links to the docs; a button with a name copies a command, or selects it if copying is not allowed."""
    page = open_page(server.url)
    assert page.evaluate("document.querySelector('footer a').href") == f"{server.url}/docs"
    page = open_page(server.url, path="docs")
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "POST /predict"
    while page.evaluate("document.activeElement.tagName") != "BUTTON":
        page.press("Tab")
    name = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert name == "Copy the command: multipart/form-data"
    page.press("Enter", "\r")
    page.evaluate("until(() => document.querySelector('#said').textContent)")
    assert re.match("Copied|Selected", page.evaluate("document.querySelector('#said').textContent"))


def test_the_docs_ask_for_a_key_and_stand_behind_a_prefix(open_page, serving, place, server):
    """A wrong key is refused with a message; with the right one everything is shown, and commands name the variable,
    not the key. Behind a prefix, commands have the address that the browser has."""
    page = open_page(server.url, PREFIX, "docs")
    assert f"{server.url}{PREFIX}/predict" in page.evaluate(COMMANDS)[0]
    secured = serving(place / "colours", "--api-key-env", "THE_KEY", THE_KEY="a-key-to-try")
    page = open_page(secured.url, path="docs")
    assert page.evaluate("document.querySelectorAll('article').length") == 0
    page.evaluate("document.querySelector('#secret').focus()")
    give_keys(page)
    page.evaluate("until(() => document.querySelector('article'))")
    commands = page.evaluate(COMMANDS)
    assert "Authorization: Bearer $API_KEY" in commands[0]
    assert not any("a-key-to-try" in command for command in commands)
    assert page.evaluate("document.activeElement.textContent") == "POST /predict"
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@pytest.mark.parametrize("name", ["page.html", "docs.html"])
def test_the_pages_never_insert_markup(name):
    """The pages insert text only, so nothing that the server sends can run."""
    source = (ROOT / "serve" / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|\son\w+=", source)
    assert re.findall(r"<(?:script|style)\b[^>]*>", source) == ["<style>", "<script>"]
    assert not re.search(r"(?:https?:)?//[a-z]", source)


# ---- accessibility

AXE = "axe-core@4"
LOOKS = [(width, scheme) for width in (360, 1280) for scheme in ("light", "dark")]

RUN = """
axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => violations.map(
  ({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`))
"""


@pytest.fixture(scope="module")
def axe(place):
    """The source of axe-core, from npm."""
    done = subprocess.run(["npm", "pack", AXE], cwd=place, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm cannot bring {AXE}: {done.stderr.strip().splitlines()[-1:]}")
    (packed,) = place.glob("axe-core-*.tgz")
    with tarfile.open(packed) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


def ask(page):
    drop(page, *(png(colour, size=(900, 600)) for colour in COLOURS), ("notes.png", "image/png", b"no picture"))


def ask_for_the_key(page):
    page.give("drop", png("red"))
    page.evaluate("until(() => document.querySelector('#note').textContent.includes('API key'))")


def ask_a_sample(page):
    page.evaluate("until(() => document.querySelector('#samples button')).then((button) => button.click())")
    page.answers()


def open_all(page):
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")


STATES = {
    "start": ("colours", "", open_all),
    "several": ("colours", "", ask),
    "key": ("secured", "", ask_for_the_key),
    "picture": ("negative", "", ask),
    "labels": ("labelled", "", ask),
    "mask": ("masked", "", ask),
    "text": ("text_classification", "", ask_a_sample),
    "row": ("table_regression", "", ask_a_sample),
    "array": ("array_multilabel", "", ask_a_sample),
    "docs": ("colours", "docs", open_all),
    "docs of rows": ("table_regression", "docs", open_all),
    "docs with a key": ("secured", "docs", open_all),
}
"""By name: the served run, the path, and the action there."""

IMAGES = {"colours": colour_run, "secured": colour_run, "negative": negative_run, "labelled": labelled_run}
IMAGES |= {"masked": masked_run}


@pytest.fixture(scope="module")
def served(place):
    """A server for each run of `STATES`."""
    from exported import exported

    servers = {}
    for kind in {kind for kind, _, _ in STATES.values()}:
        at = place / f"axe {kind}"
        folder = IMAGES[kind](at) if kind in IMAGES else exported(at, kind)[1]
        key = ("--api-key-env", "KEY") if kind == "secured" else ()
        servers[kind] = Server(folder.path, place / f"{kind}-errors", *key, KEY="a-key")
    yield servers
    for server in servers.values():
        server.stop()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm, which brings axe-core, is not installed")
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing(browser, served, axe, state):
    """axe-core (https://github.com/dequelabs/axe-core) finds no violation in names and roles, contrast, order or live
    regions, on narrow and wide windows, light and dark."""
    kind, path, act = STATES[state]
    page = Page(browser, served[kind].url, path=path)
    page.evaluate(f"{axe}; 0")
    act(page)
    found = {}
    for width, scheme in LOOKS:
        page.look(width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found[width, scheme] = page.evaluate(RUN)
    page.close()
    assert found == {look: [] for look in LOOKS}


def test_a_sample_is_written_with_the_decimal_sign_of_its_table(open_page, serving, place):
    """The numbers of a sample reach the network unchanged if the table has decimal commas."""
    from exported import RUN, task_of  # imported lazily, since it needs torch

    from deeplightning.export.bundle import export
    from deeplightning.runfolder import RunFolder
    from deeplightning.table_format import TableFormat

    task, _ = task_of("table_regression")
    task.row_spec = dataclasses.replace(task.row_spec, format=TableFormat(";", ","))
    (place / "commas").mkdir()
    export(task, RunFolder(place / "commas"), np.array([json.dumps({"age": 41.125, "city": "Bern"})]), RUN)
    page = open_page(serving(place / "commas").url)
    page.evaluate("until(() => document.querySelector('#samples button')).then((button) => button.click())")
    (answer,) = page.answers()
    assert page.evaluate("document.querySelector('#columns input').value") == "41,125"
    assert answer["title"].startswith("low: ")
