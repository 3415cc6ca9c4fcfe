"""What is released: the sdist, the wheel and their metadata; and when `make release-check` refuses."""

from __future__ import annotations

import configparser
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import flask_idempotency

ROOT = Path(__file__).parents[2]
MADE = [".*_cache", ".git", ".hypothesis", ".venv", "*.egg-info"]
MADE += ["__pycache__", "_build", "build", "dist"]
release = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci/release.py")))
described = runpy.run_path(str(ROOT / "setup.py"))["described"]
ADDRESSES = {
    "file_url": "https://example.com/blob/v{version}/{path}",
    "picture_url": "https://example.com/raw/v{version}/{path}",
}


def build(kind: str, folder: Path, out: Path) -> Path:
    code = (
        f"import sys; from setuptools import build_meta as made; print(made.build_{kind}(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, out], cwd=folder, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    """The sdist, and the wheel that is built from it; the source is gone by then."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*MADE))
    here = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    sdist = build("sdist", source, folder)
    shutil.rmtree(source)
    with tarfile.open(sdist) as packed:
        # Python 3.10.12 and 3.11.4 brought the filter (PEP 706); Debian 12 has 3.11.2.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)  # noqa: S202
    wheel = build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)
    return SimpleNamespace(sdist=sdist, wheel=wheel, source=here)


def test_the_sdist_is_the_project_and_the_wheel_is_the_package(artefacts):
    sdist, wheel = release.names_in(artefacts.sdist), release.names_in(artefacts.wheel)
    assert release.missing_files(sdist, wheel) == []
    assert artefacts.source - sdist <= {".gitignore"}
    with tarfile.open(artefacts.sdist) as packed:
        programs = {one.name.partition("/")[2] for one in packed if one.isfile() and one.mode & 0o100}
    assert {".ci/run", ".ci/due"} <= programs


def test_the_metadata_has_the_extras_for_users_and_each_python(artefacts):
    said = release.metadata_of(artefacts.wheel)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert said.get_all("Provides-Extra") == list(setup["options.extras_require"])
    pythons = re.findall(r":: Python :: (3\.\d+)", "\n".join(said.get_all("Classifier")))
    assert pythons == release.SERIES
    assert release.dead_links("the long description", said.get_payload(), []) == []
    assert "PLACEHOLDER" not in str(said)


@pytest.mark.parametrize("facts", [{}, ADDRESSES], ids=["unknown", "known"])
def test_the_description_is_readme_without_a_relative_link(facts):
    readme = (ROOT / "README.md").read_text("utf-8")
    text = described(readme, "1.0.0", facts)
    assert release.dead_links("the long description", text, []) == []
    assert text.count("https://example.com/blob/v1.0.0/docs/") == (
        readme.count("](docs/") - readme.count("](docs/pictures/") if facts else 0
    )
    assert ("![" in text) is bool(facts)


def test_there_is_one_version():
    version = release.metadata()[0]["version"]
    assert flask_idempotency.__version__ == version
    assert runpy.run_path(str(ROOT / "docs/conf.py"))["release"] == version
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    assert newest.startswith((f"Unreleased\n\nThis will be {version},", f"{version} - "))
