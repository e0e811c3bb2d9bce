"""The manual's site builds without warnings, and a browser can search it offline.

`bash test.sh --docs` installs Sphinx into .uv/docs; elsewhere these tests are skipped.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from deeplightning.config import allowed, schema

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".uv" / "docs" / "bin" / "python"
SITE = ROOT / "dist" / "site"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="Sphinx is not in .uv/docs: bash test.sh --docs installs it"),
]


@pytest.fixture(scope="module")
def site():
    """The folder of the built site. Every warning is an error, such as a broken link or a page outside the contents."""
    options = ["--nitpicky", "--fail-on-warning", "--keep-going", "--quiet"]
    command = [PYTHON, "-m", "sphinx", *options, "-c", "docs", ".", SITE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return SITE


def test_every_key_is_found_by_its_name(site):
    """The search index has every config key and the page with its row."""
    found = re.fullmatch(r"Search\.setIndex\((.*)\)", (site / "searchindex.js").read_text(), re.DOTALL)
    index = json.loads(found[1])
    named = {
        f"{prefix}.{entry[-1]}".lstrip("."): index["docnames"][entry[0]]
        for prefix, entries in index["objects"].items()
        for entry in entries
    }
    sections = dict(allowed.sections(schema.Config)) | {"": schema.Config}
    keys = [f"{path}.{f.name}".lstrip(".") for path, cls in sections.items() for f in schema.keys(cls)]
    assert [key for key in keys if key not in named] == []
    for key in keys:
        assert f'id="key-{key.replace(".", "-")}"' in (site / f"{named[key]}.html").read_text()


def test_a_page_loads_nothing_from_elsewhere(site):
    """Scripts, styles, fonts and images are part of the site; only hyperlinks lead elsewhere."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["'](https?:|//)""", page.read_text())
        assert (page.name, loaded) == (page.name, [])
    for style in site.rglob("*.css"):
        assert re.findall(r"""(?:url\(|@import )["']?(?:https?:|//)""", style.read_text()) == []


def test_a_page_can_be_used_by_keyboard_and_screen_reader(site):
    """Both sidebars have labels, and scrollable elements can get the focus: docs/conf.py adds both to the theme."""
    page = (site / "docs" / "reference" / "config-files.html").read_text()
    assert page.count('aria-label="Pages"') == page.count('aria-label="Sections of this page"') == 1
    scrollable = re.findall(r"<(?:pre|div class=\"table-wrapper)[^>]*>", page)
    assert [tag for tag in scrollable if 'tabindex="0"' not in tag] == []
    assert '<pre tabindex="0">' in page
    assert 'tabindex="0" class="table-wrapper' in page
    assert "<h1>Search</h1>" in (site / "search.html").read_text()
