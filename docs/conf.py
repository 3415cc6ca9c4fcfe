"""How the documentation is built: `make docs`. No network is used."""

import configparser
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

metadata = configparser.ConfigParser()
metadata.read(HERE.parent / "setup.cfg", encoding="utf-8")

smartquotes_action = "qe"  # quotes and ellipses, not the dashes of options
project = "Flask-Idempotency"
author = "The Flask-Idempotency authors"
copyright = author
version = release = metadata["metadata"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_markdown_builder",
    "commands",
    "confvals",
    "llms",
    "search_numbers",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext", "figures"]
myst_enable_extensions = ["colon_fence", "deflist", "tasklist"]
myst_heading_anchors = 3
highlight_language = "text"

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True

# There is no intersphinx, for it needs the network: names of other packages lead nowhere.
nitpick_ignore_regex = [
    (
        r"py:.*",
        (
            r"(blinker|collections|contextlib|datetime|decimal|flask|flask_sqlalchemy|httpx|opentelemetry"
            r"|prometheus_client|requests|sqlalchemy|uuid|werkzeug)\..*"
        ),
    ),
    (r"py:.*", r"dict\[.*"),
    (
        r"py:.*",
        r"(Connection|Engine|Flask|Blueprint|SQLAlchemy|Response|Skip|UUID|Unpack|T|View|Scope)",
    ),
    # Parts of the package that are not its public face.
    (
        r"py:.*",
        (
            r"RouteOptions|RunOptions|(flask_idempotency\.)?"
            r"(client\.(verdicts|retries|session|transport)|web|session|drivers|extension|core|testing\.crashes)\..*"
        ),
    ),
]
