"""Says whether a release can be made of this checkout: ``make release-check``. It uploads nothing.

It builds the sdist, and the wheel from that; looks at both; installs each in a fresh environment of
every Python and tries it there; and writes the licences and the SBOM of all that an application
gets. The last lines say what is missing, and what only the owner can give. The status is then 1.
``PYTHONS="python3.10 python3.13"`` names the interpreters; otherwise they are those on ``PATH``.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build/release"
SERIES = ["3.10", "3.11", "3.12", "3.13"]  # 3.14: see bench/figures/works-with.md
FOLDERS = [".ci", "bench", "docs", "example", "laboratory", "real", "scale", "servers", "tests"]
FILES = ["CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md"]
FILES += ["owner.cfg", "pyproject.toml", "setup.cfg", "setup.py"]
LINK = re.compile(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)")
FREE = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|LGPL|Lesser General Public|MPL")
"""Licences under which an application may stay closed. Somebody must look at any other."""

LICENCES = """
from importlib.metadata import distributions
for one in sorted(distributions(), key=lambda one: one.name.lower()):
    said = one.metadata
    stated = [said.get("License-Expression") or said.get("License") or ""]
    stated += [line for line in said.get_all("Classifier") or [] if line.startswith("License")]
    lines = [line.split(" :: ")[-1] for line in stated]
    short = [line for line in lines if line and "\\n" not in line and len(line) < 100]
    print(one.name, one.version, short[0] if short else "", sep="\\t")
