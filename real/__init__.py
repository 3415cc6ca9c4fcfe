"""The test suites of other packages, with and without this extension; see ``python -m real --help``."""
