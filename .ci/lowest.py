"""Writes the lowest version of each package that setup.cfg allows, as constraints for pip."""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path

setup = configparser.ConfigParser()
setup.read(Path(__file__).parents[1] / "setup.cfg", encoding="utf-8")
# The groups of pyproject.toml are left out: the project's own tools may be new.
extras = setup["options.extras_require"]
required = "\n".join([setup["options"]["install_requires"], *extras.values()])
floors = set(re.findall(r"^([\w-]+)(?:\[.*\])?>=([\w.]+)", required, re.MULTILINE))
sys.stdout.writelines(f"{name}=={version}\n" for name, version in sorted(floors))
