"""Content of the wheels. test_installed.py runs the command from a wheel."""

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


def opened(folder, project=ROOT, version="standard"):
    """Build a wheel into a folder, and open it."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=[version])
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the core, open."""
    with opened(tmp_path_factory.mktemp("dist")) as archive:
        yield archive


def test_the_wheel_has_the_package_and_its_data(wheel):
    """The wheel has all modules, the page and the schemas, and the configs and examples of the clone below
    `deeplightning`, each once; and nothing else."""
    names = wheel.namelist()
    assert len(names) == len(set(names))
    assert {f"deeplightning/{name}" for name in DATA} <= set(names)
    modules = [path for top in ("deeplightning", "serve") for path in ROOT.glob(f"{top}/**/*.py")]
    assert {str(path.relative_to(ROOT)) for path in modules} <= set(names)
    assert {"serve/page.html", "serve/docs.html", "deeplightning/report/page.css"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"deeplightning", "serve"}
    assert [name for name in names if name.endswith(".pyc") or "mlruns" in name] == []


def test_the_schema_that_a_shipped_config_names_is_in_the_wheel(wheel):
    """Each config names the schema by a relative path that is valid where the wheel is installed, except the example of
    a package, which is installed elsewhere."""
    configs = [n for n in wheel.namelist() if n.endswith(".yaml") and not re.search("/templates/|/plugin/", n)]
    assert len(configs) > 20
    for name in configs:
        text = wheel.read(name).decode()
        (address,) = re.findall(r"^# yaml-language-server: \$schema=([^#\s]+)\S*$", text, re.MULTILINE)
        assert posixpath.normpath(posixpath.join(name, "..", address)) == "deeplightning/configs/schema.json"


@pytest.mark.parametrize("plugin", sorted(ROOT.glob("plugins/*")), ids=lambda folder: folder.name)
def test_the_wheel_of_a_plugin_has_its_modules_and_its_page(plugin, tmp_path):
    """The wheel has entry points and the files of the plug-in's package, and nothing of the core."""
    with opened(tmp_path, plugin) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (entries,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        assert b"[deeplightning." in archive.read(entries)
    package = plugin / plugin.name.replace("-", "_")
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".md", ".tsv")]
    assert sorted(names) == sorted(str(path.relative_to(plugin)) for path in files)


def test_an_editable_installation_has_the_clone_alone(tmp_path):
    """An editable installation refers to the clone; it has no second copy of the configs."""
    with opened(tmp_path, version="editable") as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert [archive.read(name).decode().strip() for name in names] == [str(ROOT)]