"""


def metadata() -> tuple[dict[str, str], dict[str, str]]:
    """``setup.cfg``'s metadata, and the owner's facts."""
    read = runpy.run_path(str(ROOT / "setup.py"))["read"]
    return read("setup.cfg", "metadata"), read("owner.cfg", "owner")


def wrong_version(version: str, changelog: str, readme: str = "") -> list[str]:
    """The version is final, the changelog has it with a date, and README says that there is one."""
    wrong = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        wrong.append(f"setup.cfg: the version {version} is none of a release")
    [newest, *_] = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    if not re.fullmatch(rf"\[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d", newest):
        wrong.append(f"CHANGELOG.md: the newest section is '{newest}', not '{version} - YYYY-MM-DD'")
    if "Not released yet" in readme:
        wrong.append("README.md: it says that nothing is released yet")
    return wrong


def placeholders(owner: dict[str, str], security: str) -> list[str]:
    """What the owner has not given yet, in ``owner.cfg`` or in the text of ``SECURITY.md``."""
    unknown = {name: value for name, value in owner.items() if value.startswith("PLACEHOLDER")}
    owed = [f"owner.cfg: {name} is a {value}" for name, value in unknown.items()]
    if owner["security_contact"] not in security:
        owed.append("SECURITY.md: SECURITY_CONTACT stands where owner.cfg's security_contact belongs")
    return owed


def dead_links(name: str, text: str, there: Iterable[str]) -> list[str]:
    """The links of a text that lead to no file, where only these files are there."""
    prose = re.sub(r"^(`{3,}).*?^\1$|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)
    outside = ("http://", "https://", "mailto:", "#")
    targets = [target for target in LINK.findall(prose) if not target.startswith(outside)]
    files = set(there)
    folder = Path(name).parent
    place = {one: os.path.normpath(folder / one.partition("#")[0]) for one in targets}
    lost = [one for one, file in place.items() if file not in files and not (ROOT / file).is_dir()]
    return [f"{name}: the link to {one} leads nowhere" for one in lost]


def missing_files(sdist: set[str], wheel: set[str]) -> list[str]:
    """What the artefacts lack, or have and should not."""
    wrong = [f"sdist: {name} is missing" for name in FILES if name not in sdist]
    folders = {name.partition("/")[0] for name in sdist}
    wrong += [f"sdist: {folder}/ is missing" for folder in FOLDERS if folder not in folders]
    wrong += [f"sdist: {name} is not a source" for name in sdist if "__pycache__" in name]
    package = {name for name in sdist if name.startswith("flask_idempotency/")}
    package.add("pytest_flask_idempotency.py")
    wrong += [f"wheel: {name} is missing" for name in sorted(package - wheel)]
    other = {name for name in wheel - package if ".dist-info/" not in name}
    return wrong + [f"wheel: {name} does not belong there" for name in sorted(other)]


def names_in(artefact: Path) -> set[str]:
    """The files in an sdist, without its folder, or in a wheel."""
    if artefact.suffix == ".whl":
        with zipfile.ZipFile(artefact) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(artefact) as sdist:
        return {one.name.partition("/")[2] for one in sdist if one.isfile()}


def metadata_of(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(opened.read(name))


def interpreters() -> tuple[dict[str, str], list[str]]:
    """A program for each series of Python, and the series that this machine has not."""
    named = os.environ.get("PYTHONS", "").split() or [f"python{series}" for series in SERIES]
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    found = {}
    for name in named:
        if program := shutil.which(name):
            asked = subprocess.run([program, "-c", code], check=False, capture_output=True, text=True)
            if asked.returncode == 0:
                found[asked.stdout.strip()] = program
    return found, [series for series in SERIES if series not in found]


def run(*command: object) -> str:
    """Run a program that must succeed; returns what it printed."""
    words = [str(word) for word in command]
    # pip's own constraints and the path of this process are none of the artefact's.
    hidden = ("PYTHONPATH", "PIP_CONSTRAINT", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(words, check=False, cwd=OUT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def venv(name: str, python: str, *install: object) -> Path:
    """A fresh environment with what pip installs; returns its interpreter."""
    run(python, "-m", "venv", "--clear", OUT / name)
    inside = OUT / name / "bin/python"
    run(inside, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *install)
    return inside


def tools(python: str) -> Path:
    """The tools of the group ``release``, in an environment of their own."""
    inside = venv("tools", python, "pip>=25.1")
    run(inside, "-m", "pip", "install", "-qq", "--group", f"{ROOT / 'pyproject.toml'}:release")
    return inside


def built(tool: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    shutil.rmtree(OUT / "dist", ignore_errors=True)
    run(tool, "-m", "build", "--outdir", OUT / "dist", ROOT)
    [sdist], [wheel] = (OUT / "dist").glob("*.tar.gz"), (OUT / "dist").glob("*.whl")
    return sdist, wheel


def tried(sdist: Path, wheel: Path, found: dict[str, str]) -> list[str]:
    """Install each artefact on each Python, and use it where the source is not on the path."""
    wrong = []
    (OUT / "try/.ci").mkdir(parents=True, exist_ok=True)  # no package beside it
    shutil.copy(ROOT / ".ci/smoke.py", OUT / "try/.ci")
    shutil.copy(ROOT / "README.md", OUT / "try")
    for series, program in found.items():
        for artefact in (wheel, sdist):
            try:
                inside = venv("installed", program, artefact)
                say(f"{artefact.name}: {run(inside, '-I', OUT / 'try/.ci/smoke.py').strip()}")
            except RuntimeError as error:
                wrong.append(f"{artefact.name} on Python {series}: {error}")
    return wrong


def licences(tool: Path, wheel: Path) -> list[str]:
    """Write the licence of the package and of all that it requires, and the SBOM of them."""
    run(tool, "-m", "venv", "--clear", "--without-pip", OUT / "closure")
    inside = OUT / "closure/bin/python"
    run(tool, "-m", "pip", "--python", inside, "install", "-qq", wheel)
    for origin in (OUT / "closure").rglob("direct_url.json"):
        origin.unlink()  # the SBOM would name a folder of this machine
    table = run(inside, "-c", LICENCES)
    (OUT / "licences.tsv").write_text(table, "utf-8")
    sbom = OUT / "sbom.cdx.json"
    run(tool, "-m", "cyclonedx_py", "environment", "--output-reproducible", "-o", sbom, inside)
    say(f"{len(table.splitlines())} packages: {OUT / 'licences.tsv'}, {sbom}")
    rows = [line.split("\t") for line in table.splitlines()]
    return [
        f"{name} {version}: look at its licence, '{licence}'"
        for name, version, licence in rows
        if not FREE.search(licence)
    ]


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Check all of it; returns 1 while something is missing."""
    OUT.mkdir(parents=True, exist_ok=True)
    facts, owner = metadata()
    version = facts["version"]
    found, absent = interpreters()
    owed = placeholders(owner, (ROOT / "SECURITY.md").read_text("utf-8"))
    changelog, readme = ((ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "README.md"))
    wrong = wrong_version(version, changelog, readme)
    tool = tools(sys.executable)
    sdist, wheel = built(tool)
    inside = names_in(sdist)
    wrong += missing_files(inside, names_in(wheel))
    try:
        run(tool, "-m", "twine", "check", "--strict", sdist, wheel)
    except RuntimeError as error:
        wrong.append(str(error))
    described = metadata_of(wheel)
    if described["Version"] != version:
        wrong.append(f"the wheel is of version {described['Version']}, not {version}")
    wrong += dead_links("the long description", str(described.get_payload()), [])
    for page in sorted(name for name in inside if name.endswith(".md") and "/_" not in name):
        wrong += dead_links(page, (ROOT / page).read_text("utf-8"), inside)
    wrong += tried(sdist, wheel, found)
    wrong += licences(tool, wheel)
    if absent:
        say(f"Not tried, as there is no such program: Python {', '.join(absent)}")
    if wrong:
        say("To be mended:\n" + "\n".join(f"- {line}" for line in wrong))
    if owed:
        say("Only the owner can give:\n" + "\n".join(f"- {line}" for line in owed))
    say("The owner decides on the date in CHANGELOG.md, the tag, its signature and the upload.")
    return 1 if wrong or owed else 0


if __name__ == "__main__":
    sys.exit(main())
