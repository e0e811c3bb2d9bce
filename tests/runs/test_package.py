"""What the wheel holds, and that the command works from the wheel alone, without a clone."""

import posixpath
import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
DATA = [
    str(path.relative_to(ROOT))
    for folder in ("configs", "examples", "templates")
    for path in ROOT.glob(f"{folder}/**/*")
    if path.is_file() and path.suffix != ".pyc"
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    assert [*WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])]
    return folder


def test_the_wheel_has_the_package_and_its_data(built):
    """All modules, the page and the schemas; configs and examples of the clone below `deeplightning`, each once; and
    nothing else of the clone."""
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {f"deeplightning/{name}" for name in DATA} <= set(names)
    modules = [path for top in ("deeplightning", "serve") for path in ROOT.glob(f"{top}/**/*.py")]
    assert {str(path.relative_to(ROOT)) for path in modules} <= set(names)
    assert {"serve/page.html", "serve/docs.html", "deeplightning/report/page.css"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"deeplightning", "serve"}
    assert [name for name in names if name.endswith(".pyc") or "mlruns" in name] == []


def test_the_schema_that_a_shipped_config_names_is_in_the_wheel(built):
    """Each names it by a path relative to itself, and finds it where the wheel was installed. The example of a package
    is installed elsewhere."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        configs = [n for n in archive.namelist() if n.endswith(".yaml") and not re.search("/templates/|/plugin/", n)]
        for name in configs:
            text = archive.read(name).decode()
            (address,) = re.findall(r"^# yaml-language-server: \$schema=([^#\s]+)\S*$", text, re.MULTILINE)
            assert posixpath.normpath(posixpath.join(name, "..", address)) == "deeplightning/configs/schema.json"
    assert len(configs) > 20


@pytest.mark.parametrize("plugin", sorted(ROOT.glob("plugins/*")), ids=lambda folder: folder.name)
def test_the_wheel_of_a_plugin_has_its_modules_and_its_page(plugin, tmp_path):
    """With its entry points, and nothing of the core."""
    (wheel,) = WheelBuilder(str(plugin)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (entries,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        assert b"[deeplightning." in archive.read(entries)
    package = plugin / plugin.name.replace("-", "_")
    there = [path for path in package.rglob("*") if path.suffix in (".py", ".md", ".tsv")]
    assert sorted(names) == sorted(str(path.relative_to(plugin)) for path in there)


def test_an_editable_installation_has_the_clone_alone(tmp_path):
    """No second copy of a config that the clone has."""
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert [archive.read(name).decode().strip() for name in names] == [str(ROOT)]
